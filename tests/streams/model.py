"""A model of CUDA streams, events and the host with vector clocks, to check the order between streams.

Replacements for ``torch.cuda.Stream`` and ``torch.cuda.Event``. They order nothing in time, because on a CPU
every operation has finished when its call returns, but they record what a GPU would guarantee: which
operation of one stream is ordered after which operation of another. Used by :mod:`.tracker`.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

Clock = Counter[int]
"""For each stream, how many of its operations come before. The union of two is after both."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """One operation: the ``position``-th of a stream, counted from 1."""

    stream: int
    position: int


class ModelStream:
    """A stream: a clock that its operations advance, and into which a wait merges another clock."""

    made: ClassVar[list[ModelStream]] = []

    def __init__(self, device: Any = None, priority: int = 0, *, name: str = "", **_: Any) -> None:
        self.number = len(ModelStream.made)
        self.name = name or f"stream {self.number}"
        self.priority = priority
        self.inside_a_call = False
        self.clock = Clock()
        ModelStream.made.append(self)

    def launch(self) -> Stamp:
        """Add one operation, ordered after everything that the host has waited for."""
        self.clock |= HOST.clock
        self.clock[self.number] += 1
        return Stamp(self.number, self.clock[self.number])

    def is_after(self, stamp: Stamp) -> bool:
        """Whether the next operation is ordered after that one."""
        return max(self.clock[stamp.stream], HOST.clock[stamp.stream]) >= stamp.position

    def wait_stream(self, other: ModelStream) -> None:
        DEVICE.note("wait")
        self.clock |= other.clock

    def wait_event(self, event: ModelEvent) -> None:
        DEVICE.note("wait")
        self.clock |= event.clock

    def record_event(self, event: ModelEvent | None = None) -> ModelEvent:
        event = event or ModelEvent()
        event.record(self)
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, -5)


class ModelEvent:
    """An event: the clock of the stream when it was recorded; empty before."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock = Clock()

    def record(self, stream: ModelStream | None = None) -> None:
        stream = stream or DEVICE.current
        if not stream.inside_a_call:
            DEVICE.note("record")
        stream.clock |= HOST.clock
        self.clock = stream.clock.copy()

    def synchronize(self) -> None:
        HOST.waits_for(self.clock, "Event.synchronize")


@dataclass(slots=True)
class Host:
    """The host: the operations that it knows to be complete, and its waits, each with stage and call."""

    clock: Clock = field(default_factory=Clock)
    waits: list[tuple[str, str]] = field(default_factory=list)

    def waits_for(self, clock: Clock, call: str) -> None:
        """Block until these operations are complete."""
        self.waits.append((DEVICE.stage, call))
        self.clock |= clock


class Device:
    """The state of the device: the current stream, the stage that is being issued, and counters.

    Attributes:
        current: The current stream.
        stage: Direction and name of the stage that is being issued; "" if there is none.
        issued: For each stage, the number of device calls of each kind.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As in a fresh process."""
        ModelStream.made.clear()
        self.default = self.current = ModelStream(name="compute")
        self.stage = ""
        self.issued: dict[str, Counter[str]] = defaultdict(Counter)

    def note(self, kind: str) -> None:
        """Count one device call of the host; work inside NCCL is not counted."""
        if not self.current.inside_a_call:
            self.issued[self.stage][kind] += 1

    @contextlib.contextmanager
    def using(self, stream: ModelStream | None) -> Iterator[None]:
        """As ``torch.cuda.stream``."""
        before = self.current
        self.current = stream or before
        try:
            yield
        finally:
            self.current = before


HOST = Host()
DEVICE = Device()


def reset() -> None:
    """Reset to a device on which nothing has run."""
    HOST.clock.clear()
    HOST.waits.clear()
    DEVICE.reset()
