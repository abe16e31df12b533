"""What a tape consists of: steps, each one function of one stage bound to numbered slots.

:mod:`.compile` decides, before the first batch, what a step takes, where it puts what it gives, and which
slots it frees. A step reads and writes the state of one pass (:mod:`.pass_state`) when an executor runs it.
"""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.host_memory import HostCopies
from megatron_ampipe.runtime.inner_tensors import InnerTensors
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.moves import Move, Slots, buffer_for
from megatron_ampipe.runtime.pass_state import Pass
from megatron_ampipe.runtime.segment import Segment, with_history
from megatron_ampipe.runtime.weight_products import WeightProducts
from megatron_ampipe.schedule import Direction, Stage, StageKind

Function = Callable[..., Any]
"""Of a stage, with the state of its half of the block as first argument (``BlockFunctions``)."""
NOTHING = 0
"""A slot that is always None."""
ZERO = 1
"""A slot with the number 0, the gradient of every loss."""
FIRST_FREE = 2


@dataclass(frozen=True, slots=True)
class Take:
    """One argument: what is in a slot, or a slice of its rows."""

    slot: int
    rows: slice | None = None


@dataclass(frozen=True, slots=True)
class Give:
    """Where one result goes: into a slot, or into rows of a buffer of ``num_rows`` that is in it."""

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

    stage: Stage
    before: tuple[Move, ...] = ()
    takes: tuple[Take, ...] = ()
    gives: tuple[Give, ...] = ()
    after: tuple[Move, ...] = ()
    others: tuple[int, ...] = ()
    frees: tuple[int, ...] = field(default=(), init=False)
    drops: tuple[int, ...] = field(default=(), init=False)

    @abstractmethod
    def run(self, state: Pass) -> Transfer | None:
        """Run it on the calling thread and its current stream."""

    @property
    def taken(self) -> tuple[int, ...]:
        """The slots that are read before the function runs."""
        moved = itertools.chain.from_iterable(move.slots for move in self.before)
        return *moved, *(take.slot for take in self.takes)

    @property
    def given(self) -> tuple[int, ...]:
        """The slots that are read or written later."""
        moved = itertools.chain.from_iterable(move.slots for move in self.after)
        return *self.others, *(give.slot for give in self.gives), *moved

    def take(self, state: Pass) -> list[Any]:
        """The arguments. What is not needed any more is referred to by them alone."""
        slots = state.slots
        if state.crossing is not None:
            self._note(state.crossing, _tensors(slots, self.taken))
        for move in self.before:
            move(slots)
        found = [slots[one.slot] if one.rows is None else slots[one.slot][one.rows] for one in self.takes]
        for slot in self.frees:
            slots[slot] = None
        return found

    def give(self, state: Pass, results: Sequence[Tensor | None]) -> None:
        """Put the results where they go."""
        slots = state.slots
        for one, tensor in zip(self.gives, results, strict=True):
            if one.rows is None:
                slots[one.slot] = tensor
            elif tensor is not None:
                buffer = slots[one.slot]
                if buffer is None:
                    buffer = buffer_for(slots, one.slot, tensor, one.num_rows)
                buffer[one.rows] = tensor
        if state.crossing is not None:
            self._note(state.crossing, _tensors(slots, self.given))
        for move in self.after:
            move(slots)
        for slot in self.drops:
            slots[slot] = None

    def _note(self, crossing: Crossing, tensors: Iterable[Tensor]) -> None:
        """Report tensors that the step reads or writes."""
        crossing.note_use(tensors)

    def text(self, names: Sequence[str]) -> str:
        """As lines of a printed tape: moves, what the function takes and gives, moves, what is freed.

        Args:
            names: Of all slots.
        """

        def named(one: Take | Give) -> str:
            rows = "" if one.rows is None else f"[{one.rows.start}:{one.rows.stop}]"
            return names[one.slot] + rows

        def moved(move: Move) -> str:
            return f"{type(move).__name__}({', '.join(names[slot] for slot in move.slots)})"

        call = f"{self.stage}: {type(self).__name__}({', '.join(map(named, self.takes))})"
        if self.gives:
            call += f" -> {', '.join(map(named, self.gives))}"
        freed = [names[slot] for slot in (*self.frees, *self.drops)]
        lines = [*map(moved, self.before), call, *map(moved, self.after)]
        return "\n".join([*lines, *([f"frees {', '.join(freed)}"] if freed else [])])


@dataclass(slots=True)
class RunStage(Step):
    """The function of a stage that is computed, with or without a graph.

    Attributes:
        function: Called with the state, the chunk and the arguments.
        half: Whose state.
        keeps_graph: Whether it will be differentiated, in the slot ``segment``.
        recompute: Keep only the arguments, and run the function again before it is differentiated.
        sums: Slot of what its backward may add the gradients of keys and values to.
        apart: Makes the context in which its weights' gradients are left to the products in the slot
            ``products``; None where its backward computes them.
        inner: Makes what keeps tensors in place of its graph, in the slot ``dropped``; None where that does.
        draws: Keeps the random states, or restores them (``again``).
    """

    function: Function = field(kw_only=True)
    half: int = field(kw_only=True)
    keeps_graph: bool = field(kw_only=True)
    segment: int = field(kw_only=True, default=NOTHING)
    recompute: bool = field(kw_only=True, default=False)
    releases: bool = field(kw_only=True, default=False)
    sums: int | None = field(kw_only=True, default=None)
    apart: Callable[[WeightProducts], AbstractContextManager[None]] | None = field(kw_only=True, default=None)
    products: int = field(kw_only=True, default=NOTHING)
    inner: Callable[[], InnerTensors] | None = field(kw_only=True, default=None)
    dropped: int = field(kw_only=True, default=NOTHING)
    draws: bool = field(kw_only=True, default=False)

    def run(self, state: Pass) -> None:
        """See :class:`Step`."""
        slots, stage = state.slots, self.stage
        inputs = self.take(state)
        function = self.function
        if self.draws and (draws := state.draws[stage.layer]) is not None:
            function = draws.drawn(function, (stage.kind, stage.chunk), again=stage.again)
        bound = state.states[stage.layer][self.half], stage.chunk
        if not self.keeps_graph:
            with torch.no_grad():
                outputs = function(*bound, *inputs)
            del inputs
            self.give(state, outputs)
            return
        extra = {} if self.sums is None else {"sums": slots[self.sums]}
        if self.apart is not None:
            products = slots[self.products] = WeightProducts()
            function = _within(self.apart, products, function)
        inner: InnerTensors | None = None
        if self.inner is not None:
            inner = extra["inner"] = slots[self.dropped] = self.inner()
        if state.crossing is not None:
            key = stage.kind, stage.chunk, stage.layer
            state.crossed[key] = state.crossing.note_use(inputs)
        with contextlib.nullcontext() if inner is None else inner.dropped():
            segment = Segment(
                function, bound, extra, inputs, recompute=self.recompute, releases=self.releases
            )
        del inputs
        outputs, segment.values = segment.values, ()
        slots[self.segment] = segment
        self.give(state, outputs)


def _within(
    context: Callable[[WeightProducts], AbstractContextManager[None]],
    products: WeightProducts,
    function: Function,
) -> Function:
    """The function, run within a context; can run again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with context(products):
            return function(*args, **kwargs)

    return run


@dataclass(slots=True)
class Restore(Step):
    """Computes values once more in the backward pass: for stages that take them, or inside the graph.

    Attributes:
        function: Called with the state, the chunk and the arguments.
        half: Whose state.
        inner: Slot of what it fills; None if its results are values.
    """

    function: Function = field(kw_only=True)
    half: int = field(kw_only=True)
    inner: int | None = field(kw_only=True)

    def run(self, state: Pass) -> None:
        """See :class:`Step`."""
        slots, stage = state.slots, self.stage
        inputs = self.take(state)
        crossed = () if state.crossing is None else state.crossing.note_use(inputs)
        bound = state.states[stage.layer][self.half]
        if self.inner is None:
            with torch.no_grad():
                self.give(state, self.function(bound, stage.chunk, *inputs))
            return
        inner: InnerTensors = slots[self.inner]
        with inner.restored():
            self.function(bound, stage.chunk, *with_history(inputs), inner=inner)
        self.give(state, ())
        if state.crossing is not None:
            assert stage.kind.restores is not None
            state.crossed[stage.kind.restores, stage.chunk, stage.layer] += crossed


@dataclass(slots=True)
class Differentiate(Step):
    """The backward of :class:`RunStage`: gradients of its results to those of its arguments.

    Attributes:
        segment: Slot of its graph.
        parameters: Numbers of the parameters that it uses, in the sums of the block.
    """

    segment: int = field(kw_only=True)
    parameters: tuple[int, ...] = field(kw_only=True)

    def run(self, state: Pass) -> None:
        """See :class:`Step`."""
        slots, stage = state.slots, self.stage
        gradients = self.take(state)
        segment: Segment = slots[self.segment]
        slots[self.segment] = None
        if state.crossing is not None:
            state.crossing.note_backward(state.crossed.pop((stage.kind, stage.chunk, stage.layer)))
        found = segment.backward(gradients, parameters=self.parameters, sums=state.sums[stage.layer])
        self.give(state, found)


def _tensors(slots: Slots, numbers: Iterable[int]) -> Iterator[Tensor]:
    for slot in numbers:
        if isinstance(slots[slot], Tensor):
            yield slots[slot]
        elif isinstance(slots[slot], KeyValueSums):
            yield from slots[slot].allocated


@dataclass(slots=True)
class DifferentiateByLayer(Step):
    """The backward of a kind that has its own.

    Attributes:
        function: Called with the state, the chunk, gradients, what it recalls, and sums.
        half: Whose state.
        num_gradients: How many of the arguments are gradients; the others are recalled.
        sums: Slot of the sums to which it adds the gradients of what it recalls.
    """

    function: Function = field(kw_only=True)
    half: int = field(kw_only=True)
    num_gradients: int = field(kw_only=True)
    sums: int = field(kw_only=True)

    def run(self, state: Pass) -> None:
        """See :class:`Step`."""
        slots, stage = state.slots, self.stage
        inputs = self.take(state)
        gradients, recalled = inputs[: self.num_gradients], inputs[self.num_gradients :]
        bound = state.states[stage.layer][self.half]
        found = self.function(bound, stage.chunk, gradients, recalled, slots[self.sums])
        self.give(state, found)


@dataclass(slots=True)
class AddWeightGradients(Step):
    """The gradients of the weights of stages that were differentiated; of several chunks in one product.

    Attributes:
        products: Slots of what waits.
        joined: Whether they are one stage of the whole sequence.
    """

    products: tuple[int, ...] = field(kw_only=True)
    joined: bool = field(kw_only=True)

    def run(self, state: Pass) -> None:
        """See :class:`Step`."""
        slots = state.slots
        parts: list[WeightProducts] = [slots[slot] for slot in self.products]
        for slot in self.products:
            slots[slot] = None
        for part in [WeightProducts.joined(parts)] if self.joined else parts:
            if state.crossing is not None:
                state.crossing.note_use(part.tensors)
            part.add_to(state.sums[self.stage.layer])
        self.give(state, ())


@dataclass(slots=True)
class Communicate(Step):
    """Starts a transfer: of values forward, of their gradients backward.

    Attributes:
        function: Called with the state, the chunks, for each what it takes, and the direction.
        half: Whose state.
        chunks: Which.
        direction: Forward for values, in whichever pass.
        restores: Kinds whose graphs use what it transfers.
    """

    function: Function = field(kw_only=True)
    half: int = field(kw_only=True)
    chunks: tuple[int | None, ...] = field(kw_only=True)
    direction: Direction = field(kw_only=True)
    restores: StageKind | None = field(kw_only=True, default=None)

    def _note(self, crossing: Crossing, tensors: Iterable[Tensor]) -> None:
        crossing.note_transfer(tensors)

    def run(self, state: Pass) -> Transfer:
        """See :class:`Step`."""
        inputs = self.take(state)
        tensors, count = [inputs], len(self.chunks)
        if count > 1:
            size = len(inputs) // count
            tensors = [inputs[place * size : (place + 1) * size] for place in range(count)]
        bound = state.states[self.stage.layer][self.half]
        transfer: Transfer = self.function(bound, self.chunks, tensors, self.direction)
        self.give(state, transfer.outputs)
        if state.crossing is not None:
            state.crossing.note_transfer((*inputs, *transfer.uses, *transfer.outputs))
            for chunk in self.chunks if self.restores is not None else ():
                key = (self.restores, chunk, self.stage.layer)
                state.crossed[key] += state.crossing.note_use(transfer.uses)
        return transfer


@dataclass(slots=True)
class CopyInner(Step):
    """Starts to copy what an expert has kept to host memory, or back.

    Attributes:
        inner: Slots of it, of each chunk.
        kind: Whose graph it is.
        back: From host memory.
    """

    inner: tuple[tuple[int | None, int], ...] = field(kw_only=True)
    kind: StageKind = field(kw_only=True)
    back: bool = field(kw_only=True)

    def run(self, state: Pass) -> Transfer:
        """See :class:`Step`."""
        kept = [state.slots[slot] for _, slot in self.inner]
        found = [one.load() if self.back else one.store() for one in kept]
        transfer = found[0] if len(found) == 1 else Transfer.all_of(found)
        if state.crossing is not None:
            state.crossing.note_transfer(transfer.uses)
            for chunk, _ in self.inner if self.back else ():
                state.crossed[self.kind, chunk, self.stage.layer] += state.crossing.note_use(transfer.uses)
        self.give(state, ())
        return transfer


@dataclass(slots=True)
class StoreValues(Step):
    """Starts to copy values to host memory.

    Attributes:
        stored: Slots of the copies, of each chunk.
    """

    stored: tuple[int, ...] = field(kw_only=True)

    def run(self, state: Pass) -> Transfer:
        """See :class:`Step`."""
        inputs = self.take(state)
        size = len(inputs) // len(self.stored)
        found = []
        for place, slot in enumerate(self.stored):
            copies = state.slots[slot] = HostCopies(inputs[place * size : (place + 1) * size])
            found.append(copies.store(lambda: None))
        transfer = found[0] if len(found) == 1 else Transfer.all_of(found)
        self.give(state, ())
        if state.crossing is not None:
            state.crossing.note_transfer(transfer.uses)
        return transfer


@dataclass(slots=True)
class LoadValues(Step):
    """Starts to copy values from host memory.

    Attributes:
        stored: Slots of the copies, of each chunk.
    """

    stored: tuple[int, ...] = field(kw_only=True)

    def run(self, state: Pass) -> Transfer:
        """See :class:`Step`."""
        found = [state.slots[slot].load() for slot in self.stored]
        for slot in self.stored:
            state.slots[slot] = None
        transfer = found[0] if len(found) == 1 else Transfer.all_of(found)
        self.give(state, [tensor for one in found for tensor in one.outputs])
        if state.crossing is not None:
            state.crossing.note_transfer(transfer.uses)
        return transfer
