"""How the streams of a device are ordered in one pass, and how long memory that several use is kept.

When the host releases a tensor, torch's caching allocator may reuse its memory for the next allocation on the
stream that allocated it, even if other streams still use it, as they do what collectives read and write. The
rule, which is stated only here:

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
    """The earlier calls whose events its stream waits for, without those that others imply."""
    records: frozenset[int]
    """Calls after which an event is recorded."""
    releases: tuple[tuple[int, ...], ...]
    """The earlier calls whose memory is released before it is issued."""


def stream_plan(streams: Sequence[str], needs: Sequence[Sequence[int]]) -> StreamPlan:
    """The plan of calls on these streams, in issue order, each with the earlier ones that must have ended."""
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
    return StreamPlan(tuple(waits), frozenset(number for found in waits for number in found), tuple(releases))


class Crossing:
    """The memory that collectives have read or written in one forward pass and its backward, reported to an
    executor call by call.

    By storage, so that views are found as well. References are weak: what no graph has saved is freed.
    """

    def __init__(self) -> None:
        self._communicated: dict[int, StorageWeakRef] = {}
        self._used: list[UntypedStorage] = []

    def note_transfer(self, tensors: Iterable[Tensor]) -> None:
        """The current stage is a collective that reads or writes these tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._communicated[storage._cdata] = StorageWeakRef(storage)
            self._used.append(storage)

    def note_use(self, tensors: Iterable[Tensor | None]) -> tuple[StorageWeakRef, ...]:
        """The current stage computes with these tensors; those that a collective has used are returned."""
        found = []
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            reference = self._communicated.get(storage._cdata)
            if reference is not None:
                self._used.append(storage)
                found.append(reference)
        return tuple(found)

    def note_backward(self, references: Sequence[StorageWeakRef]) -> None:
        """The current stage runs the backward of a stage that used these, releasing its graph."""
        for reference in references:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                self._used.append(storage)

    def take(self) -> list[UntypedStorage]:
        """Return and forget what the current stage has used."""
        used, self._used = self._used, []
        return used
