"""A piece kernel (:mod:`.merged`) of plain torch operations, for what no flash kernel supports.

Supports every dtype and device, and values with another head size than keys. Materializes the scores of a
piece, in fp32 or wider.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import sum_dtype
from megatron_ampipe.runtime.merged import AttentionPiece, PieceOutput, all_visible_keys
from megatron_ampipe.runtime.rows import repeat_heads
from megatron_ampipe.schedule.chunks import Span

# R query rows, S keys, B batch, H query heads, G key/value heads, C head size of keys, V of values.


class ExactPieces:
    """All visible keys of a span in one piece."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[AttentionPiece, ...]:
        """See :class:`.merged.PieceKernel`."""
        return all_visible_keys(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`."""
        scores = _scores(query, key, causal=causal, scale=scale)
        lse = scores.logsumexp(dim=-1)
        weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(value.dtype)
        values = repeat_heads(value, query.shape[2])
        return PieceOutput(torch.einsum("bhrs,sbhv->rbhv", weights, values), lse)

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
        heads, groups, dtype = query.shape[2], key.shape[2], query.dtype
        weights = _scores(query, key, causal=causal, scale=scale).sub_(lse.unsqueeze(-1)).exp_()
        mean = (gradient.to(weights.dtype) * output).sum(-1).permute(1, 2, 0).unsqueeze(-1)
        of_scores = torch.einsum("rbhv,sbhv->bhrs", gradient, repeat_heads(value, heads)).to(weights.dtype)
        of_scores = of_scores.sub_(mean).mul_(weights).mul_(scale).to(dtype)
        dq = torch.einsum("bhrs,sbhc->rbhc", of_scores, repeat_heads(key, heads))
        dk = torch.einsum("bhrs,rbhc->sbhc", of_scores, query)
        dv = torch.einsum("bhrs,rbhv->sbhv", weights.to(dtype), gradient)
        if groups != heads:
            dk, dv = (x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))
        return dq, dk, dv


def _scores(query: Tensor, key: Tensor, *, causal: bool, scale: float) -> Tensor:
    """``[B, H, R, S]`` in the dtype of sums; the last row sees the last key."""
    scores = torch.einsum("rbhc,sbhc->bhrs", query, repeat_heads(key, query.shape[2]))
    scores = scores.to(sum_dtype(query)) * scale
    if causal:
        rows, keys = scores.shape[-2:]
        seen = torch.ones(rows, keys, dtype=torch.bool, device=scores.device).tril(keys - rows)
        scores = scores.masked_fill_(~seen, -math.inf)
    return scores
