"""torch's own flash kernels for GPUs, FlashAttention 2 and cuDNN's, as kernels of pieces (:mod:`.merged`).

Called by the names of their operators: ``scaled_dot_product_attention`` chooses among them by the shapes, and
so another one for the first chunk than for the rest. For fp16 and bf16. Which can be used where, says
``layers/kernel_choice.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.merged import Piece, PieceOutput, all_keys, own_and_earlier
from megatron_ampipe.schedule.chunks import Span


class TorchFlash2:
    """The FlashAttention 2 that torch brings; causal is aligned to the bottom right."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[Piece, ...]:
        """One."""
        return all_keys(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`; the state is of the random numbers, of which none is drawn."""
        query, key, value = (_heads_before_rows(x) for x in (query, key, value))
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
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(_heads_before_rows(x) for x in (gradient, query, key, value, output)),
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
        return of_query.permute(2, 0, 1, 3), of_key.permute(2, 0, 1, 3), of_value.permute(2, 0, 1, 3)


class Cudnn:
    """cuDNN's attention; torch lets it be causal from the top left only, so with as many keys as queries."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[Piece, ...]:
        """Own keys and earlier keys."""
        return own_and_earlier(span)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """See :class:`.merged.PieceKernel`.

        The state is that of the random numbers, of which none is drawn, and how many dimensions torch's
        version of the operator gives the log-sum-exp: ``[B, H, R]`` or ``[B, H, R, 1]``.

        Raises:
            BadInput: for a single key, which cuDNN refuses.
        """
        if key.shape[0] == 1:
            raise BadInput(
                "rows of a chunk",
                1,
                rule="cuDNN attends to two keys or more",
                remedy="Use a smaller --ampipe-degree, or --ampipe-chunks with two rows or more in each.",
            )
        rows, batch, heads, _ = query.shape
        query, key, value = (_heads_before_rows(x) for x in (query, key, value))
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
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *(_heads_before_rows(x) for x in (gradient, query, key, value, output)),
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
        return of_query.permute(2, 0, 1, 3), of_key.permute(2, 0, 1, 3), of_value.permute(2, 0, 1, 3)


def _heads_before_rows(tensor: Tensor) -> Tensor:
    """``[R, B, H, C]`` as ``[B, H, R, C]``, a view."""
    return tensor.permute(1, 2, 0, 3)
