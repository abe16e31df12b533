"""Attention that the kernels are compared with, exact pieces cut as those of flash kernels, and settings."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from megatron_ampipe.attention.backends import EXACT_PIECES, visible_keys
from megatron_ampipe.attention.kernels import KERNELS, Kernel
from megatron_ampipe.attention.pieces import PieceKernel, all_visible_keys, causal_then_earlier
from megatron_ampipe.runtime.segment import sum_dtype

forward, backward = EXACT_PIECES.forward, EXACT_PIECES.backward
"""Attention of a piece, and its gradients."""


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition, differentiable, with the softmax in the dtype of sums; a ``SpanFunction``."""
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("rbhc,sbhc->bhrs", query, key).to(sum_dtype(query))
    scores = (scores * scale).masked_fill(~visible_keys(query, key, window), -math.inf)
    if sinks is not None:
        of_rows = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, of_rows], dim=-1)
    weights = drop(scores.softmax(dim=-1)[..., : key.shape[0]].to(value.dtype), p=dropout)
    return torch.einsum("bhrs,sbhv->rbhv", weights, value)


def _kernel(*, bottom_right: bool) -> Kernel:
    """The reference in pieces; with ``bottom_right``, all keys of a span are one piece."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, str]:
        assert bottom_right or not causal or query.shape[2] == key.shape[2], "causal from the top left only"
        return *forward(query, key, value, causal=causal, scale=scale), "state"

    def differentiate(*given: Any, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, state = given
        assert state == "state"
        return backward(*tensors, causal=causal, scale=scale)

    cut = all_visible_keys if bottom_right else causal_then_earlier
    return Kernel(pieces=PieceKernel(cut, attend, differentiate))


def _documents_one_by_one(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, scale: float) -> Tensor:
    """The definition for each document, with bounds as of torch's operator; a ``DocumentFunction``."""
    *ends, most_rows, most_keys = bounds
    assert [most_rows, most_keys] == [int(of_all.diff().max()) for of_all in ends]
    assert all(of_all.dtype == torch.int32 for of_all in ends)
    parts = (
        tensor.tensor_split(of_all[1:-1].tolist())
        for tensor, of_all in zip((query, key, value), (ends[0], ends[1], ends[1]), strict=True)
    )
    outputs = [exact(*(x.unsqueeze(1) for x in part), scale=scale) for part in zip(*parts, strict=True)]
    return torch.cat(outputs).squeeze(1)


REFERENCE_KERNELS = {
    "reference-pieces": _kernel(bottom_right=False),
    "reference-bottom-right": _kernel(bottom_right=True),
    "reference-documents": Kernel(documents=_documents_one_by_one),
}
"""Attention kernels for tests, by name."""
KERNELS.update(REFERENCE_KERNELS, exact=Kernel(exact))


def settings_of_plain_attention(**other: Any) -> SimpleNamespace:
    """What ``choose_kernel`` reads of Megatron's settings: a bf16 layer of plain attention."""
    plain = {
        "params_dtype": torch.bfloat16, "kv_channels": 128, "context_parallel_size": 1, "window_size": None,
        "multi_latent_attention": False, "attention_dropout": 0.0,
        "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    }  # fmt: skip
    return SimpleNamespace(**plain | other)
