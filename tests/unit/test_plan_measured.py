"""The simulator compared with measurements: from stored times of stages to stored times of blocks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ampipe.plan.simulate import compile_named, run
from megatron_ampipe.schedule import (
    BlockFeatures,
    Direction,
    build,
    from_text,
    stage_from_text,
)

MEASURED = sorted((Path(__file__).resolve().parents[2] / "docs" / "measured").glob("cpu-small-*.json"))
SLOWDOWNS = {"compute_slowdown": 1.2, "communication_slowdown": 1.2}
"""The same for all cases: collectives of a rank also need its core."""


def simulated_ms(row: dict[str, Any], slowdowns: dict[str, float]) -> float:
    """From the times of stages: computation of the slower rank, and collectives without waiting times."""
    features = BlockFeatures(chunked_qkv=True)
    if row["order"] is not None:
        schedule = from_text(row["order"])
    else:
        schedule = build(row["schedule"], degree=row["degree"], features=features)
    total = 0.0
    for direction in Direction:
        by_rank = [
            {stage_from_text(name): statistics.median(times) for name, times in rank[direction.value].items()}
            for rank in row["stages_us_by_rank"]
        ]
        compiled = compile_named(schedule, (features,), direction)
        durations = [
            (min if stage.is_communication else max)(times[stage] for times in by_rank)
            for stage in compiled.stages
        ]
        total += max(run(compiled, durations, **slowdowns)[1])
    return total / 1e3


def errors(slowdowns: dict[str, float]) -> Iterator[float]:
    for path in MEASURED:
        for case in json.loads(path.read_text())["cases"]:
            for row in case["rows"]:
                yield abs(simulated_ms(row, slowdowns) / row["ms"] - 1)


def test_predicted_times_of_blocks_agree_with_measurements() -> None:
    found = list(errors(SLOWDOWNS))
    assert len(found) >= 20
    assert statistics.median(found) < 0.10 and max(found) < 0.20


def test_slowdown_of_concurrent_lanes_improves_the_prediction() -> None:
    assert statistics.median(errors(SLOWDOWNS)) < statistics.median(errors({}))
