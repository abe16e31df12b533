"""A simulated timeline compared with values computed by hand; golden plans hold the rest."""

from megatron_ampipe.plan.cluster import Overlap
from megatron_ampipe.plan.simulate import TimedProgram, compile_named, run
from megatron_ampipe.schedule import BlockFeatures, Direction, build, kinds
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


def ends(name: str, latency_us: float) -> dict[str, tuple[float, float]]:
    """Start and end of every forward stage of two chunks."""
    schedule = build(name, degree=2, features=PLAIN)
    compiled = compile_named(schedule, (PLAIN,), Direction.FORWARD)
    durations = [TIMES[stage.kind] for stage in compiled.stages]
    overlap = Overlap(compute_slowdown=1, communication_slowdown=1, latency_us=latency_us, **NONE)
    begin, end = run(TimedProgram(compiled, durations, None, overlap))
    return {str(stage): (begin[index], end[index]) for index, stage in enumerate(compiled.stages)}


def test_busy_latency_delays_collectives_that_begin_during_a_computation() -> None:
    found = ends("ampipe", 0.5)
    # qkv, attention and route of both chunks end at 5 and 10.
    assert found["counts.0"] == (5, 6.5)
    assert found["dispatch.0"] == (6.5, 11)
    assert found["counts.1"] == (11, 12.5)
    assert found["dispatch.1"] == (12.5, 17)
    # Nothing is added if no computation runs.
    assert ends("sequential", 0.5) == ends("sequential", 0)
