"""Attention to the keys of one context-parallel rank after another, with a running log-sum-exp.

In Megatron's zigzag order, rank ``r`` of ``n`` holds the slices ``r`` and ``2 * n - 1 - r`` of a sequence.
Its rows attend to its own keys in step 0, and in step ``t`` to those of the rank ``t`` places before it in
the ring. Of an earlier rank all rows see the first slice; of a later one the rows of the second slice see
both. So only step 0 needs a causal mask, and every step is the same work on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.attention.pieces import (
    PieceKernel,
    PieceOutput,
    attend_in_pieces,
    differentiate_in_pieces,
    merge_pieces,
)
from megatron_ampipe.runtime.segment import KeyValueSums, sum_dtype
from megatron_ampipe.schedule.chunks import Span

# R rows of a chunk, S rows of a rank, B batch, H heads, G key/value heads, C head size of keys, V of values.


@dataclass(slots=True)
class _Chunk:
    """What is kept of a chunk from its first step to the backward of that step."""

    query: Tensor
    spans: tuple[Span, ...]
    lse: Tensor
    state: tuple[Any, ...]
    output: Tensor | None = None
    gradient: Tensor | None = None
    """Of the queries so far, in the dtype of sums."""


class RingAttention:
    """Attention of the rows of one rank in one pass through a block; ``kernel`` computes every piece.

    Saves queries, outputs and log-sum-exp for the backward pass, and no keys: :meth:`differentiate` is given
    the keys of its step again. A chunk is an index, or None for all rows of the rank; keys are
    ``[S, B, G, C]``, values ``[S, B, G, V]``.
    """

    def __init__(self, kernel: PieceKernel, *, scale: float, rank: int, num_ranks: int) -> None:
        self._kernel, self._scale, self._rank, self._num_ranks = kernel, scale, rank, num_ranks
        self._chunks: dict[int | None, _Chunk] = {}

    def begin(
        self, chunk: int | None, query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span]
    ) -> Tensor:
        """Step 0: queries ``[R, B, H, C]`` attend to the keys of this rank; ``spans`` are those of the rows.

        Returns ``[R, B, H * V]``, at least fp32, for :meth:`go_on`.
        """
        # Rows of the second slice see the whole first slice: in local places, a causal mask.
        local = tuple(Span(span.local_start, span.length, span.local_start) for span in spans)
        attended = attend_in_pieces(self._kernel, query, key, value, spans=local, scale=self._scale)
        self._chunks[chunk] = _Chunk(query, local, attended.lse, attended.state)
        return attended.output.to(attended.lse.dtype).reshape(*query.shape[:2], -1)

    def go_on(self, step: int, chunk: int | None, key: Tensor, value: Tensor, context: Tensor) -> Tensor:
        """Attend to the keys of the rank ``step`` places before this one, which the ring has brought.

        ``context``, which the step before returned, may be overwritten. After the last step the result has
        the dtype of the queries.
        """
        of = self._chunks[chunk]
        first, num_keys = self._seen(step, of, key)
        if first < len(of.query):
            known = context.view(*of.query.shape[:3], -1)
            part = self._kernel.attend(
                of.query[first:], key[:num_keys], value[:num_keys], causal=False, scale=self._scale
            )
            known[first:], lse = merge_pieces([PieceOutput(known[first:], of.lse[..., first:]), part])
            of.lse = lse if not first else torch.cat([of.lse[..., :first], lse], dim=-1)
        if step < self._num_ranks - 1:
            return context
        context = context.to(of.query.dtype)
        of.output = context.view(*of.query.shape[:3], -1)
        return context

    def differentiate(
        self, step: int, chunk: int | None, gradient: Tensor, key: Tensor, value: Tensor, sums: KeyValueSums
    ) -> Tensor | None:
        """The backward of a step; steps go from the last to 0.

        ``gradient`` is of the output of the last step, ``[R, B, H * V]``; ``sums`` gets the gradients of the
        keys and values of this one. Returns in step 0 the gradient of the queries, ``[R, B, H, C]``.
        """
        of = self._chunks[chunk]
        assert of.output is not None, "the last step has not run"
        gradient = gradient.reshape(of.output.shape)
        if of.gradient is None:
            of.gradient = torch.zeros(of.query.shape, dtype=sum_dtype(of.query), device=of.query.device)
        if not step:
            attended = PieceOutput(of.output, of.lse, of.state)
            tensors = gradient, of.query, key, value
            dq, _, _ = differentiate_in_pieces(
                self._kernel, attended, tensors, spans=of.spans, scale=self._scale, add=sums.add
            )
            del self._chunks[chunk]
            return of.gradient.add_(dq).to(of.query.dtype)
        first, num_keys = self._seen(step, of, key)
        if first < len(of.query):
            attended = PieceOutput(of.output[first:], of.lse[..., first:], of.state)
            tensors = gradient[first:], of.query[first:], key[:num_keys], value[:num_keys]
            dq, dk, dv = self._kernel.differentiate(attended, *tensors, causal=False, scale=self._scale)
            of.gradient[first:] += dq
            sums.add(0, dk, dv)
        return None

    def _seen(self, step: int, of: _Chunk, key: Tensor) -> tuple[int, int]:
        """The first row of a chunk that sees keys of the rank of a step, and how many of its keys it sees."""
        slice_rows = key.shape[0] // 2
        if step <= self._rank:
            return 0, slice_rows
        of_first_slice = sum(max(0, min(span.local_end, slice_rows) - span.local_start) for span in of.spans)
        return of_first_slice, key.shape[0]
