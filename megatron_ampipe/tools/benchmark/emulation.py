"""The emulated link, and ranks that are only pretended. The one place where torch's collectives are patched.

:func:`install` puts a function of ours behind ``torch.distributed.all_to_all_single``, which both Megatron's
layer and AMPipe's look up at every call. So every all-to-all of either, forward and backward, takes
``latency + bytes / rate`` longer than its copy, on the lane that waits for it: on CPU the thread sleeps, on
CUDA a kernel of one thread spins on the stream, and so occupies one SM in part. This is how the paper
slowed its links (section 4.3). ``bytes`` is what the rank sends to or receives from others, whichever is
more. The small exchange of counts is not prolonged, in either layer. The part for CUDA has not been run yet.

Pretended ranks are for one GPU: this process is rank 0 of N, and what the others would send is zeros of the
right size. Counts are taken to be alike on all ranks. Sizes and work are those of a real rank 0; both layers
see the same zeros, so they can still be held against each other.

Call before Megatron is imported: it keeps references to some collectives. Called by :mod:`.worker`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime import collectives
from megatron_ampipe.tools.benchmark.link import Link

_CALIBRATION_CYCLES = 20_000_000


def install(link: Link, *, on_cuda: bool, pretended: bool) -> None:
    """Patch ``all_to_all_single``, and ``all_gather_into_tensor`` where ranks are pretended."""
    exchange = _pretended_exchange if pretended else dist.all_to_all_single
    occupy = _spin() if on_cuda else time.sleep

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> Any:
        group = group or dist.group.WORLD
        assert group is not None
        moved = max(
            _foreign_bytes(output, output_split_sizes, group), _foreign_bytes(input, input_split_sizes, group)
        )
        work = exchange(output, input, output_split_sizes, input_split_sizes, group=group, async_op=True)
        prolonged = _Prolonged(work, link.transfer_s(moved), occupy)
        if async_op:
            return prolonged
        prolonged.wait()
        return None

    dist.all_to_all_single = all_to_all_single
    # AMPipe's exchange for gloo is made of sends; here it has to take the way whose time is emulated.
    collectives.exchange_pairwise = collectives.exchange_at_once
    if pretended:
        dist.all_gather_into_tensor = _pretended_gather


class _Prolonged:
    """A handle whose wait takes the link's time on top of the copy's. Handles waited for in turn add up."""

    def __init__(self, work: Any, seconds: float, occupy: Callable[[float], None]) -> None:
        self._work, self._seconds, self._occupy = work, seconds, occupy

    def wait(self, *_: Any) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._occupy(self._seconds)
        return True


class _Done:
    """The handle of an exchange that was only pretended."""

    def wait(self, *_: Any) -> bool:
        return True


def _foreign_bytes(tensor: Tensor, splits: Sequence[int] | None, group: dist.ProcessGroup) -> int:
    """Bytes of a tensor's rows that belong to other ranks."""
    rows = tensor.shape[0]
    own = splits[group.rank()] if splits is not None else rows // group.size()
    return (rows - own) * (tensor.numel() // max(rows, 1)) * tensor.element_size()


def _pretended_exchange(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    *,
    group: dist.ProcessGroup,
    async_op: bool,
) -> _Done:
    """Own rows arrive, the others' are zeros. This process is rank 0, so its rows stand first."""
    own = input_split_sizes[0] if input_split_sizes is not None else input.shape[0] // group.size()
    output[:own] = input[:own]
    output[own:].zero_()
    return _Done()


def _pretended_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> _Done | None:
    """Every rank has what this one has."""
    output.view(-1, *input.shape).copy_(
        input.unsqueeze(0).expand(output.numel() // input.numel(), *input.shape)
    )
    return _Done() if async_op else None


def _spin() -> Callable[[float], None]:
    """Something that keeps the current stream busy for a number of seconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The first launch loads the kernel.
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    begin.record()
    torch.cuda._sleep(_CALIBRATION_CYCLES)
    end.record()
    end.synchronize()
    cycles_per_s = _CALIBRATION_CYCLES / (begin.elapsed_time(end) / 1e3)
    return lambda seconds: torch.cuda._sleep(int(seconds * cycles_per_s))
