"""The tensors that pass between the stages of one block call: values forward, their gradients backward.

Which stage takes what from which is :class:`~megatron_ampipe.schedule.graph.DataFlow`. A tensor is kept from
the stage that gives it to the last one that takes it. Where one of the two is of a chunk and the other of the
whole sequence, rows are cut out or put together here. Called by :mod:`.block_call`, also
from the threads of a lane.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.rows import put_rows, put_sum, take_rows
from megatron_ampipe.schedule import Chunk, DataFlow, Direction, Layout, Source, Span, StageKind, Value
from megatron_ampipe.schedule.kinds import HIDDEN_STATES

# S sequence rows, B batch, D hidden size.

Key = tuple[Source, int | None]
"""A value of a chunk, or of the whole sequence."""
Note = Callable[[Sequence[Tensor | None]], object]
"""Told of tensors that the current stage copies or adds (:meth:`.crossing.Crossing.use`)."""


class BlockLayout:
    """Which chunks there are, and which kinds of stages are of the whole sequence.

    Args:
        flow: Of the block.
        chunks: Of the sequence.
        whole: Kinds that are of the whole sequence.
    """

    def __init__(self, flow: DataFlow, chunks: Sequence[Chunk], whole: Collection[StageKind]) -> None:
        self.flow, self.chunks, self.whole = flow, chunks, whole
        self.joined = Chunk.joined(chunks)

    def spans(self, layout: Layout, chunk: int | None) -> Sequence[Span]:
        """The rows of a value that belong to a chunk."""
        found = self.joined if chunk is None else self.chunks[chunk]
        return found.hidden if layout is Layout.HIDDEN else found.queries

    def num_keys(self, chunk: int | None) -> int:
        """How many rows of keys and values the queries of a chunk see."""
        return (self.joined if chunk is None else self.chunks[chunk]).num_keys

    def is_kept_whole(self, source: Source) -> bool:
        """Whether the value is one tensor for the whole sequence, rather than one for each chunk."""
        if source.giver is not None:
            return source.giver in self.whole
        return any(kind in self.whole for kind in self.flow.takers[source])

    def num_takers(self, source: Source) -> int:
        """How many stages take a value, or a chunk of it."""
        return self._num_stages(source, self.flow.takers[source])

    def num_sums(self, source: Source) -> int:
        """How many compute stages give a gradient of a value, or of a chunk of it."""
        return self._num_stages(source, [kind for kind in self.givers(source) if kind.lane.computes])

    def givers(self, source: Source) -> list[StageKind]:
        """The kinds that give a gradient of a value."""
        takers = self.flow.takers.get(source, ())
        return [kind for kind in takers if Direction.BACKWARD in kind.directions]

    def _num_stages(self, source: Source, kinds: Collection[StageKind]) -> int:
        per_stage = len(self.chunks) if self.is_kept_whole(source) else 1
        return sum(1 if kind in self.whole else per_stage for kind in kinds)

    def taken(self, kind: StageKind) -> Iterator[tuple[Value, Source]]:
        """The tensors that a stage takes, each with where it comes from."""
        for value, source in zip(kind.takes, self.flow.sources[kind], strict=True):
            if source is not None and value.layout is not Layout.STATE:
                yield value, source

    def given(self, kind: StageKind) -> Iterator[tuple[Value, Source]]:
        """The tensors that a stage gives."""
        for value in kind.gives:
            if value.layout is not Layout.STATE:
                yield value, Source(kind, value.name)


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
        put_rows(self._rows[name], self._layout.spans(Layout.KEYS, chunk), part)

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
        hidden: ``[S, B, D]``, what the block is given.
        keys: Where keys and values are put.
        note: Told of what a stage copies before its function runs.
    """

    def __init__(self, layout: BlockLayout, hidden: Tensor, keys: KeyValueRows, *, note: Note) -> None:
        self._layout, self._hidden, self._keys, self._note = layout, hidden, keys, note
        self._tensors: dict[Key, Tensor] = {}
        self._reads: Counter[Key] = Counter()
        self._lock = threading.Lock()
        self.output: Tensor | None = None
        """``[S, B, D]``, what the block returns, once all of its rows are written."""

    def give(self, kind: StageKind, chunk: int | None, outputs: Sequence[Tensor]) -> None:
        """Keep what a stage gives for the stages that take it."""
        for (value, source), tensor in zip(self._layout.given(kind), outputs, strict=True):
            if source == self._layout.flow.output:
                if self.output is None:
                    self.output = tensor.new_empty(self._hidden.shape)
                put_rows(self.output, self._layout.spans(value.layout, chunk), tensor)
            elif value.layout is Layout.KEYS:
                self._keys.give(value.name, chunk, tensor)
            elif source in self._layout.flow.takers:
                self._tensors[source, chunk] = tensor

    def take(self, kind: StageKind, chunk: int | None) -> list[Tensor]:
        """What a stage takes: of ``Layout.CHUNK`` a stage of the whole sequence gets each chunk's tensor."""
        return [
            tensor
            for value, source in self._layout.taken(kind)
            for tensor in self._take(value, source, chunk)
        ]

    def _take(self, value: Value, source: Source, chunk: int | None) -> Sequence[Tensor]:
        layout = self._layout
        if source.giver is None:
            return (take_rows(self._hidden, layout.spans(value.layout, chunk)),)
        if value.layout is Layout.KEYS:
            return (self._keys.take(value.name, chunk),)
        if layout.is_kept_whole(source):
            tensor = self._read((source, None))
            if chunk is None:
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
        num_takers = self._layout.num_takers(key[0])
        if num_takers == 1:
            return self._tensors.pop(key)
        with self._lock:
            self._reads[key] += 1
            return self._tensors.pop(key) if self._reads[key] == num_takers else self._tensors[key]


class Gradients:
    """The gradients of what the stages of a forward pass have given and taken.

    Args:
        layout: Of the block.
        gradient: ``[S, B, D]``, of what the block returned.
        keys: Where the gradients of keys and values are added up.
        note: Told of what a stage adds up before or after its own backward.
    """

    def __init__(self, layout: BlockLayout, gradient: Tensor, keys: KeyValueRows, *, note: Note) -> None:
        self._layout, self._gradient, self._keys, self._note = layout, gradient, keys, note
        self._tensors: dict[Key, Tensor | None] = {}
        self._adds: Counter[Key] = Counter()
        # Of values that are kept whole: rows that stages of a chunk have written, and which chunks those are.
        self._rows: dict[Source, Tensor] = {}
        self._written: set[Key] = set()
        self._hidden: Tensor | None = None
        # What transfers bring: to which rows of the sum it is added (None: to all), and its parts.
        self._arriving: defaultdict[Key, list[tuple[Sequence[Span] | None, list[Tensor]]]] = defaultdict(list)
        self._lock = threading.Lock()

    @property
    def hidden(self) -> Tensor:
        """``[S, B, D]``, of what the block was given. To be read once."""
        source = Source(None, HIDDEN_STATES.name)
        if self._hidden is None:
            assert self._layout.is_kept_whole(source)
            self._hidden = self._take_sum(source, None)
        assert self._hidden is not None, "no stage has taken what the block was given"
        for chunk in range(len(self._layout.chunks)):
            rows = self._layout.spans(HIDDEN_STATES.layout, chunk)
            for _, parts in self._arriving.pop((source, chunk), ()):
                put_sum(self._hidden, rows, _whole(parts), take_rows(self._hidden, rows))
        return self._hidden

    def take(self, kind: StageKind, chunk: int | None) -> list[Tensor | None]:
        """For each tensor that a stage has given the gradient; None where nothing depends on it."""
        return [self._take(value, source, chunk) for value, source in self._layout.given(kind)]

    def add(self, kind: StageKind, chunk: int | None, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of what a stage has taken, in the order of :meth:`Values.take`."""
        left = list(gradients)
        of_keys: list[Tensor | None] = []
        for value, source in self._layout.taken(kind):
            if value.layout is Layout.KEYS:
                of_keys.append(left.pop(0))
            elif not kind.lane.computes:
                self._add_when_taken(value, source, chunk, left)
            elif self._layout.is_kept_whole(source):
                self._add_to_whole(value, source, chunk, left.pop(0))
            elif chunk is not None:
                self._add(value, source, chunk, left.pop(0))
            elif value.layout is Layout.CHUNK:
                for index in range(len(self._layout.chunks)):
                    self._add(value, source, index, left.pop(0))
            else:
                whole = left.pop(0)
                for index in range(len(self._layout.chunks)):
                    rows = self._layout.spans(value.layout, index)
                    self._add(value, source, index, None if whole is None else take_rows(whole, rows))
        assert not left, f"{kind} returned {len(left)} gradients too many"
        if of_keys:
            self._keys.add_gradients(of_keys)

    def _take(self, value: Value, source: Source, chunk: int | None) -> Tensor | None:
        if source == self._layout.flow.output:
            return take_rows(self._gradient, self._layout.spans(value.layout, chunk))
        if value.layout is Layout.KEYS:
            return self._keys.take_gradient(value.name, chunk)
        if value.layout is Layout.SCALAR:
            return torch.zeros((), device=self._gradient.device)
        return self._take_sum(source, chunk) if self._layout.givers(source) else None

    def _add_when_taken(
        self, value: Value, source: Source, chunk: int | None, left: list[Tensor | None]
    ) -> None:
        """Keep what is still on its way: whoever takes the sum comes after its arrival, and adds it."""
        layout = self._layout
        kept_whole = layout.is_kept_whole(source)
        found: list[tuple[int | None, Sequence[Span] | None, list[Tensor]]] = []
        if chunk is None and value.layout is Layout.CHUNK and not kept_whole:
            given = [(index, left.pop(0)) for index in range(len(layout.chunks))]
            found = [(index, None, [gradient]) for index, gradient in given if gradient is not None]
        elif (gradient := left.pop(0)) is None:
            pass
        elif kept_whole:
            rows = None if chunk is None else layout.spans(value.layout, chunk)
            found = [(None, rows, [gradient])]
        elif chunk is not None:
            found = [(chunk, None, [gradient])]
        else:
            for index in range(len(layout.chunks)):
                # Views: nothing is read yet.
                rows = layout.spans(value.layout, index)
                found.append((index, None, [gradient[span.local_start : span.local_end] for span in rows]))
        with self._lock:
            for index, rows, parts in found:
                self._arriving[source, index].append((rows, parts))

    def _take_sum(self, source: Source, chunk: int | None) -> Tensor | None:
        """All gradients of a value, or of a chunk of it."""
        arrived = self._arriving.pop((source, chunk), ())
        if not arrived:
            return self._take_whole(source) if chunk is None else self._tensors.pop((source, chunk))
        total = self._take_whole(source) if chunk is None else self._tensors.pop((source, chunk), None)
        of_chunks: Tensor | None = None
        for rows, parts in arrived:
            # What is passed on unchanged is noted by the stage that takes it.
            self._note((total, *parts))
            part = _whole(parts)
            if rows is None:
                total = part if total is None else total + part
                continue
            if of_chunks is None:
                num_rows = sum(span.length for span in self._layout.joined.hidden)
                of_chunks = part.new_zeros((num_rows, *part.shape[1:]))
            put_sum(of_chunks, rows, part, take_rows(of_chunks, rows))
        if total is None or of_chunks is None:
            return of_chunks if total is None else total
        return total + of_chunks

    def _add(self, value: Value, source: Source, chunk: int, gradient: Tensor | None) -> None:
        """Add to the gradient of a chunk."""
        key = (source, chunk)
        earlier = self._tensors.get(key)
        self._adds[key] += 1
        if earlier is not None:
            self._note((earlier, gradient))
        if source.giver is None and self._adds[key] == self._layout.num_sums(source):
            # The last gradient of these rows: the sum is written to where the rows are returned.
            assert gradient is not None
            if self._hidden is None:
                self._hidden = torch.empty_like(self._gradient, dtype=gradient.dtype)
            rows = self._layout.spans(value.layout, chunk)
            if self._tensors.pop(key, None) is None:
                put_rows(self._hidden, rows, gradient)
            else:
                assert earlier is not None
                put_sum(self._hidden, rows, gradient, earlier)
        elif earlier is None:
            self._tensors[key] = gradient
        elif gradient is not None:
            self._tensors[key] = earlier + gradient

    def _add_to_whole(self, value: Value, source: Source, chunk: int | None, gradient: Tensor | None) -> None:
        """Add to the gradient of a value that is one tensor for the whole sequence."""
        assert gradient is not None
        if chunk is None:
            earlier = self._tensors.get((source, None))
            self._note((earlier, gradient))
            self._tensors[source, None] = gradient if earlier is None else earlier + gradient
            return
        if source not in self._rows:
            num_rows = sum(span.length for span in self._layout.spans(value.layout, None))
            self._rows[source] = gradient.new_empty((num_rows, *gradient.shape[1:]))
        rows, written = self._rows[source], (source, chunk)
        spans = self._layout.spans(value.layout, chunk)
        if written in self._written:
            put_sum(rows, spans, gradient, take_rows(rows, spans))
        else:
            put_rows(rows, spans, gradient)
            self._written.add(written)

    def _take_whole(self, source: Source) -> Tensor | None:
        whole, rows = self._tensors.pop((source, None), None), self._rows.pop(source, None)
        if whole is None or rows is None:
            return rows if whole is None else whole
        return whole + rows


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Consecutive rows as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _joined(parts: Sequence[Tensor], value: Value, layout: BlockLayout) -> Tensor:
    """The rows of all chunks as one tensor, each where it belongs."""
    num_rows = sum(part.shape[0] for part in parts)
    joined = parts[0].new_empty((num_rows, *parts[0].shape[1:]))
    for index, part in enumerate(parts):
        put_rows(joined, layout.spans(value.layout, index), part)
    return joined
