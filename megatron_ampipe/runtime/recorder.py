"""Records when stages start and end (``files.timeline.Timeline``), and how long passes take.

On CUDA, times are events that are read only when somebody asks, so recording does not synchronize the device.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ampipe.files.timeline import StageSpan, Timeline
from megatron_ampipe.schedule import Direction, Stage

Timestamp = float | torch.cuda.Event
"""Seconds of ``time.perf_counter``, or an event on CUDA."""


class _Mark(NamedTuple):
    """A stage that has run."""

    of_pass: tuple[Direction, int]
    begin: Timestamp
    end: Timestamp
    span: Callable[..., StageSpan]
    """Makes its span, given both times in microseconds."""


@dataclass(slots=True)
class _Iteration:
    """The stages of one training iteration; ``origin`` is one point in time on both host and device."""

    number: int
    marks: list[_Mark] = field(default_factory=list)
    num_passes: int = 0
    # One for each iteration: the time between two events loses precision when it is long.
    origin: tuple[float, torch.cuda.Event] | None = None


class Recorder:
    """Records the stages of the last iterations: of so many, or none."""

    def __init__(self, *, num_iterations: int = 0) -> None:
        self._iterations: deque[_Iteration] = deque(maxlen=num_iterations)
        self.recording = False
        """Whether stages that run now are recorded."""
        self.layers: Sequence[int] = (1,)
        """Numbers of the layers of the pass that runs."""
        self.layers_ahead: Sequence[int] = ()
        """Those of the forward pass of the next micro-batch, where it shares a program with this pass."""
        self.direction = Direction.FORWARD
        """Of the pass that runs."""
        self.passes = PassTimer()
        """Times of whole passes, for ``--ampipe-degree auto``."""

    def start_iteration(self, iteration: int) -> None:
        """Start recording stages of this training iteration; may be called repeatedly for the same one."""
        if not self._iterations.maxlen:
            return
        self.recording = True
        if not self._iterations or self._iterations[-1].number != iteration:
            self._iterations.append(_Iteration(iteration))

    def pause(self) -> None:
        """Stop recording until the next call of :meth:`start_iteration`."""
        self.recording = False

    def enter(self, layers: Sequence[int], direction: Direction, *, ahead: Sequence[int] = ()) -> None:
        self.layers, self.direction, self.layers_ahead = layers, direction, ahead
        if self.recording:
            self._iterations[-1].num_passes += 1

    @contextmanager
    def on_stream(self, lane: str, stage: Stage, stream: torch.cuda.Stream) -> Iterator[None]:
        """Time a stage by events on its stream."""
        if not self.recording:
            yield
            return
        begin = _recorded(stream)
        if self._iterations[-1].origin is None:
            self._iterations[-1].origin = (time.perf_counter(), begin)
        yield
        self.add(lane, stage, begin, _recorded(stream))

    def add(self, lane: str, stage: Stage, begin: Timestamp, end: Timestamp) -> None:
        """Record a stage that was timed by the caller."""
        if self.recording:
            direction = Direction.FORWARD if stage.ahead else self.direction
            layer = (self.layers_ahead if stage.ahead else self.layers)[stage.layer]
            kept = self._iterations[-1]
            span = functools.partial(
                StageSpan, lane, stage.name, direction.value, layer, kept.number, ahead=stage.ahead
            )
            kept.marks.append(_Mark((direction, kept.num_passes), begin, end, span))

    def timeline(self, *, rank: int, labels: dict[str, str], iteration: int | None = None) -> Timeline:
        """The timeline of one iteration, or of all recorded ones. On CUDA this waits for the device."""
        spans = [
            mark.span(_microseconds(mark.begin, kept), _microseconds(mark.end, kept))
            for kept in self._iterations
            if iteration in (None, kept.number)
            for mark in kept.marks
        ]
        return Timeline(rank=rank, spans=tuple(sorted(spans, key=lambda span: span.begin_us)), labels=labels)

    def pass_times_us(self, iteration: int) -> dict[Direction, list[float]]:
        """Microseconds from the first stage's start to the last one's end, for every pass of an iteration.

        On CUDA this waits for the device.
        """
        moments: defaultdict[tuple[Direction, int], list[float]] = defaultdict(list)
        for kept in self._iterations:
            for mark in kept.marks if kept.number == iteration else ():
                of_pass = moments[mark.of_pass]
                of_pass += _microseconds(mark.begin, kept), _microseconds(mark.end, kept)
        times: dict[Direction, list[float]] = {direction: [] for direction in Direction}
        for (direction, _), of_pass in moments.items():
            times[direction].append(max(of_pass) - min(of_pass))
        return times


def _recorded(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _microseconds(moment: Timestamp, kept: _Iteration) -> float:
    if isinstance(moment, float):
        return moment * 1e6
    assert kept.origin is not None
    seconds, origin = kept.origin
    return seconds * 1e6 + _elapsed_us(origin, moment)


class PassTimer:
    """Sums of the durations of passes, and a block's largest input shape, for ``--ampipe-degree auto``."""

    def __init__(self) -> None:
        self.measuring = False
        """Whether passes are timed. Shapes are always recorded."""
        self.shape = (0, 0)
        """Rows and batch of the largest input since :meth:`restart`, on this rank."""
        self._passes: list[tuple[Direction, Timestamp, Timestamp]] = []

    def restart(self) -> None:
        self.shape = (0, 0)
        self._passes.clear()

    def record_shape(self, rows: int, batch: int) -> None:
        self.shape = max(self.shape, (rows, batch))

    @contextmanager
    def timed(self, direction: Direction) -> Iterator[None]:
        if not self.measuring:
            yield
            return
        begin = self._now()
        yield
        self._passes.append((direction, begin, self._now()))

    def timed_layer(
        self, layer: Callable[[Tensor], tuple[Tensor, Tensor | None]], hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Call a layer that is not a schedule of stages with ``hidden [S, B, D]``, and time both passes."""
        if not (self.measuring and torch.is_grad_enabled()):
            return layer(hidden)
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        began: list[Timestamp] = []
        # Hooks, as a pipeline schedule of Megatron wants outputs that are not views.
        hidden.register_hook(lambda _: self._passes.append((Direction.BACKWARD, began.pop(), self._now())))
        with self.timed(Direction.FORWARD):
            output, context = layer(hidden)
        output.register_hook(lambda _: began.append(self._now()))
        return output, context

    def sum_us(self, direction: Direction) -> float:
        """Microseconds of all passes since :meth:`restart`; waits for the device if there is one."""
        return sum(_elapsed_us(begin, end) for one, begin, end in self._passes if one is direction)

    def _now(self) -> Timestamp:
        # The host platform replaces torch.cuda.Event but not is_available, which stays False without a GPU.
        return _recorded() if torch.cuda.is_available() else time.perf_counter()


def _elapsed_us(begin: Any, end: Any) -> float:
    if isinstance(begin, float):
        return (end - begin) * 1e6
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
