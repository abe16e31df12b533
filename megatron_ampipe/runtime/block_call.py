"""One block in one pass of one micro-batch: what runs when the schedule says so, forward and backward.

A :class:`BlockCall` runs stages of any kind by the table of :mod:`megatron_ampipe.schedule.kinds`: takes
their inputs, calls their function, keeps their outputs. :mod:`.stack_call` makes one for every block that
shares a schedule.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_ampipe.runtime.block_stages import BlockStages, CompiledBlock, ComputeFunction
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.crossing import Crossing
from megatron_ampipe.runtime.gradients import Gradients
from megatron_ampipe.runtime.host_memory import HostCopies
from megatron_ampipe.runtime.inner_tensors import InnerTensors
from megatron_ampipe.runtime.segment import GradientSums, Segment, with_history
from megatron_ampipe.runtime.values import BlockLayout, KeyValueRows, Note, Values
from megatron_ampipe.runtime.weight_products import WeightProducts
from megatron_ampipe.schedule import Direction, Layout, Stage, StageKind, kinds

# S sequence rows, B batch, D hidden size.


class BlockCall:
    """One forward pass through a block and its backward.

    Args:
        stages: What the layer computes.
        block: Its data flow.
        crossing: Told of what several streams use; None where no stream is crossed.
        keep_graph: Whether there will be a backward pass.

    Attributes:
        values: What the stages of the forward pass give, while it runs; also while stages run again, or
            restore what others have not kept.
        gradients: Their gradients, while the backward pass runs.
        sums: Of the gradients of the parameters.
    """

    def __init__(
        self, stages: BlockStages, block: CompiledBlock, crossing: Crossing | None, *, keep_graph: bool
    ) -> None:
        self._stages, self._crossing = stages, crossing
        self._runs_again = keep_graph and block.recomputed
        self._keep_graph = keep_graph and not block.recomputed
        self._layout = BlockLayout(block.flow, stages.chunks, block.whole, block.flows)
        self._flow = block.flow
        self._shapes: dict[tuple[StageKind, int | None], list[_Shape]] = {}
        self._keys = KeyValueRows(self._layout, keep_graph=self._keep_graph)
        self._segments: dict[tuple[StageKind, int | None], Segment] = {}
        self._note: Note = _nothing if crossing is None else crossing.note_use
        self._inner: dict[tuple[StageKind, int | None], InnerTensors] = {}
        self._stored: dict[int | None, HostCopies] = {}
        self._restores = self._keep_graph and block.restores
        self._apart = block.apart
        self._products: dict[tuple[StageKind, int | None], WeightProducts] = {}
        self._crossed_inputs: dict[tuple[StageKind, int | None], tuple[StorageWeakRef, ...]] = {}
        self.sums = GradientSums()

    def begin_forward(self, below: Tensor | Values) -> Values:
        """Get ready to run forward on ``hidden`` ``[S, B, D]``, or on what the block below gives."""
        self.values = Values(self._layout, below, self._keys, note=self._note)
        return self.values

    def end_forward(self) -> None:
        """All stages of the forward pass have run."""
        if self._runs_again:
            self._given, self._stages = self.values.given, self._stages.again()
            self._keys = KeyValueRows(self._layout, keep_graph=True)
        if self._restores:
            self._left = self.values.left()
        self.values.let_go()
        del self.values

    def begin_backward(self, above: Tensor | Gradients, *, device: torch.device) -> Gradients:
        """Get ready to differentiate, given the gradient of the output, or those of the block above."""
        if self._runs_again:
            self._keep_graph = True
            self.values = Values(self._layout, self._given, self._keys, note=self._note, keeps_output=False)
            del self._given
        if self._restores:
            self.values = self._left
            del self._left
        self.gradients = Gradients(
            self._layout,
            above,
            self._keys,
            device=device,
            note=self._note,
            note_transfer=_nothing if self._crossing is None else self._crossing.note_transfer,
        )
        return self.gradients

    def end_backward(self) -> None:
        """All stages of the backward pass have run; :attr:`sums` are complete."""
        self.gradients.let_go()
        del self.gradients, self._keys
        if self._runs_again or self._restores:
            self.values.let_go()
            del self.values

    def run(self, parts: Sequence[Stage], direction: Direction) -> Transfer | None:
        """Run one stage, given as the same stage of each of its chunks.

        Args:
            parts: What runs.
            direction: Forward for a stage that computes values, in whichever pass.
        """
        kind = parts[0].kind
        if kind.copies:
            return self._copy(kind, [part.chunk for part in parts])
        if not kind.lane.computes:
            return self._communicate(kind, [part.chunk for part in parts], direction)
        if kind.weights_of is not None:
            self._add_weight_gradients(kind.weights_of, [part.chunk for part in parts])
            return None
        compute = self._compute if direction is Direction.FORWARD else self._differentiate
        if kind.restores is not None:
            compute = self._restore
        for part in parts:
            compute(part.kind, part.chunk)
        return None

    def _compute(self, kind: StageKind, chunk: int | None) -> None:
        """Run the function of one stage of one chunk, or of the whole sequence."""
        if self._runs_again and self._keep_graph:
            self._give_shapes(kind, chunk)
        inputs = self.values.take(kind, chunk)
        crossed = self._crossing.note_use(inputs) if self._crossing is not None else ()
        if kind.own_backward:
            with torch.no_grad():
                self.values.give(kind, chunk, self._stages.compute(kind)(chunk, *inputs))
            return
        extra: dict[str, Any] = {}
        if any(value.layout is Layout.KEYS for value, _ in self._flow.taken[kind]):
            extra["sums"] = self._keys.sums
        function = self._stages.compute(kind)
        if self._keep_graph and kind in self._apart:
            products = self._products[kind, chunk] = WeightProducts()
            apart = functools.partial(self._stages.weights_apart, kind, products)
            function = functools.partial(_within, apart, function)
        hooks: AbstractContextManager[None] = contextlib.nullcontext()
        flow = self._layout.flow_of(chunk)
        if self._restores and kind == kinds.EXPERT and flow.is_restored(kind):
            inner = self._inner[kind, chunk] = InnerTensors(
                self._stages.parameters.get(kind, ()),
                copied=kinds.STORE in flow.kinds,
                resorted=kinds.RESORT in flow.kinds,
            )
            extra["inner"], hooks = inner, inner.dropped()
        with hooks:
            segment = Segment(
                functools.partial(function, chunk, **extra),
                *inputs,
                keep_graph=self._keep_graph,
                recompute=kind in self._stages.recomputed,
                # What it computes with is several times as wide, so this is where most memory is held.
                releases=kind == kinds.EXPERT,
            )
        outputs, segment.values = segment.values, ()
        if self._keep_graph:
            self._segments[kind, chunk] = segment
            self._crossed_inputs[kind, chunk] = crossed
        self.values.give(kind, chunk, outputs)

    def _restore(self, kind: StageKind, chunk: int | None) -> None:
        """Compute values once more: for stages that take them, or inside the stage that has dropped them."""
        assert kind.restores is not None
        inputs = self.values.take(kind, chunk)
        crossed = self._crossing.note_use(inputs) if self._crossing is not None else ()
        function = self._stages.compute(kind)
        if kind.gives:
            with torch.no_grad():
                self.values.give(kind, chunk, function(chunk, *inputs))
            return
        inner = self._inner[kind.restores, chunk]
        with inner.restored():
            function(chunk, *with_history(inputs), inner=inner)
        if self._crossing is not None:
            self._crossed_inputs[kind.restores, chunk] += crossed

    def _differentiate(self, kind: StageKind, chunk: int | None) -> None:
        """The backward of :meth:`_compute`."""
        gradients = self.gradients.take(kind, chunk)
        if kind.own_backward:
            recalled = self.values.recall(kind)
            self._note((*gradients, *recalled))
            sums = self.gradients.block_sums(kind, recalled)
            found = self._stages.differentiate(kind)(chunk, gradients, recalled, sums)
            self.gradients.add(kind, chunk, found)
            return
        segment = self._segments.pop((kind, chunk))
        self._inner.pop((kind, chunk), None)
        if self._crossing is not None:
            self._crossing.note_use(gradients)
            self._crossing.note_backward(self._crossed_inputs.pop((kind, chunk)))
        parameters = self._stages.parameters.get(kind, ())
        found = segment.backward(gradients, parameters=parameters, sums=self.sums)
        self.gradients.add(kind, chunk, found)

    def _add_weight_gradients(self, kind: StageKind, chunks: Sequence[int | None]) -> None:
        """The gradients of the weights of some stages that were differentiated; None is all of a kind."""
        if chunks == [None]:
            keys = [key for key in self._products if key[0] == kind]
            parts = [WeightProducts.joined([self._products.pop(key) for key in keys])]
        else:
            parts = [self._products.pop((kind, chunk)) for chunk in chunks]
        for part in parts:
            self._note(part.tensors)
            part.add_to(self.sums)

    def _copy(self, kind: StageKind, chunks: Sequence[int | None]) -> Transfer:
        """Start copies to host memory or back, of those chunks of which something is copied."""
        found = [
            self._copy_chunk(kind, chunk) for chunk in chunks if kind in self._layout.flow_of(chunk).kinds
        ]
        transfer = found[0] if len(found) == 1 else Transfer.all_of(found)
        if self._crossing is not None:
            self._crossing.note_transfer(transfer.uses)
            for chunk in chunks if kind == kinds.LOAD else ():
                self._crossed_inputs[kinds.EXPERT, chunk] += self._crossing.note_use(transfer.uses)
        return transfer

    def _copy_chunk(self, kind: StageKind, chunk: int | None) -> Transfer:
        if kind == kinds.STORE:
            return self._inner[kinds.EXPERT, chunk].store()
        if kind == kinds.LOAD:
            return self._inner[kinds.EXPERT, chunk].load()
        if kind == kinds.STORE_TOKENS:
            copies = self._stored[chunk] = HostCopies(self.values.take(kind, chunk))
            return copies.store(_nothing)
        transfer = self._stored.pop(chunk).load()
        self.values.give(kind, chunk, transfer.outputs)
        return transfer

    def _communicate(self, kind: StageKind, chunks: Sequence[int | None], direction: Direction) -> Transfer:
        """Start the transfer of some chunks: of values forward, of their gradients backward."""
        forward = direction is Direction.FORWARD
        take = self.values.take if forward else self.gradients.take
        tensors: list[list[Tensor]] = [take(kind, chunk) for chunk in chunks]
        transfer = self._stages.communicate(kind)(chunks, tensors, direction)
        give = self.values.give if forward else self.gradients.add
        count = len(transfer.outputs) // len(chunks)
        for place, chunk in enumerate(chunks):
            outputs = transfer.outputs[place * count : (place + 1) * count]
            if forward and self._runs_again and kind in self._flow.once:
                self._shapes[kind, chunk] = [(part.shape, part.dtype, part.device) for part in outputs]
            give(kind, chunk, outputs)
        if self._crossing is not None:
            self._crossing.note_transfer((*itertools.chain(*tensors), *transfer.uses, *transfer.outputs))
            if kind.restores == kinds.QKV:
                for chunk in chunks:
                    self._crossed_inputs[kinds.QKV, chunk] += self._crossing.note_use(transfer.uses)
        return transfer

    def _give_shapes(self, kind: StageKind, chunk: int | None) -> None:
        """For a stage that runs again: uninitialized memory for what it takes of transfers that do not."""
        for giver in {source.giver for _, source in self._flow.taken[kind]} & self._flow.once:
            shapes = self._shapes.pop((giver, chunk))
            parts = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in shapes]
            self.values.give(giver, chunk, parts)


def _within(
    enter: Callable[[], AbstractContextManager[None]], function: ComputeFunction, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Run a function within a context; can run again."""
    with enter():
        return function(*args, **kwargs)


_Shape = tuple[torch.Size, torch.dtype, torch.device]


def _nothing(tensors: Sequence[Tensor | None] = ()) -> None:
    """In place of a crossing where no stream is crossed, and where there is nothing to release."""
