"""Assigns slots to gradients: where backward steps read and write those of the values of a block.

The slots of values are in :mod:`.slots`. A step reads the sum of all gradients of a value:

- Gradients of computed stages are added at once, so that one tensor is kept.
- A gradient that a transfer delivers has not arrived when its step ends; it is added when the sum is read.
- Gradients of keys and values go to a :class:`~.segment.KeyValueSums`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from megatron_ampipe.runtime.slot_ops import (
    PendingGrad,
    SlotOp,
    add,
    add_keys,
    gather,
    keys_gradient,
    scatter,
    total,
)
from megatron_ampipe.runtime.slots import SUMMED, BlockLayout
from megatron_ampipe.runtime.steps import NOTHING, ZERO, SlotRef, Step
from megatron_ampipe.schedule import Layout, Source, StageKind, Value, kinds

_INPUT = Source(None, kinds.HIDDEN_STATES.name)
"""The input of a block."""
_Part = tuple[Source, int | None]
"""A value, and the chunk whose rows of it are meant; None for all rows."""


class Gradients:
    """Binds the backward stages of a block to the gradients that they take and give, in issue order.

    Methods append the slot operations that a step runs before its function (to read gradients) or after it
    (to add them): to the lists of a step, or to ``ops``.

    Args:
        block: The block.
        above: The gradients of the next block; None for the last one.
    """

    def __init__(self, block: BlockLayout, above: Gradients | None) -> None:
        self._block, self._above = block, above
        self._num_added: Counter[_Part] = Counter()
        """How many gradients have been added so far."""
        self._pending: defaultdict[_Part, list[PendingGrad]] = defaultdict(list)
        """Gradients that transfers deliver."""
        self._input_slot: int | None = None

    def take(self, step: Step, chunk: int | None) -> None:
        """Bind the arguments: the gradient of each output of the stage; None if nothing depends on it."""
        block = self._block
        num_summed = 0
        for value, source in block.flow.given[step.stage.kind]:
            if source == block.flow.output:
                ref = self._of_output(value.layout, chunk, step.before)
            elif value.layout in SUMMED:
                ref = self._of_keys(step, value, source, chunk, num_summed)
                num_summed += 1
            elif value.layout is Layout.SCALAR:
                ref = SlotRef(ZERO)
            elif block.is_differentiated(source):
                ref = SlotRef(self._sum(value.layout, source, chunk, step.before))
            else:
                ref = SlotRef(NOTHING)
            step.takes.append(ref)

    def give(self, step: Step, chunk: int | None) -> None:
        """Bind the results: the gradients of the stage's inputs, in the order of ``take_values``."""
        block, kind = self._block, step.stage.kind
        key_slots: list[int] = []
        for value, source in block.flow.taken[kind]:
            if not kind.lane.computes:
                step.gives += self._deliver(kind, value.layout, source, chunk)
            elif value.layout in SUMMED:
                # None if the backward has added them to the sums itself.
                returned = block.numbers.temporary()
                step.gives.append(SlotRef(returned))
                if value.layout is Layout.KEYS:
                    key_slots.append(returned)
                    giver = source.giver
            else:
                step.gives += self._add(value.layout, source, chunk, step.after)
        if key_slots:
            step.after.append(SlotOp(add_keys, block.slot("sums", giver), key_slots))

    def of_input(self, chunks: Sequence[int], ops: list[SlotOp]) -> int:
        """The slot of the gradient of the block's input; ``ops`` complete the rows of these chunks."""
        block, layout = self._block, kinds.HIDDEN_STATES.layout
        if block.is_kept_whole(_INPUT):
            if self._input_slot is None:
                self._input_slot = self._sum(layout, _INPUT, None, ops)
            return self._input_slot
        buffer = block.slot("rows of gradient", _INPUT)
        for chunk in chunks:
            for pending in self._pending.pop((_INPUT, chunk), ()):
                self._add_to_buffer(buffer, pending, chunk, ops)
        return buffer

    def _add_to_buffer(self, buffer: int, pending: PendingGrad, chunk: int, ops: list[SlotOp]) -> None:
        """Add a gradient that has arrived to a chunk's rows of the gradient of the block's input."""
        block, layout = self._block, kinds.HIDDEN_STATES.layout
        spans = block.spans(layout, chunk)
        so_far = block.numbers.temporary()
        rows = pending.slot
        if pending.source_rows is not None:
            rows = block.numbers.temporary()
            ops.append(SlotOp(gather, rows, (pending.slot,), (pending.source_rows,)))
        ops.append(SlotOp(gather, so_far, (buffer,), (spans,)))
        ops.append(SlotOp(scatter, buffer, (rows, so_far), (spans, block.num_rows(layout))))

    def _of_output(self, layout: Layout, chunk: int | None, ops: list[SlotOp]) -> SlotRef:
        """The gradient of the block's output, which is the input of the block above."""
        block = self._block
        if self._above is None:
            slot = block.numbers.of("gradient of hidden", block.layer + 1)
        else:
            slot = self._above.of_input(block.indices if chunk is None else [chunk], ops)
        return block.read(slot, layout, chunk, ops)

    def _of_keys(self, step: Step, value: Value, source: Source, chunk: int | None, index: int) -> SlotRef:
        """The gradient of keys (``index`` 0) or values (1), from their sums and from the ring."""
        block = self._block
        gradient = block.numbers.temporary()
        is_part = chunk is not None and value.layout is Layout.KEYS
        spans = block.spans(Layout.KEYS, chunk) if is_part else None
        arrived = [pending.slot for pending in self._pending.pop((source, None), ())]
        sums = block.slot("sums", step.stage.kind)
        step.before.append(SlotOp(keys_gradient, gradient, (sums, *arrived), (index, spans)))
        return SlotRef(gradient)

    def _sum(self, layout: Layout, source: Source, chunk: int | None, ops: list[SlotOp]) -> int:
        """The slot of the sum of all gradients of a value, or of a chunk of it."""
        block = self._block
        parts: list[PendingGrad] = []
        if self._num_added[source, chunk]:
            parts.append(PendingGrad(block.slot("gradient", source, chunk)))
        if chunk is None and any(self._num_added[source, index] for index in block.indices):
            parts.append(PendingGrad(block.slot("rows of gradient", source)))
        parts += self._pending.pop((source, chunk), ())
        is_complete = len(parts) == 1 and parts[0] == PendingGrad(parts[0].slot)
        if is_complete:
            return parts[0].slot
        target = block.numbers.temporary()
        slots = [part.slot for part in parts]
        rows = [(part.target_rows, part.source_rows) for part in parts]
        ops.append(SlotOp(total, target, slots, (block.num_rows(layout), rows)))
        return target

    def _add(self, layout: Layout, source: Source, chunk: int | None, ops: list[SlotOp]) -> list[SlotRef]:
        """Where a computed stage puts its gradients of a value, to be added."""
        block = self._block
        if chunk is not None or block.is_kept_whole(source):
            return [self._add_rows(layout, source, chunk, ops)]
        if layout is Layout.CHUNK or len(block.indices) == 1:
            return [self._add_rows(layout, source, index, ops) for index in block.indices]
        # A stage of the whole sequence gives one gradient, whose rows belong to the chunks.
        whole = block.numbers.temporary()
        for index in block.indices:
            to_add: list[SlotOp] = []
            part = self._add_rows(layout, source, index, to_add)
            ops.append(SlotOp(gather, part.slot, (whole,), (block.spans(layout, index),)))
            ops += to_add
        return [SlotRef(whole)]

    def _add_rows(self, layout: Layout, source: Source, chunk: int | None, ops: list[SlotOp]) -> SlotRef:
        """Where a stage puts its gradient of a chunk's rows, or of all rows if ``chunk`` is None."""
        block = self._block
        self._num_added[source, chunk] += 1
        is_first = self._num_added[source, chunk] == 1
        so_far = block.slot("gradient", source, chunk)
        is_part = chunk is not None and (source == _INPUT or block.is_kept_whole(source))
        if is_part and self._num_added[source, chunk] == block.num_added(source):
            # The last gradient of these rows: the sum goes into the buffer of all rows.
            buffer = block.slot("rows of gradient", source)
            if is_first:
                return block.write(buffer, layout, chunk, ops)
            given = block.numbers.temporary()
            rows = block.spans(layout, chunk), block.num_rows(layout)
            ops.append(SlotOp(scatter, buffer, (given, so_far), rows))
            return SlotRef(given)
        if is_first:
            return SlotRef(so_far)
        given = block.numbers.temporary()
        ops.append(SlotOp(add, so_far, (given,)))
        return SlotRef(given)

    def _deliver(self, kind: StageKind, layout: Layout, source: Source, chunk: int | None) -> list[SlotRef]:
        """Where a transfer puts its gradients. The stage that reads the sum runs later and adds them."""
        block = self._block
        each_chunk = chunk is not None or layout is Layout.CHUNK
        if block.is_kept_whole(source):
            # One tensor, whose rows belong to a chunk of the value, or to all of it.
            slot = block.slot("arrival", kind, source, chunk if each_chunk else None)
            target_rows = None if chunk is None else block.spans(layout, chunk)
            self._pending[source, None].append(PendingGrad(slot, target_rows, None))
            return [SlotRef(slot)]
        chunks = block.indices if chunk is None else [chunk]
        if each_chunk:
            slots = [block.slot("arrival", kind, source, index) for index in chunks]
            for index, slot in zip(chunks, slots, strict=True):
                self._pending[source, index].append(PendingGrad(slot))
            return [SlotRef(slot) for slot in slots]
        # One tensor, of which each chunk of the value has some rows.
        slot = block.slot("arrival", kind, source, None)
        for index in chunks:
            self._pending[source, index].append(PendingGrad(slot, None, block.spans(layout, index)))
        return [SlotRef(slot)]


def gradients_of(blocks: Sequence[BlockLayout]) -> list[Gradients]:
    """The gradients of each block, from the first to the last."""
    gradients: list[Gradients] = []
    above: Gradients | None = None
    for block in reversed(blocks):
        above = Gradients(block, above)
        gradients.append(above)
    return gradients[::-1]
