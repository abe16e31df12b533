"""Times operations on this rank. Called by the modules that measure.

All operations are timed once in each round, so that a disturbance of some seconds hits a few rounds of all of
them, which the medians ignore, and not all rounds of a few.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ampipe.tools.profiling.samples import Sample

WARMUP = 2
_SIGN_S = 1.0


@dataclass(frozen=True, slots=True)
class Probe:
    """An operation of one size to be timed.

    Attributes:
        family: As in :class:`~.samples.Sample`.
        columns: Likewise.
        operation: What is timed.
        count: How many such operations it is; the time is divided by that.
        together: It is a collective: ranks meet before each call, so that no wait for a late one counts.
    """

    family: str
    columns: Mapping[str, float]
    operation: Callable[[], object]
    count: int = 1
    together: bool = False


class Stopwatch:
    """Medians of repeated calls.

    Args:
        repeats: How often each operation is timed.
        on_cuda: Whether it runs on the device, whose events then time it.
        alive: Called after a call, but at most once a second: signs of life must not slow short calls down.
    """

    def __init__(self, *, repeats: int, on_cuda: bool, alive: Callable[[], None]) -> None:
        self.repeats, self.on_cuda = repeats, on_cuda
        self._alive, self._last_sign = alive, time.monotonic()

    def samples(self, probes: Sequence[Probe]) -> list[Sample]:
        """The typical time of each operation, all of them timed in turns.

        Of a computation that is the median. Of a collective it is the lower quartile: on a host, a thread of
        the backend that has to wait for the scheduler's next tick adds 4 ms to whatever the transfer takes,
        sometimes to more than half of the calls (docs/log).
        """
        for _ in range(WARMUP):
            for probe in probes:
                probe.operation()
                self.give_sign()
        times_us: list[list[float]] = [[] for _ in probes]
        for _ in range(self.repeats):
            for times, probe in zip(times_us, probes, strict=True):
                times.append(self._once(probe) / probe.count)
                self.give_sign()
        return [
            Sample(
                probe.family,
                probe.columns,
                sorted(times)[len(times) // 4] if probe.together else statistics.median(times),
            )
            for times, probe in zip(times_us, probes, strict=True)
        ]

    def since(self, begin: float) -> float:
        """Microseconds since a moment of ``time.perf_counter``, all issued work included."""
        if self.on_cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e6

    def give_sign(self) -> None:
        """Say that something has ended, unless that was said less than a second ago."""
        now = time.monotonic()
        if now - self._last_sign >= _SIGN_S:
            self._last_sign = now
            self._alive()

    def meet(self) -> None:
        """Until every rank is here and idle."""
        if self.on_cuda:
            torch.cuda.synchronize()
        dist.barrier()
        if self.on_cuda:
            torch.cuda.synchronize()

    def _once(self, probe: Probe) -> float:
        if probe.together:
            self.meet()
        if not self.on_cuda:
            begin = time.perf_counter()
            probe.operation()
            return self.since(begin)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        probe.operation()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) * 1e3
