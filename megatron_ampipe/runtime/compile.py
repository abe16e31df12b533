"""Compiles a schedule to tapes, once for each length: what does not depend on data is decided here."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from megatron_ampipe.runtime.block_functions import BlockFunctions, Function
from megatron_ampipe.runtime.gradient_slots import gradients_of
from megatron_ampipe.runtime.saved_steps import bind_backward, bind_forward, bind_restoring
from megatron_ampipe.runtime.segment import WeightProducts
from megatron_ampipe.runtime.slot_ops import SlotOp, make, make_sums
from megatron_ampipe.runtime.slots import BlockLayout, SlotNumbers
from megatron_ampipe.runtime.steps import (
    NOTHING,
    ZERO,
    AddWeightGradients,
    Communicate,
    Copy,
    Differentiate,
    RunStage,
    SlotRef,
    Step,
)
from megatron_ampipe.runtime.tape import Call, Tape, Tapes, free_slots
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    Direction,
    Schedule,
    Stage,
    StageKind,
    issue_order,
    kinds,
    needs_of,
)
from megatron_ampipe.schedule.dataflow import is_of_feed_forward


@dataclass(frozen=True, slots=True, kw_only=True)
class TapeOptions:
    """What a tape depends on, other than blocks and their schedule.

    Attributes:
        keep_graph: Whether there will be a backward pass.
        host_waits: See :func:`~megatron_ampipe.schedule.program.issue_order`.
        threads: Whether lanes run on several threads; a slot is then freed only after all threads have read
            it, whichever thread is faster.
    """

    keep_graph: bool
    host_waits: bool
    threads: bool


def compiled(
    schedule: Schedule,
    layers: Sequence[BlockFeatures],
    *,
    chunks: Sequence[Chunk],
    functions: Sequence[BlockFunctions],
    options: TapeOptions,
) -> Tapes:
    """The tapes of both passes.

    Args:
        schedule: A checked schedule.
        layers: The features of each block.
        chunks: The chunks of the sequence.
        functions: The stage functions of each block.
        options: See :class:`TapeOptions`.
    """
    numbers = SlotNumbers()
    whole = schedule.whole_attention
    blocks = [
        BlockLayout(layer, features, chunks, functions[layer], numbers, whole_attention=whole)
        for layer, features in enumerate(layers)
    ]
    hidden, output = numbers.of("hidden", 0), numbers.of("hidden", len(blocks))
    above = numbers.of("gradient of hidden", len(blocks))
    steps = _Steps(schedule, blocks, keep_graph=options.keep_graph)
    calls: dict[Direction, list[Call]] = {direction: [] for direction in Direction}
    # The forward pass first: it creates the slots that backward steps read.
    for direction in Direction if options.keep_graph else [Direction.FORWARD]:
        needs = needs_of(schedule, layers, direction)
        issued = issue_order(schedule.program(direction), needs, host_waits=options.host_waits)
        calls[direction] = _calls(issued, needs, direction, steps)
    finish: list[SlotOp] = []
    gradient, recomputed = NOTHING, frozenset[int]()
    if options.keep_graph:
        gradient = steps.gradients[0].of_input(blocks[0].indices, finish)
        recomputed = frozenset(block.layer for block in blocks if block.recomputed)
    finish_slots = {slot for op in finish for slot in op.slots}
    free_slots(
        [*calls[Direction.FORWARD], *calls[Direction.BACKWARD]],
        pinned={NOTHING, ZERO, output, gradient, *finish_slots},
        first_backward=len(calls[Direction.FORWARD]),
        threads=options.threads,
    )
    return Tapes(
        {direction: Tape(pass_calls) for direction, pass_calls in calls.items()},
        num_slots=numbers.count,
        hidden=hidden,
        output=output,
        above=above,
        gradient=gradient,
        finish=tuple(finish),
        for_recompute=recomputed,
        names=numbers.names(),
    )


def _calls(
    issued: Sequence[tuple[str, Stage]],
    needs: Mapping[Stage, Sequence[Stage]],
    direction: Direction,
    steps: _Steps,
) -> list[Call]:
    ends, halves = _ends(issued, needs), set()
    if direction is Direction.BACKWARD:
        halves = {*{stage.layer: stage for _, stage in issued if is_of_feed_forward(stage)}.values()}
    return [
        replace(
            call,
            steps=tuple(steps.of(call.stage, direction)),
            ends=call.stage in ends,
            ends_half=call.stage in halves,
        )
        for call in Tape.of(issued, needs).calls
    ]


def _ends(order: Sequence[tuple[str, Stage]], needs: Mapping[Stage, Sequence[Stage]]) -> Collection[Stage]:
    """The last computed stage of each block, if all transfers of the block have ended by then."""
    left = Counter(stage.layer for _, stage in order if not stage.kind.of_parameters)
    ended: set[Stage] = set()
    ends = set()
    for _, stage in order:
        if not stage.kind.lane.computes:
            continue
        pending = [stage]
        while pending:
            needed = pending.pop()
            if needed not in ended and not needed.kind.of_parameters:
                ended.add(needed)
                left[needed.layer] -= 1
                pending += needs[needed]
        if not left[stage.layer]:
            ends.add(stage)
    return ends


class _Steps:
    """Creates the steps of stages; called for each stage in issue order."""

    def __init__(self, schedule: Schedule, blocks: Sequence[BlockLayout], *, keep_graph: bool) -> None:
        self._schedule, self._blocks, self._keep = schedule, blocks, keep_graph
        self._apart = frozenset(kind.weights_of for kind in schedule.backward.weights)
        self._products: defaultdict[tuple[int, StageKind], list[int]] = defaultdict(list)
        self.gradients = gradients_of(blocks)

    def of(self, stage: Stage, direction: Direction) -> Iterator[Step]:
        """One step for each chunk of a stage; a transfer has one step for all its chunks."""
        kind, block = stage.kind, self._blocks[stage.layer]
        parts = self._schedule.chunks_of(stage, direction)
        chunks = [part.chunk for part in parts]
        backward = direction is Direction.BACKWARD
        if kind.of_parameters:
            return
        if kind.copies:
            yield self._copy(stage, [chunk for chunk in chunks if kind in block.flow_of(chunk).kinds])
        elif not kind.lane.computes:
            yield self._communicate(stage, chunks, backward=backward)
        elif kind.weights_of is not None:
            yield self._add_weights(stage, chunks)
        else:
            for part in parts:
                if backward and not stage.computes_values:
                    yield self._differentiate(part)
                else:
                    yield self._compute(part, backward=backward)

    def _bind_values(self, step: Step, chunk: int | None, *, backward: bool) -> None:
        block = self._blocks[step.stage.layer]
        again = backward and block.recomputed
        block.take_values(step, chunk, again=again)
        block.give_values(step, chunk, again=again)

    def _compute(self, stage: Stage, *, backward: bool) -> RunStage:
        kind, block = stage.kind, self._blocks[stage.layer]
        step = RunStage(stage, block.functions.function_of(kind))
        if stage.is_recompute:
            block.make_empty(step, stage.chunk)
        self._bind_values(step, stage.chunk, backward=backward)
        if kind.restores is not None:
            bind_restoring(step, block)
        elif self._keep and stage.is_recompute == block.recomputed and not kind.own_backward:
            self._keep_graph(step)
        return step

    def _keep_graph(self, step: RunStage) -> None:
        """Have a step keep the graph that :class:`Differentiate` uses."""
        stage, block = step.stage, self._blocks[step.stage.layer]
        kind, chunk, functions = stage.kind, stage.chunk, block.functions
        step.segment = block.slot("segment", kind, chunk)
        # The tensors inside the experts are several times as wide as their inputs: most memory is here.
        step.releases = kind == kinds.EXPERT
        if keys := block.summed(kind):
            step.extras["sums"] = sums = block.slot("sums", keys[0][1].giver)
            slots = [block.slot("keys", value.name, stage.is_recompute) for value, _ in keys]
            step.before.append(SlotOp(make_sums, sums, slots))
        if kind in self._apart:
            step.extras["products"] = products = block.slot("products", kind, chunk)
            self._products[stage.layer, kind].append(products)
            step.before.append(SlotOp(make, products, fixed=(WeightProducts,)))
            step.function = _within(step.function, functools.partial(functions.delay_wgrad, kind))
        bind_forward(step, block)
        step.others += [step.segment, *step.extras.values()]

    def _differentiate(self, stage: Stage) -> Step:
        kind, chunk, block = stage.kind, stage.chunk, self._blocks[stage.layer]
        gradients = self.gradients[stage.layer]
        if not kind.own_backward:
            segment = block.slot("segment", kind, chunk)
            products = block.slot("products", kind, chunk) if kind in self._apart else None
            step: Step = Differentiate(stage, segment, block.parameters.get(kind, ()), products)
            step.others += [segment] if products is None else [segment, products]
            bind_backward(step, block)
            gradients.take(step, chunk)
        else:
            sums = block.slot("sums", block.summed(kind)[0][1].giver)
            step = RunStage(stage, block.functions.differentiate(kind), {"sums": sums})
            step.others.append(sums)
            gradients.take(step, chunk)
            recalled = [
                block.slot("value", source, None, block.recomputed) for _, source in block.flow.recalled[kind]
            ]
            step.takes += map(SlotRef, recalled)
            step.before.append(SlotOp(make_sums, sums, recalled))
        gradients.give(step, chunk)
        return step

    def _add_weights(self, stage: Stage, chunks: Sequence[int | None]) -> AddWeightGradients:
        kind, block = stage.kind.weights_of, self._blocks[stage.layer]
        assert kind is not None
        joined = list(chunks) == [None]
        products = [block.slot("products", kind, chunk) for chunk in chunks]
        if joined:
            products = self._products[stage.layer, kind]
        step = AddWeightGradients(stage, products, joined)
        step.others += products
        return step

    def _communicate(self, stage: Stage, chunks: Sequence[int | None], *, backward: bool) -> Communicate:
        kind, block = stage.kind, self._blocks[stage.layer]
        function = block.functions.function_of(kind)
        sends_gradients = backward and not stage.computes_values
        direction = Direction.BACKWARD if sends_gradients else Direction.FORWARD
        step = Communicate(stage, function, chunks, direction)
        for chunk in chunks:
            begin = len(step.takes)
            if sends_gradients:
                self.gradients[stage.layer].take(step, chunk)
                self.gradients[stage.layer].give(step, chunk)
            else:
                self._bind_values(step, chunk, backward=backward)
            step.parts.append(slice(begin, len(step.takes)))
            if self._keep and block.recomputed and not backward and kind in block.flow.not_recomputed:
                block.note_shapes(step, chunk)
        return step

    def _copy(self, stage: Stage, chunks: Sequence[int | None]) -> Copy:
        kind, block = stage.kind, self._blocks[stage.layer]
        name = "inner" if kind in (kinds.STORE, kinds.LOAD) else "stored"
        step = Copy(stage, [block.slot(name, chunk) for chunk in chunks], kind.restores is not None)
        step.others += step.kept
        if kind == kinds.LOAD:
            step.restores = [block.slot("segment", kinds.EXPERT, chunk) for chunk in chunks]
        for chunk in chunks:
            begin = len(step.takes)
            self._bind_values(step, chunk, backward=False)
            step.parts.append(slice(begin, len(step.takes)))
        return step


def _within(
    function: Function, context: Callable[[WeightProducts], AbstractContextManager[None]]
) -> Function:
    """The function of a stage, wrapped to run within a context."""

    def run(*args: object, products: WeightProducts, **kwargs: object) -> object:
        with context(products):
            return function(*args, **kwargs)

    return run
