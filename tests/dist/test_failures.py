"""A failure ends a run with the original error: no hang, and no follow-up error instead."""

import os
import shlex
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron_ampipe.runtime.executors import SequentialExecutor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import Direction, Stage, build, issue_order, kinds, needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from tests.megatron.launcher import started

DEGREE = 4
FEATURES = BlockFeatures(losses=True, shared=True, ordered_routing=True)
SCHEDULE = build("ampipe", degree=DEGREE, features=FEATURES)


class CablePulled(Exception):
    pass


ORDERS = {
    direction: issue_order(
        SCHEDULE.program(direction),
        needs_of(SCHEDULE, [FEATURES], direction),
        host_waits=False,
    )
    for direction in Direction
}
FAILING = [
    (direction, stage)
    for direction, order in ORDERS.items()
    for _, stage in order
    if stage.chunk in (None, 1)
]


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("direction", "failing"), FAILING, ids=str)
@pytest.mark.parametrize("executor", [ThreadExecutor, SequentialExecutor])
def test_a_failing_stage_raises_its_own_error(
    executor: type[ThreadExecutor | SequentialExecutor], failing: Stage, direction: Direction
) -> None:
    """In any lane: the caller gets the same exception object, and the lane starts no further stage.

    A stage that depends on the failed one has no input; any other may be a collective that the peers do not
    join, for which gloo ends the process.
    """
    order = ORDERS[direction]
    needs = needs_of(SCHEDULE, [FEATURES], direction)
    error = CablePulled(str(failing))
    ran: list[Stage] = []

    def run_stage(stage: Stage) -> None:
        if stage == failing:
            raise error
        # A real stage fails too if one of its inputs is missing.
        assert all(needed in ran for needed in needs[stage]), f"{stage} ran before what it needs"
        ran.append(stage)

    with pytest.raises(CablePulled) as caught:
        executor().execute(Tape.of(order, needs), lambda call: run_stage(call.stage), Recorder())
    assert caught.value is error
    lane = next(lane for lane, stage in order if stage == failing)
    expected = [stage for other, stage in order if other == lane]
    assert [stage for stage in expected if stage in ran] == expected[: expected.index(failing)]


@pytest.mark.timeout(30)
def test_a_failure_does_not_wait_for_pending_collectives() -> None:
    """A compute stage fails while a collective hangs: the error is raised immediately."""
    stuck, dispatch, attention = threading.Event(), Stage(kinds.DISPATCH, 0), Stage(kinds.ATTENTION, 1)

    def run_stage(stage: Stage) -> None:
        if stage == dispatch:
            stuck.wait(20)
        else:
            raise CablePulled

    executor = ThreadExecutor()
    began = time.monotonic()
    try:
        with pytest.raises(CablePulled):
            order = [("comm", dispatch), ("compute", attention)]
            tape = Tape.of(order, {dispatch: (), attention: ()})
            executor.execute(tape, lambda call: run_stage(call.stage), Recorder())
        assert time.monotonic() - began < 5
    finally:
        stuck.set()


@pytest.mark.timeout(240)
def test_the_survivor_of_a_killed_rank_ends_with_a_message(tmp_path: Path) -> None:
    """There is no launcher that would end the other ranks: the survivor must detect it itself."""
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    flags = shlex.split(
        "--attention-dropout 0 --hidden-dropout 0 --expert-model-parallel-size 2 --train-iters 100000 "
        f"--ampipe-degree {DEGREE} --distributed-timeout-minutes 1"
    )
    # Rank 0, which holds the rendezvous store, survives.
    with started(*flags, logs=logs, until="iteration        2/") as ranks:
        os.kill(ranks[1].pid, signal.SIGKILL)
        killed_at_s = time.monotonic()
        code = ranks[0].wait(timeout=90)
        assert time.monotonic() - killed_at_s < 60, "the collective timeout"
    said = logs[0].read_text()
    assert code == 3, said[-4000:]
    assert "error: rank 0 failed" in said
    assert "it has lost a peer, see above." in said
    assert "Traceback" in said, "the traceback of the failed collective"
