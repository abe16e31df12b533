"""Times one operation on this rank. Called by the modules that measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

WARMUP = 2


class Stopwatch:
    """Medians of repeated calls.

    Args:
        repeats: How often each operation is timed.
        on_cuda: Whether it runs on the device, whose events then time it.
    """

    def __init__(self, *, repeats: int, on_cuda: bool) -> None:
        self.repeats, self.on_cuda = repeats, on_cuda

    def median_us(self, operation: Callable[[], object], *, together: bool = False) -> float:
        """Microseconds of one call.

        Args:
            operation: What is timed.
            together: It is a collective: ranks meet before each call, so that no wait for a late one counts.
        """
        for _ in range(WARMUP):
            operation()
        return statistics.median(self._once(operation, together=together) for _ in range(self.repeats))

    def since(self, begin: float) -> float:
        """Microseconds since a moment of ``time.perf_counter``, all issued work included."""
        if self.on_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6

    def meet(self) -> None:
        """Until every rank is here and idle."""
        if self.on_cuda:
            torch.cuda.synchronize()
        dist.barrier()
        if self.on_cuda:
            torch.cuda.synchronize()

    def _once(self, operation: Callable[[], object], *, together: bool) -> float:
        if together:
            self.meet()
        if not self.on_cuda:
            begin = time.perf_counter()
            operation()
            return self.since(begin)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        operation()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3
