"""The flex dispatcher with DeepEP for one chunk, without its exchange of tokens.

The permutations are Megatron's; the exchange is a stage of the schedule
(:mod:`megatron_ampipe.runtime.deep_ep_transport`). Used by :mod:`.block_modules`.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import fused_a2a
from torch import Tensor

from megatron_ampipe.layers.flex_chunk import FlexChunk
from megatron_ampipe.runtime.deep_ep_transport import DeepEPTransport


class DeepEPChunk(FlexChunk):
    """The flex dispatcher, whose tokens are exchanged through DeepEP's buffer."""

    _transport: DeepEPTransport | None = None

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As in :class:`~.flex_chunk.FlexChunk`; notes the size of a token, for the buffer."""
        tokens, token_probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._hidden_bytes = fused_a2a.get_hidden_bytes(tokens)
        return tokens, token_probs

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
        transport = self.transport()
        self._comm_manager.dispatched_indices = transport.received_experts
        return self._receive(hidden_states, probs, torch.tensor(transport.tokens_per_expert))
