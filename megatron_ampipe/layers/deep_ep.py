"""Megatron's flex dispatcher with DeepEP for one chunk, without its exchange of tokens.

The permutations are Megatron's; the exchange is a stage of the schedule
(:mod:`megatron_ampipe.runtime.deep_ep_transport`). Used by :mod:`.dispatcher`.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

import torch
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from torch import Tensor

from megatron_ampipe.runtime.deep_ep_transport import DeepEPTransport

# T tokens of a chunk, K experts of a token, D hidden size, E experts.


class DeepEPChunk(MoEFlexTokenDispatcher):
    """The flex dispatcher, whose tokens are exchanged through DeepEP's buffer."""

    FROM_COUNTS: ClassVar = ()
    _transport: DeepEPTransport | None = None

    def __copy__(self) -> Self:
        """A dispatcher with separate state: Megatron keeps that of a call in its manager."""
        found = type(self).__new__(type(self))
        vars(found).update(vars(self))
        found._comm_manager = copy.copy(self._comm_manager)
        return found

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As in the stock dispatcher, with the probabilities ``[T, K]`` in fp32, as DeepEP needs them."""
        tokens, token_probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._hidden_bytes = fused_a2a.get_hidden_bytes(tokens)
        return tokens, token_probs.float()

    def transport(self) -> DeepEPTransport:
        """The token exchange of the chunk; the same object, with DeepEP's handle, for all of its calls."""
        if self._transport is None:
            manager = self._comm_manager
            self._transport = DeepEPTransport(
                fused_a2a.get_buffer(manager.group, self._hidden_bytes),
                manager.token_indices,
                num_experts=manager.num_experts,
            )
        return self._transport

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Any, ...]:
        """As in the stock dispatcher; can run a second time, when the experts are recomputed."""
        manager, transport = self._comm_manager, self.transport()
        manager.dispatched_indices, manager.dispatched_probs = transport.received_experts, probs
        manager.tokens_per_expert = torch.tensor(transport.tokens_per_expert)
        outputs: tuple[Any, ...] = super().dispatch_postprocess(hidden_states, probs)
        return outputs
