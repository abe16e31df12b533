"""The linear layers before and after latent experts (``--moe-latent-size``).

Megatron has them from Transformer Engine only. Every tensor-parallel rank has the whole weight. Stock and
AMPipe layers get the same one. Called by :mod:`.megatron`.
"""

from collections.abc import Callable
from typing import Any

import megatron.core.transformer.moe.moe_layer as moe_layer
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, Parameter


class HostLatentProjection(Module):
    """What ``TELinear`` computes with ``parallel_mode="duplicated"``.

    Args:
        input_size: Columns of the input.
        output_size: Columns of the output.
        config: Megatron's configuration.
        init_method: Fills the weight in place.
        bias: Whether there is a bias; it is added here.
        kwargs: Other arguments of ``TELinear``, which have one value there.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert kwargs["parallel_mode"] == "duplicated" and not kwargs["skip_bias_add"]
        self.weight = Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        self.bias = Parameter(torch.zeros(output_size, dtype=config.params_dtype)) if bias else None
        for parameter in self.parameters():
            # Megatron then adds up the gradients of the ranks, which see other rows.
            parameter.sequence_parallel = config.sequence_parallel

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:
        """``[..., input_size]`` to ``[..., output_size]``, and no bias that is still to be added."""
        return F.linear(rows, self.weight, self.bias), None


def install() -> None:
    """Let ``MoELayer`` build its projections without Transformer Engine."""
    moe_layer.HAVE_TE, moe_layer.TELinear = True, HostLatentProjection
