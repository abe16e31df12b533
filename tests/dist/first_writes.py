"""A linear layer that treats ``main_grad`` as Transformer Engine's do, which is not installed for the tests.

With gradient accumulation fusion, the backward of the forward that ran as the first micro-batch writes the
weight's gradient into ``main_grad``, and every other adds to it. Megatron's wrappers say that of their first
forward ever.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class FirstWrites(torch.nn.Module):
    """In place of a linear layer without bias or tensor parallelism.

    Args:
        weight: The layer's, with all that Megatron has noted on it.
    """

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.is_first_microbatch = True

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, None]:
        output = _Linear.apply(rows, self.weight, self.is_first_microbatch)
        self.is_first_microbatch = False
        return output, None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.nn.Parameter, first: bool) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.first = weight, first
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        (rows,), weight = ctx.saved_tensors, ctx.weight
        of_weight = gradient.flatten(0, -2).t() @ rows.flatten(0, -2)
        if ctx.first:
            weight.main_grad.copy_(of_weight)
        else:
            weight.main_grad.add_(of_weight)
        weight.grad_added_to_main_grad = True
        # Stands for a gradient that nobody may read.
        return gradient @ weight, torch.full_like(weight, float("nan")), None


def use_first_writes(layer: torch.nn.Module) -> None:
    """Replace every linear layer of Megatron's in ``layer``; names and parameters stay."""
    for parent in list(layer.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                setattr(parent, name, FirstWrites(module.weight))
