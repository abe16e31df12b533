"""A reference piece kernel in fp32 or fp64, which flash kernels are compared with.

Used as a kernel itself, and in fakes of packages that are not installed. Also the settings of a layer from
which a kernel is chosen.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.attention.kernels import Kernel
from megatron_ampipe.attention.pieces import PieceKernel, all_visible_keys, causal_then_earlier, repeat_heads
from megatron_ampipe.runtime.key_value_sums import sum_dtype

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


def _kernel(*, bottom_right: bool) -> Kernel:
    """The reference in pieces; with ``bottom_right``, all keys of a span are one piece."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, str]:
        assert bottom_right or not causal or len(query) == len(key), "causal from the top left only"
        return *forward(query, key, value, causal=causal, scale=scale), "state"

    def differentiate(*given: Any, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, state = given
        assert state == "state"
        return backward(*tensors, causal=causal, scale=scale)

    cut = all_visible_keys if bottom_right else causal_then_earlier
    return Kernel(pieces=PieceKernel(cut, attend, differentiate))


REFERENCE_KERNELS = {
    "reference-pieces": _kernel(bottom_right=False),
    "reference-bottom-right": _kernel(bottom_right=True),
}
"""Attention kernels for tests, by name."""


def settings_of_plain_attention(**other: Any) -> SimpleNamespace:
    """What ``choose_kernel`` reads of Megatron's settings: a bf16 layer of plain attention."""
    plain = {
        "params_dtype": torch.bfloat16, "kv_channels": 128, "context_parallel_size": 1, "window_size": None,
        "multi_latent_attention": False, "attention_dropout": 0.0,
    }  # fmt: skip
    return SimpleNamespace(**plain | other)
