"""The document of ``ampipe bench --json``: medians of samples, ratios with their spread, bounds. No torch.

The time of a pass is the maximum over ranks. The speedup is the median of the ratios stock / variant taken
within each repeat, where the machine was in the same state for both; its spread is the range from the 10th to
the 90th percentile of these ratios. What the machine itself contributes is :func:`spread_of`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ampipe.files import inputs, outputs
from megatron_ampipe.plan.simulate import DirectionBound, direction_bound
from megatron_ampipe.schedule import KEEP, Exchange, Stage, stage_from_text
from megatron_ampipe.tools.measuring.bench_job import CONTROL, STOCK_GLOO, BenchJob, Variant
from megatron_ampipe.tools.measuring.grid import Case

FORMAT = "ampipe-bench-1"
_ABSENT_FROM_OLDER = {"memory": KEEP, "exchange": Exchange.ROWS.value, "wire": None, "difference_seen": True}
"""Fields of a row that older documents lack, and what was measured then."""

StageSamples = Mapping[str, Mapping[str, Sequence[float]]]
"""By direction and stage, the microseconds of every pass, alone."""
StageNeeds = Mapping[str, Mapping[str, Sequence[str]]]
"""By direction and stage, the stages it waits for."""


def write(document: Mapping[str, Any], path: Path) -> None:
    """Write the document; it appears under its name only when it is whole.

    Raises:
        RunFailed: it cannot be written.
    """
    outputs.write_text(path, json.dumps(document) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a document of blocks that :func:`write` wrote, with what older ones lack filled in.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such document.
    """
    try:
        document: dict[str, Any] = json.loads(inputs.read_text(path))
        if document["format"] != FORMAT or not document["cases"]:
            raise ValueError("not a result of blocks")
        document = {"layers": 1, "missing_cases": [], "pretended": False} | document
        for case in document["cases"]:
            case |= {key: case.get(key) for key in ("control", "gloo_all_to_all", "stock_wire_bytes")}
            for row in (*case["rows"], *megatrons_again(case)):
                row |= {key: row.get(key, default) for key, default in _ABSENT_FROM_OLDER.items()}
                if not min(row["ms"], row["speedup"], row["degree"], case["stock_ms"]) > 0 or not row["cut"]:
                    raise ValueError("a time that is not above 0")
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("not a result of blocks") from error
    return document


def megatrons_again(case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The control, and Megatron's layers with gloo's all-to-all, if there are."""
    return [case[key] for key in ("control", "gloo_all_to_all") if case[key] is not None]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values; ``share`` from 0 to 1."""
    return float(np.percentile(values, 100 * share))


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


def with_control(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rows as a case holds them, each with ``difference_seen``: whether its speedup is further from 1, as a
    factor, than the spread of the control.

    Args:
        rows: Of all variants but stock.

    Returns:
        ``control``, with its ``spread``; ``gloo_all_to_all``, None where that was not measured; and ``rows``,
        all others.
    """
    control, *_ = (row for row in rows if row["schedule"] == CONTROL)
    spread = spread_of(control)
    others = [
        row | {"difference_seen": max(row["speedup"], 1 / row["speedup"]) - 1 > spread}
        for row in rows
        if row is not control
    ]
    return {
        "control": control | {"spread": spread},
        "gloo_all_to_all": next((row for row in others if row["schedule"] == STOCK_GLOO), None),
        "rows": [row for row in others if row["schedule"] != STOCK_GLOO],
    }


def slowest_rank(samples_by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Of each repeat, the maximum over ranks."""
    return [max(samples) for samples in zip(*samples_by_rank, strict=True)]


def busy_cores(
    wall_by_rank: Sequence[Sequence[float]], processor_by_rank: Sequence[Sequence[float]]
) -> float:
    """How many cores the slowest rank kept busy: median over repeats of processor time over time.

    A rank of one core that is busy all the time cannot be made faster by another order of the same work.
    """
    repeats = zip(zip(*wall_by_rank, strict=True), zip(*processor_by_rank, strict=True), strict=True)
    slowest = (max(zip(*repeat, strict=True)) for repeat in repeats)
    return round(statistics.median(worked / wall for wall, worked in slowest), 4)


def bounds(samples: StageSamples, needs: StageNeeds, *, stack: int) -> dict[str, list[DirectionBound]]:
    """The bounds of each direction on one rank, in milliseconds, from medians of the stages' times.

    Returns:
        By direction, one for every ``stack`` layers, which share a schedule.
    """
    by_direction = {}
    for direction, stages in samples.items():
        graphs: dict[int, dict[Stage, tuple[Stage, ...]]] = {}
        for name, earlier in needs[direction].items():
            stage = stage_from_text(name)
            graphs.setdefault(stage.layer // stack, {})[stage] = tuple(map(stage_from_text, earlier))
        times = {stage_from_text(name): statistics.median(passes) / 1e3 for name, passes in stages.items()}
        by_direction[direction] = [
            direction_bound({stage: times[stage] for stage in graph}, graph) for graph in graphs.values()
        ]
    return by_direction


def case_result(
    case: Case, job: BenchJob, variants: Sequence[Variant], reports: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """One entry of ``cases`` in the document.

    Args:
        case: What was measured.
        job: How.
        variants: Stock first.
        reports: What each rank found (:func:`.timed_passes.measure`), and its ``clock``.
    """
    figures = [_figures(reports, index) for index in range(len(variants))]
    stock = figures[0]
    rows = [
        _row(variant, job, figures[index], stock=stock["samples_ms"], reports=reports, index=index)
        for index, variant in enumerate(variants)
        if index > 0
    ]
    return {
        "name": case.name,
        "link": job.link.text,
        "emulated": job.link.emulated,
        "layers": job.layers,
        **{f"stock_{key}": value for key, value in stock.items()},
        **{key: reports[0][key] for key in ("kernel", "fused_gradients", "clock")},
        "block": asdict(case),
        "possible_speedup": possible_speedup(stock["ms"], rows),
        **with_control(rows),
    }


def possible_speedup(stock_ms: float, rows: Sequence[Mapping[str, Any]]) -> float | None:
    """The speedup over Megatron's layer at the lowest bound; None where nothing was cut.

    No order of the stages of these rows is faster, so a larger speedup needs another link, block or cut.
    """
    found = [row["bound_ms"] for row in rows if row["bound_ms"] is not None]
    return round(stock_ms / min(found), 4) if found else None


def _figures(reports: Sequence[Mapping[str, Any]], index: int) -> dict[str, Any]:
    """What the document holds of every variant, stock included.

    ``backward_ms`` is from the end of the forward pass of a rank. ``peak_bytes`` is of the rank that holds
    most, beyond weights and input. ``wire_bytes`` (None where nothing was counted) and
    ``expected_wire_bytes`` are of all ranks together, by the kernel's counters and by the routing; where
    there are two classes of links, also both ``by_class``.
    """

    def ms(key: str) -> list[list[float]] | None:
        if reports[0][key] is None:
            return None
        return [[round(1e3 * seconds, 4) for seconds in report[key][index]] for report in reports]

    by_rank, backward, worked = ms("samples_s"), ms("backward_s"), ms("processor_s")
    assert by_rank is not None and backward is not None
    samples = slowest_rank(by_rank)
    counted = [report["wire_bytes"][index] for report in reports]
    expected = [report["expected_wire_bytes"][index] for report in reports]
    by_class: dict[str, dict[str, int]] = {
        "wire_bytes": {
            name: round(
                statistics.median(
                    sum(ranks[name] for ranks in passed) for passed in zip(*counted, strict=True)
                )
            )
            for name in counted[0][0] or ()
        },
        "expected_wire_bytes": {name: sum(rank[name] for rank in expected) for name in expected[0]},
    }
    two_classes = len(expected[0]) > 1
    return {
        "ms": round(statistics.median(samples), 4),
        "backward_ms": round(statistics.median(slowest_rank(backward)), 4),
        "samples_ms": samples,
        "samples_ms_by_rank": by_rank,
        "processor_ms_by_rank": worked,
        "busy_cores": worked and busy_cores(by_rank, worked),
        "peak_bytes": max(report["peak_bytes"][index] for report in reports),
        **{key: sum(parts.values()) if parts else None for key, parts in by_class.items()},
        **({f"{key}_by_class": parts for key, parts in by_class.items()} if two_classes else {}),
    }


def _row(
    variant: Variant,
    job: BenchJob,
    figures: Mapping[str, Any],
    *,
    stock: Sequence[float],
    reports: Sequence[Mapping[str, Any]],
    index: int,
) -> dict[str, Any]:
    cut, needs = variant.cut, reports[0]["needs"][index]
    stages: list[StageSamples] = [report["stages"][index] for report in reports]
    row: dict[str, Any] = {
        "schedule": variant.schedule,
        "degree": cut.degree,
        # None where it is the forward pass's, as in the files of earlier versions.
        "backward_degree": None if cut.backward_degree == cut.degree else cut.backward_degree,
        "shares": cut.shares,
        "cut": str(cut),
        "order": variant.order,
        "layers": job.layers,
        "stack": variant.stack,
        "memory": variant.memory,
        "exchange": variant.exchange,
        "wire": variant.wire,
        **figures,
        **speedup(stock, figures["samples_ms"]),
        "difference_from_stock": reports[0]["difference"][index],
        # Megatron's own layer, as at degree 1, has no stages to overlap.
        "bound_ms": None,
        "bound_share": None,
        "bound": None,
        "stage_needs": needs,
        "stages_us_by_rank": stages if variant.pipelined else None,
        # On a GPU: by kind of stage, in how many of the times above the host was too slow to keep it busy.
        "starved_by_rank": [report["starved"][index] for report in reports] if variant.pipelined else None,
    }
    if needs is not None:
        slowest = max((bounds(of_rank, needs, stack=variant.stack) for of_rank in stages), key=_total_ms)
        row["bound_ms"] = round(_total_ms(slowest), 4)
        row["bound_share"] = round(_total_ms(slowest) / figures["ms"], 4)
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
