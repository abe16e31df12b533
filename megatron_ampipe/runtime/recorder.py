"""Records when stages start and end (``files.timeline.Timeline``), and how long passes take.

On CUDA, times are events that are read only on request, so recording does not synchronize the device.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ampipe.files.timeline import StageSpan, Timeline
from megatron_ampipe.schedule import Direction, Stage

Timestamp = float | torch.cuda.Event
"""Seconds of ``time.perf_counter``, or a CUDA event."""


class _Mark(NamedTuple):
    """The record of a stage that has run."""

    pass_key: tuple[Direction, int]
    begin: Timestamp
    end: Timestamp
    span: Callable[..., StageSpan]
    """Creates the stage's span from both times in microseconds."""


@dataclass(slots=True)
class _Iteration:
    """The stages of one training iteration; ``origin`` is the same moment on the host and on the device."""

    number: int
    is_repeat: bool = False
    marks: list[_Mark] = field(default_factory=list)
    num_passes: int = 0
    # One origin per iteration: a long time between two events loses precision.
    origin: tuple[float, torch.cuda.Event] | None = None


class Recorder:
    """Records the stages of the last ``num_iterations`` iterations; 0 records none."""

    def __init__(self, *, num_iterations: int = 0) -> None:
        self._iterations: deque[_Iteration] = deque(maxlen=num_iterations)
        self.recording = False
        """Whether stages that run now are recorded."""
        self.layers: Sequence[int] = (1,)
        """Layer numbers of the current pass."""
        self.layers_of_next_microbatch: Sequence[int] = ()
        """Layer numbers of the next micro-batch's forward pass, if it runs together with this pass."""
        self.direction = Direction.FORWARD
        """Direction of the current pass."""
        self.passes = PassTimer()
        """Times of whole passes, for ``--ampipe-degree auto``."""

    def start_iteration(self, iteration: int) -> None:
        """Start recording stages of this training iteration; may be called repeatedly for an iteration."""
        if not self._iterations.maxlen:
            return
        self.recording = True
        if not self._iterations or self._iterations[-1].number != iteration:
            self._iterations.append(_Iteration(iteration))

    def repeat_iteration(self) -> None:
        """What is recorded from now on is of a repeat of the current iteration, if that is recorded."""
        if self.recording:
            self._iterations.append(_Iteration(self._iterations[-1].number, is_repeat=True))

    def pause(self) -> None:
        """Stop recording until the next call of :meth:`start_iteration`."""
        self.recording = False

    def enter(self, layers: Sequence[int], direction: Direction, *, next_layers: Sequence[int] = ()) -> None:
        self.layers, self.direction, self.layers_of_next_microbatch = layers, direction, next_layers
        if self.recording:
            self._iterations[-1].num_passes += 1

    @contextmanager
    def on_stream(self, lane: str, stage: Stage, stream: torch.cuda.Stream) -> Iterator[None]:
        """Time a stage with events on its stream."""
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
            direction = Direction.FORWARD if stage.of_next_microbatch else self.direction
            layer = (self.layers_of_next_microbatch if stage.of_next_microbatch else self.layers)[stage.layer]
            current = self._iterations[-1]
            span = functools.partial(
                StageSpan,
                lane,
                stage.name,
                direction.value,
                layer,
                current.number,
                of_next_microbatch=stage.of_next_microbatch,
                of_repeat=current.is_repeat,
            )
            current.marks.append(_Mark((direction, current.num_passes), begin, end, span))

    def timeline(self, *, rank: int, labels: dict[str, str], iteration: int | None = None) -> Timeline:
        """The timeline of one iteration, or of all recorded ones. On CUDA this waits for the device."""
        spans = [
            mark.span(_microseconds(mark.begin, recorded), _microseconds(mark.end, recorded))
            for recorded in self._iterations
            if iteration in (None, recorded.number)
            for mark in recorded.marks
        ]
        return Timeline(rank=rank, spans=tuple(sorted(spans, key=lambda span: span.begin_us)), labels=labels)

    def pass_times_us(self, iteration: int) -> dict[Direction, list[float]]:
        """Microseconds from the start of the first stage to the end of the last, per pass of an iteration.

        On CUDA this waits for the device.
        """
        moments: defaultdict[tuple[Direction, int, bool], list[float]] = defaultdict(list)
        for recorded in self._iterations:
            for mark in recorded.marks if recorded.number == iteration else ():
                begin, end = _microseconds(mark.begin, recorded), _microseconds(mark.end, recorded)
                moments[*mark.pass_key, recorded.is_repeat] += begin, end
        times: dict[Direction, list[float]] = {direction: [] for direction in Direction}
        for (direction, _, _), pass_moments in moments.items():
            times[direction].append(max(pass_moments) - min(pass_moments))
        return times


def _recorded(stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _microseconds(moment: Timestamp, iteration: _Iteration) -> float:
    if isinstance(moment, float):
        return moment * 1e6
    assert iteration.origin is not None
    seconds, origin = iteration.origin
    return seconds * 1e6 + _elapsed_us(origin, moment)


class PassTimer:
    """Times passes and records the largest input shape of a block, for ``--ampipe-degree auto``."""

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
        """Call a layer that runs without a schedule on ``hidden [S, B, D]``, and time both passes."""
        if not (self.measuring and torch.is_grad_enabled()):
            return layer(hidden)
        if not hidden.requires_grad:
            hidden = hidden.detach().requires_grad_()
        began: list[Timestamp] = []
        # Hooks, not an autograd function: Megatron's pipeline schedules need outputs that are not views.
        hidden.register_hook(lambda _: self._passes.append((Direction.BACKWARD, began.pop(), self._now())))
        with self.timed(Direction.FORWARD):
            output, context = layer(hidden)
        output.register_hook(lambda _: began.append(self._now()))
        return output, context

    def sum_us(self, direction: Direction) -> float:
        """Microseconds of all passes in a direction since :meth:`restart`; waits for a device."""
        return sum(_elapsed_us(begin, end) for timed, begin, end in self._passes if timed is direction)

    def _now(self) -> Timestamp:
        # The host platform replaces torch.cuda.Event but not is_available, which stays False without a GPU.
        return _recorded() if torch.cuda.is_available() else time.perf_counter()


def _elapsed_us(begin: Timestamp, end: Timestamp) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return (end - begin) * 1e6
    assert not isinstance(begin, float) and not isinstance(end, float), "times of two clocks"
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds * 1e3
