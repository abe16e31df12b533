"""Makes a tape of a schedule: numbers for everything that stages hand to one another, decided once.

Which stage takes what from which is :class:`~megatron_ampipe.schedule.dataflow.DataFlow`. A value, or its
gradient, has a slot from the step that gives it to the last one that takes it. Where one of the two is of a
chunk and the other of the whole sequence, the argument is a slice of the slot, or a move puts rows together.
Where several stages take a value, their gradients are summed: those of compute stages at once, so that one
tensor is kept; what a transfer brings when the sum is taken, because only then it has arrived.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ampipe.runtime.block_layout import BlockFunctions, BlockLayout
from megatron_ampipe.runtime.inner_tensors import InnerTensors
from megatron_ampipe.runtime.lifetimes import free_slots
from megatron_ampipe.runtime.moves import (
    Add,
    AddKeys,
    AddRows,
    Arrival,
    Gather,
    Join,
    KeysGradient,
    MakeEmpty,
    MakeSums,
    Move,
    NoteShapes,
    Scatter,
    ScatterSum,
    Total,
)
from megatron_ampipe.runtime.steps import (
    FIRST_FREE,
    NOTHING,
    ZERO,
    AddWeightGradients,
    Communicate,
    CopyInner,
    Differentiate,
    DifferentiateByLayer,
    Give,
    LoadValues,
    Restore,
    RunStage,
    Step,
    StoreValues,
    Take,
)
from megatron_ampipe.runtime.tape import Call, Tape, Tapes
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    Direction,
    Layout,
    Schedule,
    Source,
    Span,
    Stage,
    StageKind,
    Value,
    issue_order,
    kinds,
    needs_of,
)
from megatron_ampipe.schedule.dataflow import is_of_feed_forward


@dataclass(frozen=True, slots=True)
class Order:
    """What can be derived from a schedule alone, for both directions.

    Attributes:
        schedule: That was checked.
        layers: The features of its blocks.
        needs: What each stage waits for.
        issued: Lanes and stages in issue order.
    """

    schedule: Schedule
    layers: tuple[BlockFeatures, ...]
    needs: Mapping[Direction, Mapping[Stage, tuple[Stage, ...]]]
    issued: Mapping[Direction, tuple[tuple[str, Stage], ...]]

    @classmethod
    def of(cls, schedule: Schedule, layers: Sequence[BlockFeatures], *, host_waits: bool) -> Order:
        """Derive it; see :func:`~megatron_ampipe.schedule.issue.issue_order` for ``host_waits``."""
        needs = {direction: needs_of(schedule, layers, direction) for direction in Direction}
        issued = {
            direction: issue_order(schedule.program(direction), needs[direction], host_waits=host_waits)
            for direction in Direction
        }
        return cls(schedule, tuple(layers), needs, issued)


def compiled(
    order: Order,
    *,
    chunks: Sequence[Chunk],
    functions: Sequence[BlockFunctions],
    keep_graph: bool,
    threads: bool,
) -> Tapes:
    """The tapes of both passes.

    Args:
        order: Of the stages.
        chunks: Of the sequence.
        functions: Of each block.
        keep_graph: Whether there will be a backward pass.
        threads: Whether lanes run on several threads: what one of them frees must not be read later by
            another one, whichever is faster.
    """
    return _Compiler(order, chunks, functions, keep_graph=keep_graph).tapes(threads=threads)


_Key = tuple[Hashable, ...]


class _Compiler:
    """Goes through both passes once and notes which slot has what."""

    def __init__(
        self,
        order: Order,
        chunks: Sequence[Chunk],
        functions: Sequence[BlockFunctions],
        *,
        keep_graph: bool,
    ) -> None:
        self._order, self._keep = order, keep_graph
        schedule = order.schedule
        self._apart = frozenset(kind.weights_of for kind in schedule.backward.weights)
        self._blocks = [
            BlockLayout(layer, features, chunks, functions[layer], whole_attention=schedule.whole_attention)
            for layer, features in enumerate(order.layers)
        ]
        self._slots: dict[_Key, int] = {}
        self._num_slots = FIRST_FREE
        # How many gradients of a value, or of a chunk of it, were added so far.
        self._added: Counter[_Key] = Counter()
        self._arrivals: defaultdict[_Key, list[Arrival]] = defaultdict(list)
        self._products: defaultdict[tuple[int, StageKind], list[int]] = defaultdict(list)
        self._hidden_taken: set[_Key] = set()

    # Slots

    def slot(self, *key: Hashable) -> int:
        """The slot of something, from its first mention on."""
        if key not in self._slots:
            self._slots[key] = self._num_slots
            self._num_slots += 1
        return self._slots[key]

    def temporary(self) -> int:
        """A slot that one step uses."""
        self._num_slots += 1
        return self._num_slots - 1

    def tapes(self, *, threads: bool) -> Tapes:
        """Both."""
        calls = {Direction.FORWARD: self._calls(Direction.FORWARD), Direction.BACKWARD: []}
        finish: list[Move] = []
        gradient = NOTHING
        hidden, output = self.slot("hidden", 0), self.slot("hidden", len(self._blocks))
        above = self.slot("gradient of hidden", len(self._blocks))
        if self._keep:
            calls[Direction.BACKWARD] = self._calls(Direction.BACKWARD)
            finish, gradient = self._hidden_gradient(0, range(len(self._blocks[0].chunks)))
        free_slots(
            [call for direction in Direction for call in calls[direction]],
            pinned={NOTHING, ZERO, output, gradient, *(slot for move in finish for slot in move.slots)}
            - {above},
            first_backward=len(calls[Direction.FORWARD]),
            threads=threads,
        )
        return Tapes(
            {direction: Tape(found) for direction, found in calls.items()},
            num_slots=self._num_slots,
            hidden=hidden,
            output=output,
            above=above,
            gradient=gradient,
            finish=tuple(finish),
            again=frozenset(block.layer for block in self._blocks if block.recomputed and self._keep),
            names=self._names(),
        )

    def _names(self) -> tuple[str, ...]:
        """Of the slots: what is in them, of which chunk, of which block (``@1`` is the second)."""
        names = ["none", "zero", *(f"t{slot}" for slot in range(FIRST_FREE, self._num_slots))]
        for (what, layer, *key), slot in self._slots.items():
            words = [str(what)]
            for part in key:
                if part is True:
                    words.insert(0, "again")
                elif isinstance(part, Source):
                    words += [str(part.giver), part.name] if part.giver is not None else [part.name]
                elif type(part) is int:
                    words[-1] += f".{part}"
                elif isinstance(part, str | StageKind):
                    words.append(str(part))
            names[slot] = " ".join(words).removeprefix("value ") + (f"@{layer}" if layer else "")
        return tuple(names)

    def _calls(self, direction: Direction) -> list[Call]:
        issued, needs = self._order.issued[direction], self._order.needs[direction]
        positions = {stage: position for position, (_, stage) in enumerate(issued)}
        ends = _ends(issued, needs)
        halves: set[Stage] = set()
        if direction is Direction.BACKWARD:
            last = {stage.layer: stage for _, stage in issued if is_of_feed_forward(stage)}
            halves = set(last.values())
        return [
            Call(
                position,
                lane,
                stage,
                tuple(positions[one] for one in needs[stage]),
                tuple(self._steps(stage, direction)),
                ends=stage in ends,
                ends_half=stage in halves,
            )
            for position, (lane, stage) in enumerate(issued)
        ]

    def _steps(self, stage: Stage, direction: Direction) -> Iterator[Step]:
        kind, block = stage.kind, self._blocks[stage.layer]
        parts = self._order.schedule.chunks_of(stage, direction)
        forward = direction is Direction.FORWARD or stage.computes_values
        # Values of a second run are others.
        again = block.recomputed and direction is Direction.BACKWARD
        if kind.of_parameters:
            return
        if kind.copies:
            yield from self._copy(
                stage, [part.chunk for part in parts if kind in block.flow_of(part.chunk).kinds]
            )
        elif not kind.lane.computes:
            yield self._communicate(stage, [part.chunk for part in parts], forward=forward, again=again)
        elif kind.weights_of is not None:
            yield self._add_weights(stage, [part.chunk for part in parts])
        else:
            for part in parts:
                if kind.restores is not None:
                    yield self._restore(part, again=again)
                elif forward:
                    yield self._compute(part, again=again)
                else:
                    yield self._differentiate(part)

    # Steps

    def _compute(self, stage: Stage, *, again: bool) -> RunStage:
        kind, chunk, block = stage.kind, stage.chunk, self._blocks[stage.layer]
        before, takes = self._take_values(block, kind, chunk, again=again)
        if again:
            before = [*self._empty_values(block, kind, chunk), *before]
        after, gives = self._give_values(block, kind, chunk, again=again)
        half, function = block.functions.run(kind)
        keeps = self._keep and again == block.recomputed and not kind.own_backward
        step = RunStage(
            stage,
            tuple(before),
            tuple(takes),
            tuple(gives),
            tuple(after),
            function=function,
            half=half,
            keeps_graph=keeps,
            draws=self._keep and block.recomputed,
        )
        if not keeps:
            return step
        step.segment = self.slot("segment", block.layer, kind, chunk)
        others = [step.segment]
        step.recompute = kind in block.functions.recomputed
        # What it computes with is several times as wide, so this is where most memory is held.
        step.releases = kind == kinds.EXPERT
        keys = block.keys_taken(kind)
        if keys:
            step.sums = self.slot("sums", block.layer)
            slots = tuple(self.slot("keys", block.layer, name, again) for name in keys)
            step.before = (*step.before, MakeSums((slots[0], slots[1]), step.sums))
            others.append(step.sums)
        if kind in self._apart:
            step.apart = functools.partial(block.functions.weights_apart, kind)
            step.products = self.slot("products", block.layer, kind, chunk)
            self._products[block.layer, kind].append(step.products)
            others.append(step.products)
        flow = block.flow_of(chunk)
        if block.restores and kind == kinds.EXPERT and flow.is_restored(kind):
            step.inner = functools.partial(
                InnerTensors,
                block.functions.stage_parameters.get(kind, ()),
                copied=kinds.STORE in flow.kinds,
                resorted=kinds.RESORT in flow.kinds,
            )
            step.dropped = self.slot("inner", block.layer, chunk)
            others.append(step.dropped)
        step.others = tuple(others)
        return step

    def _restore(self, stage: Stage, *, again: bool) -> Restore:
        kind, chunk, block = stage.kind, stage.chunk, self._blocks[stage.layer]
        before, takes = self._take_values(block, kind, chunk, again=again)
        after, gives = self._give_values(block, kind, chunk, again=again)
        half, function = block.functions.run(kind)
        inner = None if kind.gives else self.slot("inner", block.layer, chunk)
        return Restore(
            stage,
            tuple(before),
            tuple(takes),
            tuple(gives),
            tuple(after),
            others=() if inner is None else (inner,),
            function=function,
            half=half,
            inner=inner,
        )

    def _differentiate(self, stage: Stage) -> Step:
        kind, chunk, block = stage.kind, stage.chunk, self._blocks[stage.layer]
        before, takes = self._take_gradients(block, kind, chunk)
        after, gives = self._give_gradients(block, kind, chunk)
        if not kind.own_backward:
            segment = self.slot("segment", block.layer, kind, chunk)
            # What the graph has dropped was filled by now, and goes with it.
            inner = self._slots.get(("inner", block.layer, chunk)) if kind == kinds.EXPERT else None
            return Differentiate(
                stage,
                tuple(before),
                tuple(takes),
                tuple(gives),
                tuple(after),
                others=(segment,) if inner is None else (segment, inner),
                segment=segment,
                parameters=block.parameters_of(kind),
            )
        again = block.recomputed
        recalled = block.flow.recalled[kind]
        found = [Take(self.slot("value", block.layer, source, None, again)) for _, source in recalled]
        taken = block.flow.taken[kind]
        giver = next(source.giver for value, source in taken if value.layout is Layout.BLOCK)
        sums = self.slot("sums of", block.layer, giver)
        half, function = block.functions.differentiate(kind)
        return DifferentiateByLayer(
            stage,
            (*before, MakeSums((found[0].slot, found[1].slot), sums)),
            (*takes, *found),
            tuple(gives),
            tuple(after),
            others=(sums,),
            function=function,
            half=half,
            num_gradients=len(takes),
            sums=sums,
        )

    def _add_weights(self, stage: Stage, chunks: Sequence[int | None]) -> AddWeightGradients:
        of = stage.kind.weights_of
        assert of is not None
        joined = list(chunks) == [None]
        products = (
            self._products[stage.layer, of]
            if joined
            else [self.slot("products", stage.layer, of, chunk) for chunk in chunks]
        )
        return AddWeightGradients(stage, others=tuple(products), products=tuple(products), joined=joined)

    def _communicate(
        self, stage: Stage, chunks: Sequence[int | None], *, forward: bool, again: bool
    ) -> Communicate:
        kind, block = stage.kind, self._blocks[stage.layer]
        before: list[Move] = []
        takes: list[Take] = []
        gives: list[Give] = []
        after: list[Move] = []
        for chunk in chunks:
            if forward:
                moves, taken = self._take_values(block, kind, chunk, again=again)
                last, given = self._give_values(block, kind, chunk, again=again)
                if self._keep and block.recomputed and not again and kind in block.flow.once and given:
                    sources = tuple(give.slot for give in given)
                    last.append(NoteShapes(sources, self.slot("shapes", block.layer, kind, chunk)))
            else:
                moves, taken = self._take_gradients(block, kind, chunk)
                last, given = self._give_gradients(block, kind, chunk)
            before += moves
            takes += taken
            gives += given
            after += last
        half, function = block.functions.run(kind)
        return Communicate(
            stage,
            tuple(before),
            tuple(takes),
            tuple(gives),
            tuple(after),
            function=function,
            half=half,
            chunks=tuple(chunks),
            direction=Direction.FORWARD if forward else Direction.BACKWARD,
            restores=kinds.QKV if kind.restores == kinds.QKV else None,
        )

    def _copy(self, stage: Stage, chunks: Sequence[int | None]) -> Iterator[Step]:
        kind, block = stage.kind, self._blocks[stage.layer]
        if kind in (kinds.STORE, kinds.LOAD):
            inner = [(chunk, self.slot("inner", block.layer, chunk)) for chunk in chunks]
            yield CopyInner(
                stage,
                others=tuple(slot for _, slot in inner),
                inner=tuple(inner),
                kind=kinds.EXPERT,
                back=kind == kinds.LOAD,
            )
            return
        stored = tuple(self.slot("stored", block.layer, chunk) for chunk in chunks)
        before: list[Move] = []
        takes: list[Take] = []
        gives: list[Give] = []
        for chunk in chunks:
            moves, taken = self._take_values(block, kind, chunk, again=False)
            _, given = self._give_values(block, kind, chunk, again=False)
            before += moves
            takes += taken
            gives += given
        if kind == kinds.STORE_TOKENS:
            yield StoreValues(stage, tuple(before), tuple(takes), others=stored, stored=stored)
        else:
            yield LoadValues(stage, gives=tuple(gives), others=stored, stored=stored)

    # Values

    def _take_values(
        self, block: BlockLayout, kind: StageKind, chunk: int | None, *, again: bool
    ) -> tuple[list[Move], list[Take]]:
        """What a stage takes: of ``Layout.CHUNK`` a stage of the whole sequence gets each chunk's tensor."""
        moves: list[Move] = []
        found: list[Take] = []
        for value, source in block.flow_of(chunk).taken[kind]:
            if source.giver is None:
                slot = self.slot("hidden", block.layer)
                found.append(self._rows(block, slot, value.layout, chunk, moves))
            elif value.layout is Layout.KEYS:
                slot, rows = self.slot("keys", block.layer, value.name, again), block.num_keys(chunk)
                part = None if rows == block.num_keys(None) else slice(0, rows)
                found.append(Take(slot, part))
            elif block.is_kept_whole(source):
                slot = self.slot("value", block.layer, source, None, again)
                if chunk is None or value.layout is Layout.BLOCK:
                    found.append(Take(slot))
                else:
                    found.append(self._rows(block, slot, value.layout, chunk, moves))
            elif chunk is not None:
                found.append(Take(self.slot("value", block.layer, source, chunk, again)))
            else:
                every = range(len(block.chunks))
                parts = [self.slot("value", block.layer, source, index, again) for index in every]
                if value.layout is Layout.CHUNK:
                    found += [Take(part) for part in parts]
                elif len(parts) == 1:
                    found.append(Take(parts[0]))
                else:
                    spans = [block.spans(value.layout, index) for index in every]
                    target = self.temporary()
                    moves.append(Join(tuple(parts), spans, block.num_rows(value.layout), target))
                    found.append(Take(target))
        return moves, found

    def _rows(
        self, block: BlockLayout, slot: int, layout: Layout, chunk: int | None, moves: list[Move]
    ) -> Take:
        """The rows of a chunk of what is in a slot."""
        spans = block.spans(layout, chunk)
        if len(spans) > 1:
            target = self.temporary()
            moves.append(Gather(slot, spans, target))
            return Take(target)
        return Take(slot, block.part(layout, spans[0]))

    def _give_values(
        self, block: BlockLayout, kind: StageKind, chunk: int | None, *, again: bool
    ) -> tuple[list[Move], list[Give]]:
        moves: list[Move] = []
        found: list[Give] = []
        for value, source in block.flow.given[kind]:
            if source == block.flow.output:
                slot = self.temporary() if again else self.slot("hidden", block.layer + 1)
                found.append(Give(slot) if again else self._to_rows(block, slot, value.layout, chunk, moves))
            elif value.layout is Layout.KEYS:
                slot = self.slot("keys", block.layer, value.name, again)
                found.append(self._to_rows(block, slot, Layout.KEYS, chunk, moves))
            else:
                found.append(Give(self.slot("value", block.layer, source, chunk, again)))
        return moves, found

    def _to_rows(
        self, block: BlockLayout, slot: int, layout: Layout, chunk: int | None, moves: list[Move]
    ) -> Give:
        """Into the rows of a chunk of a buffer, or as they are where the chunk has all."""
        spans = block.spans(layout, chunk)
        num_rows = block.num_keys(None) if layout is Layout.KEYS else block.num_rows(layout)
        if chunk is None and layout is Layout.KEYS:
            return Give(slot)
        if len(spans) > 1:
            source = self.temporary()
            moves.append(Scatter(source, spans, num_rows, slot))
            return Give(source)
        part = block.part(layout, spans[0])
        return Give(slot) if part is None else Give(slot, part, num_rows)

    def _empty_values(self, block: BlockLayout, kind: StageKind, chunk: int | None) -> Iterator[Move]:
        """For a stage that runs again: memory for what it takes of transfers that do not."""
        givers = dict.fromkeys(source.giver for _, source in block.flow.taken[kind])
        for giver in givers:
            if giver in block.flow.once:
                targets = (
                    self.slot("value", block.layer, source, chunk, True)
                    for _, source in block.flow.given[giver]
                )
                yield MakeEmpty(self.slot("shapes", block.layer, giver, chunk), tuple(targets))

    # Gradients

    def _take_gradients(
        self, block: BlockLayout, kind: StageKind, chunk: int | None
    ) -> tuple[list[Move], list[Take]]:
        """For each tensor that a stage has given the gradient; of None where nothing depends on it."""
        moves: list[Move] = []
        found: list[Take] = []
        for value, source in block.flow.given[kind]:
            if source == block.flow.output:
                every = range(len(block.chunks)) if chunk is None else (chunk,)
                before, slot = self._hidden_gradient(block.layer + 1, every)
                moves += before
                found.append(self._rows(block, slot, value.layout, chunk, moves))
            elif value.layout is Layout.KEYS:
                spans = None if chunk is None else block.spans(Layout.KEYS, chunk)
                index, target = block.index_of(kind, value), self.temporary()
                moves.append(KeysGradient(self.slot("sums", block.layer), index, spans, (), target))
                found.append(Take(target))
            elif value.layout is Layout.BLOCK:
                index, target = block.index_of(kind, value), self.temporary()
                arrivals = tuple(self._arrivals.pop((block.layer, source, None), ()))
                sums = self.slot("sums of", block.layer, source.giver)
                moves.append(KeysGradient(sums, index, None, arrivals, target))
                found.append(Take(target))
            elif value.layout is Layout.SCALAR:
                found.append(Take(ZERO))
            elif block.gradient_givers(source):
                found.append(Take(self._total(block, source, chunk, moves)))
            else:
                found.append(Take(NOTHING))
        return moves, found

    def _total(self, block: BlockLayout, source: Source, chunk: int | None, moves: list[Move]) -> int:
        """The slot of all gradients of a value, or of a chunk of it."""
        key = (block.layer, source, chunk)
        arrivals = tuple(self._arrivals.pop(key, ()))
        added = [self.slot("gradient", *key)] if self._added[key] else []
        if chunk is None and self._added["rows", *key]:
            added.append(self.slot("rows of gradient", *key))
        slots = [*added, *(one.slot for one in arrivals if one.to is None and one.of is None)]
        if len(slots) == 1 and len(added) + len(arrivals) == 1:
            return slots[0]
        target = self.temporary()
        moves.append(Total(tuple(added), arrivals, block.num_rows(Layout.HIDDEN), target))
        return target

    def _hidden_gradient(self, layer: int, chunks: Sequence[int]) -> tuple[list[Move], int]:
        """The slot of the gradient of what a block is given; the rows of these chunks are complete then."""
        slot = self.slot("gradient of hidden", layer)
        moves: list[Move] = []
        if layer == len(self._blocks):
            return moves, slot
        block = self._blocks[layer]
        source = Source(None, kinds.HIDDEN_STATES.name)
        if block.is_kept_whole(source) and (layer,) not in self._hidden_taken:
            self._hidden_taken.add((layer,))
            moves.append(Total((self._total(block, source, None, moves),), (), 0, slot))
        for chunk in chunks:
            rows = block.spans(kinds.HIDDEN_STATES.layout, chunk)
            for arrival in self._arrivals.pop((layer, source, chunk), ()):
                source_slot = arrival.slot
                if arrival.of is not None:
                    source_slot = self.temporary()
                    moves.append(Gather(arrival.slot, arrival.of, source_slot))
                num_rows = block.num_rows(kinds.HIDDEN_STATES.layout)
                moves.append(AddRows(source_slot, None, rows, num_rows, slot))
        return moves, slot

    def _give_gradients(
        self, block: BlockLayout, kind: StageKind, chunk: int | None
    ) -> tuple[list[Move], list[Give]]:
        """The gradients of what a stage has taken, in the order of :meth:`_take_values`."""
        moves: list[Move] = []
        found: list[Give] = []
        of_keys: list[int] = []
        for value, source in block.flow.taken[kind]:
            if value.layout is Layout.KEYS:
                of_keys.append(self.temporary())
                found.append(Give(of_keys[-1]))
            elif value.layout is Layout.BLOCK and kind.lane.computes:
                # None: its backward has added them to the sums.
                found.append(Give(self.temporary()))
            elif not kind.lane.computes:
                found += self._arriving(block, kind, value, source, chunk)
            elif block.is_kept_whole(source):
                found.append(self._add_to_whole(block, value, source, chunk, moves))
            elif chunk is not None:
                found.append(self._add(block, value, source, chunk, moves))
            elif value.layout is Layout.CHUNK:
                found += [self._add(block, value, source, index, moves) for index in range(len(block.chunks))]
            elif len(block.chunks) == 1:
                found.append(self._add(block, value, source, 0, moves))
            else:
                whole = self.temporary()
                found.append(Give(whole))
                for index in range(len(block.chunks)):
                    part = self.temporary()
                    moves.append(Gather(whole, block.spans(value.layout, index), part))
                    later: list[Move] = []
                    give = self._add(block, value, source, index, later)
                    moves += [_moved(give, part), *later]
        if of_keys:
            moves.append(AddKeys((of_keys[0], of_keys[1]), self.slot("sums", block.layer)))
        return moves, found

    def _add(self, block: BlockLayout, value: Value, source: Source, chunk: int, moves: list[Move]) -> Give:
        """Add to the gradient of a chunk."""
        key = (block.layer, source, chunk)
        slot = self.slot("gradient", *key)
        self._added[key] += 1
        number = self._added[key]
        if source.giver is None and number == block.num_summed(source):
            # The last gradient of these rows: the sum is written to where the rows are returned.
            target = self.slot("gradient of hidden", block.layer)
            if number == 1:
                return self._to_rows(block, target, value.layout, chunk, moves)
            given, spans = self.temporary(), block.spans(value.layout, chunk)
            if len(spans) == 1 and block.part(value.layout, spans[0]) is None:
                moves.append(Total((slot, given), (), 0, target))
            else:
                moves.append(ScatterSum(given, slot, spans, block.num_rows(value.layout), target))
            return Give(given)
        if number == 1:
            return Give(slot)
        given = self.temporary()
        moves.append(Add(given, slot))
        return Give(given)

    def _add_to_whole(
        self, block: BlockLayout, value: Value, source: Source, chunk: int | None, moves: list[Move]
    ) -> Give:
        """Add to the gradient of a value that is one tensor for the whole sequence."""
        key = (block.layer, source, None)
        if chunk is None:
            slot = self.slot("gradient", *key)
            self._added[key] += 1
            if self._added[key] == 1:
                return Give(slot)
            given = self.temporary()
            moves.append(Add(given, slot))
            return Give(given)
        slot = self.slot("rows of gradient", *key)
        self._added["rows", *key] += 1
        if block.num_adding_rows(source) == 1:
            return self._to_rows(block, slot, value.layout, chunk, moves)
        given, spans = self.temporary(), block.spans(value.layout, chunk)
        written = self.slot("rows written", *key, chunk)
        moves.append(AddRows(given, written, spans, block.num_rows(value.layout), slot))
        return Give(given)

    def _arriving(
        self, block: BlockLayout, kind: StageKind, value: Value, source: Source, chunk: int | None
    ) -> list[Give]:
        """What is still on its way: whoever takes the sum comes after its arrival, and adds it."""
        every = range(len(block.chunks))

        def arrives(index: int | None, **rows: Any) -> Give:
            slot = self.slot("arrival", block.layer, kind, chunk, source, index)
            self._arrivals[block.layer, source, index].append(Arrival(slot, **rows))
            return Give(slot)

        if block.is_kept_whole(source):
            return [arrives(None, to=None if chunk is None else block.spans(value.layout, chunk))]
        if chunk is not None:
            return [arrives(chunk)]
        if value.layout is Layout.CHUNK:
            return [arrives(index) for index in every]
        slot = self.slot("arrival", block.layer, kind, chunk, source, None)
        for index in every:
            arrival = Arrival(slot, of=block.spans(value.layout, index))
            self._arrivals[block.layer, source, index].append(arrival)
        return [Give(slot)]


def _moved(give: Give, source: int) -> Move:
    """What a step would do with a result, as a move from a slot."""
    if give.rows is None:
        return Total((source,), (), 0, give.slot)
    span = Span(give.rows.start, give.rows.stop - give.rows.start, give.rows.start)
    return Scatter(source, (span,), give.num_rows, give.slot)


def _ends(order: Sequence[tuple[str, Stage]], needs: Mapping[Stage, Sequence[Stage]]) -> frozenset[Stage]:
    """For each block its last computed stage, if all of its transfers have ended by then."""
    left = Counter(stage.layer for _, stage in order if not stage.kind.of_parameters)
    ended: set[Stage] = set()
    found = []
    for _, stage in order:
        if not stage.kind.lane.computes:
            continue
        pending = [stage]
        while pending:
            one = pending.pop()
            if one not in ended and not one.kind.of_parameters:
                ended.add(one)
                left[one.layer] -= 1
                pending += needs[one]
        if not left[stage.layer]:
            found.append(stage)
    return frozenset(found)
