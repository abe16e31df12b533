"""The second hop of tokens that have crossed nodes, between the ranks of one node; the groups of both hops.

The first hop crosses nodes, to the rank that has the sender's place in its own node. That rank hands the rows
on to the ranks of its node that have their experts, and sends back what comes from those. A hop is a codec
around an all-to-all within the node. Rows are arranged where the collective is started and where it has
ended: on the lane of the transfer, not on that of the computation.

Every copy of a token in two hops (:class:`SortHop`) is the two-dimensional hierarchical all-to-all of Tutel
(Hwang et al., 2023) and FSMoE. Between nodes, a rank has one message for each other node, and not one for
each rank there. In the papers each all-to-all begins within the node, with the rank that has the place of the
destination. Here the combine does, and the dispatch is its adjoint: it crosses nodes first. Bytes and
messages are as many. A token once per node (:class:`SumHop`) is what DeepEP and HierMoE send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.errors import BadInput
from megatron_ampipe.exchange.transports import ALL_TO_ALL, RowTransport
from megatron_ampipe.schedule import NodeLayout

# R rows that came from other nodes, D hidden size, E experts, L experts of a rank, N nodes, G ranks of a
# node, C copies for the ranks of the node.

NOT_ROUTED = float("-inf")
"""Stands in place of a probability where an expert does not get the token; no router gives it."""

Arrived = tuple[Sequence[Tensor], Callable[[], None] | None]
"""As :meth:`~.transports.Codec.arrive` returns it."""


def places_of(routing_map: Tensor, num_places: int) -> Tensor:
    """``[T, E]`` to ``[T, places]``: which places have experts of a token."""
    return routing_map.unflatten(1, (num_places, -1)).any(dim=2)


def turned(tensor: Tensor, rows: Sequence[Sequence[int]], *, out: Tensor | None = None) -> Tensor:
    """``[R, ...]`` in parts of the sizes ``rows [A][B]``: those of the first ``B``, then of the second."""
    parts, count = tensor.split_with_sizes([size for sizes in rows for size in sizes]), len(rows[0])
    return torch.cat([part for place in range(count) for part in parts[place::count]], out=out)


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """The process groups of two hops, for one rank.

    Attributes:
        layout: How many nodes there are, and ranks on each.
        node: The node of this rank, counted within its expert-parallel group.
        place: The place of this rank in its node.
        inter: The ranks of the same place in all nodes, node by node.
        intra: The ranks of this rank's node.
    """

    layout: NodeLayout
    node: int
    place: int
    inter: dist.ProcessGroup
    intra: dist.ProcessGroup


@cache
def node_groups(group: dist.ProcessGroup, ranks_per_node: int | None) -> NodeGroups:
    """Make the groups of this rank. To be called by all ranks of ``group``, and by no others.

    Args:
        group: The expert-parallel ranks.
        ranks_per_node: Of all ranks, how many a node has; they follow one another.

    Raises:
        BadInput: the ranks of ``group`` do not follow one another node by node, several on each of several
            nodes.
    """
    ranks, layout = dist.get_process_group_ranks(group), None
    if ranks_per_node is not None:
        nodes = [rank // ranks_per_node for rank in ranks]
        near = nodes.count(nodes[0])
        if 1 < near < len(ranks) and nodes == sorted(nodes) and {*map(nodes.count, nodes)} == {near}:
            layout = NodeLayout(len(ranks) // near, near)
    if layout is None:
        raise BadInput(
            "--ampipe-ranks-per-node",
            ranks_per_node,
            rule=f"does not spread the expert-parallel ranks {', '.join(map(str, ranks))} equally over "
            "several nodes, with several of them on each",
            remedy="Use --ampipe-exchange ranks.",
        )
    node, place = divmod(group.rank(), layout.ranks_per_node)
    first = node * layout.ranks_per_node
    # Separate groups, also where one has the same ranks as another: each lane has its own.
    inter = ranks[place :: layout.ranks_per_node]
    intra = ranks[first : first + layout.ranks_per_node]
    return NodeGroups(
        layout,
        node,
        place,
        dist.new_group(inter, use_local_synchronization=True, group_desc="ampipe between nodes"),
        dist.new_group(intra, use_local_synchronization=True, group_desc="ampipe within a node"),
    )


class SortHop:
    """The second hop of rows of one expert each: they are put into the order of ranks, and none is added.

    Args:
        rows: ``[N][G]``, rows that came from each node for each rank of this one, in this order.
        receive: Rows from each rank of ``group``.
        group: The ranks of the node.
    """

    uses: Sequence[Tensor] = ()

    def __init__(
        self, rows: Sequence[Sequence[int]], receive: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._by_node, self._by_rank = rows, [list(of_rank) for of_rank in zip(*rows, strict=True)]
        send = [sum(of_rank) for of_rank in self._by_rank]
        self.transport = RowTransport(ALL_TO_ALL, send, receive, group)

    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        """Each ``[R, ...]`` from the order of nodes into that of ranks, ``[R, ...]``."""
        return tensors if combine else [turned(part, self._by_node) for part in tensors]

    def arrive(self, received: Sequence[Tensor], *, combine: bool) -> Arrived:
        """Each ``[R, ...]`` back into the order of nodes."""
        if not combine:
            return received, None
        outputs = [torch.empty_like(part) for part in received]

        def fill() -> None:
            for part, output in zip(received, outputs, strict=True):
                turned(part, self._by_rank, out=output)

        return outputs, fill


class SumHop:
    """The second hop of rows that came to the node once: they are copied for its ranks, and added.

    Which rows go where is seen in the first probabilities that are sent; the host does not wait for them.

    Args:
        send: Copies for each rank of ``group``.
        receive: Copies from each rank of ``group``.
        group: The ranks of the node.
    """

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> None:
        self.transport, self._ranks = RowTransport(ALL_TO_ALL, send, receive, group), len(send)
        self.uses: Sequence[Tensor] = ()

    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        """Rows ``[R, D]``, and probabilities ``[R, G * L]``, to their copies ``[C, D]`` and ``[C, L]``.

        A rank gets the columns of its experts.
        """
        if combine:
            return tensors
        rows, *probs = tensors
        if not self.uses:
            self._choose(probs[0])
        copied, columns = self.uses
        return [
            rows.index_select(0, copied),
            *[self._by_rank(part).index_select(0, columns) for part in probs],
        ]

    def _by_rank(self, columns: Tensor) -> Tensor:
        """``[R, G * L]`` as ``[R * G, L]``."""
        return columns.view(self._num_rows * self._ranks, columns.shape[1] // self._ranks)

    def _choose(self, probs: Tensor) -> None:
        """Set ``uses`` to the row of each copy ``[C]``, rank by rank, and its place among all columns."""
        self._num_rows = probs.shape[0]
        chosen = places_of(probs != NOT_ROUTED, self._ranks).T.reshape(-1).to(torch.uint8)
        # A stable sort puts what is set first, in order.
        chosen = chosen.argsort(stable=True, descending=True)[: sum(self.transport.input_splits)]
        rows = chosen % max(1, self._num_rows)
        self.uses = rows, rows * self._ranks + chosen // max(1, self._num_rows)

    def arrive(self, received: Sequence[Tensor], *, combine: bool) -> Arrived:
        """The sums of the copies ``[C, D]``, and the columns ``[C, L]`` where they were; zero elsewhere."""
        if not combine:
            return received, None
        copies, *columns = received
        sums = copies.new_empty((self._num_rows, *copies.shape[1:]))
        wide = [part.new_empty((self._num_rows, part.shape[1] * self._ranks)) for part in columns]

        def fill() -> None:
            self._add(copies, sums)
            for part, output in zip(columns, wide, strict=True):
                self._by_rank(output.zero_()).index_copy_(0, self.uses[1], part)

        return [sums, *wide], fill

    def _add(self, copies: Tensor, sums: Tensor) -> None:
        """Set ``sums [R, D]`` to the sums of ``copies [C, D]``; 16-bit numbers are added in fp32."""
        narrow = sums.dtype in (torch.bfloat16, torch.float16)
        total = torch.empty_like(sums, dtype=torch.float32) if narrow else sums
        total.zero_()
        sizes = list(self.transport.input_splits)
        # A rank gets at most one copy of a row: each addition writes a row once, so the order is fixed.
        for rows, part in zip(self.uses[0].split(sizes), copies.split(sizes), strict=True):
            total.index_add_(0, rows, part.to(total.dtype))
        if narrow:
            sums.copy_(total)
