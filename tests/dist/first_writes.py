"""A linear layer that handles ``main_grad`` like Transformer Engine, which the tests do not install.

With gradient accumulation fusion, the backward of a forward marked as first micro-batch overwrites
``main_grad`` with the weight's gradient, and every other backward adds to it. Megatron's wrappers mark only
their first forward ever.
"""

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear


class FirstWrites(torch.nn.Module):
    """Replaces a linear layer without bias and tensor parallelism.

    Args:
        weight: The weight of the layer, with the attributes that Megatron has set on it.
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
        # A placeholder: this gradient must not be read.
        return gradient @ weight, torch.full_like(weight, float("nan")), None


def use_first_writes(layer: torch.nn.Module) -> None:
    """Replace all linear layers of Megatron in ``layer``; names and parameters stay the same."""
    for parent in list(layer.modules()):
        for name, module in list(parent.named_children()):
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                setattr(parent, name, FirstWrites(module.weight))
