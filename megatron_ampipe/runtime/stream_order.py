"""Which work of one stream comes after which work of another, and what must be kept until it does.

The one place that states when memory that several streams use may be released:

    What a stage has used that crosses streams is kept until every stream that still has a stage of this
    pass to run is ordered after that stage.

Then whichever stream made the memory, its next allocation is ordered after the last use, in every order
that a checked schedule can have. A stream without stages left allocates nothing more in this pass, and every
pass begins and ends with all streams in order. There is no ``record_stream``: memory comes back at the same
stage in every pass, however far the host runs ahead of the device. Pure bookkeeping; called by
:mod:`.cuda_executor`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of one stage.

    Attributes:
        stream: Where it ran.
        number: Its position among the stages of that stream, from 1.
        after: By stream, how many of its stages come before this end.
    """

    stream: str
    number: int
    after: Mapping[str, int]


class StreamOrder:
    """What the host knows of the order of the streams in one pass.

    Args:
        streams: The stream of every stage that will be issued.
    """

    def __init__(self, streams: Iterable[str]) -> None:
        self._left = Counter(streams)
        self._after: dict[str, dict[str, int]] = {stream: {stream: 0} for stream in self._left}
        self._kept: list[tuple[Mark, object]] = []

    def is_after(self, stream: str, mark: Mark) -> bool:
        """Whether what is issued to the stream next runs after that end."""
        return self._after[stream].get(mark.stream, 0) >= mark.number

    def wait(self, stream: str, mark: Mark) -> None:
        """The stream was told to wait for that end."""
        known = self._after[stream]
        for other, number in mark.after.items():
            known[other] = max(known.get(other, 0), number)

    def issue(self, stream: str) -> Mark:
        """One more stage was issued to the stream."""
        self._left[stream] -= 1
        known = self._after[stream]
        known[stream] += 1
        return Mark(stream, known[stream], dict(known))

    def keep(self, mark: Mark, memory: object) -> None:
        """Keep a reference to what a stage has used."""
        self._kept.append((mark, memory))

    def release(self) -> None:
        """Drop every reference that the rule does not ask for any more."""
        busy = [stream for stream, left in self._left.items() if left]
        self._kept = [
            (mark, memory)
            for mark, memory in self._kept
            if any(not self.is_after(stream, mark) for stream in busy)
        ]
