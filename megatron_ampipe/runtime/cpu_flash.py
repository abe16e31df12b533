"""torch's flash attention for CPU as a kernel of pieces (:mod:`.merged`).

The kernel knows causal attention only for as many queries as keys, and it computes what the mask hides up to
512 keys to the right of the diagonal.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.merged import Piece, PieceOutput
from megatron_ampipe.runtime.rows import repeat_heads
from megatron_ampipe.schedule.chunks import Span

_TRIANGLE_ROWS = 128
"""Queries of the largest triangle: fewer would spend more on calls than they save behind the mask."""


class CpuFlash:
    """Each span as rectangles without a mask and small causal triangles."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[Piece, ...]:
        """Forward, few rows at a time; backward nothing is merged, so pieces are as large as can be."""
        return _differentiated(span) if backward else _attended(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`."""
        heads = query.shape[2]
        query, key, value = _before_rows(query, key, value, causal=causal)
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
        query, key, value = _before_rows(query, key, value, causal=causal)
        if query.shape[1] != heads:
            gradient, output, lse = (
                x.reshape(x.shape[0], groups, -1, *x.shape[3:]) for x in (gradient, output, lse)
            )
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, lse, 0.0, causal, scale=scale
        )
        of_query, of_key, of_value = found
        if query.shape[1] != heads:
            of_query = of_query.reshape(of_query.shape[0], heads, -1, of_query.shape[-1])
        if of_key.shape[1] != groups:
            of_key, of_value = (x.unflatten(1, (groups, -1)).sum(2) for x in (of_key, of_value))
        of_query, of_key, of_value = (x.permute(2, 0, 1, 3) for x in (of_query, of_key, of_value))
        return of_query, of_key, of_value


@functools.cache
def _attended(span: Span) -> tuple[Piece, ...]:
    """For every few rows a triangle, and a rectangle of all keys before it."""
    pieces = []
    for first in range(0, span.length, _TRIANGLE_ROWS):
        last = min(span.length, first + _TRIANGLE_ROWS)
        own = span.global_start + first
        pieces.append(Piece(first, last, own, span.global_start + last, causal=True))
        if own:
            pieces.append(Piece(first, last, 0, own, causal=False))
    return tuple(pieces)


@functools.cache
def _differentiated(span: Span) -> tuple[Piece, ...]:
    """Rectangles, each as large as can be, and the triangles of a span, which come first of their rows."""
    pieces = []
    if span.global_start:
        pieces.append(Piece(0, span.length, 0, span.global_start, causal=False))

    def cut(first: int, last: int) -> None:
        keys = span.global_start + first, span.global_start + last
        if last - first <= _TRIANGLE_ROWS:
            pieces.append(Piece(first, last, *keys, causal=True))
            return
        # Half, in whole triangles.
        half = first + -(-(last - first) // (2 * _TRIANGLE_ROWS)) * _TRIANGLE_ROWS
        pieces.append(Piece(half, last, keys[0], span.global_start + half, causal=False))
        cut(first, half)
        cut(half, last)

    cut(0, span.length)
    return tuple(reversed(pieces))


def _before_rows(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """Heads before rows, and as many of keys as of queries.

    Heads that share keys become more query rows of a rectangle, so its keys are never copied; a triangle's
    are.
    """
    groups = key.shape[2]
    if causal:
        key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if not causal and query.shape[1] != groups:
        query = query.reshape(query.shape[0], groups, -1, query.shape[-1])
    return query, key, value
