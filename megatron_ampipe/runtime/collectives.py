"""The collectives of a block. Each takes its process group explicitly; none is an autograd node.

All are asynchronous and return a :class:`Transfer`. On a CPU the result may be read after
:meth:`Transfer.wait`; on CUDA, immediately, on the stream that issued the collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Waitable(Protocol):
    """An unfinished operation: ``dist.Work``, or a handle of Megatron."""

    def wait(self) -> object:
        """Wait until it has ended; on CUDA, make the current stream wait for it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives that have been issued."""

    outputs: tuple[Tensor, ...]
    """The received tensors; not to be read before :meth:`wait` has returned."""
    works: tuple[dist.Work, ...] = ()
    """The unfinished operations; none on CUDA, where the stream that issued them orders them."""
    unpack: Callable[[], None] | None = None
    """Copies from a joint receive buffer into the outputs, if there is such a buffer."""
    uses: tuple[Tensor, ...] = ()
    """Tensors that are sent or received in addition to the inputs and outputs of the stage."""
    begin: Callable[[], Sequence[Waitable]] | None = None
    """Issues more operations once the lane has nothing else in flight; :meth:`wait` also waits for them."""

    def wait(self) -> None:
        """Wait until everything has been received and the send buffers may be reused."""
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
        """A transfer with other outputs, which ``fill`` computes from the outputs of this one."""

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
        """Join several transfers that have no unfinished operations into one."""
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


def issued(
    collective: Callable[..., dist.Work | None],
    tensors: Sequence[Tensor],
    *splits: Sequence[int],
    num_rows: int,
    group: dist.ProcessGroup,
) -> Transfer:
    """Start a collective of torch for each tensor, to ``[num_rows, ...]``; a group of one rank sends nothing.

    CUDA does not use ``async_op``: without it, torch 2.8 and later run the collective on the current stream
    and save NCCL's own stream, an event and a wait; earlier versions make the current stream wait.
    """
    if group.size() == 1:
        return Transfer(tuple(tensors))
    outputs, works = [], []
    for tensor in tensors:
        output = tensor.new_empty((num_rows, *tensor.shape[1:]))
        work = collective(output, tensor.contiguous(), *splits, group=group, async_op=not tensor.is_cuda)
        outputs.append(output)
        works += [work] if work is not None else []
    return Transfer(tuple(outputs), tuple(works))


def exchange_rows(
    tensors: Sequence[Tensor], *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """Start an all-to-all of ``[sum(send), ...]`` to ``[sum(receive), ...]``; both list rows by rank."""
    return issued(dist.all_to_all_single, tensors, receive, send, num_rows=sum(receive), group=group)


def pass_on(tensors: Sequence[Tensor], *, group: dist.ProcessGroup, back: bool) -> Transfer:
    """Start to send tensors of equal shapes to the next rank of a ring; with ``back`` to the previous one."""
    rows, own, count = tensors[0].shape[0], group.rank(), group.size()
    step = -1 if back else 1
    send, receive = [0] * count, [0] * count
    send[(own + step) % count] = receive[(own - step) % count] = rows
    return exchange_rows(tensors, send=send, receive=receive, group=group)


def send_receive(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Start to send a tensor to each rank of ``group``, and to receive one from each; this rank's is copied.

    Empty tensors are not sent. For gloo, which delivers the messages between two ranks in the order of calls.
    """
    own = group.rank()
    incoming[own].copy_(outgoing[own])
    works: list[dist.Work | None] = []
    # Every rank starts with its next neighbour, so that the first messages do not all go to one rank.
    for step in range(1, group.size()):
        to, source = (own + step) % group.size(), (own - step) % group.size()
        if incoming[source].shape[0]:
            works.append(dist.irecv(incoming[source], group=group, group_src=source))
        if outgoing[to].shape[0]:
            works.append(dist.isend(outgoing[to], group=group, group_dst=to))
    # torch returns None to a rank that is not in the group.
    return [work for work in works if work is not None]


class HostCopy:
    """An asynchronous copy to the host of a tensor that the current stream computes."""

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
        """Return the copy. Blocks the host until it has arrived, without synchronizing the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device, on the current stream. The host does not wait for that stream.

    ``Tensor.to`` waits for all work of the stream, unless it is non-blocking and the tensor is in pinned
    memory. That memory may be released before the copy has run: torch's allocator of pinned memory knows the
    stream of the copy, and gives the memory to nobody before the stream has passed its place of release.

    Not to be called while a CUDA graph is captured: a replay would copy what is in that memory by then.
    """
    if device.type != "cuda":
        return tensor.to(device)
    assert not torch.cuda.is_current_stream_capturing(), "a graph would copy from memory that is reused"
    return tensor.pin_memory().to(device, non_blocking=True)
