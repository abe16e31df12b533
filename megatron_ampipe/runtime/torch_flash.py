"""torch's flash kernels for GPUs (FlashAttention 2 and cuDNN) as piece kernels (:mod:`.merged`).

The operators are called directly: ``scaled_dot_product_attention`` chooses between them by shape, so it could
choose a different one for the first chunk than for the others. For fp16 and bf16. ``layers/kernel_choice.py``
decides which one can be used where.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.merged import AttentionPiece, PieceOutput, all_visible_keys, causal_then_earlier
from megatron_ampipe.schedule.chunks import Span


class TorchFlash2:
    """torch's built-in FlashAttention 2; its causal mask is aligned to the bottom right."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[AttentionPiece, ...]:
        """All visible keys in one piece."""
        return all_visible_keys(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`; ``state`` is the random state, unused without dropout."""
        query, key, value = (_heads_first(x) for x in (query, key, value))
        output, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return PieceOutput(output.permute(2, 0, 1, 3), lse, (seed, offset))

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
        seed, offset = state
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(_heads_first(x) for x in (gradient, query, key, value, output)),
            lse.contiguous(),
            None,
            None,
            query.shape[0],
            key.shape[0],
            0.0,
            causal,
            seed,
            offset,
            scale=scale,
        )
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


class Cudnn:
    """cuDNN's attention; through torch its causal mask is aligned to the top left only.

    Causal pieces therefore need as many keys as queries.
    """

    def pieces(self, span: Span, *, backward: bool) -> tuple[AttentionPiece, ...]:
        """Two pieces: the span's own keys, and the earlier keys."""
        return causal_then_earlier(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`.

        ``state`` is the random state, which is unused without dropout, and the number of dimensions of the
        log-sum-exp, which depends on torch's version: ``[B, H, R]`` or ``[B, H, R, 1]``.

        Raises:
            BadInput: for a single key, which cuDNN does not support.
        """
        if key.shape[0] == 1:
            raise BadInput(
                "rows of a chunk",
                1,
                rule="cuDNN attends to two keys or more",
                remedy="Use a smaller --ampipe-degree, or --ampipe-chunks with two rows or more in each.",
            )
        rows, batch, heads, _ = query.shape
        query, key, value = (_heads_first(x) for x in (query, key, value))
        output, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        state = (seed, offset, lse.dim())
        return PieceOutput(output.permute(2, 0, 1, 3), lse.reshape(batch, heads, rows), state)

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
        seed, offset, lse_dimensions = state
        lse = lse.contiguous()
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_heads_first(x) for x in (gradient, query, key, value, output)),
            lse if lse.dim() == lse_dimensions else lse.unsqueeze(-1),
            seed,
            offset,
            None,
            None,
            None,
            query.shape[0],
            key.shape[0],
            0.0,
            causal,
            scale=scale,
        )
        return dq.permute(2, 0, 1, 3), dk.permute(2, 0, 1, 3), dv.permute(2, 0, 1, 3)


def _heads_first(tensor: Tensor) -> Tensor:
    """``[R, B, H, C]`` as ``[B, H, R, C]``, a view."""
    return tensor.permute(1, 2, 0, 3)
