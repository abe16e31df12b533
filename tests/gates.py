"""Router classes as a user could write them; none knows of chunks.

Used by parity cases and by tests of the checker.
"""

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_ampipe.layers.gates import ExpertChoiceRouter, ScoredRouter, TokenIdRouter


class ForwardRouter(TopKRouter):
    """Overrides ``forward`` and ``routing``, and leaves the choice to Megatron."""

    def forward(self, input: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Route twice the input, and halve the weights."""
        probs, routing_map = super().forward(2 * input, *args, **kwargs)
        return probs / 2, routing_map

    def routing(self, logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Prefer the first expert."""
        preferred = torch.zeros_like(logits)
        preferred[..., 0] = 0.1
        return super().routing(logits + preferred, *args, **kwargs)


class ThresholdRouter(ScoredRouter):
    """A token takes every expert whose probability is above the mean: their number varies."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See ``ScoredRouter``."""
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        chosen = scores > scores.mean(dim=-1, keepdim=True)
        return (scores * chosen).type_as(logits), chosen, scores


class ExpertChoiceOfEight(ExpertChoiceRouter):
    """What ``expert-choice`` is in chunks of eight rows: each expert chooses among eight."""

    needs_all_tokens = None

    def routing(self, logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Route eight rows at a time."""
        routed = [super(ExpertChoiceOfEight, self).routing(rows) for rows in logits.split(8)]
        probs, routing_map = (torch.cat(parts) for parts in zip(*routed, strict=True))
        return probs, routing_map


class BiasedByIdRouter(TokenIdRouter):
    """Learned logits, and an expert that the id of a token prefers."""

    def gating(self, input: Tensor) -> Tensor:
        """Add to one logit of each token."""
        preferred = (self.token_ids % self.num_experts).unsqueeze(-1)
        return super().gating(input).scatter_add(-1, preferred, torch.full_like(input[..., :1], 0.5))


class FailingRouter(TopKRouter):
    """Fails on rank 1, in a chunk of a later iteration."""

    num_calls = 0

    def routing(self, logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Megatron's choice, until it fails."""
        type(self).num_calls += 1
        if self.num_calls > 50 and torch.distributed.get_rank() == 1:
            raise ZeroDivisionError("no expert is left")
        return super().routing(logits, *args, **kwargs)


class LookingAheadRouter(TopKRouter):
    """Wrong: the logits of a token depend on the tokens after it."""

    def gating(self, input: Tensor) -> Tensor:
        """Logits of the mean over the sequence."""
        return super().gating(input - input.mean(dim=0, keepdim=True))


class OwnLossRouter(TopKRouter):
    """Wrong: adds a loss that it computes from the tokens it is given."""

    def routing(self, logits: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Add the mean square of the logits."""
        probs, routing_map = super().routing(logits, *args, **kwargs)
        loss = logits.float().square().mean()
        probs = self.attach_and_log_load_balancing_loss(
            probs, 0.1, loss, "load_balancing_loss", self.tp_cp_group
        )
        return probs, routing_map
