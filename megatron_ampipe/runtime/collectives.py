"""The collectives of a block. Every one names its group; none is an autograd node.

Each is started, and gives back a :class:`Transfer`: on CPU its result may be read once the transfer was
waited for, on CUDA at once by the stream that started it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives that were started.

    Attributes:
        outputs: What they receive; not to be read before :meth:`wait` has returned.
        works: What is not finished yet; empty on CUDA, where the stream keeps the order.
        unpack: Fills the outputs from what was received, where that came in one piece.
    """

    outputs: tuple[Tensor, ...]
    works: tuple[dist.Work, ...] = ()
    unpack: Callable[[], None] | None = None

    def wait(self) -> None:
        """Return when everything has been received and everything sent may be written to again."""
        for work in self.works:
            work.wait()
        if self.unpack is not None:
            self.unpack()

    @classmethod
    def of(cls, outputs: Sequence[Tensor], works: Sequence[dist.Work]) -> Transfer:
        """Order the works on the current stream if this is CUDA."""
        if outputs[0].is_cuda:
            for work in works:
                work.wait()
            works = ()
        return cls(tuple(outputs), tuple(works))


class Transport(Protocol):
    """How the tokens of one chunk travel; going back is the adjoint of going there."""

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """From the ranks that own the tokens to the ranks that own the experts."""
        ...

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """From the experts' ranks to the tokens' ranks."""
        ...

    @property
    def sent(self) -> Sequence[int]:
        """Rows of each part of what goes there: by rank where ranks get different rows, else one part."""
        ...

    @property
    def received(self) -> Sequence[int]:
        """Rows of each part of what arrives there, by rank."""
        ...

    @classmethod
    def joined(cls, transports: Sequence[Self]) -> Self:
        """One for the tokens of several chunks at once."""
        ...


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Each token goes to the ranks of its experts alone.

    Attributes:
        send: Rows for each rank of ``group`` on the way there, in rank order.
        receive: Rows from each rank of ``group`` on the way there.
        group: The ranks that take part.
    """

    send: Sequence[int]
    receive: Sequence[int]
    group: dist.ProcessGroup

    @property
    def sent(self) -> Sequence[int]:
        """See :class:`Transport`."""
        return self.send

    @property
    def received(self) -> Sequence[int]:
        """See :class:`Transport`."""
        return self.receive

    @classmethod
    def joined(cls, transports: Sequence[AllToAll]) -> AllToAll:
        """See :class:`Transport`."""
        send = [sum(rows) for rows in zip(*(transport.send for transport in transports), strict=True)]
        receive = [sum(rows) for rows in zip(*(transport.receive for transport in transports), strict=True)]
        return cls(send, receive, transports[0].group)

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[sum(send), ...]`` to ``[sum(receive), ...]``."""
        return exchange_rows(tensors, send=self.send, receive=self.receive, group=self.group)

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[sum(receive), ...]`` to ``[sum(send), ...]``."""
        return exchange_rows(tensors, send=self.receive, receive=self.send, group=self.group)


@dataclass(frozen=True, slots=True)
class AllGather:
    """Every token goes to every rank; what the ranks' experts made of it is summed on the way back.

    Attributes:
        num_rows: Tokens of each rank.
        group: The ranks that take part.
    """

    num_rows: int
    group: dist.ProcessGroup

    @property
    def sent(self) -> Sequence[int]:
        """See :class:`Transport`."""
        return (self.num_rows,)

    @property
    def received(self) -> Sequence[int]:
        """See :class:`Transport`."""
        return (self.num_rows,) * self.group.size()

    @classmethod
    def joined(cls, transports: Sequence[AllGather]) -> AllGather:
        """See :class:`Transport`."""
        return cls(sum(transport.num_rows for transport in transports), transports[0].group)

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[T, ...]`` to ``[ranks * T, ...]``."""
        parts = [all_gather_rows(tensor, group=self.group) for tensor in tensors]
        return Transfer(
            tuple(output for part in parts for output in part.outputs),
            tuple(work for part in parts for work in part.works),
        )

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[ranks * T, ...]`` to ``[T, ...]``, summed over ranks."""
        if self.group.size() == 1:
            return Transfer(tuple(tensors))
        received, works = [], []
        for tensor in tensors:
            output = tensor.new_empty((tensor.shape[0] // self.group.size(), *tensor.shape[1:]))
            works.append(
                dist.reduce_scatter_tensor(output, tensor.contiguous(), group=self.group, async_op=True)
            )
            received.append(output)
        return Transfer.of(received, works)


def exchange_chunks(
    transports: Sequence[Transport], tensors: Sequence[Sequence[Tensor]], *, combine: bool
) -> Transfer:
    """Start to bring the tokens of several chunks to the experts' ranks, or back, as one collective.

    Args:
        transports: How the tokens of each chunk travel, all of one kind.
        tensors: Those of each chunk.
        combine: From the experts' ranks, rather than to them.

    Returns:
        Its outputs are those of the first chunk, then those of the second, and so on.
    """
    if len(transports) == 1:
        move = transports[0].combine if combine else transports[0].dispatch
        return move(tensors[0])
    outgoing = [transport.received if combine else transport.sent for transport in transports]
    incoming = [transport.sent if combine else transport.received for transport in transports]
    joined = type(transports[0]).joined(transports)
    moved = (joined.combine if combine else joined.dispatch)(
        [_interleaved(of_chunks, outgoing) for of_chunks in zip(*tensors, strict=True)]
    )
    return _separated(moved, incoming)


def gather_chunks(tensors: Sequence[Tensor], *, group: dist.ProcessGroup) -> Transfer:
    """:func:`all_gather_rows` of several tensors as one collective; as many rows on every rank."""
    if len(tensors) == 1:
        return all_gather_rows(tensors[0], group=group)
    gathered = all_gather_rows(torch.cat(list(tensors)), group=group)
    return _separated(gathered, [[tensor.shape[0]] * group.size() for tensor in tensors])


def _interleaved(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """The first part of every tensor, then the second of every tensor, and so on."""
    parts = [tensor.split(list(sizes)) for tensor, sizes in zip(tensors, rows, strict=True)]
    return torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])


def _separated(moved: Transfer, rows: Sequence[Sequence[int]]) -> Transfer:
    """The tensors that :func:`_interleaved` would join, of each chunk in turn."""
    sizes = [size for of_rank in zip(*rows, strict=True) for size in of_rank]
    count = len(rows)
    outputs = [
        tensor.new_empty((sum(of_chunk), *tensor.shape[1:])) for of_chunk in rows for tensor in moved.outputs
    ]

    def unpack() -> None:
        for number, tensor in enumerate(moved.outputs):
            parts = tensor.split(sizes)
            for index, output in enumerate(outputs[number :: len(moved.outputs)]):
                torch.cat(parts[index::count], out=output)

    if moved.works:
        return Transfer(tuple(outputs), moved.works, unpack)
    unpack()
    return Transfer(tuple(outputs))


def exchange_rows(
    tensors: Sequence[Tensor], *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """Start an all-to-all of tensors that are split alike along the first dimension.

    Args:
        tensors: Each ``[sum(send), ...]``.
        send: Rows for each rank of ``group``, in rank order.
        receive: Rows from each rank of ``group``.
        group: The ranks that take part.

    Returns:
        Each ``[sum(receive), ...]``; the tensors themselves when the group is one rank.
    """
    if group.size() == 1:
        return Transfer(tuple(tensors))
    received = tuple(tensor.new_empty((sum(receive), *tensor.shape[1:])) for tensor in tensors)
    exchange = exchange_at_once if tensors[0].is_cuda else exchange_pairwise
    works = [
        work
        for tag, (tensor, output) in enumerate(zip(tensors, received, strict=True))
        for work in exchange(tensor.contiguous(), output, list(send), list(receive), group, tag)
    ]
    return Transfer.of(received, works)


def exchange_at_once(
    tensor: Tensor, output: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Start the exchange of one tensor as one collective of the backend."""
    return [dist.all_to_all_single(output, tensor, receive, send, group=group, async_op=True)]


def exchange_pairwise(
    tensor: Tensor, output: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Start the exchange of one tensor as sends and receives.

    For gloo, whose own all-to-all uses one direction of a link at a time and so takes twice as long
    (docs/log.md).
    """
    own = group.rank()
    outgoing, incoming = tensor.split_with_sizes(send), output.split_with_sizes(receive)
    incoming[own].copy_(outgoing[own])
    works = []
    # Every rank starts with its next neighbour, so that no rank is everybody's first.
    for step in range(1, group.size()):
        to, source = (own + step) % group.size(), (own - step) % group.size()
        if receive[source]:
            works.append(dist.irecv(incoming[source], group=group, group_src=source, tag=tag))
        if send[to]:
            works.append(dist.isend(outgoing[to], group=group, group_dst=to, tag=tag))
    return works


def all_gather_rows(tensor: Tensor, *, group: dist.ProcessGroup) -> Transfer:
    """Start to gather ``[T, ...]`` of every rank, one after another; the tensor itself of a group of one."""
    if group.size() == 1:
        return Transfer((tensor,))
    gathered = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    work = dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group, async_op=True)
    return Transfer.of([gathered], [work])


class HostCopy:
    """A tensor on its way to the host, without anyone waiting for it yet.

    Args:
        tensor: Made on the current stream; kept as :attr:`on_device`.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.on_device = tensor
        self._copied: torch.cuda.Event | None = None
        self._on_host = tensor
        if tensor.is_cuda:
            self._on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._on_host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        """The copy; blocks the host until it is there, and nothing else."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host
