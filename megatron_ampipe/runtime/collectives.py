"""The collectives of a block. Each takes its process group explicitly; none is an autograd node.

All are asynchronous and return a :class:`Transfer`. On a CPU the result may be read after
:meth:`Transfer.wait`; on CUDA, immediately, on the stream that issued the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

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
        for work in self.works:
            work.wait()
        if self.begin is not None:
            for begun in self.begin():
                begun.wait()
        if self.unpack is not None:
            self.unpack()

    def then(
        self, outputs: Sequence[Tensor], fill: Callable[[], None], *, uses: Sequence[Tensor] = ()
    ) -> Transfer:
        """A transfer with other outputs.

        Args:
            outputs: Its outputs.
            fill: Fills them from what this one receives.
            uses: As in the attributes, in addition.
        """

        def unpack() -> None:
            if self.unpack is not None:
                self.unpack()
            fill()

        if self.works:
            return Transfer(tuple(outputs), self.works, unpack, (*self.uses, *uses))
        unpack()
        return Transfer(tuple(outputs), uses=(*self.uses, *uses))

    @classmethod
    def all_of(cls, transfers: Sequence[Transfer]) -> Transfer:
        """Several transfers without operations of other ranks, as one."""
        if len(transfers) == 1:
            return transfers[0]

        def unpack() -> None:
            for transfer in transfers:
                transfer.wait()

        return cls(
            tuple([tensor for transfer in transfers for tensor in transfer.outputs]),
            unpack=unpack,
            uses=tuple([tensor for transfer in transfers for tensor in transfer.uses]),
        )

    @classmethod
    def of(cls, outputs: Sequence[Tensor], works: Sequence[dist.Work | None]) -> Transfer:
        """Make a transfer of collectives that were issued with ``async_op`` on a CPU alone.

        On CUDA they return None. From torch 2.8 on they run on the current stream, without NCCL's own stream,
        an event and a wait for each; before, torch makes the current stream wait.
        """
        return cls(tuple(outputs), tuple([work for work in works if work is not None]))


def exchange_rows(
    tensors: Sequence[Tensor], *, send: list[int], receive: list[int], group: dist.ProcessGroup
) -> Transfer:
    """Start an all-to-all of tensors that are split identically along the first dimension.

    Args:
        tensors: Each ``[sum(send), ...]``.
        send: Rows for each rank of ``group``, in rank order; a list.
        receive: Rows from each rank of ``group``; a list.
        group: The participating ranks.

    Returns:
        Each ``[sum(receive), ...]``; the input tensors if the group has one rank.
    """
    if group.size() == 1:
        return Transfer(tuple(tensors))
    num_rows, received, works = sum(receive), [], []
    for tensor in tensors:
        output = tensor.new_empty((num_rows, *tensor.shape[1:]))
        works.append(
            dist.all_to_all_single(
                output, tensor.contiguous(), receive, send, group=group, async_op=not tensor.is_cuda
            )
        )
        received.append(output)
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


def all_gather_rows(tensors: Sequence[Tensor], *, group: dist.ProcessGroup) -> Transfer:
    """Start an all-gather of each ``[T, ...]``, in rank order; the tensors themselves for one rank."""
    count = group.size()
    if count == 1:
        return Transfer(tuple(tensors))
    gathered, works = [], []
    for tensor in tensors:
        output = tensor.new_empty((count * tensor.shape[0], *tensor.shape[1:]))
        works.append(
            dist.all_gather_into_tensor(output, tensor.contiguous(), group=group, async_op=not tensor.is_cuda)
        )
        gathered.append(output)
    return Transfer.of(gathered, works)


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
