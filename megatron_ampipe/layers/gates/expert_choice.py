"""Expert choice: each expert takes the tokens that suit it best. ``--ampipe-router expert-choice``.

Source: Zhou et al., Mixture-of-experts with expert choice routing, 2022.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from megatron_ampipe.layers.gates.scored import ScoredRouter


class ExpertChoiceRouter(ScoredRouter):
    """Each expert takes its ``topk * tokens / experts`` best tokens, rounded up: loads are always equal.

    A token may have any number of experts, also none; it then passes by the residual connection alone.
    """

    needs_all_tokens: ClassVar[str] = (
        "each expert chooses among all tokens of a sequence, so a later token can take the place of an "
        "earlier one"
    )

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`ScoredRouter`; a softmax over experts gives scores and weights."""
        num_tokens, num_experts = logits.shape
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        taken = min(-(-num_tokens * self.topk // num_experts), num_tokens)
        best = scores.topk(taken, dim=0).indices
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(0, best, True)
        return (scores * routing_map).type_as(logits), routing_map, scores
