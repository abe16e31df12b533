"""A router that leaves ranks without tokens."""

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class OneRankRouter(TopKRouter):
    """Prefers the experts of one rank in each layer, so strongly that other ranks get few tokens or none.

    A token is routed by its own row alone, so chunks are routed as the whole sequence is.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Megatron's logits ``[S, B, E]``, with the preference added."""
        logits: Tensor = super().gating(input)
        ranks = self.config.expert_model_parallel_size
        local = self.config.num_moe_experts // ranks
        first = ((self.layer_number or 0) % ranks) * local
        preference = logits.new_zeros(logits.shape[-1])
        preference[first : first + local] = 8.0
        return logits + preference
