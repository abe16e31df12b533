"""Exact pieces cut as those of flash kernels, also in fakes of packages that are not installed.

And the settings of a layer from which a kernel is chosen.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.attention.backends import EXACT_PIECES
from megatron_ampipe.attention.kernels import Kernel
from megatron_ampipe.attention.pieces import PieceKernel, all_visible_keys, causal_then_earlier

forward, backward = EXACT_PIECES.forward, EXACT_PIECES.backward
"""Attention of a piece, and its gradients."""


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
