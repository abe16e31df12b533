"""Simulated timelines compared with values computed by hand."""

from collections.abc import Mapping

import pytest

from megatron_ampipe.plan.cluster import Overlap
from megatron_ampipe.plan.simulate import TimedProgram, compile_named, run
from megatron_ampipe.schedule import (
    BlockFeatures,
    Direction,
    StageKind,
    build,
    kinds,
)
from tests.plan_cases import NONE

PLAIN = BlockFeatures(chunked_qkv=True)
TIMES = {
    kinds.QKV: 1.0,
    kinds.ATTENTION: 3.0,
    kinds.ROUTE: 1.0,
    kinds.COUNTS: 1.0,
    kinds.DISPATCH: 4.0,
    kinds.EXPERT: 6.0,
    kinds.COMBINE: 4.0,
    kinds.MERGE: 1.0,
}


def ends(
    name: str, times: Mapping[StageKind, float], *, degree: int = 2, **settings: float
) -> dict[str, tuple[float, float]]:
    """Start and end of every forward stage."""
    schedule = build(name, degree=degree, features=PLAIN)
    compiled = compile_named(schedule, (PLAIN,), Direction.FORWARD)
    issue = settings.pop("issue", None)
    issues = None if issue is None else [issue] * len(compiled.stages)
    durations = [times[stage.kind] for stage in compiled.stages]
    overlap = Overlap(**{"compute_slowdown": 1.0, "communication_slowdown": 1.0} | settings, **NONE)
    begin, end = run(TimedProgram(compiled, durations, issues, overlap))
    return {str(stage): (begin[index], end[index]) for index, stage in enumerate(compiled.stages)}


def test_two_chunks_equal_values_by_hand() -> None:
    found = ends("ampipe", TIMES)
    # qkv, attention and route of both chunks end at 5 and 10.
    assert found["route.0"] == (4, 5)
    assert found["counts.0"] == (5, 6)
    assert found["dispatch.0"] == (6, 10)
    assert found["route.1"] == (9, 10)
    assert found["counts.1"] == (10, 11)
    assert found["dispatch.1"] == (11, 15)
    assert found["expert.0"] == (10, 16)
    assert found["combine.0"] == (16, 20)
    assert found["expert.1"] == (16, 22)
    assert found["merge.0"] == (22, 23)
    assert found["combine.1"] == (22, 26)
    assert found["merge.1"] == (26, 27)


def test_lanes_slow_each_other_only_while_both_run() -> None:
    found = ends("ampipe", TIMES, compute_slowdown=2.0, communication_slowdown=1.25)
    # From 5 on both lanes are busy: counts.0 takes 1.25, and 0.625 of the 1 of qkv.1 is done by then.
    assert found["counts.0"] == (5, 6.25)
    # The remaining 0.375 takes 0.75.
    assert found["qkv.1"] == (5, 7)
    # attention.1 begins at 7 at half speed: it would take 6 with a busy network, but dispatch.0 ends at
    # 6.25 + 5 = 11.25. By then (11.25 - 7) / 2 = 2.125 is done; the remaining 0.875 runs at full speed.
    assert found["dispatch.0"] == (6.25, 11.25)
    assert found["attention.1"] == (7, pytest.approx(12.125))


def test_busy_latency_delays_collectives_that_begin_during_a_computation() -> None:
    found = ends("ampipe", TIMES, latency_us=0.5)
    assert found["counts.0"] == (5, 6.5)
    assert found["dispatch.0"] == (6.5, 11)
    assert found["counts.1"] == (11, 12.5)
    assert found["dispatch.1"] == (12.5, 17)
    # Nothing is added if no computation runs.
    alone = ends("sequential", TIMES, latency_us=0.5)
    assert alone == ends("sequential", TIMES)


def test_the_host_waits_for_the_counts_of_a_dispatch() -> None:
    times = TIMES | {kinds.COUNTS: 50.0}
    found = ends("ampipe", times, issue=0.5)
    # No stage after dispatch.0 in the issue order can begin before the counts have arrived.
    assert found["counts.0"] == (5.5, 55.5)
    assert found["dispatch.0"][0] == pytest.approx(56.0)
    assert found["expert.0"][0] >= 60
