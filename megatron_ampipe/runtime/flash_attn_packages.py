"""FlashAttention 2 and 3 from the packages ``flash-attn`` and ``flash-attn-3``.

Both align causal masks to the bottom right. The packages are imported at the first call; ``compat`` tells
which of them is installed and new enough. For fp16 and bf16.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import RowSums
from megatron_ampipe.runtime.merged import AttentionPiece, PieceOutput, all_visible_keys
from megatron_ampipe.runtime.rows import join_spans, split_spans
from megatron_ampipe.schedule.chunks import Span

# The packages' layout is batch, rows, heads: ``[B, R, H, C]``.


def flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spans: Sequence[Span],
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sums: RowSums | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The public function of flash-attn 2.1 or later: for dropout, windows and older versions."""
    assert sinks is None, "another kernel is chosen for sinks"
    from flash_attn import flash_attn_func

    outputs = []
    for rows, span in split_spans(query, spans):
        output = flash_attn_func(
            rows.transpose(0, 1),
            key[: span.global_end].transpose(0, 1),
            value[: span.global_end].transpose(0, 1),
            dropout_p=dropout,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window, 0),
        )
        outputs.append(output.transpose(0, 1))
    return join_spans(outputs)


class FlashAttn2:
    """flash-attn 2.7 or later, through the two internal functions that its public function calls."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[AttentionPiece, ...]:
        """All visible keys in one piece."""
        return all_visible_keys(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`; ``state`` is the random state, unused without dropout."""
        from flash_attn.flash_attn_interface import _flash_attn_forward

        output, lse, _, random_state = _flash_attn_forward(
            *(x.transpose(0, 1) for x in (query, key, value)),
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            return_softmax=False,
        )
        return PieceOutput(output.transpose(0, 1), lse, (random_state,))

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
        from flash_attn.flash_attn_interface import _flash_attn_backward

        tensors = [x.transpose(0, 1) for x in (gradient, query, key, value, output)]
        found = [_empty_gradient(x) for x in tensors[1:4]]
        _flash_attn_backward(
            *tensors,
            lse.contiguous(),
            *found,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=causal,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            rng_state=state[0],
        )
        dq, dk, dv = (x.transpose(0, 1) for x in found)
        return dq, dk, dv


class FlashAttn3:
    """flash-attn-3, for Hopper, through its torch operators, whose schemas name all arguments."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[AttentionPiece, ...]:
        """All visible keys in one piece."""
        return all_visible_keys(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`."""
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        output, lse, *_ = _flash_attn_3().fwd(
            query, key, value, softmax_scale=scale, is_causal=causal, num_splits=1
        )
        return PieceOutput(output.transpose(0, 1), lse)

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
        tensors = [x.transpose(0, 1) for x in (gradient, query, key, value, output)]
        dq, dk, dv = (_empty_gradient(x) for x in tensors[1:4])
        _flash_attn_3().bwd(
            *tensors,
            lse.contiguous(),
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=scale,
            is_causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


def _flash_attn_3() -> Any:
    """The operators, which the package's extension module registers when it is imported."""
    importlib.import_module("flash_attn_3._C")
    return torch.ops.flash_attn_3


def _empty_gradient(like: Tensor) -> Tensor:
    """An uninitialized gradient ``[B, R, H, C]``, contiguous."""
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
