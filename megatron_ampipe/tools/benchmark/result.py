"""From samples to figures: medians, ratios with their spread, bounds. Called by ``ampipe bench``.

Pure; :mod:`.result_file` writes and reads the document that holds them.

The time of a pass is the maximum over ranks. The speedup is the median of the ratios stock / variant taken
within each repeat, where the machine was in the same state for both; its spread is the range from the 10th to
the 90th percentile of these ratios. What the machine itself contributes is :func:`spread_of`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from megatron_ampipe.plan.simulate import DirectionBound, direction_bound
from megatron_ampipe.schedule import Stage, stage_from_text
from megatron_ampipe.tools.measuring.grid import Case
from megatron_ampipe.tools.measuring.link import Link
from megatron_ampipe.tools.measuring.variant import CONTROL, STOCK_GLOO, Variant

StageSamples = Mapping[str, Mapping[str, Sequence[float]]]
"""By direction and stage, the microseconds of every pass, alone."""

StageNeeds = Mapping[str, Mapping[str, Sequence[str]]]
"""By direction and stage, the stages it waits for."""


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values; ``share`` from 0 to 1."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def speedup(stock: Sequence[float], samples: Sequence[float]) -> dict[str, float]:
    """The ratios stock / variant within each repeat: ``speedup``, their median, and two percentiles."""
    ratios = [before / after for before, after in zip(stock, samples, strict=True)]
    return {
        "speedup": round(statistics.median(ratios), 4),
        "speedup_p10": round(percentile(ratios, 0.1), 4),
        "speedup_p90": round(percentile(ratios, 0.9), 4),
    }


def spread_of(control: Mapping[str, Any]) -> float:
    """By how much Megatron's layer differs from itself: the spread of the control, 0.03 for 3 %.

    The control is Megatron's layer measured a second time, in turns with everything else. The spread is how
    far the 10th or the 90th percentile of stock / control within a repeat is from 1, whichever is further, as
    a factor: max(p90, 1 / p10) - 1. So it is at least the deviation of the control's median, which is what
    other rows are compared by.
    """
    return round(max(control["speedup_p90"], 1 / control["speedup_p10"]) - 1, 4)


def is_seen(row: Mapping[str, Any], spread: float) -> bool:
    """Whether the speedup of a row is further from 1, as a factor, than the spread of the control."""
    return max(row["speedup"], 1 / row["speedup"]) - 1 > spread


def with_control(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows as a case holds them, each with ``difference_seen``.

    Args:
        rows: Of all variants but stock.

    Returns:
        ``control``, with its ``spread``; ``gloo_all_to_all``, None where that was not measured; and ``rows``,
        all others.
    """
    control, *_ = (row for row in rows if row["schedule"] == CONTROL)
    spread = spread_of(control)
    others = [row | {"difference_seen": is_seen(row, spread)} for row in rows if row is not control]
    return {
        "control": control | {"spread": spread},
        "gloo_all_to_all": next((row for row in others if row["schedule"] == STOCK_GLOO), None),
        "rows": [row for row in others if row["schedule"] != STOCK_GLOO],
    }


def slowest_rank(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each repeat, the maximum over ranks."""
    return [max(samples) for samples in zip(*samples_by_rank, strict=True)]


def busy_cores(
    wall_ms_by_rank: Sequence[Sequence[float]], processor_ms_by_rank: Sequence[Sequence[float]]
) -> float:
    """How many cores the slowest rank kept busy: median over repeats of processor time over time.

    A rank of one core that is busy all the time cannot be made faster by another order of the same work.
    """
    shares = []
    for walls, processors in zip(
        zip(*wall_ms_by_rank, strict=True), zip(*processor_ms_by_rank, strict=True), strict=True
    ):
        slowest = max(range(len(walls)), key=walls.__getitem__)
        shares.append(processors[slowest] / walls[slowest])
    return round(statistics.median(shares), 4)


def bounds(samples: StageSamples, needs: StageNeeds, *, stack: int) -> dict[str, list[DirectionBound]]:
    """The bounds of each direction on one rank, in milliseconds, from medians of the stages' times.

    Returns:
        By direction, one for every ``stack`` layers, which share a schedule.
    """
    found = {}
    for direction, stages in samples.items():
        graphs: dict[int, dict[Stage, tuple[Stage, ...]]] = {}
        for name, earlier in needs[direction].items():
            stage = stage_from_text(name)
            graphs.setdefault(stage.layer // stack, {})[stage] = tuple(map(stage_from_text, earlier))
        times = {stage_from_text(name): statistics.median(passes) / 1e3 for name, passes in stages.items()}
        found[direction] = [
            direction_bound({stage: times[stage] for stage in graph}, graph) for graph in graphs.values()
        ]
    return found


def case_result(
    case: Case,
    variants: Sequence[Variant],
    reports: Sequence[Mapping[str, Any]],
    *,
    link: Link,
    layers: int,
) -> dict[str, Any]:
    """One entry of ``cases`` in the document.

    Args:
        case: What was measured.
        variants: Stock first.
        reports: What each rank found (:func:`.timed_passes.measure`).
        link: Over which link.
        layers: How many of these blocks one pass goes through.
    """
    by_variant, backward, worked = (
        _by_variant_ms(reports, key) for key in ("samples_s", "backward_s", "processor_s")
    )
    assert by_variant is not None and backward is not None
    stock = slowest_rank(by_variant[0])
    rows = [
        _row(
            variant,
            layers=layers,
            stock=stock,
            by_rank=by_variant[index],
            backward_by_rank=backward[index],
            processor_by_rank=worked and worked[index],
            stages=[report["stages"][index] for report in reports],
            needs=reports[0]["needs"][index],
            starved=[report["starved"][index] for report in reports],
            difference=reports[0]["difference"][index],
            peak_bytes=_largest(reports, "peak_bytes", index),
            wire=_wire(reports, index),
        )
        for index, variant in enumerate(variants)
        if index > 0
    ]
    stock_ms = round(statistics.median(stock), 4)
    return {
        "name": case.name,
        "link": link.text,
        "emulated": link.emulated,
        "layers": layers,
        "stock_ms": stock_ms,
        "stock_samples_ms": stock,
        "stock_backward_ms": round(statistics.median(slowest_rank(backward[0])), 4),
        "stock_samples_ms_by_rank": by_variant[0],
        "stock_processor_ms_by_rank": worked and worked[0],
        "stock_peak_bytes": _largest(reports, "peak_bytes", 0),
        **{f"stock_{key}": value for key, value in _wire(reports, 0).items()},
        "stock_busy_cores": worked and busy_cores(by_variant[0], worked[0]),
        "kernel": reports[0]["kernel"],
        "attention": reports[0]["attention"],
        "fused_gradients": reports[0]["fused_gradients"],
        "clock": reports[0]["clock"],
        "block": asdict(case),
        "possible_speedup": possible_speedup(stock_ms, rows),
        **with_control(rows),
    }


def possible_speedup(stock_ms: float, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The speedup over Megatron's layer at the lowest bound; None where nothing was cut.

    No order of the stages of these rows is faster, so a larger speedup needs another link, block or cut.
    """
    found = [row["bound_ms"] for row in rows if row["bound_ms"] is not None]
    return round(stock_ms / min(found), 4) if found else None


def _by_variant_ms(reports: Sequence[Mapping[str, Any]], key: str) -> list[list[list[float]]] | None:
    """Milliseconds by variant, rank and repeat; None if they were not measured."""
    if reports[0][key] is None:
        return None
    return [
        [[round(1e3 * s, 4) for s in of_variant] for of_variant in of_ranks]
        for of_ranks in zip(*(report[key] for report in reports), strict=True)
    ]


def _largest(reports: Sequence[Mapping[str, Any]], key: str, index: int) -> int:
    """Of a variant, over all ranks."""
    return max(report[key][index] for report in reports)


def _wire(reports: Sequence[Mapping[str, Any]], index: int) -> dict[str, Any]:
    """What all ranks together send in a pass of a variant: counted, the median over repeats, and expected.

    ``wire_bytes`` (None where nothing was counted) and ``expected_wire_bytes``; where there are two classes
    of links also both ``by_class``.
    """
    of_ranks = [report["wire_bytes"][index] for report in reports]
    expected = [report["expected_wire_bytes"][index] for report in reports]
    by_class = {
        "wire_bytes": {
            name: round(
                statistics.median(sum(part[name] for part in parts) for parts in zip(*of_ranks, strict=True))
            )
            for name in of_ranks[0][0] or ()
        },
        "expected_wire_bytes": {name: sum(part[name] for part in expected) for name in expected[0]},
    }
    found: dict[str, Any] = {key: sum(parts.values()) if parts else None for key, parts in by_class.items()}
    if len(expected[0]) > 1:
        found |= {f"{key}_by_class": parts for key, parts in by_class.items()}
    return found


def _row(
    variant: Variant,
    *,
    layers: int,
    stock: Sequence[float],
    by_rank: Sequence[Sequence[float]],
    backward_by_rank: Sequence[Sequence[float]],
    processor_by_rank: Sequence[Sequence[float]] | None,
    stages: Sequence[StageSamples | None],
    needs: StageNeeds | None,
    starved: Sequence[Mapping[str, int] | None],
    difference: float,
    peak_bytes: int,
    wire: Mapping[str, Any],
) -> dict[str, Any]:
    samples = slowest_rank(by_rank)
    median_ms, cut = statistics.median(samples), variant.cut
    row: dict[str, Any] = {
        "schedule": variant.schedule,
        "degree": cut.degree,
        # None where it is the forward pass's, as in the files of earlier versions.
        "backward_degree": None if cut.backward_degree == cut.degree else cut.backward_degree,
        "shares": cut.shares,
        "cut": str(cut),
        "order": variant.order,
        "layers": layers,
        "stack": variant.stack,
        "memory": variant.memory,
        "exchange": variant.exchange,
        "wire": variant.wire,
        "ms": round(median_ms, 4),
        # Of these, from the end of the forward pass of a rank.
        "backward_ms": round(statistics.median(slowest_rank(backward_by_rank)), 4),
        **speedup(stock, samples),
        # Megatron's own layer, as at degree 1, has no stages to overlap.
        "bound_ms": None,
        "bound_share": None,
        "bound": None,
        "busy_cores": None if processor_by_rank is None else busy_cores(by_rank, processor_by_rank),
        "difference_from_stock": difference,
        # Of what a pass holds at once beyond weights and input, on the rank that holds most.
        "peak_bytes": peak_bytes,
        # Of all ranks together: by the kernel's counters on a real network, and by the routing.
        **wire,
        "samples_ms": samples,
        "samples_ms_by_rank": by_rank,
        "processor_ms_by_rank": processor_by_rank,
        "stages_us_by_rank": stages if variant.pipelined else None,
        "stage_needs": needs,
        # On a GPU: by kind of stage, in how many of the times above the host was too slow to keep it busy.
        "starved_by_rank": starved if variant.pipelined else None,
    }
    if needs is not None:
        of_ranks = [bounds(found, needs, stack=variant.stack) for found in stages if found is not None]
        slowest = max(of_ranks, key=_total_ms)
        bound_ms = _total_ms(slowest)
        row["bound_ms"] = round(bound_ms, 4)
        row["bound_share"] = round(bound_ms / median_ms, 4)
        row["bound"] = {
            direction: {
                f"{part.name}_ms": round(sum(getattr(bound, part.name) for bound in of_stacks), 4)
                for part in fields(DirectionBound)
            }
            for direction, of_stacks in slowest.items()
        }
    return row


def _total_ms(of_directions: Mapping[str, Sequence[DirectionBound]]) -> float:
    return sum(bound.time for of_stacks in of_directions.values() for bound in of_stacks)
