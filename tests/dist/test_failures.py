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
from megatron_ampipe.schedule import Stage, kinds
from tests.megatron.launcher import started


class CablePulled(Exception):
    pass


OF_CHUNK = (kinds.ROUTE, kinds.DISPATCH, kinds.EXPERT, kinds.COMBINE)
STAGES = [Stage(kind, chunk) for chunk in range(3) for kind in OF_CHUNK]
NEEDS = {stage: STAGES[number - number % 4 : number] for number, stage in enumerate(STAGES)}
"""Of each stage the earlier ones of its chunk."""


@pytest.mark.timeout(30)
@pytest.mark.parametrize("failing", STAGES, ids=str)
@pytest.mark.parametrize("executor", [ThreadExecutor, SequentialExecutor])
def test_a_failing_stage_raises_its_own_error(
    executor: type[ThreadExecutor | SequentialExecutor], failing: Stage
) -> None:
    """In any lane: the caller gets the same exception object, and the lane starts no further stage.

    A stage that depends on the failed one has no input; any other may be a collective that the peers do not
    join, for which gloo ends the process.
    """
    order = [(stage.kind.lane.name, stage) for stage in STAGES]
    error = CablePulled(str(failing))
    ran: list[Stage] = []

    def run_stage(stage: Stage) -> None:
        if stage == failing:
            raise error
        if stage.is_communication:
            time.sleep(0.002)
        # A real stage fails too if one of its inputs is missing.
        assert all(needed in ran for needed in NEEDS[stage]), f"{stage} ran before what it needs"
        ran.append(stage)

    with pytest.raises(CablePulled) as caught:
        executor().execute(Tape.of(order, NEEDS), lambda call: run_stage(call.stage), Recorder())
    assert caught.value is error
    expected = [stage for stage in STAGES if stage.kind.lane == failing.kind.lane]
    assert [stage for stage in expected if stage in ran] == expected[: expected.index(failing)]


@pytest.mark.timeout(30)
def test_a_failure_does_not_wait_for_pending_collectives() -> None:
    """A compute stage fails while a collective hangs: the error is raised immediately; no other starts."""
    stuck, ran = threading.Event(), []
    first, second, attention = STAGES[1], STAGES[5], Stage(kinds.ATTENTION, 1)

    def run_stage(stage: Stage) -> None:
        if stage == attention:
            raise CablePulled
        ran.append(stage)
        stuck.wait(20)

    def execute(*stages: Stage) -> None:
        order = [(stage.kind.lane.name, stage) for stage in stages]
        tape = Tape.of(order, dict.fromkeys(stages, ()))
        executor.execute(tape, lambda call: run_stage(call.stage), Recorder())

    executor = ThreadExecutor()
    began = time.monotonic()
    try:
        with pytest.raises(CablePulled):
            execute(first, second, attention)
        assert time.monotonic() - began < 5
    finally:
        stuck.set()
    # When this one has run, the lane has come to all before it.
    execute(first)
    assert second not in ran


@pytest.mark.timeout(240)
def test_the_survivor_of_a_killed_rank_ends_with_a_message(tmp_path: Path) -> None:
    """There is no launcher that would end the other ranks: the survivor must detect it itself."""
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    flags = shlex.split(
        "--attention-dropout 0 --hidden-dropout 0 --expert-model-parallel-size 2 --train-iters 100000 "
        "--ampipe-degree 4 --distributed-timeout-minutes 1"
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
