"""What a tape does with slots between the functions of stages: cut rows, put rows together, add gradients.

Only what cannot be a slot, or a slice of one, is a move. None stands for a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import Span

Slots = list[Any]
Spans = Sequence[Span]


class Move(NamedTuple):
    """A function of this module: of what is in ``target``, what is ``fixed`` and what is in ``sources``, to
    ``target``."""

    function: Callable[..., Any]
    target: int
    sources: Sequence[int] = ()
    fixed: Sequence[Any] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots that it reads and writes."""
        return self.target, *self.sources


def run_moves(moves: Iterable[Move], slots: Slots) -> None:
    """Run them in order."""
    for function, target, sources, fixed in moves:
        slots[target] = function(slots[target], *fixed, *[slots[source] for source in sources])


def take_rows(tensor: Tensor, spans: Spans) -> Tensor:
    """The rows of the spans, in order, along the first dimension: a view of one span, a copy of several."""
    if len(spans) == 1:
        return tensor[spans[0].local_start : spans[0].local_end]
    return torch.cat([tensor[span.local_start : span.local_end] for span in spans])


def _write_rows(target: Tensor, spans: Spans, rows: Tensor, others: Tensor | None = None) -> None:
    """Write rows that :func:`take_rows` would read, or the sum of two tensors of them."""
    start = 0
    for span in spans:
        end = start + span.length
        if others is None:
            target[span.local_start : span.local_end] = rows[start:end]
        else:
            torch.add(rows[start:end], others[start:end], out=target[span.local_start : span.local_end])
        start = end


def gather(_: None, spans: Spans, tensor: Tensor | None) -> Tensor | None:
    """The rows of several spans."""
    return None if tensor is None else take_rows(tensor, spans)


def join(_: None, spans: Sequence[Spans], num_rows: int, *parts: Tensor) -> Tensor:
    """The rows of all chunks, each where it belongs."""
    joined = parts[0].new_empty((num_rows, *parts[0].shape[1:]))
    for part, of_chunk in zip(parts, spans, strict=True):
        _write_rows(joined, of_chunk, part)
    return joined


def scatter(buffer: Tensor | None, spans: Spans, num_rows: int, *parts: Tensor | None) -> Tensor | None:
    """Write rows, or the sum of two, to the spans of a buffer, which the first rows make."""
    rows = [part for part in parts if part is not None]
    if not rows:
        return buffer
    if spans[0].length == num_rows:
        return add(*parts)
    if buffer is None:
        buffer = rows[0].new_empty((num_rows, *rows[0].shape[1:]))
    _write_rows(buffer, spans, *rows)
    return buffer


def add(total: Tensor | None, gradient: Tensor | None = None) -> Tensor | None:
    """The sum of two gradients; not in place, because others may refer to the first."""
    if gradient is None or total is None:
        return total if gradient is None else gradient
    return total + gradient


class Arrival(NamedTuple):
    """A gradient that is added when it is taken, because a transfer brings it; None for all rows."""

    slot: int
    to: Spans | None = None
    """Rows of the sum to which it is added."""
    of: Spans | None = None
    """Rows of what arrives that are added."""


def total(
    _: None, num_rows: int, rows: Sequence[tuple[Spans | None, Spans | None]], *parts: Tensor | None
) -> Tensor | None:
    """The sum of gradients; ``rows`` are ``to`` and ``of`` of each (:class:`Arrival`)."""
    whole: Tensor | None = None
    of_chunks: Tensor | None = None
    for part, (to, of) in zip(parts, rows, strict=True):
        if part is None:
            continue
        if of is not None:
            part = take_rows(part, of)
        if to is None:
            whole = add(whole, part)
            continue
        if of_chunks is None:
            of_chunks = part.new_zeros((num_rows, *part.shape[1:]))
        _write_rows(of_chunks, to, part, take_rows(of_chunks, to))
    return add(whole, of_chunks)


def make(_: None, factory: Callable[[], object]) -> object:
    return factory()


def make_sums(sums: KeyValueSums | None, key: Tensor, value: Tensor) -> KeyValueSums:
    """What sums the gradients of keys and values, before the first stage that adds to it."""
    return KeyValueSums(key, value) if sums is None else sums


def add_keys(sums: KeyValueSums, key: Tensor | None, value: Tensor | None) -> KeyValueSums:
    """Add the gradients of all keys and values that a stage saw, unless its function has added them."""
    if key is not None and value is not None:
        sums.add(0, key, value)
    return sums


def keys_gradient(_: None, index: int, spans: Spans | None, sums: KeyValueSums, *arrived: Tensor) -> Tensor:
    """The summed gradient of keys (index 0) or values (1) in their dtype: of the rows of a chunk, or of all.

    ``arrived`` is what the ring has brought in addition, of all rows.
    """
    total = sums.totals()[index]
    for part in arrived:
        total.add_(part)
    return sums.rounded(total if spans is None else take_rows(total, spans), index)


def note_shape(_: None, tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def make_empty(_: None, noted: tuple[Any, ...]) -> Tensor:
    """Uninitialized memory in place of what a transfer brought that does not run again."""
    shape, dtype, device = noted
    return torch.empty(shape, dtype=dtype, device=device)
