"""How the streams of a device are ordered in one pass, and how long memory that several use is kept.

The rule, which is stated only here:

    Memory that a call has used and that several streams use is kept until every stream that still has
    calls of this pass to run is ordered after that call.

Then the next allocation on any stream is ordered after the last use of the memory, for every valid schedule.
A stream without remaining calls allocates nothing more in this pass, and every pass begins and ends with all
streams ordered after each other. ``record_stream`` is not used, so memory is released at the same call in
every pass, no matter how far the host runs ahead of the device.

A function on what is known before the first batch: nothing is decided when a pass runs. Read by
:mod:`.cuda_executor`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What an executor does around each call of a pass.

    Attributes:
        waits: For each call the earlier ones whose events its stream waits for; waits that others imply are
            left out.
        records: Calls after which an event is recorded.
        releases: For each call the earlier ones whose memory is released before it is issued.
    """

    waits: tuple[tuple[int, ...], ...]
    records: frozenset[int]
    releases: tuple[tuple[int, ...], ...]


def stream_plan(streams: Sequence[str], needs: Sequence[Sequence[int]]) -> StreamPlan:
    """The plan of a pass.

    Args:
        streams: Of each call, in the order in which the host issues them.
        needs: For each call the earlier ones that must have ended before it runs.
    """
    left = Counter(streams)
    # For each stream how many calls of every stream are ordered before its next one.
    after: dict[str, Counter[str]] = {stream: Counter() for stream in left}
    marks: list[tuple[str, int, Counter[str]]] = []
    waits: list[tuple[int, ...]] = []
    releases: list[tuple[int, ...]] = []
    kept: list[int] = []
    for stream, needed in zip(streams, needs, strict=True):
        known, waited = after[stream], []
        for number in needed:
            of, place, before = marks[number]
            if known[of] < place:
                waited.append(number)
                known |= before
        after[stream] = known
        waits.append(tuple(waited))
        busy = [other for other, count in left.items() if count]
        released = [
            number
            for number in kept
            if all(after[other][marks[number][0]] >= marks[number][1] for other in busy)
        ]
        releases.append(tuple(released))
        kept = [number for number in kept if number not in released]
        kept.append(len(marks))
        left[stream] -= 1
        known[stream] += 1
        marks.append((stream, known[stream], known.copy()))
    return StreamPlan(tuple(waits), frozenset(number for found in waits for number in found), tuple(releases))
