"""Simulates a schedule, and computes a lower bound over all orders, from the time of each stage alone.

:func:`run` computes the start and end of every stage, as a run records them. A lane runs its stages in order,
and a stage begins when its dependencies have ended. Concurrent computation and communication slow each other
down, and lanes with the same resource share it, so speeds change when a stage begins or ends. Where a host
issues stages to a device (``host.issue`` above zero), a stage cannot begin before it was issued, in the order
of ``schedule.issue_order``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from megatron_ampipe.plan.cluster import Overlap
from megatron_ampipe.schedule import BlockFeatures, Direction, Program, Schedule, Stage, needs_of, stream_of
from megatron_ampipe.schedule.program import merge_numbered, read_by_host
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

    Attributes:
        stages: The stages, by number. All of the following up to ``contended`` have an entry for each stage.
        needs: Its direct dependencies.
        followers: The stages that directly depend on it.
        communicates: Whether it is a transfer.
        host_needs: The stage for whose result the host waits before it issues the stage, or -1.
        waits_before: Whether there is one.
        covers: Whether it is long enough to keep a device busy during such a wait.
        contended: The number of its resource if several lanes use that, else -1.
        lanes: Each lane's name and stages in order; the compute lane comes first.
        streams: The stages of each stream of a device (``schedule.stream_of``), last first.
        issued: The order in which a host issues stages to a device.
        positions: Each stage's place in ``issued``.
    """

    stages: tuple[Stage, ...]
    needs: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    communicates: tuple[bool, ...]
    host_needs: tuple[int, ...]
    waits_before: tuple[bool, ...]
    covers: tuple[bool, ...]
    contended: tuple[int, ...]
    lanes: tuple[tuple[str, tuple[int, ...]], ...]
    streams: Lanes = ()
    issued: tuple[int, ...] = ()
    positions: tuple[int, ...] = ()

    def in_order(self, lanes: Lanes, *, issued: bool = True) -> Compiled | None:
        """The same stages in another order of each lane; None if a host cannot issue them to a device."""
        named = tuple((name, order) for (name, _), order in zip(self.lanes, lanes, strict=True))
        if not issued:
            return replace(self, lanes=named, positions=(-1,) * len(self.stages))
        order = self._issue_order(lanes)
        if order is None:
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

    def _issue_order(self, lanes: Lanes) -> list[int] | None:
        """The order in which a host issues stages from these lanes to a device; None if they deadlock."""
        merged = merge_numbered(
            lanes,
            compute_lane=self._compute_lane,
            needs=self.needs,
            followers=self.followers,
            waits_before=self.waits_before,
            covers=self.covers,
        )
        if len(merged) < len(self.stages):
            return None
        return [stage for _, stage in merged]

    @property
    def _compute_lane(self) -> int | None:
        """The index of the compute lane, if there is one."""
        return next((index for index, (name, _) in enumerate(self.lanes) if name == COMPUTE), None)


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
    host_needs = []
    for stage in stages:
        counts = read_by_host(stage, needs)
        host_needs.append(-1 if counts is None else number[counts])
    compiled = Compiled(
        stages=stages,
        needs=tuple(tuple(number[needed] for needed in needs[stage]) for stage in stages),
        followers=tuple(map(tuple, followers)),
        communicates=tuple(stage.is_communication for stage in stages),
        host_needs=tuple(host_needs),
        waits_before=tuple(counts >= 0 for counts in host_needs),
        covers=tuple(stage.kind.covers_wait for stage in stages),
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
        host_waits: Whether the host waits for counts before it issues the stages that send rows.
    """

    compiled: Compiled
    durations: tuple[float, ...]
    issue_us: tuple[float, ...] | None
    overlap: Overlap
    host_waits: bool = True

    def in_order(self, lanes: Lanes) -> TimedProgram | None:
        """See :meth:`Compiled.in_order`."""
        compiled = self.compiled.in_order(lanes, issued=self.issue_us is not None)
        if compiled is None:
            return None
        return replace(self, compiled=compiled)

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

    They are infinite for stages that never run because lanes deadlock.

    From event to event: an event is the end of a stage, or its issue by the host. One loop with few calls,
    because a search runs it several thousand times.
    """
    compiled, durations = timed.compiled, timed.durations
    followers, communicates, contended = compiled.followers, compiled.communicates, compiled.contended
    positions, latency_us = compiled.positions, timed.overlap.latency_us
    num_stages = num_left = len(compiled.stages)
    begin = [0.0] * num_stages
    end = [NOT_YET] * num_stages
    # For each stage, the number of its dependencies that have not ended.
    num_awaited = list(map(len, compiled.needs))
    # For each lane (on a device: stream), its stages that have not begun, last first.
    queues = [list(reversed(order)) for _, order in compiled.lanes]
    host: _Host | None = None
    num_issued = num_stages
    if timed.issue_us is not None:
        queues = list(map(list, compiled.streams))
        host = _Host(compiled, timed.issue_us, waits=timed.host_waits)
        num_issued = 0
    lanes = range(len(queues))
    # For each lane, the stage that runs, or -1; how long it would still run if it ran alone; and the factor
    # by which others slow it down until the next event.
    running = [-1] * len(queues)
    left = [0.0] * len(queues)
    slowdown = [1.0] * len(queues)
    num_resources = 1 + max(contended, default=-1)
    now = 0.0
    while num_left:
        next_event = NOT_YET
        if host is not None and num_issued < num_stages:
            next_event = host.issue_until(now, end)
            num_issued = host.num_issued

        # Begin the next stage of every free lane if its dependencies have ended and it has been issued.
        busy: list[int] = []
        compute_left = 0.0
        transfers = False
        for lane in lanes:
            stage = running[lane]
            if stage < 0:
                queue = queues[lane]
                if not queue:
                    continue
                stage = queue[-1]
                if num_awaited[stage] or positions[stage] >= num_issued:
                    continue
                running[lane] = queue.pop()
                begin[stage] = now
                left[lane] = durations[stage]
                if communicates[stage] and durations[stage]:
                    # A collective begins later on a busy processor, at most when the computation has ended.
                    # The compute lane comes first, so its stage is known.
                    left[lane] += min(latency_us, compute_left)
            busy.append(lane)
            if communicates[stage]:
                transfers = True
            elif left[lane] > compute_left:
                compute_left = left[lane]

        # The running stages slow each other down until the next event.
        compute_slowdown = communication_slowdown = 1.0
        if transfers and compute_left > 0.0:
            compute_slowdown = timed.overlap.compute_slowdown
            communication_slowdown = timed.overlap.communication_slowdown
        for lane in busy:
            slowdown[lane] = communication_slowdown if communicates[running[lane]] else compute_slowdown
        if num_resources:
            users = [contended[running[lane]] for lane in busy]
            for lane, resource in zip(busy, users, strict=True):
                if resource >= 0:
                    slowdown[lane] *= users.count(resource)
        for lane in busy:
            lane_end = now + left[lane] * slowdown[lane]
            if lane_end < next_event:
                next_event = lane_end
        if next_event == NOT_YET:
            # Lanes wait for each other.
            break

        elapsed = next_event - now
        now = next_event
        for lane in busy:
            left[lane] -= elapsed / slowdown[lane]
            if left[lane] <= ROUNDING_US:
                stage = running[lane]
                running[lane] = -1
                end[stage] = now
                num_left -= 1
                for follower in followers[stage]:
                    num_awaited[follower] -= 1
    return begin, end


class _Host:
    """The host, which issues the stages of a program to a device, one after another.

    Attributes:
        num_issued: How many stages have been issued; all later stages of the issue order cannot begin yet.
        num_stages: How many there are.
    """

    def __init__(self, compiled: Compiled, issue_us: Sequence[float], *, waits: bool) -> None:
        self._order, self._issue_us = compiled.issued, issue_us
        self._host_needs = compiled.host_needs if waits else (-1,) * len(compiled.stages)
        self.num_issued, self.num_stages = 0, len(compiled.issued)
        self._issued_at = issue_us[compiled.issued[0]]

    def issue_until(self, now: float, end: Sequence[float]) -> float:
        """Issue what can be issued until ``now``.

        Args:
            now: The time.
            end: The end of each stage, infinite for those that have not ended.

        Returns:
            When the next stage will have been issued; infinite if there is none, or if the host waits for
            counts whose exchange has not ended.
        """
        order, issue_us = self._order, self._issue_us
        while self.num_issued < self.num_stages:
            stage = order[self.num_issued]
            counts = self._host_needs[stage]
            if counts >= 0:
                counts_end = end[counts]
                if counts_end == NOT_YET:
                    return NOT_YET
                # The host blocks until the counts have arrived, and then needs the time to issue the stage.
                if self._issued_at < counts_end + issue_us[stage]:
                    self._issued_at = counts_end + issue_us[stage]
            if self._issued_at > now:
                return self._issued_at
            self.num_issued += 1
            if self.num_issued < self.num_stages:
                self._issued_at += issue_us[order[self.num_issued]]
        return NOT_YET


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
