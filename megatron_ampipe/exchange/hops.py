"""The second hop of tokens that have crossed nodes, between the ranks of one node; the groups of both hops.

The first hop goes to the rank that has the sender's place in another node, so that a rank has one message for
each node. That rank hands the rows on in its node, and sends back what comes from there. A hop is a codec
around an all-to-all within the node.

Every copy of a token in two hops (:class:`SortHop`) is the two-dimensional all-to-all of Tutel (Hwang et al.,
2023) and FSMoE. A token once per node (:class:`SumHop`) is what DeepEP and HierMoE send.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.exchange.transports import ALL_TO_ALL, Arrived, RowTransport

# R rows that came from other nodes, D hidden size, E experts, L experts of a rank, N nodes, G ranks of a
# node, C copies for the ranks of the node.

NOT_ROUTED = float("-inf")
"""Stands in place of a probability where an expert does not get the token; no router gives it."""


def places_of(routing_map: Tensor, num_places: int) -> Tensor:
    """``[T, E]`` to ``[T, places]``: which places have experts of a token."""
    return routing_map.unflatten(1, (num_places, -1)).any(dim=2)


def copies_for(to_places: Tensor, num_copies: int) -> tuple[Tensor, Tensor]:
    """Of each copy ``[C]`` of rows for places, place by place: its row, and its mark in ``[T, places]``."""
    num_rows, num_places = to_places.shape
    # A stable sort puts what is marked first, in order, without a wait for how much that is.
    marks = to_places.T.reshape(-1).argsort(stable=True, descending=True)[:num_copies]
    rows = marks % max(1, num_rows)
    return rows, rows * num_places + marks // max(1, num_rows)


def turned(tensor: Tensor, rows: Sequence[Sequence[int]], *, out: Tensor | None = None) -> Tensor:
    """``[R, ...]`` in parts of the sizes ``rows [A][B]``: those of the first ``B``, then of the second."""
    parts, count = tensor.split_with_sizes([size for sizes in rows for size in sizes]), len(rows[0])
    return torch.cat([part for place in range(count) for part in parts[place::count]], out=out)


@cache
def node_groups(
    group: dist.ProcessGroup, ranks_per_node: int | None
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of the two hops: to be called by all expert-parallel ranks of ``group``, and no others.

    Of the ranks of this rank's place in all nodes, and of its node; ranks of a node follow one another.
    """
    ranks, near = dist.get_process_group_ranks(group), 0
    if ranks_per_node is not None:
        nodes = [rank // ranks_per_node for rank in ranks]
        near = nodes.count(nodes[0])
    assert 1 < near < len(ranks) and nodes == sorted(nodes) and {*map(nodes.count, nodes)} == {near}, (
        f"{ranks_per_node} ranks of a node do not spread the expert-parallel ranks {ranks} equally over nodes"
    )
    node, place = divmod(group.rank(), near)
    first = node * near
    # Separate groups, also where one has the same ranks as another: each lane has its own.
    return (
        dist.new_group(ranks[place::near], use_local_synchronization=True, group_desc="ampipe between nodes"),
        dist.new_group(
            ranks[first : first + near], use_local_synchronization=True, group_desc="ampipe within a node"
        ),
    )


class SortHop:
    """The second hop of rows of one expert each: they are put into the order of ranks, and none is added.

    ``rows [N][G]`` came from each node for each rank of this one; ``receive [G]`` come from each rank of
    ``group``, the node.
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
    ``send`` and ``receive`` are copies for and from each rank of ``group``, the node.
    """

    uses: Sequence[Tensor] = ()

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> None:
        self.transport, self._ranks = RowTransport(ALL_TO_ALL, send, receive, group), len(send)

    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        """Rows ``[R, D]``, and probabilities ``[R, G * L]``, to their copies ``[C, D]`` and ``[C, L]``."""
        if combine:
            return tensors
        rows, *probs = tensors
        if not self.uses:
            self._num_rows = probs[0].shape[0]
            to_ranks = places_of(probs[0] != NOT_ROUTED, self._ranks).to(torch.uint8)
            self.uses = copies_for(to_ranks, sum(self.transport.input_splits))
        copied, columns = self.uses
        parts = [self._by_rank(part).index_select(0, columns) for part in probs]
        return [rows.index_select(0, copied), *parts]

    def _by_rank(self, columns: Tensor) -> Tensor:
        """``[R, G * L]`` as ``[R * G, L]``: a rank gets the columns of its experts."""
        return columns.view(self._num_rows * self._ranks, columns.shape[1] // self._ranks)

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
