"""Measures how long the passes through all blocks take, by direction; ``--ampipe-degree auto`` uses the sums.

Unlike the recorder it does not time stages: only the begin and the end of each pass, and only while
:attr:`PassTimer.measuring` is set. On CUDA these are events that are read when a sum is requested, so
measuring never synchronizes between blocks. Called by :mod:`.stack_call` through the recorder, and by
``layers.layer`` for Megatron's own layers; read by ``launch.auto``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megatron_ampipe.schedule.stage_kind import Direction

Timestamp = float | torch.cuda.Event


class PassTimer:
    """Sums of the durations of passes, and the largest input shape of a block."""

    def __init__(self) -> None:
        self.measuring = False
        """Whether passes are timed. Shapes are always recorded."""
        self.shape = (0, 0)
        """Rows and batch of the largest input since :meth:`restart`, on this rank."""
        self._passes: list[tuple[Direction, Timestamp, Timestamp]] = []

    def restart(self) -> None:
        """Reset the times and the shape."""
        self.shape = (0, 0)
        self._passes.clear()

    def record_shape(self, rows: int, batch: int) -> None:
        """Record the shape of one input."""
        self.shape = max(self.shape, (rows, batch))

    @contextmanager
    def timed(self, direction: Direction) -> Iterator[None]:
        """Context manager around one pass of one block."""
        if not self.measuring:
            yield
            return
        begin = self._now()
        yield
        self._passes.append((direction, begin, self._now()))

    def timed_layer(
        self, layer: Callable[[Tensor], tuple[Tensor, Tensor | None]], hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Call a layer that is not a schedule of stages; its two directions are passes as well.

        The backward pass lasts from the gradient of the output to that of ``hidden [S, B, D]``.
        """
        if not (self.measuring and torch.is_grad_enabled()):
            return layer(hidden)
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        began: list[Timestamp] = []
        # Hooks, as a pipeline schedule of Megatron wants outputs that are not views.
        hidden.register_hook(
            lambda _: self._passes.append((Direction.BACKWARD, began.pop(), self._now())),
        )
        with self.timed(Direction.FORWARD):
            output, context = layer(hidden)
        output.register_hook(lambda _: began.append(self._now()))
        return output, context

    def sum_us(self, direction: Direction) -> float:
        """Microseconds of all passes since :meth:`restart`; synchronizes with the device if there is one."""
        return sum(_elapsed_us(begin, end) for one, begin, end in self._passes if one is direction)

    def _now(self) -> Timestamp:
        # The host platform replaces torch.cuda.Event but not is_available, which stays False without a GPU.
        if not torch.cuda.is_available():
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed_us(begin: Timestamp, end: Timestamp) -> float:
    if isinstance(begin, float):
        assert isinstance(end, float)
        return (end - begin) * 1e6
    assert not isinstance(end, float)
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
