"""A reference piece kernel in fp32 or fp64, which flash kernels are compared with.

Used as a kernel itself, and in fakes of packages that are not installed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import sum_dtype
from megatron_ampipe.runtime.merged import (
    AttentionPiece,
    MergedAttention,
    PieceOutput,
    all_visible_keys,
    causal_then_earlier,
)
from megatron_ampipe.runtime.rows import repeat_heads
from megatron_ampipe.schedule import Span

# R query rows, S keys, B batch, H query heads, G key/value heads, C and V head sizes.


def forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """``[R, B, H, C]``, ``[S, B, G, C]``, ``[S, B, G, V]`` to ``[R, B, H, V]`` and ``[B, H, R]``.

    The causal mask is aligned to the bottom right.
    """
    heads, dtype = query.shape[2], sum_dtype(query)
    scores = _scores(query, key, causal=causal, scale=scale)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse.unsqueeze(-1)).exp()
    output = torch.einsum("bhrs,sbhv->rbhv", weights, repeat_heads(value, heads).to(dtype))
    return output.to(query.dtype), lse


def backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from the attention weights of these keys."""
    heads, groups, dtype = query.shape[2], key.shape[2], sum_dtype(query)
    weights = (_scores(query, key, causal=causal, scale=scale) - lse.unsqueeze(-1)).exp()
    gradient, output = gradient.to(dtype), output.to(dtype)
    dweights = torch.einsum("rbhv,sbhv->bhrs", gradient, repeat_heads(value, heads).to(dtype))
    common = (gradient * output).sum(-1).permute(1, 2, 0).unsqueeze(-1)
    dscores = weights * (dweights - common) * scale
    dq = torch.einsum("bhrs,sbhc->rbhc", dscores, repeat_heads(key, heads).to(dtype))
    dk = torch.einsum("bhrs,rbhc->sbhc", dscores, query.to(dtype))
    dv = torch.einsum("bhrs,rbhv->sbhv", weights, gradient)
    dk, dv = (x.unflatten(2, (groups, -1)).sum(3) for x in (dk, dv))
    return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype)


def _scores(query: Tensor, key: Tensor, *, causal: bool, scale: float) -> Tensor:
    dtype = sum_dtype(query)
    key = repeat_heads(key, query.shape[2])
    scores = torch.einsum("rbhc,sbhc->bhrs", query.to(dtype), key.to(dtype)) * scale
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~seen.tril(key.shape[0] - query.shape[0]), -math.inf)
    return scores


class ReferencePieces:
    """The reference kernel as a ``PieceKernel``.

    Args:
        bottom_right: Take all keys of a span as one piece.
    """

    def __init__(self, *, bottom_right: bool) -> None:
        self._bottom_right = bottom_right

    def pieces(self, span: Span, *, backward: bool) -> tuple[AttentionPiece, ...]:
        return all_visible_keys(span) if self._bottom_right else causal_then_earlier(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        assert self._bottom_right or not causal or len(query) == len(key), "causal from the top left only"
        return PieceOutput(*forward(query, key, value, causal=causal, scale=scale), ("state",))

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
        assert state == ("state",)
        return backward(gradient, query, key, value, output, lse, causal=causal, scale=scale)


REFERENCE_KERNELS = {
    "reference-pieces": MergedAttention(ReferencePieces(bottom_right=False)),
    "reference-bottom-right": MergedAttention(ReferencePieces(bottom_right=True)),
}
"""Attention kernels for tests, by name."""
