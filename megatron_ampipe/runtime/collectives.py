"""The collectives of a block. Every one names its group; none is an autograd node.

They return when the result may be used by the lane that called them: on CPU when the bytes are there,
on CUDA when the operation is ordered on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """How the tokens of one chunk travel; going back is the adjoint of going there."""

    def there(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """From the ranks that own the tokens to the ranks that own the experts."""
        ...

    def back(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
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

    def there(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each ``[sum(send), ...]`` to ``[sum(receive), ...]``."""
        return self._exchange(tensors, self.send, self.receive)

    def back(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each ``[sum(receive), ...]`` to ``[sum(send), ...]``."""
        return self._exchange(tensors, self.receive, self.send)

    def _exchange(
        self, tensors: Sequence[Tensor], send: Sequence[int], receive: Sequence[int]
    ) -> tuple[Tensor, ...]:
        if self.group.size() == 1:
            return tuple(tensors)
        received = tuple(tensor.new_empty((sum(receive), *tensor.shape[1:])) for tensor in tensors)
        works = [
            dist.all_to_all_single(
                output, tensor.contiguous(), list(receive), list(send), group=self.group, async_op=True
            )
            for output, tensor in zip(received, tensors, strict=True)
        ]
        for work in works:
            work.wait()
        return received


@dataclass(frozen=True, slots=True)
class AllGather:
    """Every token goes to every rank; what the ranks' experts made of it is summed on the way back."""

    group: dist.ProcessGroup

    def there(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each ``[T, ...]`` to ``[ranks * T, ...]``."""
        return tuple(all_gather_rows(tensor, group=self.group) for tensor in tensors)

    def back(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Each ``[ranks * T, ...]`` to ``[T, ...]``, summed over ranks."""
        if self.group.size() == 1:
            return tuple(tensors)
        received = []
        for tensor in tensors:
            output = tensor.new_empty((tensor.shape[0] // self.group.size(), *tensor.shape[1:]))
            dist.reduce_scatter_tensor(output, tensor.contiguous(), group=self.group)
            received.append(output)
        return tuple(received)


def all_gather_rows(tensor: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """``[T, ...]`` of every rank, one after another; the tensor itself when the group is one rank."""
    if group.size() == 1:
        return tensor
    gathered = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
    return gathered


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
