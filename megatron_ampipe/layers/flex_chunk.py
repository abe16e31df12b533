"""Megatron's flex dispatcher for one chunk, without its exchange of tokens: what all of its backends share.

Subclassed by :mod:`.deep_ep` and :mod:`.hybrid_ep`.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, Self

from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from torch import Tensor

from megatron_ampipe.runtime.collectives import Transport

# T tokens of a chunk, K experts of a token, D hidden size, E experts.


class FlexChunk(MoEFlexTokenDispatcher):
    """The flex dispatcher, whose backend may count the tokens in the call that sends them."""

    FROM_COUNTS: ClassVar = ()
    num_out_tokens: ClassVar = None
    """All rows that are prepared are sent."""

    def __copy__(self) -> Self:
        """A dispatcher with separate state: Megatron keeps that of a call in its manager."""
        found = type(self).__new__(type(self))
        vars(found).update(vars(self))
        found._comm_manager = copy.copy(self._comm_manager)
        return found

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As in the stock dispatcher, with the probabilities in fp32, as the backends need them.

        ``[T, K]`` with DeepEP, ``[T, E]`` with HybridEP.
        """
        tokens, token_probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        return tokens, token_probs.float()

    def transport(self) -> Transport:
        """The token exchange of the chunk; the same object, with its handle, for all of its calls."""
        raise NotImplementedError

    def _receive(self, hidden_states: Tensor, probs: Tensor, tokens_per_expert: Tensor) -> tuple[Any, ...]:
        """The stock ``dispatch_postprocess``, of what its manager would have kept of the exchange."""
        self._comm_manager.dispatched_probs = probs
        self._comm_manager.tokens_per_expert = tokens_per_expert
        outputs: tuple[Any, ...] = super().dispatch_postprocess(hidden_states, probs)
        return outputs
