"""torch's flash attention for CPU as a piece kernel (:mod:`.merged`).

The kernel supports causal attention only with as many queries as keys, and it also computes masked scores, up
to 512 keys to the right of the diagonal.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.merged import AttentionPiece, PieceOutput
from megatron_ampipe.runtime.rows import repeat_heads
from megatron_ampipe.schedule.chunks import Span

_TRIANGLE_ROWS = 128
"""Queries of the largest causal piece: with fewer, the extra calls cost more than the masked scores saved."""


class CpuFlash:
    """Splits each span into rectangles without a mask and small causal triangles."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[AttentionPiece, ...]:
        """Forward: a few rows at a time. Backward merges nothing, so its pieces are as large as possible."""
        return _backward_pieces(span) if backward else _forward_pieces(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`."""
        heads = query.shape[2]
        query, key, value = _heads_first(query, key, value, causal=causal)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        if query.shape[1] != heads:
            output = output.reshape(output.shape[0], heads, -1, output.shape[-1])
            lse = lse.reshape(lse.shape[0], heads, -1)
        return PieceOutput(output.permute(2, 0, 1, 3), lse)

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        state: tuple[Any, ...],
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`.merged.PieceKernel`."""
        heads, groups = query.shape[2], key.shape[2]
        gradient, output = (x.permute(1, 2, 0, 3) for x in (gradient, output))
        query, key, value = _heads_first(query, key, value, causal=causal)
        if query.shape[1] != heads:
            gradient, output, lse = (
                x.reshape(x.shape[0], groups, -1, *x.shape[3:]) for x in (gradient, output, lse)
            )
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, lse, 0.0, causal, scale=scale
        )
        dq, dk, dv = found
        if query.shape[1] != heads:
            dq = dq.reshape(dq.shape[0], heads, -1, dq.shape[-1])
        if dk.shape[1] != groups:
            dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
        dq, dk, dv = (x.permute(2, 0, 1, 3) for x in (dq, dk, dv))
        return dq, dk, dv


@functools.cache
def _forward_pieces(span: Span) -> tuple[AttentionPiece, ...]:
    """For every block of rows a triangle, and a rectangle of all keys before it."""
    pieces = []
    for first in range(0, span.length, _TRIANGLE_ROWS):
        last = min(span.length, first + _TRIANGLE_ROWS)
        own = span.global_start + first
        pieces.append(AttentionPiece(first, last, own, span.global_start + last, causal=True))
        if own:
            pieces.append(AttentionPiece(first, last, 0, own, causal=False))
    return tuple(pieces)


@functools.cache
def _backward_pieces(span: Span) -> tuple[AttentionPiece, ...]:
    """The triangles of a span, then rectangles, each as large as possible."""
    pieces = []
    if span.global_start:
        pieces.append(AttentionPiece(0, span.length, 0, span.global_start, causal=False))

    def cut(first: int, last: int) -> None:
        keys = span.global_start + first, span.global_start + last
        if last - first <= _TRIANGLE_ROWS:
            pieces.append(AttentionPiece(first, last, *keys, causal=True))
            return
        # Half the rows, rounded up to a multiple of the triangle's.
        half = first + -(-(last - first) // (2 * _TRIANGLE_ROWS)) * _TRIANGLE_ROWS
        pieces.append(AttentionPiece(half, last, keys[0], span.global_start + half, causal=False))
        cut(first, half)
        cut(half, last)

    cut(0, span.length)
    return tuple(reversed(pieces))


def _heads_first(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """``[B, heads, rows, C]``, with as many key heads as query heads.

    In a rectangle, query heads that share a key head become additional query rows, so no keys are copied. In
    a triangle the keys are repeated.
    """
    groups = key.shape[2]
    if causal:
        key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if not causal and query.shape[1] != groups:
        query = query.reshape(query.shape[0], groups, -1, query.shape[-1])
    return query, key, value
