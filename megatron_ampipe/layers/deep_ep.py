"""The flex dispatcher with DeepEP for one chunk, without its exchange of tokens.

The permutations are Megatron's; the exchange is a stage of the schedule
(:mod:`megatron_ampipe.runtime.deep_ep_transport`). Used by :mod:`.block_modules`.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a
from torch import Tensor

from megatron_ampipe.block_features import counts_inside
from megatron_ampipe.layers.flex_chunk import FlexChunk
from megatron_ampipe.runtime.collectives import HostCopy
from megatron_ampipe.runtime.deep_ep_transport import DeepEPTransport

# T tokens of a chunk, K experts of a token, E experts of all ranks, P ranks, L experts of a rank.


class DeepEPChunk(FlexChunk):
    """The flex dispatcher, whose tokens are exchanged through DeepEP's buffer.

    Within a node it counts as :class:`~.dispatcher.AllToAllChunk` does, and tells DeepEP how many rows will
    arrive. Among more ranks DeepEP counts itself.
    """

    FROM_COUNTS: ClassVar = ("_num_received", "_tokens_per_expert")
    _transport: DeepEPTransport | None = None
    _num_received: int | None = None
    _tokens_per_expert: tuple[int, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron's waits for the number of chosen experts.
        self._comm_manager._indices_to_multihot = functools.partial(
            to_multihot, num_experts=self.num_local_experts
        )

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As in :class:`~.flex_chunk.FlexChunk`; also counts, and notes a token's size for the buffer."""
        tokens, token_probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        self._hidden_bytes = fused_a2a.get_hidden_bytes(tokens)
        if self._num_received is None and not counts_inside(self.config):
            to_experts, _ = to_multihot(
                self._comm_manager.token_indices, token_probs, num_experts=self._comm_manager.num_experts
            )
            to_ranks = to_experts.unflatten(1, (-1, self.num_local_experts)).any(dim=2)
            self.counts = torch.cat([to_experts.sum(dim=0), to_ranks.sum(dim=0)])
        return tokens, token_probs

    @property
    def counts_group(self) -> dist.ProcessGroup:
        """The ranks that exchange :attr:`counts`, ``[E + P]`` int64: tokens for each expert and each rank."""
        return self._comm_manager.group

    def set_counts(self, gathered: Tensor) -> None:
        """Set the counts of all ranks ``[P * (E + P)]``; :meth:`transport` waits for them on the host."""
        self._gathered = HostCopy(gathered)

    def transport(self) -> DeepEPTransport:
        """The token exchange of the chunk; the same object, with DeepEP's handle, for all of its calls."""
        if self._transport is None:
            manager = self._comm_manager
            counts_itself = counts_inside(self.config)
            if self._num_received is None and not counts_itself:
                arriving = self._gathered.wait().view(manager.group.size(), -1).sum(dim=0)
                to_experts, to_ranks = arriving.split([manager.num_experts, manager.group.size()])
                rank = manager.group.rank()
                self._num_received = int(to_ranks[rank])
                self._tokens_per_expert = tuple(to_experts.view(-1, self.num_local_experts)[rank].tolist())
            find_buffer = fused_a2a.get_buffer if counts_itself else told_buffer
            self._transport = DeepEPTransport(
                find_buffer(manager.group, self._hidden_bytes),
                manager.token_indices,
                num_experts=manager.num_experts,
                num_received=self._num_received,
                tokens_per_expert=self._tokens_per_expert,
            )
        return self._transport

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Any, ...]:
        """As in the stock dispatcher; can run a second time, when the experts are recomputed."""
        transport = self.transport()
        self._comm_manager.dispatched_indices = transport.received_experts
        return self._receive(hidden_states, probs, torch.tensor(transport.tokens_per_expert))


_told_buffer: Any = None


def told_buffer(group: dist.ProcessGroup, hidden_bytes: int) -> Any:
    """The buffer of dispatches that are told how many rows arrive, made as Megatron makes its own.

    A buffer counts into one place on the host. A dispatch that waits for its count there could read that of
    an earlier one that did not wait, so the stock layers, which wait, have another buffer.

    Args:
        group: The ranks that exchange tokens.
        hidden_bytes: Size of a token.
    """
    global _told_buffer
    of_stock, fused_a2a._buffer = fused_a2a._buffer, _told_buffer
    try:
        _told_buffer = fused_a2a.get_buffer(group, hidden_bytes)
    finally:
        fused_a2a._buffer = of_stock
    return _told_buffer


def to_multihot(experts: Tensor, probs: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """Megatron's ``_indices_to_multihot``, for which the host waits for nothing.

    Args:
        experts: ``[T, K]`` int64; -1 for none.
        probs: ``[T, K]``.
        num_experts: E.

    Returns:
        ``[T, E]`` bool, the experts of each token; and ``[T, E]``, their probabilities, 0 elsewhere.
    """
    # What has no expert goes into a separate column, which is left out.
    places = experts.masked_fill(experts < 0, num_experts)
    zeros = probs.new_zeros((experts.shape[0], num_experts + 1))
    chosen = zeros.bool().scatter(1, places, True)
    return chosen[:, :num_experts], zeros.scatter(1, places, probs)[:, :num_experts]
