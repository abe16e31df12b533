"""Slot operations: what a tape does with slots between stage functions (gather or join rows, add gradients).

An argument that is a slot, or a slice of a slot, needs none. None stands for a gradient of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import Span

Slots = list[Any]
"""What a slot holds was decided when the tape was compiled: a tensor, a graph, sums of gradients, or None."""
Spans = Sequence[Span]


class SlotOp(NamedTuple):
    """A call of a function of this module: ``slots[target] = function(slots[target], *fixed, *sources)``,
    with ``sources`` read from slots."""

    function: Callable[..., object]
    target: int
    sources: Sequence[int] = ()
    fixed: Sequence[object] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """All slots that the operation reads or writes."""
        return self.target, *self.sources


def run_slot_ops(ops: Iterable[SlotOp], slots: Slots) -> None:
    """Run operations in order."""
    for function, target, sources, fixed in ops:
        slots[target] = function(slots[target], *fixed, *[slots[source] for source in sources])


def take_rows(tensor: Tensor, spans: Spans) -> Tensor:
    """The rows of the spans along the first dimension: a view if there is one span, else a copy."""
    if len(spans) == 1:
        return tensor[spans[0].local_start : spans[0].local_end]
    return torch.cat([tensor[span.local_start : span.local_end] for span in spans])


def _write_rows(target: Tensor, spans: Spans, rows: Tensor, others: Tensor | None = None) -> None:
    """Write rows, or the sum of two tensors of rows, to where :func:`take_rows` reads them."""
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
    """Join the rows of all chunks, each written to its spans."""
    joined = parts[0].new_empty((num_rows, *parts[0].shape[1:]))
    for part, chunk_spans in zip(parts, spans, strict=True):
        _write_rows(joined, chunk_spans, part)
    return joined


def scatter(buffer: Tensor | None, spans: Spans, num_rows: int, *parts: Tensor | None) -> Tensor | None:
    """Write rows, or the sum of two tensors of rows, to the spans of a buffer; allocate it if None."""
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
    """The sum of two gradients; not in place, because something else may refer to the first."""
    if gradient is None or total is None:
        return total if gradient is None else gradient
    return total + gradient


class PendingGrad(NamedTuple):
    """A gradient that a transfer delivers: it is added when the sum is read. None means all rows."""

    slot: int
    target_rows: Spans | None = None
    """Rows of the sum to which it is added."""
    source_rows: Spans | None = None
    """Rows of the received tensor that are added."""


def total(
    _: None, num_rows: int, rows: Sequence[tuple[Spans | None, Spans | None]], *parts: Tensor | None
) -> Tensor | None:
    """The sum of gradients; ``rows`` are target and source rows of each (:class:`PendingGrad`)."""
    whole: Tensor | None = None
    by_rows: Tensor | None = None
    for part, (target_rows, source_rows) in zip(parts, rows, strict=True):
        if part is None:
            continue
        if source_rows is not None:
            part = take_rows(part, source_rows)
        if target_rows is None:
            whole = add(whole, part)
            continue
        if by_rows is None:
            by_rows = part.new_zeros((num_rows, *part.shape[1:]))
        _write_rows(by_rows, target_rows, part, take_rows(by_rows, target_rows))
    return add(whole, by_rows)


def make(_: None, factory: Callable[[], object]) -> object:
    return factory()


def make_sums(sums: KeyValueSums | None, key: Tensor, value: Tensor) -> KeyValueSums:
    """Create the sums of the gradients of keys and values, if no stage has done so before."""
    return KeyValueSums(key, value) if sums is None else sums


def add_keys(sums: KeyValueSums, key: Tensor | None, value: Tensor | None) -> KeyValueSums:
    """Add a stage's gradients of keys and values, unless its function has added them (None)."""
    if key is not None and value is not None:
        sums.add(0, key, value)
    return sums


def keys_gradient(_: None, index: int, spans: Spans | None, sums: KeyValueSums, *arrived: Tensor) -> Tensor:
    """The summed gradient of keys (index 0) or values (1) in their dtype, for a chunk's rows or for all.

    ``arrived`` are gradients of all rows that were received through the ring; they are added.
    """
    total = sums.totals()[index]
    for part in arrived:
        total.add_(part)
    return sums.rounded(total if spans is None else take_rows(total, spans), index)


_Noted = tuple[torch.Size, torch.dtype, torch.device]


def note_shape(_: None, tensor: Tensor) -> _Noted:
    return tensor.shape, tensor.dtype, tensor.device


def make_empty(_: None, noted: _Noted) -> Tensor:
    """Uninitialized memory for the output of a transfer that a recompute does not repeat."""
    shape, dtype, device = noted
    return torch.empty(shape, dtype=dtype, device=device)
