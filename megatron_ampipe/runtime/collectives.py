"""The collectives of a block. Every one names its group; none is an autograd node.

They return when the result may be used by the lane that called them: on CPU when the bytes are there,
on CUDA when the operation is ordered on the current stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def all_to_all_rows(
    tensors: Sequence[Tensor], *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Exchange rows of several tensors that are split alike.

    Args:
        tensors: Each ``[sum(send), ...]``.
        send: Rows for each rank of ``group``, in rank order.
        receive: Rows from each rank of ``group``, in rank order.
        group: The ranks that take part.

    Returns:
        Each ``[sum(receive), ...]``; the tensors themselves when the group is one rank.
    """
    if group.size() == 1:
        return tuple(tensors)
    received = []
    works = []
    for tensor in tensors:
        output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
        works.append(
            dist.all_to_all_single(
                output, tensor.contiguous(), list(receive), list(send), group=group, async_op=True
            )
        )
        received.append(output)
    for work in works:
        work.wait()
    return tuple(received)


class CountsOnHost:
    """Token counts of every rank, on their way to the host.

    Args:
        counts: ``[E]`` int64, tokens that this rank has for each expert.
        group: Ranks to gather from, in the order of the result's rows.
    """

    def __init__(self, counts: Tensor, *, group: dist.ProcessGroup) -> None:
        gathered = counts
        if group.size() > 1:
            gathered = counts.new_empty(group.size() * counts.numel())
            dist.all_gather_into_tensor(gathered, counts.contiguous(), group=group)
        gathered = gathered.view(group.size(), counts.numel())
        self.on_device = gathered
        """``[group size, E]`` int64 on the counts' device."""
        self._copied: torch.cuda.Event | None = None
        if gathered.is_cuda:
            self._on_host = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            self._on_host.copy_(gathered, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._on_host = gathered

    def wait(self) -> Tensor:
        """``[group size, E]`` int64 on the host; blocks it until they are there, and nothing else."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host
