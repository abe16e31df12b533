"""A loss with a given gradient, for loops of Megatron that divide losses by numbers of micro-batches."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class _Context(Protocol):
    saved_tensors: tuple[Tensor]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class GivenGradient(torch.autograd.Function):
    """``apply(output, gradient)`` is a loss of 0, and gives ``gradient``, whatever the loss is divided by."""

    @staticmethod
    def forward(ctx: _Context, output: Tensor, gradient: Tensor) -> Tensor:
        """See the class."""
        ctx.save_for_backward(gradient)
        return torch.zeros([], dtype=torch.float32, device=output.device)

    @staticmethod
    def backward(ctx: _Context, _: Tensor) -> tuple[Tensor, None]:
        """See the class."""
        (gradient,) = ctx.saved_tensors
        return gradient, None
