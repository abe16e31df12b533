"""The sigmoid gate of BASE layers and StableMoE, without their assignment. ``--ampipe-router sigmoid``.

Sources: Lewis et al., BASE layers, 2021; Dai et al., StableMoE, 2022; FSMoE, section 3. BASE assigns tokens
in training so that every expert gets the same number, which needs all tokens of the batch; here every token
takes its best experts, as BASE does in evaluation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ampipe.layers.gates.scored import ScoredRouter


class SigmoidRouter(ScoredRouter):
    """Each token takes the ``topk`` experts of the highest logits; their outputs are weighted by the sigmoid.

    Weights are not normalized over the chosen experts, unlike ``--moe-router-score-function sigmoid``: an
    expert that helps a token raises the weight of that expert alone.
    """

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`ScoredRouter`; load-balancing losses get the sigmoids, divided by their sum."""
        sigmoids = torch.sigmoid(logits.float())
        best = logits.topk(self.topk, dim=-1).indices
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, best, True)
        scores = sigmoids / sigmoids.sum(dim=-1, keepdim=True)
        return (sigmoids * routing_map).type_as(logits), routing_map, scores
