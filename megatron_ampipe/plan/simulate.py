"""Runs a schedule on paper: when every stage begins and ends, from how long each takes alone.

The schedule is the value that an executor runs, and the result is the timeline that a run records. Lanes
run their stages in order, a stage begins when all it needs is done, and computation and communication slow
each other while both run, so rates change as stages begin and end. Where a host runs ahead of a device
(``host.issue`` above zero), a stage cannot begin before it was issued, in the order of
``schedule.issue_order``. Called by :mod:`.search` some hundred times per plan.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.cost import NOTHING, Pair
from megatron_ampipe.schedule import (
    BlockFeatures,
    Direction,
    Kind,
    Program,
    Schedule,
    Stage,
    dependencies,
    issue_order,
)
from megatron_ampipe.timeline import StageSpan, Timeline

NOT_YET = float("inf")
ROUNDING_US = 1e-6
"""What may be left of a stage that is done."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a simulation knows of the cluster.

    Attributes:
        compute_slowdown: Factor on a computation while something travels.
        communication_slowdown: Factor on a collective while something computes.
        issue: Microseconds in which the host issues one stage; zero where the host computes itself.
    """

    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0
    issue: Pair = NOTHING

    @classmethod
    def of(cls, cluster: Cluster) -> Machine:
        """That of a cluster file."""
        return cls(
            compute_slowdown=cluster.overlap.compute_slowdown,
            communication_slowdown=cluster.overlap.communication_slowdown,
            issue=Pair(cluster.host.issue.forward_us, cluster.host.issue.backward_us),
        )


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program with numbers for stages, so that it can be run many times.

    Attributes:
        stages: All stages; the numbers below are positions in here.
        lanes: For each lane its name and the stages it runs, in order.
        num_needs: For each stage how many must be done before.
        followers: For each stage those that wait for it.
        communicates: Whether a stage is a collective.
        reversed_lanes: For each lane the stages it runs, last first.
        issued: The order in which a host issues them that runs ahead of its device.
        positions: For each stage its place in that order.
        host_needs: For each stage the one that the host waits for before issuing it, or -1.
    """

    stages: tuple[Stage, ...]
    lanes: tuple[tuple[str, tuple[int, ...]], ...]
    num_needs: tuple[int, ...]
    followers: tuple[tuple[int, ...], ...]
    communicates: tuple[bool, ...]
    reversed_lanes: tuple[tuple[int, ...], ...]
    issued: tuple[int, ...]
    positions: tuple[int, ...]
    host_needs: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def graph(
    features: BlockFeatures, degree: int, whole_attention: bool, direction: Direction
) -> dict[Stage, tuple[Stage, ...]]:
    """``schedule.dependencies``, remembered."""
    return dependencies(features, degree=degree, whole_attention=whole_attention, direction=direction)


@functools.lru_cache(maxsize=512)
def compile_program(
    program: Program, features: BlockFeatures, degree: int, whole_attention: bool, direction: Direction
) -> Compiled:
    """Number the stages of one direction of a checked schedule."""
    needs = graph(features, degree, whole_attention, direction)
    stages = program.stages
    number = {stage: index for index, stage in enumerate(stages)}
    followers: list[list[int]] = [[] for _ in stages]
    for stage, earlier in needs.items():
        for needed in earlier:
            followers[number[needed]].append(number[stage])
    issued = [number[stage] for _, stage in issue_order(program, needs, host_waits=True)]
    lanes = tuple((lane.lane, tuple(number[stage] for stage in lane.stages)) for lane in program.lanes)
    return Compiled(
        stages=stages,
        lanes=lanes,
        num_needs=tuple(len(needs[stage]) for stage in stages),
        followers=tuple(map(tuple, followers)),
        communicates=tuple(stage.is_communication for stage in stages),
        reversed_lanes=tuple(order[::-1] for _, order in lanes),
        issued=tuple(issued),
        positions=tuple(issued.index(index) for index in range(len(stages))),
        host_needs=tuple(_waited_for(stage, number) for stage in stages),
    )


def _waited_for(stage: Stage, number: Mapping[Stage, int]) -> int:
    """A host that runs ahead must know how many tokens travel before it issues their dispatch."""
    if stage.kind is not Kind.DISPATCH:
        return -1
    return number.get(Stage(Kind.COUNTS, stage.chunk), -1)


def run(
    compiled: Compiled, durations: Sequence[float], machine: Machine, *, issue_us: float
) -> tuple[list[float], list[float]]:
    """When each stage begins and ends.

    One loop without calls: it runs some hundred times in every search.

    Args:
        compiled: The program.
        durations: How long each stage takes alone.
        machine: How lanes slow each other.
        issue_us: The host's time for one stage.

    Returns:
        Begin and end of every stage, in the unit of the durations.
    """
    waiting = list(compiled.num_needs)
    followers, communicates = compiled.followers, compiled.communicates
    begin, end = [0.0] * len(durations), [NOT_YET] * len(durations)
    # By lane: what it still has to run, last first; the stage that runs, or -1; and how much of it is left.
    queues = [list(stages) for stages in compiled.reversed_lanes]
    current, left = [-1] * len(queues), [0.0] * len(queues)
    lanes = range(len(queues))
    slow_compute, slow_travel = machine.compute_slowdown, machine.communication_slowdown
    slows = slow_compute > 1.0 or slow_travel > 1.0
    issued, positions, host_needs = compiled.issued, compiled.positions, compiled.host_needs
    # Stages before this position have been issued. Without a host that runs ahead, all of them.
    num_issued, issued_at = (0, issue_us) if issue_us else (len(issued), 0.0)
    now, remaining = 0.0, len(durations)
    while remaining:
        next_event = NOT_YET
        while num_issued < len(issued):
            needed = host_needs[issued[num_issued]]
            if needed >= 0:
                # The host stands still until it knows the count; the time to issue runs from there.
                if end[needed] == NOT_YET:
                    break
                issued_at = max(issued_at, end[needed] + issue_us)
            if issued_at > now:
                next_event = issued_at
                break
            num_issued += 1
            issued_at += issue_us
        computing = travelling = 0
        for lane in lanes:
            stage = current[lane]
            if stage < 0:
                queue = queues[lane]
                if not queue or waiting[queue[-1]] or positions[queue[-1]] >= num_issued:
                    continue
                stage = current[lane] = queue.pop()
                left[lane], begin[stage] = durations[stage], now
            if communicates[stage]:
                travelling = 1
            else:
                computing = 1
        both = slows and computing and travelling
        for lane in lanes:
            stage = current[lane]
            if stage >= 0:
                done_at = now + left[lane] * (
                    (slow_travel if communicates[stage] else slow_compute) if both else 1
                )
                if done_at < next_event:
                    next_event = done_at
        assert next_event < NOT_YET, "a lane waits for itself; the schedule was not checked"
        step, now = next_event - now, next_event
        for lane in lanes:
            stage = current[lane]
            if stage >= 0:
                slow = (slow_travel if communicates[stage] else slow_compute) if both else 1.0
                left[lane] -= step / slow
                if left[lane] <= ROUNDING_US:
                    end[stage] = now
                    current[lane] = -1
                    remaining -= 1
                    for follower in followers[stage]:
                        waiting[follower] -= 1
    return begin, end


def compiled_direction(schedule: Schedule, features: BlockFeatures, direction: Direction) -> Compiled:
    """One direction of a schedule, ready to run."""
    return compile_program(
        schedule.program(direction), features, schedule.degree, schedule.whole_attention, direction
    )


def direction_us(
    schedule: Schedule,
    costs: Mapping[Stage, Pair],
    *,
    features: BlockFeatures,
    direction: Direction,
    machine: Machine,
) -> float:
    """How long one direction takes."""
    compiled = compiled_direction(schedule, features, direction)
    durations = [costs[stage].of(direction) for stage in compiled.stages]
    return max(run(compiled, durations, machine, issue_us=machine.issue.of(direction))[1])


def simulate(
    schedule: Schedule,
    costs: Mapping[Stage, Pair],
    *,
    features: BlockFeatures,
    machine: Machine,
    backward_schedule: Schedule | None = None,
    backward_costs: Mapping[Stage, Pair] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Timeline:
    """The timeline of a forward and a backward pass, one behind the other.

    Args:
        schedule: What runs; checked.
        costs: Every stage's time alone.
        features: What the block contains.
        machine: How lanes slow each other.
        backward_schedule: Gives the backward pass, where that has another degree.
        backward_costs: The times of that pass's stages.
        labels: What the drawing shall say.
    """
    spans: list[StageSpan] = []
    offset = 0.0
    for direction in Direction:
        if direction is Direction.BACKWARD and backward_schedule is not None:
            schedule, costs = backward_schedule, backward_costs or costs
        compiled = compiled_direction(schedule, features, direction)
        durations = [costs[stage].of(direction) for stage in compiled.stages]
        begin, end = run(compiled, durations, machine, issue_us=machine.issue.of(direction))
        for lane, stages in compiled.lanes:
            spans += [
                StageSpan(
                    lane=lane,
                    stage=str(compiled.stages[stage]),
                    direction=direction.value,
                    layer=1,
                    iteration=0,
                    begin_us=offset + begin[stage],
                    end_us=offset + end[stage],
                )
                for stage in stages
            ]
        offset += max(end)
    ordered = tuple(sorted(spans, key=lambda span: span.begin_us))
    return Timeline(rank=0, spans=ordered, labels=dict(labels or {}))
