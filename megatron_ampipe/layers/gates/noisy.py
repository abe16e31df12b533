"""The noisy top-k gate, as GShard and FSMoE use it. Chosen by ``--ampipe-router noisy-topk``.

Sources: Shazeer et al., Outrageously large neural networks, 2017, equations 3 to 5; FSMoE, section 3.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import softplus


class NoisyTopKRouter(TopKRouter):
    """Megatron's router with normal noise on the logits in training; its size is learned for each token.

    ``logits = x W + normal * softplus(x W_noise)``. ``noise_weight`` ``[E, D]`` begins with zeros, so that
    the noise has a standard deviation of ``log 2`` at first. An evaluation adds no noise.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.noise_weight = Parameter(torch.zeros_like(self.weight))
        # Each tensor-parallel rank sees some of the rows, as for ``weight``.
        self.noise_weight.sequence_parallel = self.config.sequence_parallel

    def gating(self, input: Tensor) -> Tensor:
        """``[R, B, D]`` to ``[R, B, E]``."""
        logits: Tensor = super().gating(input)
        if not self.training:
            return logits
        deviation = softplus(router_gating_linear(input, self.noise_weight, None, logits.dtype))
        return logits + _normal_like(logits) * deviation


def _normal_like(tensor: Tensor) -> Tensor:
    """Normal numbers of the shape of ``tensor``.

    From uniform ones, which torch draws one by one on a CPU: chunks that are routed in order continue the
    series of the whole sequence there. On a GPU they do not.
    """
    uniform = torch.rand(tensor.shape, dtype=torch.float32, device=tensor.device)
    # Not 0, whose quantile is infinite.
    centered = 2 * uniform.clamp_min(torch.finfo(torch.float32).eps) - 1
    return (math.sqrt(2) * torch.erfinv(centered)).to(tensor.dtype)
