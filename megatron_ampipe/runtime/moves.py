"""What a tape does with slots between the functions of stages: cut rows, put rows together, add gradients.

Only what cannot be a slot, or a slice of one, is a move. Made by :mod:`.compile`, run by :mod:`.steps`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.rows import take_rows, write_rows, write_sum
from megatron_ampipe.schedule import Span

Slots = list[Any]


class Move(ABC):
    """One of them; :attr:`slots` are all that it reads and writes."""

    @property
    @abstractmethod
    def slots(self) -> tuple[int, ...]:
        """All slots that it reads and writes."""

    @abstractmethod
    def __call__(self, slots: Slots) -> None:
        """Do it."""


@dataclass(frozen=True, slots=True)
class Gather(Move):
    """Put the rows of several spans of ``source`` together."""

    source: int
    spans: Sequence[Span]
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return self.source, self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        tensor = slots[self.source]
        slots[self.target] = None if tensor is None else take_rows(tensor, self.spans)


@dataclass(frozen=True, slots=True)
class Join(Move):
    """Put the rows of all chunks together, each where it belongs."""

    sources: tuple[int, ...]
    spans: Sequence[Sequence[Span]]
    num_rows: int
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return *self.sources, self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        parts = [slots[source] for source in self.sources]
        joined = slots[self.target] = parts[0].new_empty((self.num_rows, *parts[0].shape[1:]))
        for part, spans in zip(parts, self.spans, strict=True):
            write_rows(joined, spans, part)


@dataclass(frozen=True, slots=True)
class Scatter(Move):
    """Write rows to the spans of a buffer of ``num_rows``, which the first one makes; None writes nothing."""

    source: int
    spans: Sequence[Span]
    num_rows: int
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return self.source, self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        rows = slots[self.source]
        if rows is not None:
            write_rows(buffer_for(slots, self.target, rows, self.num_rows), self.spans, rows)


@dataclass(frozen=True, slots=True)
class ScatterSum(Move):
    """Write the sum of two gradients of rows to a buffer; or one of them, where the other is None."""

    source: int
    earlier: int
    spans: Sequence[Span]
    num_rows: int
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return self.source, self.earlier, self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        rows, earlier = slots[self.source], slots[self.earlier]
        if rows is None or earlier is None:
            rows, earlier = earlier if rows is None else rows, None
        if rows is None:
            return
        buffer = buffer_for(slots, self.target, rows, self.num_rows)
        if earlier is None:
            write_rows(buffer, self.spans, rows)
        else:
            write_sum(buffer, self.spans, rows, earlier)


@dataclass(frozen=True, slots=True)
class AddRows(Move):
    """Add rows to those of a buffer, or write them where there are none yet; None adds nothing.

    Attributes:
        source: What is added.
        written: Whether rows of these spans were written before; None where they were for certain.
        spans: Of the buffer.
        num_rows: Of the buffer.
        target: The buffer.
    """

    source: int
    written: int | None
    spans: Sequence[Span]
    num_rows: int
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return self.source, self.target, *(() if self.written is None else (self.written,))

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        rows = slots[self.source]
        if rows is None:
            return
        buffer = buffer_for(slots, self.target, rows, self.num_rows)
        if self.written is None or slots[self.written]:
            write_sum(buffer, self.spans, rows, take_rows(buffer, self.spans))
        else:
            write_rows(buffer, self.spans, rows)
            slots[self.written] = True


def buffer_for(slots: Slots, target: int, rows: Tensor, num_rows: int) -> Tensor:
    """The buffer in a slot, made like ``rows`` if it is not there yet."""
    buffer = slots[target]
    if buffer is None:
        buffer = slots[target] = rows.new_empty((num_rows, *rows.shape[1:]))
    found: Tensor = buffer
    return found


@dataclass(frozen=True, slots=True)
class Add(Move):
    """Add a gradient to the one that ``target`` has, if both are there."""

    source: int
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return self.source, self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        added, earlier = slots[self.source], slots[self.target]
        if added is not None:
            slots[self.target] = added if earlier is None else earlier + added


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that a transfer brings: to which rows of the sum it is added, and which rows of it.

    Attributes:
        slot: Where it arrives.
        to: Of the sum; None for all.
        of: Of what arrives; None for all.
    """

    slot: int
    to: Sequence[Span] | None = None
    of: Sequence[Span] | None = None

    def read(self, slots: Slots) -> Tensor | None:
        """The rows that are added."""
        tensor = slots[self.slot]
        return tensor if tensor is None or self.of is None else take_rows(tensor, self.of)


@dataclass(frozen=True, slots=True)
class Total(Move):
    """The sum of what compute stages have added, in one or two slots, and of what has arrived."""

    added: tuple[int, ...]
    arrivals: tuple[Arrival, ...]
    num_rows: int
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return *self.added, *(arrival.slot for arrival in self.arrivals), self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        total: Tensor | None = None
        for slot in self.added:
            if slots[slot] is not None:
                total = slots[slot] if total is None else total + slots[slot]
        of_chunks: Tensor | None = None
        for arrival in self.arrivals:
            part = arrival.read(slots)
            if part is None:
                continue
            if arrival.to is None:
                total = part if total is None else total + part
                continue
            if of_chunks is None:
                of_chunks = part.new_zeros((self.num_rows, *part.shape[1:]))
            write_sum(of_chunks, arrival.to, part, take_rows(of_chunks, arrival.to))
        if of_chunks is not None:
            total = of_chunks if total is None else total + of_chunks
        slots[self.target] = total


@dataclass(frozen=True, slots=True)
class MakeSums(Move):
    """Make what sums the gradients of keys and values, before the first stage that adds to it."""

    keys: tuple[int, int]
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return *self.keys, self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        if slots[self.target] is None:
            key, value = self.keys
            slots[self.target] = KeyValueSums(slots[key], slots[value])


@dataclass(frozen=True, slots=True)
class AddKeys(Move):
    """Add the gradients of all keys and values that a stage saw, unless its function has added them."""

    gradients: tuple[int, int]
    sums: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return *self.gradients, self.sums

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        key, value = (slots[slot] for slot in self.gradients)
        if key is not None and value is not None:
            slots[self.sums].add(0, key, value)


@dataclass(frozen=True, slots=True)
class KeysGradient(Move):
    """The summed gradient of the keys (index 0) or values (1) of a chunk, or of all, in their dtype.

    Attributes:
        sums: A :class:`~.key_value_sums.KeyValueSums`.
        index: Of the two.
        spans: Of the chunk; None for all rows.
        arrivals: What the ring has brought, of all rows.
        target: Where the gradient goes.
    """

    sums: int
    index: int
    spans: Sequence[Span] | None
    arrivals: tuple[Arrival, ...]
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return self.sums, *(arrival.slot for arrival in self.arrivals), self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        sums = slots[self.sums]
        total = sums.totals()[self.index]
        for arrival in self.arrivals:
            total.add_(slots[arrival.slot])
        if self.spans is not None:
            total = take_rows(total, self.spans)
        slots[self.target] = sums.rounded(total, self.index)


@dataclass(frozen=True, slots=True)
class MakeEmpty(Move):
    """Uninitialized memory in place of what a transfer brought that does not run again."""

    shapes: int
    targets: tuple[int, ...]

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return self.shapes, *self.targets

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        for target, (shape, dtype, device) in zip(self.targets, slots[self.shapes], strict=True):
            slots[target] = torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class NoteShapes(Move):
    """What :class:`MakeEmpty` needs."""

    sources: tuple[int, ...]
    target: int

    @property
    def slots(self) -> tuple[int, ...]:
        """See :class:`Move`."""
        return *self.sources, self.target

    def __call__(self, slots: Slots) -> None:
        """See :class:`Move`."""
        tensors = [slots[source] for source in self.sources]
        slots[self.target] = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
