"""X-MoE's cosine router. Chosen by ``--ampipe-router cosine``.

Source: Chi et al., On the representation collapse of sparse mixture of experts, 2022 (arXiv 2204.09179).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import normalize


class CosineRouter(TopKRouter):
    """Scores an expert by the cosine between its embedding and a projection of the token, over a temperature.

    The parameters are ``projection`` ``[d, D]``, ``weight`` ``[E, d]`` (the embeddings) and ``temperature``
    ``[1]``. A subclass may set ``dimension`` and ``first_temperature``.
    """

    dimension: ClassVar[int | None] = None
    """Size ``d`` of embeddings; None for half the number of experts, and at least 2."""
    first_temperature: ClassVar[float] = 0.3
    """The learned temperature at the beginning of training."""
    lowest_temperature: ClassVar[float] = 0.01
    """Logits stay below its inverse, whatever is learned."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size = self.dimension or max(self.config.num_moe_experts // 2, 2)
        dtype = self.weight.dtype
        self.projection = Parameter(torch.empty(size, self.config.hidden_size, dtype=torch.float32))
        self.temperature = Parameter(torch.tensor([self.first_temperature], dtype=torch.float32))
        # In place of Megatron's weight of a row of the hidden size for each expert.
        self.weight = Parameter(torch.empty(self.config.num_moe_experts, size, dtype=torch.float32))
        for parameter in (self.projection, self.temperature, self.weight):
            if self.config.perform_initialization and parameter is not self.temperature:
                self.config.init_method(parameter)
            parameter.data = parameter.data.to(dtype)
            # Each tensor-parallel rank sees some of the rows.
            parameter.sequence_parallel = self.config.sequence_parallel

    def gating(self, input: Tensor) -> Tensor:
        """``[R, B, D]`` to ``[R, B, E]``, in fp32 or the dtype of ``--moe-router-dtype``."""
        dtype = torch.float64 if self.config.moe_router_dtype == "fp64" else torch.float32
        token = normalize(router_gating_linear(input, self.projection, None, dtype), dim=-1)
        embedding = normalize(self.weight.to(dtype), dim=-1)
        temperature = self.temperature.to(dtype).clamp_min(self.lowest_temperature)
        return token @ embedding.t() / temperature
