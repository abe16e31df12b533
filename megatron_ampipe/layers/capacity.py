"""Which tokens of a chunk are within the capacity of the experts, and how many rows a padded expert has.

Reproduces Megatron's ``apply_router_token_dropping`` over the chunks of a block. Used by :mod:`.router`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity
from torch import Tensor

# E experts.


class Capacity(Protocol):
    """Decides which tokens of a chunk are within the experts' capacity; one object per block and pass."""

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """The kept entries of ``routing_map`` ``[tokens, E]``; called once per chunk, in order."""
        ...

    def slots(self, num_tokens: int) -> int:
        """How many rows every expert gets of a chunk if it is padded to its capacity; as :meth:`keep`."""
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
        self._num_tokens = 0

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """See :class:`Capacity`."""
        position = routing_map.long().cumsum(dim=0) + self._used
        self._used = position[-1]
        return routing_map & (position <= self._capacity)

    def slots(self, num_tokens: int) -> int:
        """See :class:`Capacity`."""
        before = min(self._num_tokens, self._capacity)
        self._num_tokens += num_tokens
        return min(self._num_tokens, self._capacity) - before


class ChunkCapacity:
    """A separate capacity for every chunk, in proportion to its tokens. A stock run drops other tokens.

    Args:
        topk: Experts per token.
        num_experts: Of the layer.
        factor: Megatron's capacity factor.
        policy: Megatron's drop policy.
    """

    def __init__(self, *, topk: int, num_experts: int, factor: float, policy: str) -> None:
        self._topk, self._num_experts = topk, num_experts
        self._factor, self._policy = factor, policy

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """See :class:`Capacity`."""
        with torch.no_grad():
            _, kept = apply_router_token_dropping(
                probs, routing_map, self._topk, self._factor, drop_policy=self._policy
            )
        return kept

    def slots(self, num_tokens: int) -> int:
        """See :class:`Capacity`."""
        return min(num_tokens, get_capacity(num_tokens * self._topk, self._num_experts, self._factor))
