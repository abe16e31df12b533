"""The base class of gates with their own choice: everything in Megatron's routing except the choice."""

from __future__ import annotations

from typing import ClassVar

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class ScoredRouter(TopKRouter):
    """A router whose subclasses choose experts and their weights in :meth:`choose`.

    Losses, capacity and expert counts are Megatron's: this is ``TopKRouter.routing`` around another choice.
    It also takes the place of ``--moe-router-score-function softmax`` and ``--moe-router-pre-softmax``.
    """

    ignored_settings: ClassVar[tuple[str, ...]] = (
        "moe_router_num_groups",
        "moe_router_group_topk",
        "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias",
    )
    """Settings of Megatron's own choice, which start-up refuses next to the class."""

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Experts and weights of each token.

        Args:
            logits: ``[T, E]``.

        Returns:
            ``probs [T, E]``, 0 where an expert is not chosen; ``routing_map [T, E]`` bool; ``scores [T, E]``,
            a distribution over experts for the load-balancing losses.
        """
        raise NotImplementedError

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """``[R, B, E]`` to ``probs [R*B, E]`` and ``routing_map [R*B, E]``; as ``TopKRouter.routing``."""
        assert padding_mask is None, "padding masks are for inference"
        sequence_length, batch = logits.shape[:2]
        logits = self.apply_z_loss(logits.view(-1, self.config.num_moe_experts))
        probs, routing_map, scores = self.choose(logits)
        kept = routing_map
        if self.config.moe_expert_capacity_factor is not None:
            probs, kept = apply_router_token_dropping(
                probs,
                routing_map,
                router_topk=self.topk,
                capacity_factor=self.config.moe_expert_capacity_factor,
                drop_policy=self.config.moe_token_drop_policy,
                pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
            )
        if self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled():
            probs = self._apply_aux_loss(probs, scores, routing_map)
            probs = self._apply_seq_aux_loss(probs, scores, routing_map, sequence_length, batch)
            probs = self._apply_global_aux_loss(probs, scores, routing_map)
        self._apply_expert_bias(kept)
        return probs, kept
