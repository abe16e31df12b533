"""The second hop of tokens that have crossed nodes: between the ranks of one node.

A rank that received rows for its node hands them on to the ranks there that have their experts
(:func:`spread`), and sends back what comes from those (:func:`collect`). Each is the adjoint of the other, so
the backward pass of one is the other. Rows are arranged where the collective is started and where it has
ended: on the lane of the transfer, not on that of the computation.

With :class:`CopyHop` every row goes to one rank, with :class:`NodeHop` to each that has experts of the token.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.collectives import AllToAll, Transfer, exchange_chunks

# R rows that came from other nodes, D hidden size, L experts of a rank, N nodes, G ranks of a node,
# C copies for the ranks of the node.


class Hop(Protocol):
    """The second hop of one chunk. Of its tensors the first has the rows, the second their probabilities."""

    @property
    def transport(self) -> AllToAll:
        """The exchange of what :meth:`pack` gives."""
        ...

    @property
    def indices(self) -> Sequence[Tensor]:
        """What the two functions below read besides the tensors that they are given."""
        ...

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What a spread sends: for the first rank of the node, then for the second, and so on."""
        ...

    def empty(self, received: Sequence[Tensor]) -> list[Tensor]:
        """What a collect returns, before :meth:`unpack` has filled it."""
        ...

    def unpack(self, received: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The adjoint of :meth:`pack`, into ``outputs``."""
        ...


@dataclass(frozen=True, slots=True)
class CopyHop:
    """The second hop of rows of one expert each: they are put into another order, and none is added.

    Attributes:
        rows: ``[N][G]``, rows that came from each node for each rank of this one, in this order.
        receive: Rows from each rank of ``group``.
        group: The ranks of the node.
    """

    rows: Sequence[Sequence[int]]
    receive: Sequence[int]
    group: dist.ProcessGroup

    @property
    def transport(self) -> AllToAll:
        """See :class:`Hop`."""
        return AllToAll([sum(of_rank) for of_rank in self._by_rank], self.receive, self.group)

    @property
    def indices(self) -> Sequence[Tensor]:
        """See :class:`Hop`."""
        return ()

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each ``[R, ...]`` from the order of nodes into that of ranks, ``[R, ...]``."""
        return [torch.cat(_turned(tensor, self.rows)) for tensor in tensors]

    def empty(self, received: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Hop`."""
        return [torch.empty_like(tensor) for tensor in received]

    def unpack(self, received: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Each ``[R, ...]`` back into the order of nodes."""
        for tensor, output in zip(received, outputs, strict=True):
            torch.cat(_turned(tensor, self._by_rank), out=output)

    @property
    def _by_rank(self) -> Sequence[Sequence[int]]:
        return [list(of_rank) for of_rank in zip(*self.rows, strict=True)]


def _turned(tensor: Tensor, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """``[R, ...]`` in parts of the sizes ``rows [A][B]``: those of the first ``B``, then of the second."""
    parts = tensor.split([size for sizes in rows for size in sizes])
    count = len(rows[0])
    return [part for place in range(count) for part in parts[place::count]]


@dataclass(frozen=True, slots=True)
class NodeHop:
    """The second hop of rows that came to the node once: they are copied for its ranks, and added.

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
        """See :class:`Hop`."""
        return AllToAll(self.send, self.receive, self.group)

    @property
    def indices(self) -> Sequence[Tensor]:
        """See :class:`Hop`."""
        return self.rows, self.ranks

    def pack(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Rows ``[R, D]`` and probabilities ``[R, G * L]`` to their copies ``[C, D]`` and ``[C, L]``."""
        return [
            self.copied_columns(part) if place else self.copies(part) for place, part in enumerate(tensors)
        ]

    def empty(self, received: Sequence[Tensor]) -> list[Tensor]:
        """See :class:`Hop`."""
        return [
            part.new_empty((self.num_rows, part.shape[1] * (self.group.size() if place else 1)))
            for place, part in enumerate(received)
        ]

    def unpack(self, received: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """The sums of the copies ``[C, D]``, and the columns ``[C, L]`` where they were."""
        for place, (part, output) in enumerate(zip(received, outputs, strict=True)):
            (self.put_columns if place else self.add)(part, output)

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


def spread(hops: Sequence[Hop], tensors: Sequence[Sequence[Tensor]]) -> Transfer:
    """Start to hand rows on to the ranks of their experts.

    Args:
        hops: Of each chunk, all of the same class.
        tensors: Of each chunk, rows ``[R, D]``, and in a dispatch their probabilities: ``[R, G * L]``, or
            ``[R]`` where a row is of one expert.

    Returns:
        For each chunk ``[C', D]``, the copies that this rank has received, and ``[C', L]`` or ``[C']``.
    """
    packed = [hop.pack(of_chunk) for hop, of_chunk in zip(hops, tensors, strict=True)]
    sent = exchange_chunks([hop.transport for hop in hops], packed, combine=False)
    return replace(sent, uses=(*sent.uses, *(part for parts in packed for part in parts), *_indices(hops)))


def collect(hops: Sequence[Hop], tensors: Sequence[Sequence[Tensor]]) -> Transfer:
    """Start the adjoint of :func:`spread`: what comes back for a row is added.

    Args:
        hops: Of each chunk, all of the same class.
        tensors: Of each chunk ``[C', D]``, and in the backward pass of a dispatch ``[C', L]`` or ``[C']``.

    Returns:
        For each chunk ``[R, D]``, and ``[R, G * L]`` or ``[R]``; not complete before ``wait``.
    """
    sent = exchange_chunks([hop.transport for hop in hops], tensors, combine=True)
    count = len(tensors[0])
    received = list(itertools.batched(sent.outputs, count))
    outputs = [hop.empty(of_chunk) for hop, of_chunk in zip(hops, received, strict=True)]

    def unpack() -> None:
        if sent.unpack is not None:
            sent.unpack()
        for hop, of_chunk, output in zip(hops, received, outputs, strict=True):
            hop.unpack(of_chunk, output)

    flat = tuple(output for of_chunk in outputs for output in of_chunk)
    used = (*sent.uses, *sent.outputs, *_indices(hops))
    if sent.works:
        return Transfer(flat, sent.works, unpack, used)
    unpack()
    return Transfer(flat, uses=used)


def _indices(hops: Sequence[Hop]) -> list[Tensor]:
    return [index for hop in hops for index in hop.indices]
