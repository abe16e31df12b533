"""The planner compared with measurements: results of ``ampipe bench`` that docs/measured/results holds.

From the stored times of stages the simulator predicts the time of a pass, from the stored sizes of a block
the memory model its peak. Nothing is copied by hand: every result counts that has such rows.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ampipe.plan.cluster import Overlap
from megatron_ampipe.plan.simulate import TimedProgram, compile_named
from megatron_ampipe.schedule import SCHEDULE_NAMES, Direction, stage_from_text
from megatron_ampipe.tools.measuring.prediction import block_of, pipeline_of, predict_peaks
from tests.plan_cases import NONE

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "measured" / "results"
FITTED_LINK, CHECKED_LINK = "100mbit", "200mbit"
"""How much concurrent lanes slow each other is fitted to the results over one link (least mean error), and
checked with those over another, which no figure of the model has seen."""
SLOWDOWNS = [
    {"compute_slowdown": compute, "communication_slowdown": communication}
    for compute in (1.0, 1.1, 1.2, 1.3)
    for communication in (1.0, 1.2, 1.4)
]
"""What is tried. Collectives of a rank also need the core that computes."""
OVERLAPPABLE = 0.3
"""Rows count in which at least this share of the pass could be hidden; others hardly depend on the order."""


def results() -> list[dict[str, Any]]:
    """What ``ampipe bench --json`` wrote."""
    documents = [json.loads(path.read_text()) for path in sorted(MEASURED.glob("*.json"))]
    return [one for one in documents if isinstance(one, dict) and one.get("format") == "ampipe-bench-1"]


def simulated_ms(
    row: Mapping[str, Any], case: Mapping[str, Any], num_ranks: int, slowdowns: Mapping[str, float]
) -> tuple[float, float, float]:
    """From the times of stages: of the order that ran, one stage after another, and the longest lane alone.

    Stages take computation of the slower rank, and collectives without waiting times.
    """
    layers = (block_of(case, num_ranks).features,) * row.get("stack", 1)
    schedule = pipeline_of(row).schedule_of(layers)
    overlap = Overlap(**{"compute_slowdown": 1.0, "communication_slowdown": 1.0} | slowdowns, **NONE)
    in_order = in_turn = longest = 0.0
    for direction in Direction:
        by_rank = [
            {stage_from_text(name): statistics.median(times) for name, times in rank[direction.value].items()}
            for rank in row["stages_us_by_rank"]
        ]
        compiled = compile_named(schedule, layers, direction)
        durations = tuple(
            (min if stage.is_communication else max)(times[stage] for times in by_rank)
            for stage in compiled.stages
        )
        in_order += TimedProgram(compiled, durations, None, overlap).end_us
        in_turn += sum(durations)
        longest += max(sum(durations[stage] for stage in lane) for _, lane in compiled.lanes)
    num_stacks = case.get("layers", 1) / row.get("stack", 1)
    return tuple(us * num_stacks / 1e3 for us in (in_order, in_turn, longest))  # type: ignore[return-value]


def errors(slowdowns: Mapping[str, float], *, link: str) -> list[float]:
    """Of each row over a link the error of the simulated time, as a share of what the order can change.

    Of ranks that have a core each. A row that several runs measured counts once, with the median of its
    errors: one run repeats itself within 10 to 15 % only.
    """
    by_row: dict[str, list[float]] = {}
    for document in results():
        if document["link"] != link or document["ranks"] > len(document["cores"]):
            continue
        for case in document["cases"]:
            for row in case["rows"]:
                if row.get("stages_us_by_rank"):
                    found, in_turn, longest = simulated_ms(row, case, document["ranks"], slowdowns)
                    if in_turn - longest > OVERLAPPABLE * row["ms"]:
                        error = abs(found - row["ms"]) / (in_turn - longest)
                        by_row.setdefault(same_row(document, case, row), []).append(error)
    return [statistics.median(repeated) for repeated in by_row.values()]


def same_row(document: Mapping[str, Any], case: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """A text that is equal for rows of the same link, block and pipeline."""
    pipeline = ("schedule", "cut", "degree", "backward_degree", "shares", "order", "layers", "stack")
    return json.dumps(
        [
            document["link"],
            case["block"],
            *(row.get(name) for name in (*pipeline, "memory", "exchange", "wire")),
        ]
    )


def test_predicted_times_of_blocks_agree_with_measurements() -> None:
    """0 is exact, 1 the error of a model that knows no overlap where all is hidden."""
    fitted = min(SLOWDOWNS, key=lambda slowdowns: statistics.fmean(errors(slowdowns, link=FITTED_LINK)))
    shares = errors(fitted, link=CHECKED_LINK)
    assert len(shares) >= 10
    assert statistics.median(shares) < 0.06 and max(shares) < 0.2
    # A model without what concurrent lanes cost each other is farther off, on every machine that measured.
    assert statistics.median(errors({}, link=CHECKED_LINK)) > 1.5 * statistics.median(shares)


def test_predicted_peaks_are_those_that_were_measured() -> None:
    """Within 3 %, of all results that compare memory strategies: stock's and each strategy's peak."""
    dtypes, strategies = set(), set()
    for document in results():
        if len({row.get("memory") for case in document["cases"] for row in case["rows"]}) < 2:
            continue
        predict_peaks(document)
        for case in document["cases"]:
            pairs = {"stock": (case["stock_predicted_peak_bytes"], case["stock_peak_bytes"])}
            pairs |= {row["memory"]: (row["predicted_peak_bytes"], row["peak_bytes"]) for row in case["rows"]}
            wrong = {name: pair for name, pair in pairs.items() if abs(pair[0] / pair[1] - 1) > 0.03}
            assert not wrong, f"{document['command']}: predicted and measured {wrong}"
            dtypes.add(case["block"]["dtype"])
            strategies |= pairs.keys()
    assert dtypes == {"fp32", "bf16"}
    assert {"stock", "keep", "rebuild", "redispatch", "offload", "S2", "S3"} <= strategies


def test_predicted_peaks_hold_for_every_number_of_experts_per_token() -> None:
    """Within 5 %, of single layers of ``cpu-small`` over links: named schedules, degrees, exchanges."""
    compared: dict[int, set[int]] = {}
    for document in results():
        is_small = document["grid"].startswith("cpu-small") and document["layers"] == 1
        # Without a link, fewer transfers are in flight than can be.
        if not is_small or document["link"] == "none":
            continue
        predict_peaks(document)
        for case in document["cases"]:
            pairs = [(1, case["stock_predicted_peak_bytes"], case["stock_peak_bytes"])]
            pairs += [
                (row["degree"], row["predicted_peak_bytes"], row["peak_bytes"])
                for row in case["rows"]
                if row["schedule"] in SCHEDULE_NAMES
            ]
            wrong = [pair for pair in pairs if abs(pair[1] / pair[2] - 1) > 0.05]
            assert not wrong, f"{document['command']}, {case['name']}: degree, predicted, measured {wrong}"
            compared.setdefault(case["block"]["topk"], set()).update(degree for degree, *_ in pairs)
    assert compared.keys() >= {1, 2, 8}
    assert all({1, 4} <= degrees for degrees in compared.values())
