"""Reductions of gradients as stages: when they start, and that they are alone.

Where a schedule has them is in the golden texts.
"""

import gc
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import Stage, kinds
from megatron_ampipe.schedule.kinds import REDUCE
from megatron_ampipe.schedule.stage_kind import COMM


class Pass:
    """A pass whose backward is to come."""


def test_what_is_asked_for_while_a_pass_is_to_come_is_held() -> None:
    started: list[str] = []
    reductions, call = Reductions(on_cuda=False, with_experts=True), Pass()

    def ask(name: str) -> int:
        reductions.ask(name, lambda: started.append(name))
        return reductions.mark

    ask("a")
    assert started == ["a"]
    reductions.expect(call)
    mark = [ask(name) for name in "bcd"][1]
    assert started == ["a"] and reductions.is_held("b") and not reductions.is_held("a")
    reductions.start_until(mark).wait()
    assert started == ["a", "b", "c"]
    assert reductions.start_until(mark).begin is None
    reductions.passed(call)
    ask("e")
    assert started == ["a", "b", "c", "d", "e"], "the earlier one first"
    reductions.expect(call)
    ask("f")
    reductions.start_all()
    assert started[5:] == ["f"] and not reductions.is_held("f")
    ask("g")
    del call
    gc.collect()
    ask("h")
    assert started[6:] == ["g", "h"], "a forgotten pass holds nothing"


class Wire:
    """Records what is on the wire, and what shares it. Everything takes 20 ms from when it is waited for."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.shared: set[frozenset[str]] = set()
        self.begun: list[str] = []

    def send(self, name: str) -> SimpleNamespace:
        self.shared |= {frozenset((name, other)) for other in self.busy}
        self.busy.add(name)
        self.begun.append(name)
        return SimpleNamespace(wait=lambda: (time.sleep(0.02), self.busy.discard(name)))


def execute(stages: list[Stage], run_stage: Callable[[Stage], Transfer]) -> None:
    tape = Tape.of([(COMM, stage) for stage in stages], {stage: () for stage in stages})
    ThreadExecutor().execute(tape, lambda call: run_stage(call.stage), Recorder())


@pytest.mark.timeout(30)
@pytest.mark.parametrize("empty", [True, False])
def test_nothing_in_the_lane_shares_the_wire_with_a_reduction(empty: bool) -> None:
    """Without anything to reduce, transfers overlap across it as they do elsewhere."""
    stages = [Stage(kinds.COMBINE, chunk) for chunk in (2, 1)]
    stages += [Stage(REDUCE), *(Stage(kinds.DISPATCH, chunk) for chunk in (2, 1))]
    wire = Wire()

    def run_stage(stage: Stage) -> Transfer:
        if stage.kind != REDUCE:
            return Transfer((), (wire.send(stage.name),))  # type: ignore[arg-type]
        return Transfer(()) if empty else Transfer((), begin=lambda: [wire.send("reduce")])

    execute(stages, run_stage)
    assert wire.begun == [stage.name for stage in stages if stage.kind != REDUCE or not empty]
    assert not wire.busy
    assert wire.shared >= {frozenset((f"{kind}.2", f"{kind}.1")) for kind in ("combine", "dispatch")}
    assert not any("reduce" in pair for pair in wire.shared)
    assert empty or frozenset(("combine.1", "dispatch.2")) not in wire.shared
