"""Runs a schedule on paper: when every stage begins and ends, from how long each takes alone.

The schedule is the value that an executor runs, and the result is the timeline that a run records. Lanes
run their stages in order, and a stage begins when all it needs is done. Computation and communication slow
each other while both run, and lanes of one resource share it, so rates change as stages begin and end. Where
a host runs ahead of a device (``host.issue`` above zero), a stage cannot begin before it was issued, in the
order of ``schedule.issue_order``. Called by :mod:`.search` some hundred times per plan.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ampipe.schedule import (
    BlockFeatures,
    Direction,
    Program,
    Schedule,
    Stage,
    issue_order,
    needs_of,
    stream_of,
)
from megatron_ampipe.schedule.issue import read_by_host
from megatron_ampipe.schedule.kinds import COMPUTE

NOT_YET = float("inf")
ROUNDING_US = 1e-6
"""What may be left of a stage that is done."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program with numbers for stages, so that it can be run many times.

    Attributes:
        stages: All stages; the numbers below are positions in here.
        lanes: For each lane its name and the stages it runs, in order.
        num_needs: For each stage how many must be done before.
        followers: For each stage those that wait for it.
        communicates: Whether a stage is a transfer rather than a computation.
        contended: For each stage the number of its resource where several lanes occupy that, else -1.
        reversed_lanes: For each lane the stages it runs, last first.
        reversed_streams: The same for each stream of a device (``schedule.stream_of``).
        issued: The order in which a host issues them that runs ahead of its device.
        positions: For each stage its place in that order.
        host_needs: For each stage the one that the host waits for before issuing it, or -1.
    """

    stages: tuple[Stage, ...]
    lanes: tuple[tuple[str, tuple[int, ...]], ...]
    num_needs: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    communicates: tuple[bool, ...]
    contended: tuple[int, ...]
    reversed_lanes: tuple[tuple[int, ...], ...]
    reversed_streams: tuple[tuple[int, ...], ...]
    issued: tuple[int, ...]
    positions: tuple[int, ...]
    host_needs: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def compile_named(schedule: Schedule, features: BlockFeatures, direction: Direction) -> Compiled:
    """One direction of a schedule, ready to run. Remembered, because a search comes back to few schedules."""
    return compile_program(schedule.program(direction), needs_of(schedule, features, direction))


def compile_program(program: Program, needs: Mapping[Stage, tuple[Stage, ...]]) -> Compiled:
    """Number the stages of a checked program."""
    stages = program.stages
    number = {stage: index for index, stage in enumerate(stages)}
    followers: list[list[int]] = [[] for _ in stages]
    for stage, earlier in needs.items():
        for needed in earlier:
            followers[number[needed]].append(number[stage])
    issued = [number[stage] for _, stage in issue_order(program, dict(needs), host_waits=True)]
    lanes = tuple((lane.lane, tuple(number[stage] for stage in lane.stages)) for lane in program.lanes)
    positions = [0] * len(stages)
    for position, index in enumerate(issued):
        positions[index] = position
    return Compiled(
        stages=stages,
        lanes=lanes,
        num_needs=tuple(len(needs[stage]) for stage in stages),
        followers=tuple(map(tuple, followers)),
        communicates=tuple(stage.is_communication for stage in stages),
        contended=contention(lanes, stages),
        reversed_lanes=tuple(order[::-1] for _, order in lanes),
        reversed_streams=streams_of(lanes, stages),
        issued=tuple(issued),
        positions=tuple(positions),
        host_needs=tuple(
            -1 if (counts := read_by_host(stage, needs)) is None else number[counts] for stage in stages
        ),
    )


def contention(lanes: Sequence[tuple[str, Sequence[int]]], stages: Sequence[Stage]) -> tuple[int, ...]:
    """For each stage the number of the resource that several lanes occupy, or -1.

    A transfer in the compute lane keeps no other lane from its resource: nothing is computed meanwhile.
    """
    users: dict[str, set[str]] = {}
    for lane, numbers in lanes:
        for number in numbers:
            users.setdefault(stages[number].kind.lane.resource, set()).add(lane)
    shared = [resource for resource, names in users.items() if len(names - {COMPUTE}) > 1]
    return tuple(
        shared.index(stage.kind.lane.resource) if stage.kind.lane.resource in shared else -1
        for stage in stages
    )


def streams_of(
    lanes: Sequence[tuple[str, Sequence[int]]], stages: Sequence[Stage]
) -> tuple[tuple[int, ...], ...]:
    """For each stream of a device the stages it runs, last first."""
    streams: dict[str, list[int]] = {}
    for lane, numbers in lanes:
        for number in numbers:
            streams.setdefault(stream_of(lane, stages[number]), []).append(number)
    return tuple(tuple(reversed(numbers)) for numbers in streams.values())


def run(
    compiled: Compiled,
    durations: Sequence[float],
    *,
    issue_us: Sequence[float] | None = None,
    latency_us: Sequence[float] | None = None,
    compute_slowdown: float = 1.0,
    communication_slowdown: float = 1.0,
    busy_latency_us: float = 0.0,
) -> tuple[list[float], list[float]]:
    """When each stage begins and ends.

    One loop without calls: it runs some hundred times in every search.

    Args:
        compiled: The program.
        durations: How long each stage takes alone.
        issue_us: The host's time to issue each stage; None where the host computes itself.
        latency_us: The part of each collective that passes while the one ahead of it still travels, if it
            was ready by then, and in which nothing is slowed; None where a collective begins only when the
            one ahead of it has ended.
        compute_slowdown: Factor on a computation while something travels.
        communication_slowdown: Factor on a collective while something computes.
        busy_latency_us: What a collective takes longer that begins while something is computed, at most up to
            the end of that.

    Returns:
        Begin and end of every stage, in the unit of the durations; infinite for stages that lanes which wait
        for each other never come to.
    """
    waiting = list(compiled.num_needs)
    followers, communicates = compiled.followers, compiled.communicates
    begin, end = [0.0] * len(durations), [NOT_YET] * len(durations)
    # By lane: what it still has to run, last first; the stage that runs, or -1; and how much of it is left.
    queues = list(map(list, compiled.reversed_lanes if issue_us is None else compiled.reversed_streams))
    current, left = [-1] * len(queues), [0.0] * len(queues)
    lanes, slowness = range(len(queues)), [1.0] * len(queues)
    ready_at, last_begin = [0.0] * len(durations), [0.0] * len(queues)
    slows = compute_slowdown > 1.0 or communication_slowdown > 1.0
    # By stage, in which share of its time something is on the wire.
    sending = [float(communicates[stage]) for stage in range(len(durations))]
    if latency_us is not None:
        sending = [
            share * max(0.0, 1.0 - latency / duration) if duration else 0.0
            for share, latency, duration in zip(sending, latency_us, durations, strict=True)
        ]
    contended = compiled.contended
    contends = max(contended, default=-1) >= 0
    issued, positions, host_needs = compiled.issued, compiled.positions, compiled.host_needs
    # Stages before this position have been issued. Without a host that runs ahead, all of them.
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
                # The host stands still until it knows the count; the time to issue runs from there.
                if end[needed] == NOT_YET:
                    break
                issued_at = max(issued_at, end[needed] + issue_us[stage])
            if issued_at > now:
                next_event = issued_at
                break
            num_issued += 1
            if num_issued < len(issued):
                issued_at += issue_us[issued[num_issued]]
        computing, travelling = 0.0, 0.0
        for lane in lanes:
            stage = current[lane]
            if stage < 0:
                queue = queues[lane]
                if not queue or waiting[queue[-1]] or positions[queue[-1]] >= num_issued:
                    continue
                stage = current[lane] = queue.pop()
                left[lane], begin[stage] = durations[stage], now
                if communicates[stage] and durations[stage]:
                    # The computing lanes come first: what they run is known. At its end they let others in.
                    latency = min(busy_latency_us, computing)
                    left[lane] += latency
                    if latency_us is not None:
                        # Begun behind the one ahead of it, in whose time its own latency has passed.
                        passed = now - max(ready_at[stage], last_begin[lane])
                        left[lane] = max(0.0, left[lane] - min(latency_us[stage] + latency, passed))
                last_begin[lane] = now
            # No calls of max() in here: they were a tenth of a search.
            if communicates[stage]:
                if sending[stage] > travelling:
                    travelling = sending[stage]
            elif left[lane] > computing:
                computing = left[lane]
        slow_compute = slow_communication = 1.0
        if slows and computing and travelling:
            slow_compute += (compute_slowdown - 1.0) * travelling
            slow_communication += (communication_slowdown - 1.0) * travelling
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
                        ready_at[follower] = now
    return begin, end
