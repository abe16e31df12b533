"""The all-to-all dispatcher of one chunk that sends a token once to each node (``--ampipe-exchange nodes``).

As :mod:`.rank_dispatcher`, with a second hop (DeepEP, HierMoE): a row goes once to every node that has an
expert of the token, to the rank there that has the same place as the sender in its own node. That rank hands
it on to the ranks of the node that have experts of the token, and adds what they send back to one row. The
second hop is :mod:`megatron_ampipe.runtime.node_hop`, a separate stage on the lane within nodes.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from megatron_ampipe.layers.rank_dispatcher import NOT_ROUTED, RankChunk
from megatron_ampipe.layers.two_hop_dispatcher import TwoHopChunk
from megatron_ampipe.runtime.collectives import HostCopy
from megatron_ampipe.runtime.node_hop import Hop, NodeHop

# E experts, P expert-parallel ranks, N nodes, G ranks of the group on a node, L experts of a rank,
# R rows that came for this node.


class NodeChunk(TwoHopChunk, RankChunk):
    """The all-to-all dispatcher in two hops, with one row for each pair of a token and a node.

    :attr:`counts` are ``[E + N + P]`` int64: this rank's tokens for each expert, its rows for each node, and
    its tokens for each rank, from which the splits of both hops follow. Rows arrive in another order than in
    the stock dispatcher: sorted by the sender's place first, then by its node.

    Args:
        ranks_per_node: Of all ranks, how many a node has.

    Raises:
        BadInput: the expert-parallel ranks are not spread equally over nodes.
    """

    FROM_COUNTS: ClassVar = (*RankChunk.FROM_COUNTS, "_hop", "_hop_splits")

    @property
    def num_places(self) -> int:
        """Of the first hop: nodes."""
        return self._groups.layout.num_nodes

    def _more_counts(self, routing_map: Tensor) -> list[Tensor]:
        return [self._places_of(routing_map, self.ep_size).sum(dim=0)]

    def _derive(self, gathered: HostCopy) -> None:
        layout, node, place = self._groups.layout, self._groups.node, self._groups.place
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
        to_experts, to_nodes, to_ranks = self._by_source(gathered).split(
            [self.num_experts, layout.num_nodes, self.ep_size], dim=3
        )
        to_nodes = to_nodes[self.tp_rank, :, place]
        self.input_splits, self.output_splits = to_nodes[node].tolist(), to_nodes[:, node].tolist()
        # [tp, source's place, place in this node]
        within = to_ranks.unflatten(3, (layout.num_nodes, -1))[:, :, :, node].sum(dim=1)
        self._hop_splits = within[self.tp_rank, place].tolist(), within[self.tp_rank, :, place].tolist()
        self.output_splits_tp = within[:, :, place].sum(dim=1)
        self.tokens_per_expert = to_experts[..., first:last].sum(dim=(0, 1, 2))

    def hop(self, probs: Tensor | None = None) -> Hop:
        """The second hop of the chunk.

        Args:
            probs: ``[R, G * L]``, which the first hop has brought; for the first call.
        """
        if self._hop is None:
            assert probs is not None
            send, receive = self._hop_splits
            to_ranks = self._places_of(probs != NOT_ROUTED, self._groups.layout.ranks_per_node)
            self._hop = NodeHop.of(to_ranks, send=send, receive=receive, group=self._groups.intra)
        return self._hop
