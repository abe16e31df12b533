"""The collectives of a block. Every one names its group; none is an autograd node.

Each is started, and gives back a :class:`Transfer`: on CPU its result may be read once the transfer was
waited for, on CUDA at once by the stream that started it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Transfer:
    """Collectives that were started.

    Attributes:
        outputs: What they receive; not to be read before :meth:`wait` has returned.
        works: What is not finished yet; empty on CUDA, where the stream keeps the order.
    """

    outputs: tuple[Tensor, ...]
    works: tuple[dist.Work, ...] = ()

    def wait(self) -> None:
        """Return when everything has been received and everything sent may be written to again."""
        for work in self.works:
            work.wait()

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

    def there(self, tensors: Sequence[Tensor]) -> Transfer:
        """From the ranks that own the tokens to the ranks that own the experts."""
        ...

    def back(self, tensors: Sequence[Tensor]) -> Transfer:
        """From the experts' ranks to the tokens' ranks."""
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

    def there(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[sum(send), ...]`` to ``[sum(receive), ...]``."""
        return exchange_rows(tensors, send=self.send, receive=self.receive, group=self.group)

    def back(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[sum(receive), ...]`` to ``[sum(send), ...]``."""
        return exchange_rows(tensors, send=self.receive, receive=self.send, group=self.group)


@dataclass(frozen=True, slots=True)
class AllGather:
    """Every token goes to every rank; what the ranks' experts made of it is summed on the way back."""

    group: dist.ProcessGroup

    def there(self, tensors: Sequence[Tensor]) -> Transfer:
        """Each ``[T, ...]`` to ``[ranks * T, ...]``."""
        parts = [all_gather_rows(tensor, group=self.group) for tensor in tensors]
        return Transfer(
            tuple(output for part in parts for output in part.outputs),
            tuple(work for part in parts for work in part.works),
        )

    def back(self, tensors: Sequence[Tensor]) -> Transfer:
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
    outgoing, incoming = tensor.split(send), output.split(receive)
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
