"""Megatron's top-k router, extended to route a sequence chunk by chunk with the same result.

Parameters, buffers and checkpoint keys are those of the stock router. Used by :mod:`.megatron_stages`.
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

# S sequence rows of the whole block, R rows of one chunk, B batch, D hidden size, E experts.


class Capacity(Protocol):
    """Decides which tokens of a chunk are within the experts' capacity; one object per block and pass."""

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """The kept entries of ``routing_map`` ``[tokens, E]``; called once per chunk, in order."""
        ...


class CapacityCounter:
    """Counts how much of each expert's capacity the chunks of a block have used so far.

    Dropping by position keeps an expert's first ``capacity`` tokens of the sequence, so a count that is
    carried from chunk to chunk, in order, keeps exactly the tokens that are kept without chunks.

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
    """A separate capacity for every chunk, in proportion to its tokens. A stock run drops other tokens.

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
    """Routing state that the chunks of one block share; one per forward pass.

    Attributes:
        capacity: Which tokens are kept; None for dropless routing.
    """

    capacity: Capacity | None


class ChunkRouter(TopKRouter):
    """The stock router, which can also route single chunks and compute the losses of a block separately.

    Chunks are routed by calling the module (``__call__``): with ``--overlap-param-gather``, Megatron's
    forward hooks wait for the parameters, and calling a method would read them without the hooks.
    """

    def begin_block(self, num_tokens: int, *, per_chunk: bool) -> BlockRouting:
        """The argument ``block`` of :meth:`forward` for all chunks of a block.

        Args:
            num_tokens: Tokens of the whole block on this rank.
            per_chunk: Every chunk has a separate capacity, if a capacity is set.
        """
        factor = self.config.moe_expert_capacity_factor
        if factor is None:
            return BlockRouting(None)
        if per_chunk:
            policy = self.config.moe_token_drop_policy
            return BlockRouting(ChunkCapacity(topk=self.topk, factor=factor, policy=policy))
        capacity = get_capacity(num_tokens * self.topk, self.config.num_moe_experts, factor)
        return BlockRouting(CapacityCounter(capacity))

    def forward(
        self, hidden: Tensor, *args: Any, block: BlockRouting | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Route the tokens of one chunk without the losses; without ``block``, run the stock router.

        Mirrors ``TopKRouter.forward`` and ``routing``, with losses and dropping replaced.

        Args:
            hidden: ``[R, B, D]``.
            args: Arguments of the stock router.
            block: From :meth:`begin_block`; chunks must be routed in order.
            kwargs: Arguments of the stock router.

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
        """All losses of the router, computed once for the whole block and logged as in a stock run.

        The losses are not linear in the tokens, so the sum over chunks would be a different function. Reads
        no parameter and therefore needs no hook: it is called as a method.

        Args:
            logits: ``[S, B, E]``, all chunks.

        Returns:
            A scalar whose backward adds the gradient of the losses to ``logits``, independent of the incoming
            gradient (Megatron's ``MoEAuxLossAutoScaler``); call it with a gradient of zero.
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
