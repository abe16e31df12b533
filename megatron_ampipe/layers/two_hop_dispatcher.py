"""The all-to-all dispatcher of one chunk whose rows take two hops (``--ampipe-exchange 2dh``).

The rows are those of Megatron's dispatcher, one for each expert of a token. Each crosses nodes to the rank
that has the sender's place in its own node, and goes from there to the rank of its expert; the results take
the same way back. Between nodes, a rank has one message for each other node, and not one for each rank there.
The second hop is :mod:`megatron_ampipe.runtime.node_hop`, a separate stage on the lane within nodes.

Source: the two-dimensional hierarchical all-to-all of Tutel (Hwang et al., 2023) and FSMoE. There each
all-to-all begins within the node, with the rank that has the place of the destination. Here the combine does,
and the dispatch is its adjoint: it crosses nodes first, so that both have the stages of ``nodes``. Bytes and
messages are as many. What a rank sends to a node crosses over the links of that rank, whichever rank there
has the expert that most tokens choose.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from megatron_ampipe.layers.dispatcher import AllToAllChunk
from megatron_ampipe.layers.node_groups import node_groups
from megatron_ampipe.runtime.collectives import AllToAll, HostCopy, Transport
from megatron_ampipe.runtime.node_hop import CopyHop, Hop

# E experts, P expert-parallel ranks, N nodes, G ranks of the group on a node, L experts of a rank.


class TwoHopChunk(AllToAllChunk):
    """The all-to-all dispatcher in two hops.

    The splits of both follow from the counts of :class:`AllToAllChunk`. Rows arrive in another order than in
    the stock dispatcher: sorted by the sender's place first, then by its node.
    :class:`~.node_dispatcher.NodeChunk` sends fewer rows over the same hops.

    Args:
        ranks_per_node: Of all ranks, how many a node has.

    Raises:
        BadInput: the expert-parallel ranks are not spread equally over nodes.
    """

    FROM_COUNTS: ClassVar = (*AllToAllChunk.FROM_COUNTS, "_hop")

    def __init__(self, *args: Any, ranks_per_node: int | None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups = node_groups(self.ep_group, ranks_per_node)
        self._hop: Hop | None = None

    def transport(self) -> Transport:
        """The first hop of the chunk."""
        super().transport()
        return AllToAll(self.input_splits, self.output_splits, self._groups.inter)

    def hop(self, probs: Tensor | None = None) -> Hop:
        """The second hop of the chunk, once :meth:`transport` has been called.

        Args:
            probs: What the first hop has brought; not needed where every row is of one expert.
        """
        assert self._hop is not None
        return self._hop

    def _by_source(self, gathered: HostCopy) -> Tensor:
        """The counts of all ranks, ``[tp, source's node, source's place, counts]``."""
        layout = self._groups.layout
        counts = gathered.wait().view(layout.num_nodes, layout.ranks_per_node, self._num_shares, -1)
        return counts.permute(2, 0, 1, 3)

    def _derive(self, gathered: HostCopy) -> None:
        layout, node, place = self._groups.layout, self._groups.node, self._groups.place
        by_source = self._by_source(gathered)
        # [source's node, source's place, node, place], of this tensor-parallel rank.
        rows = by_source[self.tp_rank].unflatten(2, (layout.num_nodes, layout.ranks_per_node, -1)).sum(dim=4)
        self.input_splits = rows[node, place].sum(dim=1).tolist()
        handed_on = rows[:, place, node]
        self.output_splits = handed_on.sum(dim=1).tolist()
        received = rows[:, :, node, place].sum(dim=0)
        self._hop = CopyHop(handed_on.tolist(), received.tolist(), self._groups.intra)
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
        # In the order of arrival: by place, then by node.
        arriving = by_source[..., first:last].transpose(1, 2).flatten(1, 2).contiguous()
        self._set_received(arriving, gathered.on_device.device)
