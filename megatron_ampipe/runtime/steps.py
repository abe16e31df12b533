"""What a tape consists of: steps, each one function of one stage bound to numbered slots.

:mod:`.compile` decides, before the first batch, what a step takes, where it puts what it gives, and which
slots it frees. A step reads and writes the state of one pass when an executor runs it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_ampipe.runtime.block_functions import BlockState, Function
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.moves import Move, Slots, run_moves
from megatron_ampipe.runtime.saved_tensors import HostCopies, InnerTensors
from megatron_ampipe.runtime.segment import (
    BlockParameters,
    GradientSums,
    KeyValueSums,
    Segment,
    WeightProducts,
)
from megatron_ampipe.runtime.streams import Crossing
from megatron_ampipe.schedule import Direction, Stage

NOTHING = 0
"""A slot that is always None."""
ZERO = 1
"""A slot with the number 0, the gradient of every loss."""
FIRST_FREE = 2


class Pass:
    """One forward pass of one micro-batch and its backward: what the steps of a tape read and write.

    Attributes:
        slots: Tensors and other things that steps hand to one another, by number.
        blocks: Their states.
        sums: By block, of the gradients of its parameters.
        crossing: Told of what several streams use; None where no stream is crossed.
    """

    __slots__ = ("__weakref__", "blocks", "crossing", "slots", "sums")

    def __init__(
        self,
        num_slots: int,
        blocks: Sequence[BlockState],
        parameters: Sequence[BlockParameters],
        crossing: Crossing | None,
    ) -> None:
        self.slots: Slots = [None] * num_slots
        self.blocks = list(blocks)
        self.sums = [GradientSums(of_block) for of_block in parameters]
        self.crossing = crossing


class Place(NamedTuple):
    """An argument or a result of a step: what is in a slot, or a slice of its rows.

    Attributes:
        slot: Which.
        rows: The slice; None for all.
        num_rows: Of the buffer in the slot, which the first result makes.
    """

    slot: int
    rows: slice | None = None
    num_rows: int = 0


@dataclass(slots=True)
class Step(ABC):
    """One function of one stage of one chunk; a transfer can be of several chunks.

    Attributes:
        stage: Of which stage.
        before: What is done first.
        takes: The arguments.
        gives: Where the results go.
        after: What is done last.
        others: Slots that the function itself reads and writes.
        frees: Slots that nobody reads after the arguments are taken.
        drops: Slots that nobody reads after the step.
    """

    transfers: ClassVar[bool] = False
    """Whether :meth:`work` returns a transfer, whose outputs are the results."""
    stage: Stage
    before: list[Move] = field(default_factory=list, init=False)
    takes: list[Place] = field(default_factory=list, init=False)
    gives: list[Place] = field(default_factory=list, init=False)
    after: list[Move] = field(default_factory=list, init=False)
    others: list[int] = field(default_factory=list, init=False)
    frees: list[int] = field(default_factory=list, init=False)
    drops: list[int] = field(default_factory=list, init=False)

    @abstractmethod
    def work(self, state: Pass, inputs: list[Any]) -> Any:
        """From the arguments to the results, one for each of :attr:`gives`."""

    def run(self, state: Pass) -> Transfer | None:
        """Run it on the calling thread and its current stream. What it starts is returned."""
        slots, crossing = state.slots, state.crossing
        if crossing is not None:
            self._note(crossing, _tensors(slots, self.taken))
        if self.before:
            run_moves(self.before, slots)
        inputs = [slots[slot] if rows is None else slots[slot][rows] for slot, rows, _ in self.takes]
        # What is not needed any more is referred to by the arguments alone.
        for slot in self.frees:
            slots[slot] = None
        results, transfer = self.work(state, inputs), None
        if self.transfers:
            transfer, results = results, results.outputs
            if crossing is not None:
                self._note(crossing, (*inputs, *transfer.uses, *results))
        del inputs
        for (slot, rows, num_rows), tensor in zip(self.gives, results, strict=True):
            if rows is None:
                slots[slot] = tensor
            elif tensor is not None:
                buffer = slots[slot]
                if buffer is None:
                    buffer = slots[slot] = tensor.new_empty((num_rows, *tensor.shape[1:]))
                buffer[rows] = tensor
        if crossing is not None:
            self._note(crossing, _tensors(slots, self.given))
        if self.after:
            run_moves(self.after, slots)
        for slot in self.drops:
            slots[slot] = None
        return transfer

    def _note(self, crossing: Crossing, tensors: Iterable[Tensor]) -> None:
        """Report tensors that the step reads or writes."""
        if self.transfers:
            crossing.note_transfer(tensors)
        else:
            crossing.note_use(tensors)

    @property
    def taken(self) -> list[int]:
        """The slots that are read before the function runs."""
        return [slot for move in self.before for slot in move.slots] + [place.slot for place in self.takes]

    @property
    def given(self) -> list[int]:
        """The slots that are read or written later."""
        moved = [slot for move in self.after for slot in move.slots]
        return [*self.others, *(place.slot for place in self.gives), *moved]

    def text(self, names: Sequence[str]) -> str:
        """As lines of a printed tape: moves, what the function takes and gives, moves, what is freed.

        Args:
            names: Of all slots.
        """

        def named(places: Sequence[Place]) -> str:
            rows = ("" if rows is None else f"[{rows.start}:{rows.stop}]" for _, rows, _ in places)
            return ", ".join(names[place.slot] + part for place, part in zip(places, rows, strict=True))

        def moved(moves: Sequence[Move]) -> list[str]:
            return [
                f"{move.function.__name__}({', '.join(names[slot] for slot in move.sources)})"
                f" -> {names[move.target]}"
                for move in moves
            ]

        call = f"{self.stage}: {type(self).__name__}({named(self.takes)})"
        if self.gives:
            call += f" -> {named(self.gives)}"
        lines = [*moved(self.before), call, *moved(self.after)]
        if freed := [names[slot] for slot in (*self.frees, *self.drops)]:
            lines.append(f"frees {', '.join(freed)}")
        return "\n".join(lines)


def _tensors(slots: Slots, numbers: Iterable[int]) -> Iterator[Tensor]:
    for slot in numbers:
        if isinstance(slots[slot], Tensor):
            yield slots[slot]
        elif isinstance(slots[slot], KeyValueSums):
            yield from slots[slot].allocated


@dataclass(slots=True)
class RunStage(Step):
    """The function of a stage that is computed, with or without a graph.

    Attributes:
        function: Called with the state, the chunk and the arguments.
        extras: Slots of further arguments, by keyword.
        segment: Slot of the graph; None if it is not differentiated.
        recompute: Keep no more than the arguments, and run the function again before it is differentiated.
        releases: Its backward releases the gradient that it is given after the first use.
        restores: Slots of graphs that will use what this has computed once more.
    """

    function: Function
    extras: dict[str, int] = field(default_factory=dict)
    segment: int | None = None
    recompute: bool = False
    releases: bool = False
    restores: Sequence[int] = ()

    def work(self, state: Pass, inputs: list[Any]) -> Any:
        """See :class:`Step`."""
        slots, stage, function = state.slots, self.stage, self.function
        block = state.blocks[stage.layer]
        if block.draws:
            function = block.drawn(function, (stage.kind, stage.chunk), again=stage.again)
        extras = {name: slots[slot] for name, slot in self.extras.items()}
        if state.crossing is not None:
            _note_in_graphs(state, state.crossing, self.restores, inputs)
        if self.segment is None:
            with torch.no_grad():
                return function(block, stage.chunk, *inputs, **extras)
        bound = functools.partial(function, block, stage.chunk, **extras)
        recall = block.recall(stage.kind, stage.chunk, inputs) if self.recompute else None
        segment = slots[self.segment] = Segment(bound, inputs, recall=recall, releases=self.releases)
        if state.crossing is not None:
            segment.crossed = state.crossing.note_use(inputs)
        outputs, segment.values = segment.values, ()
        return outputs


@dataclass(slots=True)
class Differentiate(Step):
    """The backward of :class:`RunStage`: gradients of its results to those of its arguments.

    Attributes:
        segment: Slot of its graph.
        parameters: Numbers of the parameters that it uses, in the sums of the block.
        products: Slot of what its weights' gradients wait in; None if they do not.
    """

    segment: int
    parameters: Sequence[int]
    products: int | None = None

    def work(self, state: Pass, inputs: list[Any]) -> Sequence[Tensor | None]:
        """See :class:`Step`."""
        segment: Segment = state.slots[self.segment]
        state.slots[self.segment] = None
        if state.crossing is not None:
            state.crossing.note_backward(segment.crossed)
        products = None if self.products is None else state.slots[self.products]
        return segment.backward(
            inputs, parameters=self.parameters, sums=state.sums[self.stage.layer], products=products
        )


@dataclass(slots=True)
class AddWeightGradients(Step):
    """The gradients of the weights of stages that were differentiated.

    Attributes:
        products: Slots of what waits.
        joined: Whether one product is of all of them, because the stage is of the whole sequence.
    """

    products: Sequence[int]
    joined: bool

    def work(self, state: Pass, inputs: list[Any]) -> tuple[()]:
        """See :class:`Step`."""
        slots = state.slots
        parts: list[WeightProducts] = [slots[slot] for slot in self.products]
        for slot in self.products:
            slots[slot] = None
        for part in [WeightProducts.joined(parts)] if self.joined else parts:
            if state.crossing is not None:
                state.crossing.note_use(part.tensors)
            part.add_to(state.sums[self.stage.layer])
        return ()


@dataclass(slots=True)
class Communicate(Step):
    """Starts a transfer: of values forward, of their gradients backward.

    Attributes:
        function: Called with the state, the chunks, for each what it takes, and the direction.
        chunks: Which.
        direction: Forward for values, in whichever pass.
        parts: Of each chunk the arguments.
        restores: Slots of graphs that use what it transfers without taking it from a slot.
    """

    transfers: ClassVar[bool] = True
    function: Function
    chunks: Sequence[int | None]
    direction: Direction
    parts: list[slice] = field(default_factory=list)
    restores: Sequence[int] = ()

    def work(self, state: Pass, inputs: list[Any]) -> Transfer:
        """See :class:`Step`."""
        block, tensors = state.blocks[self.stage.layer], [inputs[part] for part in self.parts]
        transfer: Transfer = self.function(block, self.chunks, tensors, self.direction)
        if state.crossing is not None:
            _note_in_graphs(state, state.crossing, self.restores, transfer.uses, transfers=True)
        return transfer


@dataclass(slots=True)
class Copy(Step):
    """Starts to copy to host memory, or back: what a graph has kept, or values.

    Attributes:
        kept: Slots of what copies: :class:`InnerTensors`, or :class:`HostCopies` of the arguments.
        back: From host memory.
        parts: Of each of them the arguments.
        restores: Slots of the graphs that use what comes back.
    """

    transfers: ClassVar[bool] = True
    kept: Sequence[int]
    back: bool
    parts: list[slice] = field(default_factory=list)
    restores: Sequence[int] = ()

    def work(self, state: Pass, inputs: list[Any]) -> Transfer:
        """See :class:`Step`."""
        slots = state.slots
        if inputs:
            for slot, part in zip(self.kept, self.parts, strict=True):
                slots[slot] = HostCopies(inputs[part])
        kept: list[InnerTensors | HostCopies] = [slots[slot] for slot in self.kept]
        transfer = Transfer.all_of([each.load() if self.back else each.store() for each in kept])
        if state.crossing is not None:
            _note_in_graphs(state, state.crossing, self.restores, transfer.uses, transfers=True)
        return transfer


def _note_in_graphs(
    state: Pass,
    crossing: Crossing,
    segments: Sequence[int],
    tensors: Sequence[Tensor],
    *,
    transfers: bool = False,
) -> None:
    """Note tensors as used by graphs that will be differentiated."""
    for slot in segments:
        if transfers:
            crossing.note_transfer(tensors)
        state.slots[slot].crossed += crossing.note_use(tensors)
