"""Records when stages ran, as a :class:`~megatron_ampipe.timeline.Timeline`.

Executors call it around every stage; it does nothing unless it was asked to keep something. On CUDA the
times come from events and are read only when the timeline is asked for, so recording never
synchronises the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_ampipe.runtime.pass_timer import PassTimer
from megatron_ampipe.schedule.types import Direction, Stage
from megatron_ampipe.timeline import StageSpan, Timeline


@dataclass(slots=True)
class _Mark:
    """A stage that ran; ``begin`` and ``end`` are seconds, or events on CUDA."""

    lane: str
    stage: str
    direction: Direction
    layer: int
    begin: float | torch.cuda.Event
    end: float | torch.cuda.Event


class Recorder:
    """Keeps the stages of the last iterations.

    Args:
        num_iterations: How many iterations to keep; 0 records nothing.
    """

    def __init__(self, *, num_iterations: int = 0) -> None:
        self._iterations: deque[tuple[int, list[_Mark]]] = deque(maxlen=num_iterations)
        self.enabled = num_iterations > 0
        self._recording = False
        self._layer = 0
        self._direction = Direction.FORWARD
        self.passes = PassTimer()
        """Times of whole passes, which others ask for."""
        self._origin: tuple[float, torch.cuda.Event] | None = None

    def start_iteration(self, iteration: int) -> None:
        """Everything recorded from here on belongs to this training iteration; may be called again for it."""
        if not self.enabled:
            return
        self._recording = True
        if not self._iterations or self._iterations[-1][0] != iteration:
            self._iterations.append((iteration, []))

    def pause(self) -> None:
        """Record nothing until the next training iteration starts: an evaluation runs."""
        self._recording = False

    def enter(self, layer: int, direction: Direction) -> None:
        """Everything recorded from here on belongs to this pass through this layer."""
        self._layer, self._direction = layer, direction

    @contextmanager
    def on_host(self, lane: str, stage: Stage) -> Iterator[None]:
        """Time a stage by the host's clock."""
        if not self._recording:
            yield
            return
        begin = time.perf_counter()
        yield
        self.add(lane, stage, begin, time.perf_counter())

    @contextmanager
    def on_stream(self, lane: str, stage: Stage, stream: torch.cuda.Stream) -> Iterator[None]:
        """Time a stage by events on its stream."""
        if not self._recording:
            yield
            return
        if self._origin is None:
            origin = torch.cuda.Event(enable_timing=True)
            origin.record(stream)
            self._origin = (time.perf_counter(), origin)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        yield
        end.record(stream)
        self._append(lane, stage, begin, end)

    def add(self, lane: str, stage: Stage, begin: float, end: float) -> None:
        """Keep a stage that was timed by the caller, in seconds of ``time.perf_counter``."""
        if self._recording:
            self._append(lane, stage, begin, end)

    def timeline(self, *, rank: int, labels: dict[str, str]) -> Timeline:
        """What was recorded. On CUDA this waits for the device."""
        spans = [
            StageSpan(
                lane=mark.lane,
                stage=mark.stage,
                direction=mark.direction.value,
                layer=mark.layer,
                iteration=iteration,
                begin_us=self._microseconds(mark.begin),
                end_us=self._microseconds(mark.end),
            )
            for iteration, marks in self._iterations
            for mark in marks
        ]
        return Timeline(rank=rank, spans=tuple(sorted(spans, key=lambda span: span.begin_us)), labels=labels)

    def _append(
        self, lane: str, stage: Stage, begin: float | torch.cuda.Event, end: float | torch.cuda.Event
    ) -> None:
        mark = _Mark(lane, str(stage), self._direction, self._layer, begin, end)
        self._iterations[-1][1].append(mark)

    def _microseconds(self, moment: float | torch.cuda.Event) -> float:
        if isinstance(moment, float):
            return moment * 1e6
        assert self._origin is not None
        seconds, origin = self._origin
        moment.synchronize()
        return seconds * 1e6 + origin.elapsed_time(moment) * 1e3
