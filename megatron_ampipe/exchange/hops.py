"""Exchanges in two hops, between nodes and then within a node: the second hop, and the groups of both hops.

The first hop sends to the rank with the sender's index in another node, so a rank has one message per node.
That rank forwards the rows within its node, and returns the outputs. The second hop is a codec around an
all-to-all within the node.

:class:`SortHop`, which sends every copy of a token, is the two-dimensional all-to-all of Tutel (Hwang et al.,
2023) and FSMoE. :class:`SumHop`, which sends a token once per node, is the exchange of DeepEP and HierMoE.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.exchange.transports import ALL_TO_ALL, Arrived, RowTransport
from megatron_ampipe.runtime.groups import GroupRequest

# R rows that came from other nodes, D hidden size, E experts, L experts of a rank, N nodes, G ranks of a
# node, C copies for the ranks of the node.

NOT_ROUTED = float("-inf")
"""The probability of an expert that does not get the token; no router returns it."""


def destination_mask(routing_map: Tensor, num_destinations: int) -> Tensor:
    """The places (ranks or nodes) with experts of each token: ``[T, E]`` bool to ``[T, places]``."""
    by_place: Tensor = routing_map.unflatten(1, (num_destinations, -1))
    return by_place.any(dim=2)


def copies_for(to_destinations: Tensor, num_copies: int) -> tuple[Tensor, Tensor]:
    """For each copy of a row, place by place: its row ``[C]``, and its flat index in ``[T, places]``."""
    num_rows, num_destinations = to_destinations.shape
    # A stable sort puts marked entries first, in order, without a wait for their number.
    marks = to_destinations.T.reshape(-1).argsort(stable=True, descending=True)[:num_copies]
    rows = marks % max(1, num_rows)
    return rows, rows * num_destinations + marks // max(1, num_rows)


def transpose_splits(tensor: Tensor, rows: Sequence[Sequence[int]], *, out: Tensor | None = None) -> Tensor:
    """Reorder ``[R, ...]``, parts of the sizes ``rows [A][B]``, from order ``[A][B]`` into ``[B][A]``."""
    parts, count = tensor.split_with_sizes([size for sizes in rows for size in sizes]), len(rows[0])
    return torch.cat([part for place in range(count) for part in parts[place::count]], out=out)


def node_groups(group: dist.ProcessGroup, ranks_per_node: int | None) -> tuple[GroupRequest, GroupRequest]:
    """The groups of both hops of the expert-parallel ``group``, which ``runtime.groups`` makes.

    They are the ranks with this rank's index in all nodes, and the ranks of its node, ordered node by node.
    """
    ranks = dist.get_process_group_ranks(group)
    node_of_ranks = [] if ranks_per_node is None else [rank // ranks_per_node for rank in ranks]
    # Of the ranks of the group, how many are on each node.
    num_on_node = set(map(node_of_ranks.count, node_of_ranks))
    size = min(num_on_node, default=0)
    is_equal = len(num_on_node) == 1 and node_of_ranks == sorted(node_of_ranks)
    assert is_equal and 1 < size < len(ranks), (
        f"{ranks_per_node} ranks of a node do not spread the expert-parallel ranks {ranks} equally over nodes"
    )
    node, place = divmod(group.rank(), size)
    first = node * size
    # New groups even if an existing group has the same ranks, because each lane needs its own.
    return (
        GroupRequest(group, "between nodes", tuple(ranks[place::size])),
        GroupRequest(group, "within a node", tuple(ranks[first : first + size])),
    )


class SortHop:
    """The second hop if each row is for one expert: sorts rows by rank; no rows are added.

    ``rows [N][G]`` are numbers of rows from each node for each rank of this node; ``receive [G]`` are numbers
    of rows from each rank of ``group``, the node.
    """

    uses: Sequence[Tensor] = ()

    def __init__(
        self, rows: Sequence[Sequence[int]], receive: Sequence[int], group: dist.ProcessGroup
    ) -> None:
        self._by_node, self._by_rank = rows, [list(sizes) for sizes in zip(*rows, strict=True)]
        send = [sum(sizes) for sizes in self._by_rank]
        self.transport = RowTransport(ALL_TO_ALL, send, receive, group)

    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        """Reorder each ``[R, ...]`` from node order into rank order."""
        return tensors if combine else [transpose_splits(part, self._by_node) for part in tensors]

    def arrive(self, received: Sequence[Tensor], *, combine: bool) -> Arrived:
        """Reorder each ``[R, ...]`` back into node order."""
        if not combine:
            return received, None
        outputs = [torch.empty_like(part) for part in received]

        def fill() -> None:
            for part, output in zip(received, outputs, strict=True):
                transpose_splits(part, self._by_rank, out=output)

        return outputs, fill


class SumHop:
    """The second hop if a row comes to the node once: copies it for the ranks, and adds their outputs.

    The first probabilities that are sent show which ranks need a row; the host does not wait for them.
    ``send`` and ``receive`` are numbers of copies for and from each rank of ``group``, the node.
    """

    uses: Sequence[Tensor] = ()

    def __init__(self, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup) -> None:
        self.transport, self._ranks = RowTransport(ALL_TO_ALL, send, receive, group), len(send)

    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        """Copy rows ``[R, D]`` and probabilities ``[R, G * L]`` for ranks, to ``[C, D]`` and ``[C, L]``."""
        if combine:
            return tensors
        rows, *probs = tensors
        if not self.uses:
            self._num_rows = probs[0].shape[0]
            to_ranks = destination_mask(probs[0] != NOT_ROUTED, self._ranks).to(torch.uint8)
            self.uses = copies_for(to_ranks, sum(self.transport.input_splits))
        copied, columns = self.uses
        parts = [self._by_rank(part).index_select(0, columns) for part in probs]
        return [rows.index_select(0, copied), *parts]

    def _by_rank(self, columns: Tensor) -> Tensor:
        """View ``[R, G * L]`` as ``[R * G, L]``: each rank gets the columns of its experts."""
        return columns.view(self._num_rows * self._ranks, columns.shape[1] // self._ranks)

    def arrive(self, received: Sequence[Tensor], *, combine: bool) -> Arrived:
        """Sum the copies ``[C, D]`` to ``[R, D]``, and put ``[C, L]`` back into their columns, else zero."""
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
