"""Megatron's top-k router, able to route a sequence chunk by chunk with the result of routing it whole.

The parameters, buffers and checkpoint keys are the stock router's. Used by :mod:`.megatron_stages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.moe_utils import (
    apply_random_logits,
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_capacity,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_ampipe.block_features import router_has_losses

# S sequence rows of the whole block, R rows of one chunk, B batch, D hidden size, E experts.


class Capacity(Protocol):
    """Which tokens of a chunk an expert still takes; one object per block and pass."""

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """The part of ``routing_map`` ``[tokens, E]`` that is kept; call once per chunk, first to last."""
        ...


class CapacityLedger:
    """How much of each expert's capacity the chunks of one block have used so far.

    Dropping by position keeps an expert's first ``capacity`` tokens of the sequence, so carrying the
    count from chunk to chunk, in order, keeps exactly the tokens that the whole sequence would keep.

    Args:
        capacity: Tokens per expert, for the whole sequence.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used: Tensor | int = 0

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """See :class:`Capacity`."""
        position = routing_map.long().cumsum(dim=0) + self._used
        self._used = position[-1]
        return routing_map & (position <= self._capacity)


class ChunkCapacity:
    """A capacity of its own for every chunk, in proportion to its tokens: not what a stock run drops.

    Args:
        topk: Experts per token.
        factor: Megatron's capacity factor.
        policy: Megatron's drop policy.
    """

    def __init__(self, *, topk: int, factor: float, policy: str) -> None:
        self._topk, self._factor, self._policy = topk, factor, policy

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """See :class:`Capacity`."""
        with torch.no_grad():
            _, kept = apply_router_token_dropping(
                probs, routing_map, self._topk, self._factor, drop_policy=self._policy
            )
        return kept


@dataclass(frozen=True, slots=True)
class BlockRouting:
    """What the chunks of one block share while they are routed; one per pass of a micro-batch.

    Attributes:
        capacity: Which tokens the experts still take; None for dropless routing.
    """

    capacity: Capacity | None


class ChunkRouter(TopKRouter):
    """The stock router, which also routes single chunks, and computes the losses of a block apart from them.

    Chunks are routed by calling the module, as the stock layer calls it: under ``--overlap-param-gather``
    Megatron's forward hooks wait for the parameters, and a method would read them without the hooks.
    """

    def begin_block(self, num_tokens: int, *, per_chunk: bool) -> BlockRouting:
        """What :meth:`forward` takes as ``block`` for every chunk of a block.

        Args:
            num_tokens: Of the whole block on this rank.
            per_chunk: Every chunk has a capacity of its own, if there is a capacity.
        """
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return BlockRouting(None)
        if per_chunk:
            policy = self.config.moe_token_drop_policy
            return BlockRouting(ChunkCapacity(topk=self.topk, factor=factor, policy=policy))
        capacity = get_capacity(num_tokens * self.topk, self.config.num_moe_experts, factor)
        return BlockRouting(CapacityLedger(capacity))

    @property
    def has_losses(self) -> bool:
        """Whether a training step adds any loss of the router to the model's."""
        return router_has_losses(
            self.routing_type,
            coefficients=self.config.moe_aux_loss_coeff,
            z_loss_coefficient=self.config.moe_z_loss_coeff,
        )

    def forward(
        self, hidden: Tensor, *args: Any, block: BlockRouting | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Route the tokens of one chunk without the losses; without ``block``, do what the stock router does.

        Mirrors ``TopKRouter.forward`` and ``routing``, the losses and dropping replaced.

        Args:
            hidden: ``[R, B, D]``.
            args: Of the stock router.
            block: From :meth:`begin_block`, for every chunk of the block, first to last.
            kwargs: Of the stock router.

        Returns:
            ``probs [R*B, E]``, ``routing_map [R*B, E]`` bool, and for a chunk ``logits [R, B, E]``.
        """
        if block is None:
            routed: tuple[Tensor, ...] = super().forward(hidden, *args, **kwargs)
            return routed
        assert not args and not kwargs, "chunks are routed by their hidden states alone"
        self._maintain_float32_expert_bias()
        logits = self.gating(self.apply_input_jitter(hidden))
        if self.config.moe_router_force_load_balancing:
            logits = apply_random_logits(logits)
        probs, routing_map = topk_routing_with_score_function(
            logits.view(-1, self.config.num_moe_experts),
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            fused=self.config.moe_router_fusion,
        )
        if block.capacity is not None:
            routing_map = block.capacity.keep(probs, routing_map)
            probs = probs * routing_map
        self._apply_expert_bias(routing_map)
        return probs, routing_map, logits

    def block_losses(self, logits: Tensor) -> Tensor:
        """Every loss of the router, computed once for the whole block and logged as in a stock run.

        Reads no parameter, so it needs no hook: it is called as a method.

        The losses are not linear in the tokens, so a sum over chunks would be another function.

        Args:
            logits: ``[S, B, E]``, of all chunks.

        Returns:
            A number whose backward, whatever its incoming gradient, adds the losses' gradient to
            ``logits`` (Megatron's ``MoEAuxLossAutoScaler``); give it a gradient of zero.
        """
        sequence_length, batch = logits.shape[:2]
        flat = self.apply_z_loss(logits.view(-1, self.config.num_moe_experts))
        carrier = flat
        if self.is_aux_loss_enabled():
            routing_map, scores = compute_routing_scores_for_aux_loss(
                flat, self.topk, self.score_function, fused=self.config.moe_router_fusion
            )
            carrier = self._apply_aux_loss(carrier, scores, routing_map)
            carrier = self._apply_seq_aux_loss(carrier, scores, routing_map, sequence_length, batch)
            carrier = self._apply_global_aux_loss(carrier, scores, routing_map)
        return carrier.sum(dtype=torch.float32)
