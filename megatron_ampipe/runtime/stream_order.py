"""Tracks how CUDA streams are ordered, and keeps memory that several streams use until it may be released.

The rule, which is stated only here:

    Memory that a stage has used and that several streams use is kept until every stream that still has
    stages of this pass to run is ordered after that stage.

Then the next allocation on any stream is ordered after the last use of the memory, for every valid schedule.
A stream without remaining stages allocates nothing more in this pass, and every pass begins and ends with all
streams ordered after each other. ``record_stream`` is not used, so memory is released at the same stage in
every pass, no matter how far the host runs ahead of the device. Pure bookkeeping, without torch; called by
:mod:`.cuda_executor`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageEnd:
    """The end of one stage.

    Attributes:
        stream: The stream on which it ran.
        number: Its position among the stages of that stream, from 1.
        after: For each stream, how many of its stages are ordered before this end.
    """

    stream: str
    number: int
    after: Mapping[str, int]


class StreamOrder:
    """What the host knows about the order of the streams in one pass.

    Args:
        streams: The stream of every stage that will be issued.
    """

    def __init__(self, streams: Iterable[str]) -> None:
        self._left = Counter(streams)
        self._after: dict[str, dict[str, int]] = {stream: {stream: 0} for stream in self._left}
        self._kept: list[tuple[StageEnd, object]] = []

    def is_after(self, stream: str, mark: StageEnd) -> bool:
        """Whether the next work issued to the stream runs after that end."""
        return self._after[stream].get(mark.stream, 0) >= mark.number

    def wait(self, stream: str, mark: StageEnd) -> None:
        """Record that the stream was made to wait for that end."""
        known = self._after[stream]
        for other, number in mark.after.items():
            known[other] = max(known.get(other, 0), number)

    def issue(self, stream: str) -> StageEnd:
        """Record that one more stage was issued to the stream."""
        self._left[stream] -= 1
        known = self._after[stream]
        known[stream] += 1
        return StageEnd(stream, known[stream], dict(known))

    def keep(self, mark: StageEnd, memory: object) -> None:
        """Keep a reference to memory that a stage has used."""
        self._kept.append((mark, memory))

    def release(self) -> None:
        """Drop every reference that the rule no longer requires."""
        busy = [stream for stream, left in self._left.items() if left]
        self._kept = [
            (mark, memory)
            for mark, memory in self._kept
            if any(not self.is_after(stream, mark) for stream in busy)
        ]
