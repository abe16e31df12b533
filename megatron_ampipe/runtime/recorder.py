"""Records the start and end of stages, as a :class:`~megatron_ampipe.timeline.Timeline`.

Executors report every stage; nothing is recorded unless a number of iterations is given. On CUDA, times come
from events that are read only when a timeline is requested, so recording does not synchronize the device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from megatron_ampipe.runtime.pass_timer import PassTimer
from megatron_ampipe.schedule import Direction, Stage
from megatron_ampipe.timeline import StageSpan, Timeline


@dataclass(slots=True)
class _Mark:
    """A stage that has run; ``begin`` and ``end`` are seconds, or events on CUDA."""

    lane: str
    stage: str
    direction: Direction
    layer: int
    pass_index: int
    begin: float | torch.cuda.Event
    end: float | torch.cuda.Event


@dataclass(slots=True)
class _Iteration:
    """The stages of one training iteration; ``origin`` is one point in time on both host and device."""

    number: int
    marks: list[_Mark] = field(default_factory=list)
    num_passes: int = 0
    # One for each iteration: the time between two events loses precision when it is long.
    origin: tuple[float, torch.cuda.Event] | None = None


class Recorder:
    """Records the stages of the last iterations.

    Args:
        num_iterations: How many iterations to keep; 0 records nothing.
    """

    def __init__(self, *, num_iterations: int = 0) -> None:
        self._iterations: deque[_Iteration] = deque(maxlen=num_iterations)
        self.enabled = num_iterations > 0
        self.recording = False
        """Whether stages that run now are recorded."""
        self.layers: Sequence[int] = (1,)
        """Numbers of the layers of the pass that runs."""
        self.direction = Direction.FORWARD
        """Of the pass that runs."""
        self.passes = PassTimer()
        """Times of whole passes, for ``--ampipe-degree auto``."""

    def start_iteration(self, iteration: int) -> None:
        """Start recording stages of this training iteration; may be called repeatedly for the same one."""
        if not self.enabled:
            return
        self.recording = True
        if not self._iterations or self._iterations[-1].number != iteration:
            self._iterations.append(_Iteration(iteration))

    def pause(self) -> None:
        """Stop recording until the next call of :meth:`start_iteration`, for example in evaluation."""
        self.recording = False

    def enter(self, layers: Sequence[int], direction: Direction) -> None:
        """Start a pass: stages that follow belong to these layers and this direction."""
        self.layers, self.direction = layers, direction
        if self.recording:
            self._iterations[-1].num_passes += 1

    @contextmanager
    def on_stream(self, lane: str, stage: Stage, stream: torch.cuda.Stream) -> Iterator[None]:
        """Time a stage by events on its stream."""
        if not self.recording:
            yield
            return
        if self._iterations[-1].origin is None:
            origin = torch.cuda.Event(enable_timing=True)
            origin.record(stream)
            self._iterations[-1].origin = (time.perf_counter(), origin)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        yield
        end.record(stream)
        self._append(lane, stage, begin, end)

    def add(self, lane: str, stage: Stage, begin: float, end: float) -> None:
        """Record a stage that was timed by the caller, in seconds of ``time.perf_counter``."""
        if self.recording:
            self._append(lane, stage, begin, end)

    def timeline(self, *, rank: int, labels: dict[str, str], iteration: int | None = None) -> Timeline:
        """The timeline of one iteration, or of all recorded ones. On CUDA this waits for the device."""
        spans = [
            StageSpan(
                lane=mark.lane,
                stage=mark.stage,
                direction=mark.direction.value,
                layer=mark.layer,
                iteration=kept.number,
                begin_us=_microseconds(mark.begin, kept),
                end_us=_microseconds(mark.end, kept),
            )
            for kept in self._iterations
            if iteration in (None, kept.number)
            for mark in kept.marks
        ]
        return Timeline(rank=rank, spans=tuple(sorted(spans, key=lambda span: span.begin_us)), labels=labels)

    def pass_times_us(self, iteration: int) -> dict[Direction, list[float]]:
        """Time from the first stage's start to the last one's end, for every pass of an iteration.

        In microseconds. A pass is one direction of one layer for one micro-batch. On CUDA this waits for the
        device.
        """
        ends: dict[tuple[Direction, int], tuple[float, float]] = {}
        for kept in self._iterations:
            for mark in kept.marks if kept.number == iteration else ():
                begin, end = _microseconds(mark.begin, kept), _microseconds(mark.end, kept)
                earliest, latest = ends.get((mark.direction, mark.pass_index), (begin, end))
                ends[mark.direction, mark.pass_index] = (min(earliest, begin), max(latest, end))
        times: dict[Direction, list[float]] = {direction: [] for direction in Direction}
        for (direction, _), (begin, end) in ends.items():
            times[direction].append(end - begin)
        return times

    def _append(
        self, lane: str, stage: Stage, begin: float | torch.cuda.Event, end: float | torch.cuda.Event
    ) -> None:
        kept = self._iterations[-1]
        mark = _Mark(lane, stage.name, self.direction, self.layers[stage.layer], kept.num_passes, begin, end)
        kept.marks.append(mark)


def _microseconds(moment: float | torch.cuda.Event, kept: _Iteration) -> float:
    if isinstance(moment, float):
        return moment * 1e6
    assert kept.origin is not None
    seconds, origin = kept.origin
    moment.synchronize()
    return seconds * 1e6 + origin.elapsed_time(moment) * 1e3
