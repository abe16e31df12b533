"""How long the passes through all blocks took, by direction: what a choice of degree is made from.

Not a recorder of stages: two moments of each pass, and only while someone is measuring. On CUDA they are
events, read when the sums are asked for, so measuring never synchronises between blocks. Called by
:mod:`.autograd_block` through the recorder; read by ``launch.auto``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_ampipe.schedule.kinds import Direction

Moment = float | torch.cuda.Event


class PassTimer:
    """Sums of the times of passes, and the largest shape that went through a block."""

    def __init__(self) -> None:
        self.measuring = False
        """Whether passes are timed. Shapes are always seen."""
        self.shape = (0, 0)
        """Rows and batch of the largest input since :meth:`restart`, on this rank."""
        self._passes: list[tuple[Direction, Moment, Moment]] = []

    def restart(self) -> None:
        """Forget everything."""
        self.shape = (0, 0)
        self._passes.clear()

    def saw(self, rows: int, batch: int) -> None:
        """Take note of the shape of one input."""
        self.shape = max(self.shape, (rows, batch))

    @contextmanager
    def timed(self, direction: Direction) -> Iterator[None]:
        """Around one pass of one block."""
        if not self.measuring:
            yield
            return
        begin = self._now()
        yield
        self._passes.append((direction, begin, self._now()))

    def sum_us(self, direction: Direction) -> float:
        """Microseconds of all passes since :meth:`restart`; waits for the device where there is one."""
        return sum(_between_us(begin, end) for found, begin, end in self._passes if found is direction)

    def _now(self) -> Moment:
        # Not what the host platform stands in for: it says that there is no CUDA.
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between_us(begin: Moment, end: Moment) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return (end - begin) * 1e6
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
