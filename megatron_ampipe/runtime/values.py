"""The tensors that pass between the stages of one block call. Their gradients are in :mod:`.gradients`.

Which stage takes what from which is :class:`~megatron_ampipe.schedule.flow.DataFlow`. A tensor is kept from
the stage that gives it to the last one that takes it. Where one of the two is of a chunk and the other of the
whole sequence, rows are cut out or put together here. Called by :mod:`.block_call`, also
from the threads of a lane.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.rows import take_rows, write_rows
from megatron_ampipe.schedule import Chunk, DataFlow, Layout, Source, Span, StageKind, Value

# S sequence rows, B batch, D hidden size.

Key = tuple[Source, int | None]
"""A value of a chunk, or of the whole sequence."""
Note = Callable[[Sequence[Tensor | None]], object]
"""Told of tensors that the current stage copies or adds (:meth:`.crossing.Crossing.note_use`)."""


class BlockLayout:
    """Which chunks there are, and which kinds of stages are of the whole sequence.

    Args:
        flow: Of the block.
        chunks: Of the sequence.
        whole: Kinds that are of the whole sequence.
        flows: Of equal numbers of consecutive chunks, which differ in what is restored.
    """

    def __init__(
        self,
        flow: DataFlow,
        chunks: Sequence[Chunk],
        whole: Collection[StageKind],
        flows: Sequence[DataFlow],
    ) -> None:
        self.flow, self.chunks, self.whole, self._flows = flow, chunks, whole, flows
        self.joined = Chunk.joined(chunks)

    def flow_of(self, chunk: int | None) -> DataFlow:
        """The data flow of a chunk, or of the block."""
        return self.flow if chunk is None else self._flows[chunk * len(self._flows) // len(self.chunks)]

    def spans(self, layout: Layout, chunk: int | None) -> Sequence[Span]:
        """The rows of a value that belong to a chunk."""
        found = self.joined if chunk is None else self.chunks[chunk]
        return found.hidden if layout is Layout.HIDDEN else found.queries

    def num_rows(self, layout: Layout) -> int:
        """How many rows a value of the whole sequence has."""
        return sum(span.length for span in self.spans(layout, None))

    def num_keys(self, chunk: int | None) -> int:
        """How many rows of keys and values the queries of a chunk see."""
        return (self.joined if chunk is None else self.chunks[chunk]).num_keys

    def is_kept_whole(self, source: Source) -> bool:
        """Whether the value is one tensor for the whole sequence, rather than one for each chunk."""
        if source.giver is not None:
            return source.giver in self.whole
        return any(kind in self.whole for kind in self.flow.takers[source])

    def num_takers(self, source: Source, chunk: int | None) -> int:
        """How many stages take a value, or a chunk of it."""
        if chunk is not None:
            return len(self.flow_of(chunk).takers[source])
        every = range(len(self.chunks))
        recalls = [1 if kind in self.whole else len(every) for kind in self.flow.recallers.get(source, ())]
        return sum(recalls) + sum(
            1 if kind in self.whole else sum(kind in self.flow_of(each).takers[source] for each in every)
            for kind in self.flow.takers.get(source, ())
        )

    def num_summed(self, source: Source) -> int:
        """How many compute stages give a gradient of a value, or of a chunk of it."""
        return self._num_stages(source, [kind for kind in self.gradient_givers(source) if kind.lane.computes])

    def gradient_givers(self, source: Source) -> list[StageKind]:
        """The kinds that give a gradient of a value."""
        takers = self.flow.takers.get(source, ())
        return [kind for kind in takers if kind.is_differentiated]

    def _num_stages(self, source: Source, kinds: Collection[StageKind]) -> int:
        per_stage = len(self.chunks) if self.is_kept_whole(source) else 1
        return sum(1 if kind in self.whole else per_stage for kind in kinds)


class KeyValueRows:
    """Keys and values of the sequence, to which each chunk adds its rows, and the sums of their gradients.

    Args:
        layout: Of the block.
        keep_graph: Whether gradients will be added.
    """

    def __init__(self, layout: BlockLayout, *, keep_graph: bool) -> None:
        self._layout, self._keep_graph = layout, keep_graph
        self._rows: dict[str, Tensor] = {}
        self._sums: KeyValueSums | None = None

    def give(self, name: str, chunk: int | None, part: Tensor) -> None:
        """The rows of a chunk, or all of them."""
        if chunk is None:
            self._rows[name] = part
            return
        if name not in self._rows:
            self._rows[name] = part.new_empty((self._layout.num_keys(None), *part.shape[1:]))
        write_rows(self._rows[name], self._layout.spans(Layout.KEYS, chunk), part)

    def take(self, name: str, chunk: int | None) -> Tensor:
        """All rows that the queries of a chunk see."""
        return self._rows[name][: self._layout.num_keys(chunk)]

    @property
    def sums(self) -> KeyValueSums | None:
        """What adds up the gradients; None where nothing is differentiated."""
        if self._sums is None and self._keep_graph:
            self._sums = KeyValueSums(*self._rows.values())
        return self._sums

    def add_gradients(self, gradients: Sequence[Tensor | None]) -> None:
        """Of all rows that a stage saw; None where its function has added them itself."""
        key, value = gradients
        if key is not None and value is not None:
            assert self.sums is not None
            self.sums.add(0, key, value)

    def take_gradient(self, name: str, chunk: int | None) -> Tensor:
        """The sum for the rows of a chunk, or for all, in the dtype of the rows."""
        assert self.sums is not None
        total = self.sums.totals()[list(self._rows).index(name)]
        if chunk is not None:
            total = take_rows(total, self._layout.spans(Layout.KEYS, chunk))
        return total.to(self._rows[name].dtype)


class Values:
    """What the stages of a forward pass give and take.

    Args:
        layout: Of the block.
        below: ``[S, B, D]``, what the block is given, or the values of the block that gives it; None if no
            stage takes it any more.
        keys: Where keys and values are put.
        note: Told of what a stage copies before its function runs.
        keeps_output: Whether :attr:`output` is needed.
    """

    def __init__(
        self,
        layout: BlockLayout,
        below: Tensor | Values | None,
        keys: KeyValueRows,
        *,
        note: Note,
        keeps_output: bool = True,
    ) -> None:
        self._layout, self._keys, self._note, self._keeps_output = layout, keys, note, keeps_output
        self._below: Tensor | Values | None = below
        self._tensors: dict[Key, Tensor] = {}
        self._reads: Counter[Key] = Counter()
        self._lock = threading.Lock()
        self.output: Tensor | None = None
        """``[S, B, D]``, what the block returns, once all of its rows are written."""

    def give(self, kind: StageKind, chunk: int | None, outputs: Sequence[Tensor]) -> None:
        """Keep what a stage gives for the stages that take it."""
        for (value, source), tensor in zip(self._layout.flow.given[kind], outputs, strict=True):
            if source == self._layout.flow.output:
                if not self._keeps_output:
                    continue
                if self.output is None:
                    self.output = tensor.new_empty((self._layout.num_rows(value.layout), *tensor.shape[1:]))
                write_rows(self.output, self._layout.spans(value.layout, chunk), tensor)
            elif value.layout is Layout.KEYS:
                self._keys.give(value.name, chunk, tensor)
            elif source in (flow := self._layout.flow_of(chunk)).takers or source in flow.recallers:
                self._tensors[source, chunk] = tensor

    def take(self, kind: StageKind, chunk: int | None) -> list[Tensor]:
        """What a stage takes: of ``Layout.CHUNK`` a stage of the whole sequence gets each chunk's tensor."""
        return [
            tensor
            for value, source in self._layout.flow_of(chunk).taken[kind]
            for tensor in self._take(value, source, chunk)
        ]

    def recall(self, kind: StageKind) -> list[Tensor]:
        """What the backward of a stage takes besides gradients (``DataFlow.recalled``)."""
        return [self._read((source, None)) for _, source in self._layout.flow.recalled[kind]]

    @property
    def given(self) -> Tensor:
        """``[S, B, D]``, what the block is given: the rows that the block below has written so far."""
        hidden = self._below.output if isinstance(self._below, Values) else self._below
        assert hidden is not None, "a block runs before the one below it"
        return hidden

    def left(self) -> Values:
        """What stages of the backward pass will take. All stages of the forward pass have run."""
        found = Values(self._layout, None, self._keys, note=self._note, keeps_output=False)
        found._tensors, found._reads = self._tensors, self._reads
        return found

    def let_go(self) -> None:
        """All stages of the block have run: only :attr:`output` is read, by the block above."""
        self._below = None
        del self._keys

    def _take(self, value: Value, source: Source, chunk: int | None) -> Sequence[Tensor]:
        layout = self._layout
        if source.giver is None:
            return (take_rows(self.given, layout.spans(value.layout, chunk)),)
        if value.layout is Layout.KEYS:
            return (self._keys.take(value.name, chunk),)
        if layout.is_kept_whole(source):
            tensor = self._read((source, None))
            if chunk is None or value.layout is Layout.BLOCK:
                return (tensor,)
            spans = layout.spans(value.layout, chunk)
            if len(spans) > 1:
                self._note((tensor,))
            return (take_rows(tensor, spans),)
        if chunk is not None:
            return (self._read((source, chunk)),)
        parts = [self._read((source, index)) for index in range(len(layout.chunks))]
        if value.layout is Layout.CHUNK:
            return parts
        self._note(parts)
        return (_joined(parts, value, layout),)

    def _read(self, key: Key) -> Tensor:
        """The tensor, which goes with its last reader."""
        num_takers = self._layout.num_takers(*key)
        if num_takers == 1:
            return self._tensors.pop(key)
        with self._lock:
            self._reads[key] += 1
            return self._tensors.pop(key) if self._reads[key] == num_takers else self._tensors[key]


def _joined(parts: Sequence[Tensor], value: Value, layout: BlockLayout) -> Tensor:
    """The rows of all chunks as one tensor, each where it belongs."""
    num_rows = sum(part.shape[0] for part in parts)
    joined = parts[0].new_empty((num_rows, *parts[0].shape[1:]))
    for index, part in enumerate(parts):
        write_rows(joined, layout.spans(value.layout, index), part)
    return joined
