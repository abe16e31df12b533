"""Orders the streams of a device in one pass, and says how long memory that several streams use is kept.

When the host releases a tensor, torch's caching allocator may reuse its memory for the next allocation on the
stream that allocated it, even if other streams still use it, as with the tensors of collectives. The rule,
which is stated only here:

    Memory that a call has used and that several streams use is kept until every stream that still has
    calls of this pass to run is ordered after that call.

Then the next allocation on any stream is ordered after the last use of the memory, for every valid schedule.
A stream without remaining calls allocates nothing more in this pass, and every pass begins and ends with all
streams ordered after each other. Unlike ``record_stream``, this releases memory at one call in every pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What an executor does around each call of a pass."""

    waits: tuple[tuple[int, ...], ...]
    """For each call, the earlier calls whose events its stream waits for, without redundant ones."""
    records: frozenset[int]
    """Calls after which an event is recorded."""
    releases: tuple[tuple[int, ...], ...]
    """For each call, the earlier calls whose memory is released before it is issued."""


def stream_plan(streams: Sequence[str], needs: Sequence[Sequence[int]]) -> StreamPlan:
    """The plan for calls in issue order, given the stream of each and the earlier calls that it needs."""
    left = Counter(streams)
    # For each stream, how many calls of every stream are ordered before its next call.
    after: dict[str, Counter[str]] = {stream: Counter() for stream in left}
    marks: list[tuple[str, int, Counter[str]]] = []
    waits: list[tuple[int, ...]] = []
    releases: list[tuple[int, ...]] = []
    kept: list[int] = []
    for stream, needed in zip(streams, needs, strict=True):
        known, waited = after[stream], []
        for number in needed:
            needed_stream, place, before = marks[number]
            if known[needed_stream] < place:
                waited.append(number)
                known |= before
        after[stream] = known
        waits.append(tuple(waited))
        busy = [after[other] for other, count in left.items() if count]
        released = [
            number
            for number in kept
            if all(ordered[marks[number][0]] >= marks[number][1] for ordered in busy)
        ]
        releases.append(tuple(released))
        kept = [number for number in kept if number not in released]
        kept.append(len(marks))
        left[stream] -= 1
        known[stream] += 1
        marks.append((stream, known[stream], known.copy()))
    return StreamPlan(tuple(waits), frozenset(number for call in waits for number in call), tuple(releases))


class CommMemory:
    """Records the memory that collectives read or write in one forward pass and its backward, and reports to
    an executor which of it each call uses.

    Tracks storages, so views count as well. References are weak, so memory that no graph saves is freed.
    """

    def __init__(self) -> None:
        self._communicated: dict[int, StorageWeakRef] = {}
        self._used: list[UntypedStorage] = []

    def record_transfer(self, tensors: Iterable[Tensor]) -> None:
        """Record that the current stage is a collective that reads or writes these tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._communicated[storage._cdata] = StorageWeakRef(storage)
            self._used.append(storage)

    def record_use(self, tensors: Iterable[Tensor | None]) -> tuple[StorageWeakRef, ...]:
        """Record that the current stage computes with these tensors; returns those that collectives use."""
        comm_memory = []
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            reference = self._communicated.get(storage._cdata)
            if reference is not None:
                self._used.append(storage)
                comm_memory.append(reference)
        return tuple(comm_memory)

    def record_backward(self, references: Sequence[StorageWeakRef]) -> None:
        """Record that the current stage runs the backward of a stage that used these tensors."""
        for reference in references:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                self._used.append(storage)

    def take(self) -> list[UntypedStorage]:
        """Return the memory that the current stage has used, and forget it."""
        used, self._used = self._used, []
        return used
