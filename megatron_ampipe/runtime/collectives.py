"""The collectives of a block. Each takes its process group explicitly; none is an autograd node.

All are asynchronous and return a :class:`Transfer`. On a CPU the result may be read after
:meth:`Transfer.wait`; on CUDA, immediately, on the stream that issued the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor


class Waitable(Protocol):
    """An unfinished operation: ``dist.Work``, or what Megatron returns in its place."""

    def wait(self) -> object:
        """Return when it has ended; on CUDA, make the current stream wait for it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives that have been issued.

    Attributes:
        outputs: The received tensors; not to be read before :meth:`wait` has returned.
        works: The unfinished operations; empty on CUDA, where the stream that issued them orders them.
        unpack: Copies from a joint receive buffer into the outputs, if there is such a buffer.
        uses: Tensors that are sent or received besides those that the stage takes and gives by the table.
        begin: Issues further operations, which :meth:`wait` waits for as well. Not called before nothing
            else of the lane is in flight.
    """

    outputs: tuple[Tensor, ...]
    works: tuple[dist.Work, ...] = ()
    unpack: Callable[[], None] | None = None
    uses: tuple[Tensor, ...] = ()
    begin: Callable[[], Sequence[Waitable]] | None = None

    def wait(self) -> None:
        """Return when everything has been received and the send buffers may be reused."""
        for work in (*self.works, *(() if self.begin is None else self.begin())):
            work.wait()
        if self.unpack is not None:
            self.unpack()

    @classmethod
    def all_of(cls, transfers: Sequence[Transfer]) -> Transfer:
        """Several transfers without operations of other ranks, as one."""
        assert not any(one.works or one.begin for one in transfers)

        def unpack() -> None:
            for one in transfers:
                one.wait()

        return cls(
            tuple(tensor for one in transfers for tensor in one.outputs),
            unpack=unpack,
            uses=tuple(tensor for one in transfers for tensor in one.uses),
        )

    @classmethod
    def of(cls, outputs: Sequence[Tensor], works: Sequence[dist.Work | None]) -> Transfer:
        """Make a transfer of collectives that were issued with ``async_op`` on a CPU alone.

        On CUDA they return None. From torch 2.8 on they run on the current stream, without NCCL's own stream,
        an event and a wait for each; before, torch makes the current stream wait.
        """
        return cls(tuple(outputs), tuple(work for work in works if work is not None))


class Transport(Protocol):
    """The token exchange of one chunk; ``combine`` is the adjoint of ``dispatch``."""

    merges: ClassVar[bool]
    """Whether the exchanges of several chunks can be one (:class:`MergedTransport`)."""

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """From the ranks that own the tokens to the ranks that own the experts."""
        ...

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """From the experts' ranks to the tokens' ranks."""
        ...


class MergedTransport(Transport, Protocol):
    """A transport whose class can exchange the tokens of several chunks in one collective."""

    @property
    def input_splits(self) -> Sequence[int]:
        """Rows of each part of the dispatch's input: one part per rank for all-to-all, one for all-gather."""
        ...

    @property
    def output_splits(self) -> Sequence[int]:
        """Rows of each part of the dispatch's output, per rank."""
        ...

    @classmethod
    def merged(cls, transports: Sequence[Self]) -> Self:
        """One transport for the tokens of several chunks at once."""
        ...


@dataclass(frozen=True, slots=True)
class AllToAll:
    """Each token goes only to the ranks of its experts.

    Attributes:
        input_splits: Rows for each rank of ``group`` in the dispatch, in rank order.
        output_splits: Rows from each rank of ``group`` in the dispatch.
        group: The participating ranks.
    """

    merges: ClassVar = True
    input_splits: Sequence[int]
    output_splits: Sequence[int]
    group: dist.ProcessGroup

    @classmethod
    def merged(cls, transports: Sequence[AllToAll]) -> AllToAll:
        """See :class:`Transport`."""
        inputs = [sum(rows) for rows in zip(*(one.input_splits for one in transports), strict=True)]
        outputs = [sum(rows) for rows in zip(*(one.output_splits for one in transports), strict=True)]
        return cls(inputs, outputs, transports[0].group)

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[sum(input_splits), ...]`` to ``[sum(output_splits), ...]``."""
        return exchange_rows(tensors, send=self.input_splits, receive=self.output_splits, group=self.group)

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[sum(output_splits), ...]`` to ``[sum(input_splits), ...]``."""
        return exchange_rows(tensors, send=self.output_splits, receive=self.input_splits, group=self.group)


@dataclass(frozen=True, slots=True)
class AllGather:
    """Every token goes to every rank; ``combine`` sums the ranks' expert outputs (reduce-scatter).

    Attributes:
        num_rows: Tokens of each rank.
        group: The participating ranks.
    """

    merges: ClassVar = True
    num_rows: int
    group: dist.ProcessGroup

    @property
    def input_splits(self) -> Sequence[int]:
        """See :class:`Transport`."""
        return (self.num_rows,)

    @property
    def output_splits(self) -> Sequence[int]:
        """See :class:`Transport`."""
        return (self.num_rows,) * self.group.size()

    @classmethod
    def merged(cls, transports: Sequence[AllGather]) -> AllGather:
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
                dist.reduce_scatter_tensor(
                    output, tensor.contiguous(), group=self.group, async_op=not tensor.is_cuda
                )
            )
            received.append(output)
        return Transfer.of(received, works)


def exchange_chunks(
    transports: Sequence[Any], tensors: Sequence[Sequence[Tensor]], *, combine: bool
) -> Transfer:
    """Issue the dispatch or the combine of several chunks, as one collective if their class allows it.

    Args:
        transports: The :class:`Transport` of each chunk, all of the same class.
        tensors: The tensors of each chunk.
        combine: Combine instead of dispatch.

    Returns:
        A transfer whose outputs are those of the first chunk, then those of the second, and so on.
    """
    if len(transports) == 1:
        move = transports[0].combine if combine else transports[0].dispatch
        return move(tensors[0])
    if not transports[0].merges:
        each = [
            exchange_chunks([one], [of_chunk], combine=combine)
            for one, of_chunk in zip(transports, tensors, strict=True)
        ]
        return Transfer(
            tuple(output for one in each for output in one.outputs),
            tuple(work for one in each for work in one.works),
            uses=tuple(tensor for one in each for tensor in one.uses),
        )
    send = [one.output_splits if combine else one.input_splits for one in transports]
    receive = [one.input_splits if combine else one.output_splits for one in transports]
    merged = type(transports[0]).merged(transports)
    transfer = (merged.combine if combine else merged.dispatch)(
        [_concatenate_by_rank(of_chunks, send) for of_chunks in zip(*tensors, strict=True)]
    )
    return _split_into_chunks(transfer, receive)


def gather_chunks(tensors: Sequence[Tensor], *, group: dist.ProcessGroup) -> Transfer:
    """:func:`all_gather_rows` of several tensors as one collective, with the same number of rows per rank."""
    if len(tensors) == 1:
        return all_gather_rows(tensors[0], group=group)
    gathered = all_gather_rows(torch.cat(list(tensors)), group=group)
    return _split_into_chunks(gathered, [[tensor.shape[0]] * group.size() for tensor in tensors])


def _concatenate_by_rank(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate the first part of every tensor, then the second part of every tensor, and so on."""
    parts = [tensor.split(list(sizes)) for tensor, sizes in zip(tensors, rows, strict=True)]
    return torch.cat([part for of_rank in zip(*parts, strict=True) for part in of_rank])


def _split_into_chunks(transfer: Transfer, rows: Sequence[Sequence[int]]) -> Transfer:
    """The inverse of :func:`_concatenate_by_rank`, applied to a transfer; ordered by chunk."""
    sizes = [size for of_rank in zip(*rows, strict=True) for size in of_rank]
    count = len(rows)
    outputs = [
        tensor.new_empty((sum(of_chunk), *tensor.shape[1:]))
        for of_chunk in rows
        for tensor in transfer.outputs
    ]

    def unpack() -> None:
        if transfer.unpack is not None:
            transfer.unpack()
        for index, tensor in enumerate(transfer.outputs):
            parts = tensor.split(sizes)
            for chunk, output in enumerate(outputs[index :: len(transfer.outputs)]):
                torch.cat(parts[chunk::count], out=output)

    if transfer.works:
        return Transfer(tuple(outputs), transfer.works, unpack)
    unpack()
    return Transfer(tuple(outputs))


def exchange_rows(
    tensors: Sequence[Tensor], *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """Start an all-to-all of tensors that are split identically along the first dimension.

    Args:
        tensors: Each ``[sum(send), ...]``.
        send: Rows for each rank of ``group``, in rank order.
        receive: Rows from each rank of ``group``.
        group: The participating ranks.

    Returns:
        Each ``[sum(receive), ...]``; the input tensors if the group has one rank.
    """
    if group.size() == 1:
        return Transfer(tuple(tensors))
    received = tuple(tensor.new_empty((sum(receive), *tensor.shape[1:])) for tensor in tensors)
    works = [
        dist.all_to_all_single(
            output,
            tensor.contiguous(),
            list(receive),
            list(send),
            group=group,
            async_op=not tensor.is_cuda,
        )
        for tensor, output in zip(tensors, received, strict=True)
    ]
    return Transfer.of(received, works)


def pass_on(tensors: Sequence[Tensor], *, group: dist.ProcessGroup, back: bool) -> Transfer:
    """Start to send tensors to the next rank of a ring, or back to the one before it.

    Args:
        tensors: Of the same shapes on every rank.
        group: The ranks of the ring, at least 2.
        back: To the rank before.

    Returns:
        What the rank on the other side sends.
    """
    rows, own, count = tensors[0].shape[0], group.rank(), group.size()
    step = -1 if back else 1
    send, receive = [0] * count, [0] * count
    send[(own + step) % count] = receive[(own - step) % count] = rows
    return exchange_rows(tensors, send=send, receive=receive, group=group)


def send_receive(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start to send a tensor to each rank of ``group``, and to receive one from each; the own one is copied.

    Empty tensors are not sent. For gloo, which delivers what one rank sends to another in the order of calls.
    """
    own = group.rank()
    incoming[own].copy_(outgoing[own])
    works = []
    # Every rank starts with its next neighbour, so that the first messages do not all go to one rank.
    for step in range(1, group.size()):
        to, source = (own + step) % group.size(), (own - step) % group.size()
        if incoming[source].shape[0]:
            works.append(dist.irecv(incoming[source], group=group, group_src=source))
        if outgoing[to].shape[0]:
            works.append(dist.isend(outgoing[to], group=group, group_dst=to))
    return works


def all_gather_rows(tensor: Tensor, *, group: dist.ProcessGroup) -> Transfer:
    """Start an all-gather of ``[T, ...]``, in rank order; the tensor itself for a group of one rank."""
    if group.size() == 1:
        return Transfer((tensor,))
    gathered = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    work = dist.all_gather_into_tensor(
        gathered, tensor.contiguous(), group=group, async_op=not tensor.is_cuda
    )
    return Transfer.of([gathered], [work])


@cache
def lane_group(group: dist.ProcessGroup, lane: str) -> dist.ProcessGroup:
    """A separate group of the same ranks. To be called by all of them, before the first batch.

    Two lanes must not share one: they are issued independently, and NCCL runs the collectives of a group one
    after another.

    Args:
        group: What other lanes use.
        lane: What uses the new one.
    """
    options = None
    if dist.get_backend(group) == "nccl":
        # A transfer that is ready does not wait for a computation that fills the device.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    return dist.new_group(
        dist.get_process_group_ranks(group),
        pg_options=options,
        use_local_synchronization=True,
        group_desc=f"ampipe {lane}",
    )


class HostCopy:
    """An asynchronous copy of a tensor to the host.

    Args:
        tensor: Computed on the current stream; kept as :attr:`on_device`.
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
        """The copy; blocks the host until it has arrived, without synchronizing the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host
