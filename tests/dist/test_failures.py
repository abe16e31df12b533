"""A failure ends a run with the original error: no hang, and no follow-up error instead."""

import contextlib
import itertools
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import SequentialExecutor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule import Partner, Stage, kinds
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

    All collectives before the failure still run: the peers start them too, and gloo ends a process whose
    next collective meets another one.
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
    before = STAGES[: STAGES.index(failing)]
    collectives = [stage for stage in STAGES if stage.is_communication and stage in ran]
    assert collectives == [stage for stage in before if stage.is_communication]


@pytest.mark.timeout(30)
def test_a_failure_does_not_wait_for_pending_collectives() -> None:
    """A compute stage fails while a collective hangs: the error is raised soon; no later one starts.

    The next pass waits for those before the failure.
    """
    stuck, ran = threading.Event(), []
    first, second, third = STAGES[1], STAGES[5], STAGES[9]
    attention = Stage(kinds.ATTENTION, 1)

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
            execute(first, second, attention, third)
        assert time.monotonic() - began < 5
        assert ran == [first]
    finally:
        stuck.set()
    execute(first)
    assert ran == [first, second, first]


@pytest.mark.timeout(30)
def test_collectives_that_no_peer_joins_end_the_next_pass() -> None:
    """The peers have failed at another stage: the group's timeout ends what a failed pass has left."""
    timeout = threading.Event()
    dispatch, attention = STAGES[1], Stage(kinds.ATTENTION, 1)

    class Joined:
        def wait(self) -> None:
            timeout.wait(20)
            raise ConnectionError("Timed out waiting 60000ms for recv operation to complete")

    def run(call: Call) -> Transfer:
        if call.stage == attention:
            raise CablePulled
        return Transfer((), works=(Joined(),))

    order = [(stage.kind.lane.name, stage) for stage in (dispatch, attention)]
    tape = Tape.of(order, {dispatch: (), attention: ()})
    executor = ThreadExecutor()
    with pytest.raises(CablePulled):
        executor.execute(tape, run, Recorder())
    timeout.set()
    with pytest.raises(RuntimeError, match=r"an earlier pass has failed .* from its last checkpoint") as said:
        executor.execute(tape, run, Recorder())
    assert isinstance(said.value.__cause__, ConnectionError)


@dataclass(frozen=True)
class Failure:
    """Where a pass fails on all ranks, in one chunk of four."""

    name: str
    module: str
    backward: bool = False
    executor: str = "thread"
    partner: bool = False


FAILURES = [
    Failure(f"{module.rpartition('.')[2]}-{'backward' if backward else 'forward'}-{kind}", module, backward,
            executor="cuda" if kind == "cuda" else "thread", partner=kind == "partner")
    for module in ("self_attention.linear_proj", "mlp.router", "mlp.experts")
    for backward in (False, True)
    for kind in ("thread", "cuda", "partner")
]  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.name)
def test_after_a_failure_on_all_ranks_the_next_batch_is_right(failure: Failure) -> None:
    """A script that catches it goes on, as with Megatron's layers; a rank is slower than the other."""
    import torch

    from tests.dist.blocks import build_layers, wrong
    from tests.dist.cases import LARGE, Case
    from tests.dist.micro_batches import step

    case = Case(failure.name, executor=failure.executor, layers="mm", stack=0, model=LARGE)
    stock, ours = build_layers(case)
    expected = step(stock, case)
    rank = torch.distributed.get_rank()
    partner = Partner() if failure.partner else None
    # Partners run in one chunk: the second micro-batch fails.
    for place in (1, 2) if failure.partner else (1, 2, 3):
        calls = itertools.count()

        def fail(*_: object, calls: Iterator[int] = calls, place: int = place) -> None:
            if next(calls) == place:
                time.sleep(0.05 * (rank == place % 2))
                raise CablePulled(failure.name)

        def fail_in_backward(_: object, __: object, output: Any) -> None:
            (output[0] if isinstance(output, tuple) else output).register_hook(fail)

        module = ours.get_submodule(f"layers.1.{failure.module}")
        with (
            pytest.raises(CablePulled),
            _forward_replaced(module, after=fail_in_backward if failure.backward else fail),
        ):
            step(ours, case, partner=partner)
        context = ours.layers[0]._block.context
        context.pipeline, context.partners = case.pipeline, None
        ours.zero_grad()
        assert wrong(expected, step(ours, case, partner=partner), 1e-5) == {}
        ours.zero_grad()


@contextlib.contextmanager
def _forward_replaced(module: Any, after: Callable[..., None]) -> Iterator[None]:
    """Within it, ``after`` is called with module, inputs and output; not a hook, which layers may refuse."""
    forward = type(module).forward

    def replaced(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if self is module:
            after(self, args, output)
        return output

    with mock.patch.object(type(module), "forward", replaced):
        yield


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


@pytest.mark.timeout(240)
def test_a_failure_on_one_rank_ends_all_with_a_line_each(tmp_path: Path) -> None:
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
    flags = shlex.split(
        "--attention-dropout 0 --hidden-dropout 0 --expert-model-parallel-size 2 --train-iters 100000 "
        "--ampipe-degree 4 --ampipe-router tests.gates:FailingRouter --distributed-timeout-minutes 1"
    )
    with started(*flags, logs=logs, until="no expert is left") as ranks:
        failed_at_s = time.monotonic()
        assert [rank.wait(timeout=90) for rank in ranks] == [3, 3]
        assert time.monotonic() - failed_at_s < 60, "the collective timeout"
    survivor, failed = (log.read_text() for log in logs)
    assert failed.count("error: ") == survivor.count("error: ") == 1, failed[-4000:] + survivor[-4000:]
    assert "ZeroDivisionError: no expert is left" in failed
    assert failed.rstrip().endswith("error: rank 1 failed; the cause is above.")
    assert "error: rank 0 failed: it has lost a peer, see above." in survivor
