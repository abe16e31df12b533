"""The gradients that pass between the stages of one block call: the mirror of :mod:`.values`.

Where several stages take a value, their gradients are summed: those of compute stages at once, so that one
tensor is kept; what a transfer brings when the sum is taken, because only then it has arrived. Called by
:mod:`.block_call`, also from the threads of a lane.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.rows import take_rows, write_rows, write_sum
from megatron_ampipe.runtime.values import BlockLayout, Key, KeyValueRows, Note
from megatron_ampipe.schedule import Layout, Source, Span, StageKind, Value
from megatron_ampipe.schedule.kinds import HIDDEN_STATES

# S sequence rows, B batch, D hidden size.


class Gradients:
    """The gradients of what the stages of a forward pass have given and taken.

    Args:
        layout: Of the block.
        above: ``[S, B, D]``, the gradient of what the block returned, or the gradients of the block that
            took it.
        keys: Where the gradients of keys and values are added up.
        device: Of all tensors.
        note: Told of what a stage adds up before or after its own backward.
        note_transfer: Told of what a transfer adds up before it sends it.
    """

    def __init__(
        self,
        layout: BlockLayout,
        above: Tensor | Gradients,
        keys: KeyValueRows,
        *,
        device: torch.device,
        note: Note,
        note_transfer: Note,
    ) -> None:
        self._layout, self._keys, self._device, self._note = layout, keys, device, note
        self._note_transfer = note_transfer
        self._above: Tensor | Gradients | None = above
        self._tensors: dict[Key, Tensor | None] = {}
        self._adds: Counter[Key] = Counter()
        # Of values that are kept whole: rows that stages of a chunk have written, and which chunks those are.
        self._rows: dict[Source, Tensor] = {}
        self._written: set[Key] = set()
        self._hidden: Tensor | None = None
        # What transfers bring: to which rows of the sum it is added (None: to all), and its parts.
        self._arriving: defaultdict[Key, list[tuple[Sequence[Span] | None, list[Tensor]]]] = defaultdict(list)
        self._lock = threading.Lock()
        # For each kind that gives keys of one rank, the sums of what the stages that take them add.
        self._blocks: dict[StageKind, KeyValueSums] = {}

    @property
    def hidden(self) -> Tensor:
        """``[S, B, D]``, of what the block was given, once all of its stages have run."""
        return self._hidden_with(range(len(self._layout.chunks)))

    def let_go(self) -> None:
        """All stages of the block have run: only :attr:`hidden` is read, by the block below."""
        self._above = None
        del self._keys

    def _hidden_with(self, chunks: Iterable[int]) -> Tensor:
        """``[S, B, D]``, of which the rows of these chunks are complete."""
        source = Source(None, HIDDEN_STATES.name)
        if self._hidden is None:
            assert self._layout.is_kept_whole(source)
            self._hidden = self._take_sum(source, None)
        assert self._hidden is not None, "no stage has taken what the block was given"
        for chunk in chunks:
            rows = self._layout.spans(HIDDEN_STATES.layout, chunk)
            for _, parts in self._arriving.pop((source, chunk), ()):
                self._note(parts)
                write_sum(self._hidden, rows, _whole(parts), take_rows(self._hidden, rows))
        return self._hidden

    def take(self, kind: StageKind, chunk: int | None) -> list[Tensor | None]:
        """For each tensor that a stage has given the gradient; None where nothing depends on it."""
        return [self._take(value, source, chunk) for value, source in self._layout.flow.given[kind]]

    def add(self, kind: StageKind, chunk: int | None, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of what a stage has taken, in the order of :meth:`Values.take`."""
        left = list(gradients)
        of_keys: list[Tensor | None] = []
        for value, source in self._layout.flow.taken[kind]:
            if value.layout is Layout.KEYS:
                of_keys.append(left.pop(0))
            elif value.layout is Layout.BLOCK and kind.lane.computes:
                added = left.pop(0)
                assert added is None, "gradients of keys of one rank are added to their sums"
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
            gradient = self._above
            if isinstance(gradient, Gradients):
                every = range(len(self._layout.chunks))
                gradient = gradient._hidden_with(every if chunk is None else (chunk,))
            assert gradient is not None, "a block is differentiated before the one above it"
            return take_rows(gradient, self._layout.spans(value.layout, chunk))
        if value.layout is Layout.KEYS:
            return self._keys.take_gradient(value.name, chunk)
        if value.layout is Layout.BLOCK:
            return self._take_block(value, source)
        if value.layout is Layout.SCALAR:
            return torch.zeros((), device=self._device)
        return self._take_sum(source, chunk) if self._layout.gradient_givers(source) else None

    def block_sums(self, kind: StageKind, recalled: Sequence[Tensor]) -> KeyValueSums:
        """Where the backward of a stage adds the gradients of the keys and values that it has recalled."""
        taken = self._layout.flow.taken[kind]
        giver = next(source.giver for value, source in taken if value.layout is Layout.BLOCK)
        assert giver is not None
        if giver not in self._blocks:
            self._blocks[giver] = KeyValueSums(*recalled)
        return self._blocks[giver]

    def _take_block(self, value: Value, source: Source) -> Tensor:
        """The gradient of keys or values of one rank: what was added here, and what the ring has brought."""
        giver = source.giver
        assert giver is not None
        names = [one.name for one, _ in self._layout.flow.given[giver] if one.layout is Layout.BLOCK]
        sums, index = self._blocks[giver], names.index(value.name)
        total = sums.totals()[index]
        self._note_transfer((total,))
        for _, parts in self._arriving.pop((source, None), ()):
            self._note_transfer(parts)
            total.add_(_whole(parts))
        if index == len(names) - 1:
            del self._blocks[giver]
        return sums.rounded(total, index)

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
                of_chunks = part.new_zeros((self._layout.num_rows(Layout.HIDDEN), *part.shape[1:]))
            write_sum(of_chunks, rows, part, take_rows(of_chunks, rows))
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
        if source.giver is None and self._adds[key] == self._layout.num_summed(source):
            # The last gradient of these rows: the sum is written to where the rows are returned.
            assert gradient is not None
            if self._hidden is None:
                self._hidden = gradient.new_empty((self._layout.num_rows(value.layout), *gradient.shape[1:]))
            rows = self._layout.spans(value.layout, chunk)
            if self._tensors.pop(key, None) is None:
                write_rows(self._hidden, rows, gradient)
            else:
                assert earlier is not None
                write_sum(self._hidden, rows, gradient, earlier)
        elif earlier is None:
            self._tensors[key] = gradient
        elif gradient is not None:
            self._tensors[key] = earlier + gradient

    def _add_to_whole(self, value: Value, source: Source, chunk: int | None, gradient: Tensor | None) -> None:
        """Add to the gradient of a value that is one tensor for the whole sequence."""
        if gradient is None:
            return
        if chunk is None:
            earlier = self._tensors.get((source, None))
            self._note((earlier, gradient))
            self._tensors[source, None] = gradient if earlier is None else earlier + gradient
            return
        if source not in self._rows:
            num_rows = self._layout.num_rows(value.layout)
            self._rows[source] = gradient.new_empty((num_rows, *gradient.shape[1:]))
        rows, written = self._rows[source], (source, chunk)
        spans = self._layout.spans(value.layout, chunk)
        if written in self._written:
            write_sum(rows, spans, gradient, take_rows(rows, spans))
        else:
            write_rows(rows, spans, gradient)
            self._written.add(written)

    def _take_whole(self, source: Source) -> Tensor | None:
        whole, rows = self._tensors.pop((source, None), None), self._rows.pop(source, None)
        if whole is None or rows is None:
            return rows if whole is None else whole
        return whole + rows


def _whole(parts: Sequence[Tensor]) -> Tensor:
    """Consecutive rows as one tensor."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
