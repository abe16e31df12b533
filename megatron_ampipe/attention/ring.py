"""Attention to the keys of one context-parallel rank after another, with a running log-sum-exp.

In Megatron's zigzag order, rank ``r`` of ``n`` holds the slices ``r`` and ``2 * n - 1 - r`` of a sequence.
Its rows attend to its own keys in step 0, and in step ``t`` to the keys of the rank ``t`` places before it in
the ring. If that rank is lower, all rows see its first slice; if it is higher, the rows of the second slice
see both slices. So only step 0 needs a causal mask, and each step is the same work on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ampipe.attention.pieces import (
    KernelState,
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
    """The tensors of a chunk that are kept from its first step to the backward of that step."""

    query: Tensor
    spans: tuple[Span, ...]
    lse: Tensor
    state: KernelState
    output: Tensor | None = None
    gradient: Tensor | None = None
    """The gradient of the queries so far, in the dtype of sums."""


class RingAttention:
    """Attention of the rows of one rank in one pass through a block; ``kernel`` computes every piece.

    Saves queries, outputs and log-sum-exp for the backward pass, but no keys: :meth:`differentiate` gets the
    keys of its step again. ``chunk`` is an index, or None for all rows of the rank; keys are
    ``[S, B, G, C]``, values ``[S, B, G, V]``.
    """

    def __init__(self, kernel: PieceKernel, *, scale: float, rank: int, num_ranks: int) -> None:
        self._kernel, self._scale, self._rank, self._num_ranks = kernel, scale, rank, num_ranks
        self._chunks: dict[int | None, _Chunk] = {}

    def begin(
        self, chunk: int | None, query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span]
    ) -> Tensor:
        """Step 0: queries ``[R, B, H, C]``, the rows of ``spans``, attend to the keys of this rank.

        Returns ``[R, B, H * V]``, at least fp32, for :meth:`go_on`.
        """
        # Rows of the second slice see the whole first slice, so the mask is causal in local positions.
        local = tuple(Span(span.local_start, span.length, span.local_start) for span in spans)
        attended = attend_in_pieces(self._kernel, query, key, value, spans=local, scale=self._scale)
        self._chunks[chunk] = _Chunk(query, local, attended.lse, attended.state)
        return attended.output.to(attended.lse.dtype).reshape(*query.shape[:2], -1)

    def go_on(self, step: int, chunk: int | None, key: Tensor, value: Tensor, context: Tensor) -> Tensor:
        """Attend to the keys of the rank ``step`` places before this one, received through the ring.

        ``context``, the result of the step before, may be overwritten. After the last step the result has
        the dtype of the queries.
        """
        saved = self._chunks[chunk]
        first, num_keys = self._seen(step, saved, key)
        if first < len(saved.query):
            known = context.view(*saved.query.shape[:3], -1)
            part = self._kernel.attend(
                saved.query[first:], key[:num_keys], value[:num_keys], causal=False, scale=self._scale
            )
            known[first:], lse = merge_pieces([PieceOutput(known[first:], saved.lse[..., first:]), part])
            saved.lse = lse if not first else torch.cat([saved.lse[..., :first], lse], dim=-1)
        if step < self._num_ranks - 1:
            return context
        context = context.to(saved.query.dtype)
        saved.output = context.view(*saved.query.shape[:3], -1)
        return context

    def differentiate(
        self, step: int, chunk: int | None, gradient: Tensor, key: Tensor, value: Tensor, sums: KeyValueSums
    ) -> Tensor | None:
        """The backward of a step; called from the last step to step 0.

        ``gradient`` is that of the last step's output, ``[R, B, H * V]``. The gradients of the keys and
        values of this step are added to ``sums``. Step 0 returns the gradient of the queries.
        """
        saved = self._chunks[chunk]
        assert saved.output is not None, "the last step has not run"
        gradient = gradient.reshape(saved.output.shape)
        if saved.gradient is None:
            query = saved.query
            saved.gradient = torch.zeros(query.shape, dtype=sum_dtype(query), device=query.device)
        if not step:
            attended = PieceOutput(saved.output, saved.lse, saved.state)
            tensors = gradient, saved.query, key, value
            dq, _, _ = differentiate_in_pieces(
                self._kernel, attended, tensors, spans=saved.spans, scale=self._scale, add=sums.add
            )
            del self._chunks[chunk]
            return saved.gradient.add_(dq).to(saved.query.dtype)
        first, num_keys = self._seen(step, saved, key)
        if first < len(saved.query):
            attended = PieceOutput(saved.output[first:], saved.lse[..., first:], saved.state)
            tensors = gradient[first:], saved.query[first:], key[:num_keys], value[:num_keys]
            dq, dk, dv = self._kernel.differentiate(attended, *tensors, causal=False, scale=self._scale)
            saved.gradient[first:] += dq
            sums.add(0, dk, dv)
        return None

    def _seen(self, step: int, saved: _Chunk, key: Tensor) -> tuple[int, int]:
        """The first row of a chunk that sees keys of the rank of a step, and the number of keys it sees."""
        slice_rows = key.shape[0] // 2
        if step <= self._rank:
            return 0, slice_rows
        in_first = sum(max(0, min(span.local_end, slice_rows) - span.local_start) for span in saved.spans)
        return in_first, key.shape[0]
