"""The steps of a tape. A step is a function of one stage, bound to numbered slots.

When a schedule is compiled (:mod:`.compile`), it is decided which slots a step reads as its arguments, which
it writes its results to, and which it frees. A run step reads and writes the state of a micro-batch.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatron_ampipe.runtime.block_functions import BlockState, Function
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.host_copies import HostCopies
from megatron_ampipe.runtime.saved_tensors import InnerTensors, inputs_again
from megatron_ampipe.runtime.segment import (
    BlockParameters,
    GradientSums,
    KeyValueSums,
    Segment,
    WeightProducts,
)
from megatron_ampipe.runtime.slot_ops import SlotOp, Slots, run_slot_ops
from megatron_ampipe.runtime.streams import CommMemory
from megatron_ampipe.schedule import Direction, Stage

NOTHING = 0
"""A slot that is always None."""
ZERO = 1
"""A slot that holds a zero, the gradient of every loss."""
FIRST_FREE = 2


class MicroBatchState:
    """The state of one forward pass of one micro-batch and its backward, which steps read and write.

    Attributes:
        slots: Tensors and other objects that steps pass to each other, by number.
        blocks: The state of each block.
        sums: The sums of parameter gradients of each block.
        comm_memory: Records memory that several streams use; None if there is only one stream.
    """

    __slots__ = ("__weakref__", "blocks", "comm_memory", "slots", "sums")

    def __init__(
        self,
        num_slots: int,
        blocks: Sequence[BlockState],
        parameters: Sequence[BlockParameters],
        comm_memory: CommMemory | None,
    ) -> None:
        self.slots: Slots = [None] * num_slots
        self.blocks = list(blocks)
        self.sums = [GradientSums(block_parameters) for block_parameters in parameters]
        self.comm_memory = comm_memory


class SlotRef(NamedTuple):
    """Where a step's argument or result is: a slot, or a slice of the rows in a slot.

    Attributes:
        slot: The number of the slot.
        rows: The slice; None for all rows.
        num_rows: Rows of the buffer in the slot, which the first result allocates.
    """

    slot: int
    rows: slice | None = None
    num_rows: int = 0


@dataclass(slots=True)
class Step(ABC):
    """A function of one stage of one chunk; a transfer can be of several chunks.

    Attributes:
        stage: The stage.
        before: Slot operations before the function.
        takes: Where its arguments are.
        gives: Where its results go.
        after: Slot operations after it.
        others: Further slots that the function itself reads or writes.
        frees: Slots that are emptied once the arguments are taken.
        drops: Slots that are emptied at the end of the step.
    """

    transfers: ClassVar[bool] = False
    """Whether :meth:`work` returns a transfer, whose outputs are the results."""
    stage: Stage
    before: list[SlotOp] = field(default_factory=list, init=False)
    takes: list[SlotRef] = field(default_factory=list, init=False)
    gives: list[SlotRef] = field(default_factory=list, init=False)
    after: list[SlotOp] = field(default_factory=list, init=False)
    others: list[int] = field(default_factory=list, init=False)
    frees: list[int] = field(default_factory=list, init=False)
    drops: list[int] = field(default_factory=list, init=False)

    @abstractmethod
    def work(self, state: MicroBatchState, inputs: Slots) -> Transfer | Sequence[Tensor | None]:
        """Compute the results, one for each of :attr:`gives`, from the arguments."""

    def run(self, state: MicroBatchState) -> Transfer | None:
        """Run the step on the calling thread and its current stream. Returns the transfer that it starts."""
        slots, comm_memory = state.slots, state.comm_memory
        if comm_memory is not None:
            self._note(comm_memory, _tensors(slots, self.taken))
        if self.before:
            run_slot_ops(self.before, slots)
        inputs = [slots[slot] if rows is None else slots[slot][rows] for slot, rows, _ in self.takes]
        # From here on only ``inputs`` refers to tensors that are not needed later.
        for slot in self.frees:
            slots[slot] = None
        transfer: Transfer | None = None
        results: Sequence[Tensor | None]
        done = self.work(state, inputs)
        # Not ``isinstance``: this runs for every step of every pass.
        if self.transfers:
            sent: Transfer = done  # type: ignore[assignment]  # of these steps
            transfer, results = sent, sent.outputs
            if comm_memory is not None:
                self._note(comm_memory, (*inputs, *sent.uses, *sent.outputs))
        else:
            results = done  # type: ignore[assignment]  # of all others
        del done
        del inputs
        for (slot, rows, num_rows), tensor in zip(self.gives, results, strict=True):
            if rows is None:
                slots[slot] = tensor
            elif tensor is not None:
                buffer = slots[slot]
                if buffer is None:
                    buffer = slots[slot] = tensor.new_empty((num_rows, *tensor.shape[1:]))
                buffer[rows] = tensor
        if comm_memory is not None:
            self._note(comm_memory, _tensors(slots, self.given))
        if self.after:
            run_slot_ops(self.after, slots)
        for slot in self.drops:
            slots[slot] = None
        return transfer

    def _note(self, comm_memory: CommMemory, tensors: Iterable[Tensor]) -> None:
        """Record tensors that the step reads or writes."""
        if self.transfers:
            comm_memory.record_transfer(tensors)
        else:
            comm_memory.record_use(tensors)

    @property
    def taken(self) -> list[int]:
        """The slots that are read before the function runs."""
        return [slot for op in self.before for slot in op.slots] + [place.slot for place in self.takes]

    @property
    def given(self) -> list[int]:
        """The slots that are read or written later."""
        moved = [slot for op in self.after for slot in op.slots]
        return [*self.others, *(place.slot for place in self.gives), *moved]

    def text(self, names: Sequence[str]) -> str:
        """The lines of the step in a printed tape: operations, arguments, results, operations, freed slots.

        Args:
            names: The names of all slots.
        """

        def named(places: Sequence[SlotRef]) -> str:
            rows = ("" if rows is None else f"[{rows.start}:{rows.stop}]" for _, rows, _ in places)
            return ", ".join(names[place.slot] + part for place, part in zip(places, rows, strict=True))

        def moved(ops: Sequence[SlotOp]) -> list[str]:
            return [
                f"{op.function.__name__}({', '.join(names[slot] for slot in op.sources)})"
                f" -> {names[op.target]}"
                for op in ops
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
    """Runs the function of a computed stage, with or without a graph.

    Attributes:
        function: Called with the state, the chunk and the arguments.
        extras: Slots of further arguments, by keyword.
        segment: Slot of the graph; None if the stage is not differentiated.
        recompute: Save only the arguments, and run the function again before its backward.
        releases: The backward releases its input gradient after the first use.
        restores: Slots of the graphs that will use the tensors that this step rebuilds.
    """

    function: Function
    extras: dict[str, int] = field(default_factory=dict)
    segment: int | None = None
    recompute: bool = False
    releases: bool = False
    restores: Sequence[int] = ()

    def work(self, state: MicroBatchState, inputs: Slots) -> Sequence[Tensor | None]:
        """See :class:`Step`."""
        slots, stage, function = state.slots, self.stage, self.function
        block = state.blocks[stage.layer]
        if block.draws:
            function = block.with_rng_state(
                function, (stage.kind, stage.chunk), is_recompute=stage.is_recompute
            )
        extras = {name: slots[slot] for name, slot in self.extras.items()}
        if state.comm_memory is not None:
            _record_in_graphs(state, state.comm_memory, self.restores, inputs)
        if self.segment is None:
            with torch.no_grad():
                results: Sequence[Tensor | None] = function(block, stage.chunk, *inputs, **extras)
                return results
        recall = None
        if self.recompute:
            recall = inputs_again(inputs, extras.pop("first_again", None))
        bound = functools.partial(function, block, stage.chunk, **extras)
        segment = slots[self.segment] = Segment(bound, inputs, recall=recall, releases=self.releases)
        if state.comm_memory is not None:
            segment.comm_memory = state.comm_memory.record_use(inputs)
        outputs, segment.values = segment.values, ()
        return outputs


@dataclass(slots=True)
class Differentiate(Step):
    """The backward of :class:`RunStage`: from gradients of its results to gradients of its arguments.

    Attributes:
        segment: Slot of the graph.
        parameters: Numbers of the parameters that the stage uses, in the sums of the block.
        products: Slot of the delayed weight-gradient products; None if they are not delayed.
    """

    segment: int
    parameters: Sequence[int]
    products: int | None = None

    def work(self, state: MicroBatchState, inputs: Slots) -> Sequence[Tensor | None]:
        """See :class:`Step`."""
        segment: Segment = state.slots[self.segment]
        state.slots[self.segment] = None
        if state.comm_memory is not None:
            state.comm_memory.record_backward(segment.comm_memory)
        products = None if self.products is None else state.slots[self.products]
        return segment.backward(
            inputs, parameters=self.parameters, sums=state.sums[self.stage.layer], products=products
        )


@dataclass(slots=True)
class AddWeightGradients(Step):
    """Computes and adds delayed weight gradients.

    Attributes:
        products: Slots of the delayed products.
        joined: Whether to compute one product for all chunks, because the stage is of the whole sequence.
    """

    products: Sequence[int]
    joined: bool

    def work(self, state: MicroBatchState, inputs: Slots) -> tuple[()]:
        """See :class:`Step`."""
        slots = state.slots
        parts: list[WeightProducts] = [slots[slot] for slot in self.products]
        for slot in self.products:
            slots[slot] = None
        for part in [WeightProducts.joined(parts)] if self.joined else parts:
            if state.comm_memory is not None:
                state.comm_memory.record_use(part.tensors)
            part.add_to(state.sums[self.stage.layer])
        return ()


@dataclass(slots=True)
class Communicate(Step):
    """Starts a transfer of values, or of gradients in the other direction.

    Attributes:
        function: Called with the state, the chunks, the arguments of each chunk, and the direction.
        chunks: The chunks that are transferred.
        direction: Forward for values in both passes, backward for gradients.
        parts: The range of arguments of each chunk.
    """

    transfers: ClassVar[bool] = True
    function: Function
    chunks: Sequence[int | None]
    direction: Direction
    parts: list[slice] = field(default_factory=list)

    def work(self, state: MicroBatchState, inputs: Slots) -> Transfer:
        """See :class:`Step`."""
        block, tensors = state.blocks[self.stage.layer], [inputs[part] for part in self.parts]
        transfer: Transfer = self.function(block, self.chunks, tensors, self.direction)
        return transfer


@dataclass(slots=True)
class Copy(Step):
    """Starts to copy saved activations of a graph, or values, to host memory or back.

    Attributes:
        kept: Slots of the objects that copy: :class:`InnerTensors`, or :class:`HostCopies` of the arguments.
        back: Copy from host memory to the device.
        parts: The range of arguments of each object.
        restores: Slots of the graphs that use the tensors that are copied back.
    """

    transfers: ClassVar[bool] = True
    kept: Sequence[int]
    back: bool
    parts: list[slice] = field(default_factory=list)
    restores: Sequence[int] = ()

    def work(self, state: MicroBatchState, inputs: Slots) -> Transfer:
        """See :class:`Step`."""
        slots = state.slots
        if inputs:
            for slot, part in zip(self.kept, self.parts, strict=True):
                slots[slot] = HostCopies(inputs[part])
        kept: list[InnerTensors | HostCopies] = [slots[slot] for slot in self.kept]
        transfer = Transfer.all_of([copies.load() if self.back else copies.store() for copies in kept])
        if state.comm_memory is not None:
            _record_in_graphs(state, state.comm_memory, self.restores, transfer.uses, transfers=True)
        return transfer


def _record_in_graphs(
    state: MicroBatchState,
    comm_memory: CommMemory,
    segments: Sequence[int],
    tensors: Sequence[Tensor],
    *,
    transfers: bool = False,
) -> None:
    """Record that graphs, which will be differentiated later, use these tensors."""
    for slot in segments:
        if transfers:
            comm_memory.record_transfer(tensors)
        state.slots[slot].comm_memory += comm_memory.record_use(tensors)
