"""Assigns slots: which slots a step reads and writes for its values. Gradients are in :mod:`.gradient_slots`.

:class:`~megatron_ampipe.schedule.dataflow.DataFlow` lists the values that each stage takes from other stages.
A value or gradient has a slot from the step that gives it to the last step that takes it. If one of them is
per chunk and the other per sequence, the argument is a slice of the slot, or an operation gathers
or joins rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_ampipe.runtime.block_functions import BlockFunctions
from megatron_ampipe.runtime.slot_ops import (
    SlotOp,
    gather,
    join,
    make_empty,
    note_shape,
    scatter,
)
from megatron_ampipe.runtime.steps import FIRST_FREE, SlotRef, Step
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    DataFlow,
    Layout,
    SavedPolicy,
    Source,
    Span,
    StageKind,
    Value,
    data_flow,
    is_whole,
)

SUMMED = (Layout.KEYS, Layout.BLOCK)
"""Layouts of keys and values, whose gradients a :class:`~.segment.KeyValueSums` adds."""


class SlotNumbers:
    """Numbers the slots, by a name for their contents."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, tuple[Hashable, ...]], int] = {}
        self.count = FIRST_FREE

    def of(self, name: str, layer: int, *key: Hashable) -> int:
        """The slot for a name of a block; the first request creates it."""
        if (name, layer, key) not in self._numbers:
            self._numbers[name, layer, key] = self.temporary()
        return self._numbers[name, layer, key]

    def temporary(self) -> int:
        """Create a slot without a name, for one step."""
        self.count += 1
        return self.count - 1

    def names(self) -> tuple[str, ...]:
        """A text for each slot: its contents, the chunk, and the block (``@1`` is the second)."""
        names = ["none", "zero", *(f"t{slot}" for slot in range(FIRST_FREE, self.count))]
        for (name, layer, key), slot in self._numbers.items():
            words = [name]
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


class BlockLayout:
    """The slots of one block, its chunks, and which rows of each value belong to a chunk."""

    def __init__(
        self,
        layer: int,
        features: BlockFeatures,
        chunks: Sequence[Chunk],
        functions: BlockFunctions,
        numbers: SlotNumbers,
        *,
        whole_attention: bool,
    ) -> None:
        self.layer, self.functions, self.numbers = layer, functions, numbers
        self.flow = data_flow(features)
        _check_transfers(self.flow)
        self.indices = range(len(chunks))
        self.recomputed = features.recomputed
        by_chunk = [features.of_chunk(chunk, len(chunks)) for chunk in self.indices]
        self._flows = [data_flow(of_chunk) for of_chunk in by_chunk]
        self._policy, self._policies = features.saved, [of_chunk.saved for of_chunk in by_chunk]
        self._chunks, self._joined = chunks, Chunk.joined(chunks)
        self._whole = {kind for kind in self.flow.kinds if is_whole(kind, whole_attention=whole_attention)}
        self.parameters = {
            kind: [functions.parameters.numbers[parameter] for parameter in parameters]
            for kind, parameters in functions.stage_parameters.items()
        }
        """Numbers of the parameters that a kind uses."""

    def slot(self, name: str, *key: Hashable) -> int:
        """The slot for a name of this block."""
        return self.numbers.of(name, self.layer, *key)

    def flow_of(self, chunk: int | None) -> DataFlow:
        """The data flow of a chunk, or of the block; chunks can differ in the activations they rebuild."""
        return self.flow if chunk is None else self._flows[chunk]

    def policy_of(self, chunk: int | None) -> SavedPolicy:
        """What stages of a chunk, or of the whole sequence, save for the backward pass."""
        return self._policy if chunk is None else self._policies[chunk]

    def spans(self, layout: Layout, chunk: int | None) -> Sequence[Span]:
        """The rows of a value that belong to a chunk."""
        rows = self._joined if chunk is None else self._chunks[chunk]
        return rows.hidden if layout is Layout.HIDDEN else rows.queries

    def num_rows(self, layout: Layout) -> int:
        """The number of rows of a value of the whole sequence."""
        if layout is Layout.KEYS:
            return self._joined.num_keys
        return sum(span.length for span in self.spans(layout, None))

    def read(self, slot: int, layout: Layout, chunk: int | None, ops: list[SlotOp]) -> SlotRef:
        """The argument for a chunk's rows of a value of the whole sequence; of keys, all that it sees."""
        if chunk is None or layout is Layout.BLOCK:
            return SlotRef(slot)
        spans = self.spans(layout, chunk)
        if layout is Layout.KEYS:
            spans = [Span(0, self._chunks[chunk].num_keys, 0)]
        if len(spans) == 1:
            return self._slice(slot, spans[0], layout)
        target = self.numbers.temporary()
        ops.append(SlotOp(gather, target, (slot,), (spans,)))
        return SlotRef(target)

    def write(self, slot: int, layout: Layout, chunk: int | None, ops: list[SlotOp]) -> SlotRef:
        """The place for a result: a chunk's rows of a buffer, or the slot if it is of the whole sequence."""
        if chunk is None:
            return SlotRef(slot)
        spans = self.spans(layout, chunk)
        if len(spans) == 1:
            return self._slice(slot, spans[0], layout)
        source = self.numbers.temporary()
        ops.append(SlotOp(scatter, slot, (source,), (spans, self.num_rows(layout))))
        return SlotRef(source)

    def _slice(self, slot: int, span: Span, layout: Layout) -> SlotRef:
        num_rows = self.num_rows(layout)
        if span.length == num_rows:
            return SlotRef(slot)
        return SlotRef(slot, slice(span.local_start, span.local_end), num_rows)

    def summed(self, kind: StageKind) -> list[tuple[Value, Source]]:
        """The keys and values that a kind takes, and where they come from."""
        return [taken for taken in self.flow.taken[kind] if taken[0].layout in SUMMED]

    def is_kept_whole(self, source: Source) -> bool:
        """Whether a value is one tensor of the whole sequence, rather than one tensor per chunk."""
        if source.giver is not None:
            return source.giver in self._whole
        return any(kind in self._whole for kind in self.flow.takers[source])

    def is_differentiated(self, source: Source) -> bool:
        """Whether any stage gives a gradient of a value."""
        return any(kind.is_differentiated for kind in self.flow.takers.get(source, ()))

    def num_added(self, source: Source) -> int:
        """How many computed stages of a chunk give a gradient of the chunk's rows of a value."""
        return sum(
            kind.is_differentiated and kind.lane.computes and kind not in self._whole
            for kind in self.flow.takers[source]
        )

    def take_values(self, step: Step, chunk: int | None, *, again: bool = False) -> None:
        """Bind the arguments of a stage. ``again``: of the recompute of a block, whose values are separate.

        For a value with ``Layout.CHUNK``, a stage of the whole sequence gets the tensor of each chunk.
        """
        for value, source in self.flow_of(chunk).taken[step.stage.kind]:
            if source.giver is None:
                slot = self.slot("hidden")
            elif value.layout is Layout.KEYS:
                slot = self.slot("keys", value.name, again)
            elif self.is_kept_whole(source):
                slot = self.slot("value", source, None, again)
            else:
                chunks = self.indices if chunk is None else [chunk]
                slots = [self.slot("value", source, index, again) for index in chunks]
                if len(slots) > 1 and value.layout is not Layout.CHUNK:
                    target = self.numbers.temporary()
                    spans = [self.spans(value.layout, index) for index in chunks]
                    step.before.append(SlotOp(join, target, slots, (spans, self.num_rows(value.layout))))
                    slots = [target]
                step.takes += map(SlotRef, slots)
                continue
            step.takes.append(self.read(slot, value.layout, chunk, step.before))

    def give_values(self, step: Step, chunk: int | None, *, again: bool = False) -> None:
        """Bind the results of a stage."""
        for value, source in self.flow.given[step.stage.kind]:
            if source == self.flow.output and not again:
                slot = self.numbers.of("hidden", self.layer + 1)
                step.gives.append(self.write(slot, value.layout, chunk, step.after))
            elif value.layout is Layout.KEYS:
                slot = self.slot("keys", value.name, again)
                step.gives.append(self.write(slot, value.layout, chunk, step.after))
            else:
                step.gives.append(SlotRef(self.slot("value", source, chunk, again)))

    def note_shapes(self, step: Step, chunk: int | None) -> None:
        """Record the output shapes of a transfer that a recompute does not repeat, for :meth:`make_empty`."""
        for _, source in self.flow.given[step.stage.kind]:
            slot = self.slot("value", source, chunk, False)
            step.after.append(SlotOp(note_shape, self.slot("shape", source, chunk), (slot,)))

    def make_empty(self, step: Step, chunk: int | None) -> None:
        """For a stage that runs again: empty tensors in place of the outputs of transfers that do not."""
        for _, source in self.flow.taken[step.stage.kind]:
            if source.giver in self.flow.not_recomputed:
                slot = self.slot("value", source, chunk, True)
                step.before.append(SlotOp(make_empty, slot, (self.slot("shape", source, chunk),)))


def _check_transfers(flow: DataFlow) -> None:
    """Check that no output of a transfer goes into a buffer: it has not arrived when it would be copied."""
    for kind in flow.kinds:
        if not kind.lane.computes:
            values = (*kind.takes, *kind.gives)
            assert all(value.layout is not Layout.KEYS for value in values), f"{kind} transfers keys"
            assert kind is not flow.output.giver, f"{kind} is a transfer and gives what the block returns"
