"""Simulates a schedule, and computes a lower bound over all orders, from the time of each stage alone.

:func:`run` computes the start and end of every stage, as a run records them. A lane runs its stages in order,
and a stage begins when its dependencies have ended. Concurrent computation and communication slow each other
down, and lanes with the same resource share it, so speeds change when a stage begins or ends. Where a host
issues stages to a device (``host.issue`` above zero), a stage cannot begin before it was issued, in the order
of ``schedule.issue_order``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from megatron_ampipe.plan.cluster import Overlap
from megatron_ampipe.schedule import BlockFeatures, Direction, Program, Schedule, Stage, needs_of, stream_of
from megatron_ampipe.schedule.program import read_by_host
from megatron_ampipe.schedule.stage_kind import COMPUTE, COMPUTE_LANE, StageKind

NOT_YET = float("inf")
ROUNDING_US = 1e-6
"""Remaining time below which a stage has ended."""

Lanes = tuple[tuple[int, ...], ...]
"""The order of the stages of each lane."""
Needs = Mapping[Stage, tuple[Stage, ...]]
"""The direct dependencies of every stage (:func:`megatron_ampipe.schedule.needs_of`)."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program whose stages are numbered, so that it can be simulated many times.

    For each stage: its direct dependencies (``needs``), the stages that directly depend on it
    (``followers``), whether it is a transfer (``communicates``), the stage that the host waits for before it
    issues the stage, or -1 (``host_needs``), and the number of its resource if several lanes use that, else
    -1 (``contended``). Lanes have a name and stages in order; the compute lane comes first. ``streams`` are
    the stages of each stream of a device (``schedule.stream_of``), last first. ``issued`` is the order in
    which a host issues stages to a device, and ``positions`` each stage's place in it.
    """

    stages: tuple[Stage, ...]
    needs: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    communicates: tuple[bool, ...]
    host_needs: tuple[int, ...]
    contended: tuple[int, ...]
    lanes: tuple[tuple[str, tuple[int, ...]], ...]
    streams: Lanes = ()
    issued: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()

    def _issue_order(self, lanes: Lanes) -> list[int]:
        """``schedule.program.merge_lanes`` of these lanes, with the host's waits; it ends if lanes deadlock.

        A search asks for thousands of orders, so this is one loop with few calls.
        """
        followers, host_needs, stages = self.followers, self.host_needs, self.stages
        missing = list(map(len, self.needs))
        compute = next((place for place, (name, _) in enumerate(self.lanes) if name == COMPUTE), -1)
        places, lengths = [0] * len(lanes), list(map(len, lanes))
        order: list[int] = []
        postponed: set[int] = set()

        def issue(lane: int) -> int:
            stage = lanes[lane][places[lane]]
            places[lane] += 1
            order.append(stage)
            for follower in followers[stage]:
                missing[follower] -= 1
            return stage

        while True:
            ready = []
            computes = False
            for lane, place in enumerate(places):
                if place < lengths[lane] and not missing[lanes[lane][place]]:
                    if lane == compute:
                        computes = True
                    else:
                        ready.append(lane)
            if not ready:
                if not computes:
                    return order
                issue(compute)
                continue
            for lane in ready:
                head = lanes[lane][places[lane]]
                if host_needs[head] >= 0 and head not in postponed:
                    postponed.add(head)
                    # The next compute stage that is long enough keeps the device busy during the wait.
                    while (place := places[compute]) < lengths[compute] and not missing[
                        lanes[compute][place]
                    ]:
                        if stages[issue(compute)].kind.covers_wait:
                            break
                issue(lane)

    def in_order(self, lanes: Lanes, *, issued: bool = True) -> Compiled | None:
        """The same stages in another order of each lane; None if a host cannot issue them to a device."""
        named = tuple((name, order) for (name, _), order in zip(self.lanes, lanes, strict=True))
        if not issued:
            return replace(self, lanes=named, positions=(-1,) * len(self.stages))
        order = self._issue_order(lanes)
        if len(order) < len(self.stages):
            return None
        positions = [0] * len(order)
        for position, stage in enumerate(order):
            positions[stage] = position
        streams: dict[str, list[int]] = {}
        for name, stages in named:
            for stage in stages:
                streams.setdefault(stream_of(name, self.stages[stage]), []).append(stage)
        last_first = tuple(tuple(reversed(stages)) for stages in streams.values())
        return replace(self, lanes=named, streams=last_first, issued=tuple(order), positions=tuple(positions))


@functools.lru_cache(maxsize=512)
def compile_named(schedule: Schedule, layers: tuple[BlockFeatures, ...], direction: Direction) -> Compiled:
    """One direction of a schedule. Cached, because a search uses the same schedules repeatedly."""
    return compile_program(schedule.program(direction), needs_of(schedule, layers, direction))


def compile_program(program: Program, needs: Needs) -> Compiled:
    """Number the stages of a checked program."""
    stages = program.stages
    number = {stage: index for index, stage in enumerate(stages)}
    followers: list[list[int]] = [[] for _ in stages]
    for stage, earlier in needs.items():
        for needed in earlier:
            followers[number[needed]].append(number[stage])
    lanes = tuple((lane, tuple(number[stage] for stage in order)) for lane, order in program.lanes)
    compiled = Compiled(
        stages=stages,
        needs=tuple(tuple(number[needed] for needed in needs[stage]) for stage in stages),
        followers=tuple(map(tuple, followers)),
        communicates=tuple(stage.is_communication for stage in stages),
        host_needs=tuple(
            -1 if (counts := read_by_host(stage, needs)) is None else number[counts] for stage in stages
        ),
        contended=contention(lanes, stages),
        lanes=lanes,
    ).in_order(tuple(order for _, order in lanes))
    assert compiled is not None, "the program was not checked"
    return compiled


def contention(lanes: Sequence[tuple[str, Sequence[int]]], stages: Sequence[Stage]) -> tuple[int, ...]:
    """For each stage, the number of its resource if several lanes use that, else -1.

    The compute lane does not count, because a transfer in it does not overlap with computation.
    """
    resources = [stage.kind.lane.resource for stage in stages]
    users: dict[str, set[str]] = {}
    for lane, numbers in lanes:
        for number in numbers:
            users.setdefault(resources[number], set()).add(lane)
    shared = [resource for resource, names in users.items() if len(names - {COMPUTE}) > 1]
    return tuple(shared.index(resource) if resource in shared else -1 for resource in resources)


@dataclass(frozen=True, slots=True)
class TimedProgram:
    """A program with all that its times depend on.

    Attributes:
        compiled: The program.
        durations: The time of each stage alone.
        issue_us: The host's time to issue each stage; None for training on the CPU.
        overlap: How much concurrent lanes slow each other down. The latency is at most the rest of the
            computation during which a collective begins.
    """

    compiled: Compiled
    durations: Sequence[float]
    issue_us: Sequence[float] | None
    overlap: Overlap

    def in_order(self, lanes: Lanes) -> TimedProgram | None:
        """See :meth:`Compiled.in_order`."""
        compiled = self.compiled.in_order(lanes, issued=self.issue_us is not None)
        if compiled is None:
            return None
        return TimedProgram(compiled, self.durations, self.issue_us, self.overlap)

    @property
    def end_us(self) -> float:
        """When the last stage ends."""
        return max(run(self)[1])

    @property
    def least_us(self) -> float:
        """A lower bound of :attr:`end_us` over all orders, with slowdown and the host's time."""
        times: dict[str, float] = {}
        for stage, duration in zip(self.compiled.stages, self.durations, strict=True):
            resource = resource_of(stage.kind, on_device=self.issue_us is not None)
            times[resource] = times.get(resource, 0.0) + duration
        issue_us = sum(self.issue_us or ())
        return max(self.bound_us, least_time_us(times, issue_us, self.overlap))

    @property
    def bound_us(self) -> float:
        """A lower bound over all orders of its stages, without slowdown between lanes."""
        stages, needs = self.compiled.stages, self.compiled.needs
        return direction_bound(
            dict(zip(stages, self.durations, strict=True)),
            {stage: tuple(stages[other] for other in needs[place]) for place, stage in enumerate(stages)},
            on_device=self.issue_us is not None,
        )


def run(timed: TimedProgram) -> tuple[list[float], list[float]]:
    """Compute the start and end of each stage, in the unit of the durations.

    They are infinite for stages that never run because lanes deadlock. One loop with few calls: it runs
    several hundred times in every search.
    """
    compiled, durations, issue_us = timed.compiled, timed.durations, timed.issue_us
    compute_slowdown = timed.overlap.compute_slowdown
    communication_slowdown, latency_us = timed.overlap.communication_slowdown, timed.overlap.latency_us
    waiting = list(map(len, compiled.needs))
    followers, communicates = compiled.followers, compiled.communicates
    begin, end = [0.0] * len(durations), [NOT_YET] * len(durations)
    # By lane: its remaining stages, last first; the running stage, or -1; and the remaining time of that.
    queues = [list(order) for order in compiled.streams]
    if issue_us is None:
        queues = [list(order[::-1]) for _, order in compiled.lanes]
    current, left = [-1] * len(queues), [0.0] * len(queues)
    lanes, slowness = range(len(queues)), [1.0] * len(queues)
    slows = compute_slowdown > 1.0 or communication_slowdown > 1.0
    contended = compiled.contended
    contends = max(contended, default=-1) >= 0
    issued, positions, host_needs = compiled.issued, compiled.positions, compiled.host_needs
    # Stages before this position have been issued; all of them for training on the CPU.
    num_issued, issued_at = len(issued), 0.0
    if issue_us is not None:
        num_issued, issued_at = 0, issue_us[issued[0]]
    now, remaining = 0.0, len(durations)
    while remaining:
        next_event = NOT_YET
        while num_issued < len(issued):
            assert issue_us is not None
            stage = issued[num_issued]
            needed = host_needs[stage]
            if needed >= 0:
                # The host blocks until the counts have arrived, and then needs the time to issue the stage.
                if end[needed] == NOT_YET:
                    break
                issued_at = max(issued_at, end[needed] + issue_us[stage])
            if issued_at > now:
                next_event = issued_at
                break
            num_issued += 1
            if num_issued < len(issued):
                issued_at += issue_us[issued[num_issued]]
        computing, transferring = 0.0, False
        for lane in lanes:
            stage = current[lane]
            if stage < 0:
                queue = queues[lane]
                if not queue or waiting[queue[-1]] or positions[queue[-1]] >= num_issued:
                    continue
                stage = current[lane] = queue.pop()
                left[lane], begin[stage] = durations[stage], now
                if communicates[stage] and durations[stage]:
                    # The compute lane comes first, so its stage is known.
                    left[lane] += min(latency_us, computing)
            # Without max(): its calls took a tenth of a search.
            if communicates[stage]:
                transferring = True
            elif left[lane] > computing:
                computing = left[lane]
        slow_compute = slow_communication = 1.0
        if slows and computing and transferring:
            slow_compute, slow_communication = compute_slowdown, communication_slowdown
        if contends:
            users = Counter(contended[stage] for stage in current if stage >= 0)
        for lane in lanes:
            stage = current[lane]
            if stage >= 0:
                slow = slow_communication if communicates[stage] else slow_compute
                if contends and contended[stage] >= 0:
                    slow *= users[contended[stage]]
                slowness[lane] = slow
                done_at = now + left[lane] * slow
                if done_at < next_event:
                    next_event = done_at
        if next_event == NOT_YET:
            break
        step, now = next_event - now, next_event
        for lane in lanes:
            stage = current[lane]
            if stage >= 0:
                left[lane] -= step / slowness[lane]
                if left[lane] <= ROUNDING_US:
                    end[stage] = now
                    current[lane] = -1
                    remaining -= 1
                    for follower in followers[stage]:
                        waiting[follower] -= 1
    return begin, end


def resource_of(kind: StageKind, *, on_device: bool) -> str:
    """What only one stage at a time uses: on a device, results that the host reads have a separate stream."""
    return f"{kind.lane.resource} {kind}" if on_device and kind.host_reads else kind.lane.resource


def least_time_us(times: Mapping[str, float], issue_us: float, overlap: Overlap) -> float:
    """The least time of any program whose stages take these times on each resource.

    While computation and a transfer overlap, both are slower. If they overlap for a time ``o``, computation
    ``c`` and transfer ``t`` take ``(c - o / compute_slowdown) + o + (t - o / communication_slowdown)``.

    Args:
        times: By resource (``Lane.resource``), the sum of the times of its stages.
        issue_us: The sum of the host's times to issue them, one after another.
        overlap: How much concurrent lanes slow each other down.
    """
    compute_us, least_us = times.get(COMPUTE_LANE.resource, 0.0), issue_us
    saved = 1 / overlap.compute_slowdown + 1 / overlap.communication_slowdown - 1
    for resource, time_us in times.items():
        if resource == COMPUTE_LANE.resource:
            least_us = max(least_us, compute_us)
            continue
        overlapped_us = min(compute_us * overlap.compute_slowdown, time_us * overlap.communication_slowdown)
        least_us = max(least_us, time_us, compute_us + time_us - max(0.0, saved) * overlapped_us)
    return least_us


def direction_bound(times: Mapping[Stage, float], needs: Needs, *, on_device: bool = False) -> float:
    """A lower bound of the time of one direction over all orders, from the time of every stage alone.

    Stages that use the same processor or link run one after another (``Lane.resource``). Before the first of
    them, its dependencies must run; after the last, the stages that depend on it; the least of each is added.
    Compute stages that depend on a transfer, and those that a transfer depends on, also give bounds:
    without enough other stages, the lane is idle.

    Times must be of stages that run alone, without waits for a peer, slowdown by overlap, or waits of a GPU
    for its host. ``on_device`` says whether lanes are streams of a device (``schedule.stream_of``).
    """
    assert times.keys() == needs.keys(), times.keys() ^ needs.keys()
    followers: dict[Stage, list[Stage]] = {stage: [] for stage in needs}
    for stage, earlier in needs.items():
        for needed in earlier:
            followers[needed].append(stage)
    order = list(TopologicalSorter(needs).static_order())
    before, fed = _towards_end(times, needs, order)
    after, feeding = _towards_end(times, followers, order[::-1])
    computing = {stage for stage in times if not stage.is_communication}
    in_turn = [computing, computing & fed, computing & feeding, computing & fed & feeding]
    link_of = {stage: resource_of(stage.kind, on_device=on_device) for stage in times.keys() - computing}
    in_turn += ({stage for stage in link_of if link_of[stage] == link} for link in {*link_of.values()})
    return max(
        *(before[stage] + times[stage] for stage in times),
        *(
            min(map(before.__getitem__, stages))
            + sum(map(times.__getitem__, stages))
            + min(map(after.__getitem__, stages))
            for stages in in_turn
            if stages
        ),
    )


def _towards_end(
    times: Mapping[Stage, float], edges: Mapping[Stage, Iterable[Stage]], order: Iterable[Stage]
) -> tuple[dict[Stage, float], set[Stage]]:
    """The longest chain along ``edges`` from each stage, and the stages whose chains contain a transfer.

    ``order`` has each stage after the stages that its edges lead to.
    """
    longest: dict[Stage, float] = {}
    with_transfer: set[Stage] = set()
    for stage in order:
        longest[stage] = max((times[other] + longest[other] for other in edges[stage]), default=0.0)
        if any(other.is_communication or other in with_transfer for other in edges[stage]):
            with_transfer.add(stage)
    return longest, with_transfer
