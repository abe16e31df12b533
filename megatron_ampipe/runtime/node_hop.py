"""The second hop of tokens that cross the network between nodes once: between the ranks of one node.

A rank that received a token for its node copies it for the ranks there that have experts of it
(:meth:`NodeHop.spread`), and adds what they send back (:meth:`NodeHop.collect`). Each is the adjoint of the
other, so the backward pass of one is the other. The copies are made where the collective is started, and
sums where it has ended: on the lane of the transfer, not on that of the computation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.collectives import AllToAll, Transfer, exchange_chunks

# R rows that came from other nodes, D hidden size, L experts of a rank, G ranks of a node,
# C copies for the ranks of the node.


@dataclass(frozen=True, slots=True)
class NodeHop:
    """The second hop of one chunk.

    Attributes:
        rows: ``[C]`` int64, which of the ``R`` rows each copy is of; the copies for the first rank of the
            node come first, and so on.
        ranks: ``[C]`` int64, for which rank of the node each copy is.
        num_rows: ``R``.
        send: Copies for each rank of ``group``.
        receive: Copies from each rank of ``group``.
        group: The ranks of the node.
    """

    rows: Tensor
    ranks: Tensor
    num_rows: int
    send: Sequence[int]
    receive: Sequence[int]
    group: dist.ProcessGroup

    @classmethod
    def of(
        cls, to_ranks: Tensor, *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
    ) -> NodeHop:
        """The hop of rows of which it is known where they go; the host does not wait for the device.

        Args:
            to_ranks: ``[R, G]`` bool, which ranks of the node get each row.
            send: As in the attributes.
            receive: As in the attributes.
            group: As in the attributes.
        """
        chosen = to_ranks.T.reshape(-1).to(torch.uint8)
        # A stable sort puts what is set first, in order.
        places = chosen.argsort(stable=True, descending=True)[: sum(send)]
        num_rows = to_ranks.shape[0]
        return cls(places % max(1, num_rows), places // max(1, num_rows), num_rows, send, receive, group)

    @property
    def transport(self) -> AllToAll:
        """The exchange of the copies."""
        return AllToAll(self.send, self.receive, self.group)

    def copies(self, tensor: Tensor) -> Tensor:
        """``[R, D]`` to ``[C, D]``."""
        return tensor.index_select(0, self.rows)

    def copied_columns(self, tensor: Tensor) -> Tensor:
        """``[R, G * L]`` to ``[C, L]``: a rank gets the columns of its experts."""
        return self._by_rank(tensor).index_select(0, self._places)

    def add(self, received: Tensor, output: Tensor) -> None:
        """Set ``output [R, D]`` to the sums of ``received [C, D]``; 16-bit numbers are added in fp32."""
        narrow = output.dtype in (torch.bfloat16, torch.float16)
        total = torch.empty_like(output, dtype=torch.float32) if narrow else output
        total.zero_()
        # A rank gets at most one copy of a row: each addition writes a row once, so the order is fixed.
        for rows, part in zip(self.rows.split(list(self.send)), received.split(list(self.send)), strict=True):
            total.index_add_(0, rows, part.to(total.dtype))
        if narrow:
            output.copy_(total)

    def put_columns(self, received: Tensor, output: Tensor) -> None:
        """``[C, L]`` into the columns of ``output [R, G * L]`` that were copied; zero elsewhere."""
        output.zero_()
        self._by_rank(output).index_copy_(0, self._places, received)

    def _by_rank(self, tensor: Tensor) -> Tensor:
        """``[R, G * L]`` as ``[R * G, L]``."""
        ranks = self.group.size()
        return tensor.view(self.num_rows * ranks, tensor.shape[1] // ranks)

    @property
    def _places(self) -> Tensor:
        return self.rows * self.group.size() + self.ranks


def spread(hops: Sequence[NodeHop], tensors: Sequence[Sequence[Tensor]]) -> Transfer:
    """Start to hand rows on to the ranks of their experts.

    Args:
        hops: Of each chunk.
        tensors: Of each chunk, rows ``[R, D]``, and in a dispatch their probabilities ``[R, G * L]``.

    Returns:
        For each chunk ``[C', D]``, the copies that this rank has received, and ``[C', L]``.
    """
    packed = [
        [hop.copied_columns(part) if place else hop.copies(part) for place, part in enumerate(of_chunk)]
        for hop, of_chunk in zip(hops, tensors, strict=True)
    ]
    sent = exchange_chunks([hop.transport for hop in hops], packed, combine=False)
    used = (part for of_chunk in packed for part in of_chunk)
    return replace(sent, uses=(*sent.uses, *used, *_indices(hops)))


def collect(hops: Sequence[NodeHop], tensors: Sequence[Sequence[Tensor]]) -> Transfer:
    """Start the adjoint of :func:`spread`: what comes back for a row is added.

    Args:
        hops: Of each chunk.
        tensors: Of each chunk ``[C', D]``, and in the backward pass of a dispatch ``[C', L]``.

    Returns:
        For each chunk ``[R, D]`` and ``[R, G * L]``; not complete before ``wait``.
    """
    sent = exchange_chunks([hop.transport for hop in hops], tensors, combine=True)
    count = len(tensors[0])
    outputs = [
        part.new_empty((hop.num_rows, part.shape[1] * (hop.group.size() if place else 1)))
        for hop, of_chunk in zip(hops, tensors, strict=True)
        for place, part in enumerate(of_chunk)
    ]

    def unpack() -> None:
        if sent.unpack is not None:
            sent.unpack()
        for place, (received, output) in enumerate(zip(sent.outputs, outputs, strict=True)):
            hop = hops[place // count]
            (hop.put_columns if place % count else hop.add)(received, output)

    used = (*sent.uses, *sent.outputs, *_indices(hops))
    if sent.works:
        return Transfer(tuple(outputs), sent.works, unpack, used)
    unpack()
    return Transfer(tuple(outputs), uses=used)


def _indices(hops: Sequence[NodeHop]) -> Iterator[Tensor]:
    for hop in hops:
        yield from (hop.rows, hop.ranks)
