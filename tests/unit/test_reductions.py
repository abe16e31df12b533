"""Reductions of gradients as stages: where a schedule has them, when they start, and that they are alone."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ampipe.launch.hooks import WaitedOnce
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.runtime.tape import Tape
from megatron_ampipe.schedule import (
    SCHEDULE_NAMES,
    BlockFeatures,
    Direction,
    Pipeline,
    Stage,
    build,
    issue_order,
    kinds,
    needs_of,
)
from megatron_ampipe.schedule.kinds import REDUCE, REDUCE_EXPERTS
from megatron_ampipe.schedule.stage_kind import COMM

# Where a schedule has them.

BLOCK = BlockFeatures(losses=True, shared=True, chunked_qkv=True, reduces=True)
DENSE = BlockFeatures(dense=True, chunked_qkv=True, reduces=True)


@settings(deadline=None)
@given(
    st.sampled_from(SCHEDULE_NAMES),
    st.integers(1, 4),
    st.lists(st.sampled_from([BLOCK, DENSE, replace(BLOCK, recomputed=True)]), min_size=1, max_size=4).filter(
        lambda layers: any(not layer.dense for layer in layers)
    ),
    st.booleans(),
    st.booleans(),
)
def test_a_layer_reduces_what_the_layer_above_and_its_experts_have_completed(
    name: str, degree: int, layers: list[BlockFeatures], named: bool, of_experts: bool
) -> None:
    """After the last transfer of the layer it is in; also in an order that was made without reductions.

    In one chunk, what the layer above has completed comes between its transfers if that of experts is left.
    """
    layers = [replace(layer, reduces_experts=of_experts and not layer.dense) for layer in layers]
    order = None if named else build(name, degree=degree, features=replace(BLOCK, reduces=False))
    pipeline = replace(Pipeline.of(degree, schedule=name, stack=0), order=order)
    if not named and len(layers) == 1:
        layers = [*layers, layers[0]]
    schedule = pipeline.schedule_of(layers)
    needs = needs_of(schedule, layers, Direction.BACKWARD)
    issued = [stage for _, stage in issue_order(schedule.backward, needs, host_waits=False)]
    assert not any(stage.kind.of_parameters for stage in schedule.forward.stages)
    for layer in range(len(layers)):
        place = issued.index(Stage(REDUCE, None, layer))
        above = [at for at, stage in enumerate(issued) if stage.layer == layer + 1 and not stage.again]
        own = [
            at
            for at, stage in enumerate(issued)
            if stage.layer == layer and stage.kind in (kinds.COMBINE, kinds.DISPATCH) and not stage.again
        ]
        assert max((at for at in above if not issued[at].kind.of_parameters), default=-1) < place
        if not layers[layer].reduces_experts:
            assert max(own, default=-1) < place
            continue
        place_of_experts = issued.index(Stage(REDUCE_EXPERTS, None, layer))
        complete = [
            at
            for at, stage in enumerate(issued)
            if stage.layer == layer and (stage.kind.weights_of or stage.kind) == kinds.EXPERT
        ]
        assert max(place, *own, *complete) < place_of_experts
        if degree > 1:
            assert max(own) < place
            continue
        combines = [at for at in own if issued[at].kind == kinds.COMBINE]
        earliest = max(*combines, *(issued.index(one) for one in needs[issued[place]]), -1)
        assert not [at for at in own if earliest < at < place]


# When they start.


class Started:
    """Reductions by name, in the order in which they start."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str) -> Callable[[], None]:
        return lambda: self.names.append(name)


class Pass:
    """A pass whose backward is to come."""


def test_what_is_asked_for_while_a_pass_is_to_come_is_held() -> None:
    started, reductions, call = Started(), Reductions(on_cuda=False, of_experts=True), Pass()
    reductions.ask("a", started("a"))
    assert started.names == ["a"]
    reductions.expect(call)
    for name in "bcd":
        reductions.ask(name, started(name))
        if name == "c":
            mark = reductions.mark
    assert started.names == ["a"]
    assert reductions.is_held("b") and not reductions.is_held("a")
    reductions.start_until(mark).wait()
    assert started.names == ["a", "b", "c"]
    assert reductions.start_until(mark).begin is None
    reductions.passed(call)
    reductions.ask("e", started("e"))
    assert started.names == ["a", "b", "c", "d", "e"], "the earlier one first"


def test_all_that_is_held_can_be_started_and_a_forgotten_pass_holds_nothing() -> None:
    started, reductions, call = Started(), Reductions(on_cuda=False, of_experts=True), Pass()
    reductions.expect(call)
    reductions.ask("a", started("a"))
    assert started.names == []
    reductions.start_all()
    assert started.names == ["a"] and not reductions.is_held("a")
    reductions.ask("b", started("b"))
    del call
    gc.collect()
    reductions.ask("c", started("c"))
    assert started.names == ["a", "b", "c"]


def test_a_handle_is_waited_for_once() -> None:
    class Handle:
        waits = 0

        def wait(self) -> None:
            self.waits += 1

    handle = Handle()
    shared = WaitedOnce(handle, on_cuda=False)
    shared.wait()
    shared.wait()
    assert handle.waits == 1


# That they are alone.


class Wire:
    """Records what is on the wire, and what shares it."""

    def __init__(self) -> None:
        self.busy: set[str] = set()
        self.shared: set[frozenset[str]] = set()
        self.begun: list[str] = []

    def send(self, name: str) -> Sent:
        self.shared |= {frozenset((name, other)) for other in self.busy}
        self.busy.add(name)
        self.begun.append(name)
        return Sent(self, name)


class Sent:
    """Something on the wire, which takes 20 ms from when it is waited for."""

    def __init__(self, wire: Wire, name: str) -> None:
        self._wire, self._name = wire, name

    def wait(self) -> None:
        time.sleep(0.02)
        self._wire.busy.discard(self._name)


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

    order = [(COMM, stage) for stage in stages]
    tape = Tape.of(order, {stage: () for stage in stages})
    ThreadExecutor().execute(tape, lambda call: run_stage(call.stage), Recorder())
    names = [stage.name for stage in stages if stage.kind != REDUCE or not empty]
    assert wire.begun == names and not wire.busy
    assert frozenset(("combine.2", "combine.1")) in wire.shared
    assert frozenset(("dispatch.2", "dispatch.1")) in wire.shared
    assert not any("reduce" in pair for pair in wire.shared)
    assert empty or frozenset(("combine.1", "dispatch.2")) not in wire.shared


def test_what_a_reduction_fails_with_is_raised() -> None:
    def failing() -> list[Sent]:
        raise ConnectionError("peer is gone")

    stages = [Stage(REDUCE), Stage(kinds.DISPATCH, 0)]
    ran = []

    def run_stage(stage: Stage) -> Transfer:
        ran.append(stage)
        return Transfer((), begin=failing) if stage.kind == REDUCE else Transfer(())

    with pytest.raises(ConnectionError, match="peer is gone"):
        tape = Tape.of([(COMM, stage) for stage in stages], {stage: () for stage in stages})
        ThreadExecutor().execute(tape, lambda call: run_stage(call.stage), Recorder())
    assert ran == stages[:1]
