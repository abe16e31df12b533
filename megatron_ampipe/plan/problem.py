"""The problem of ordering the stages of one direction in their lanes: durations and dependencies.

Stages are numbers here. Computes the time of an order (:meth:`OrderProblem.time`, with :mod:`.simulate`) and
the order of a greedy list scheduler (:func:`list_schedule`). Used by :mod:`.order` and
:mod:`.exact`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.simulate import NOT_YET, Compiled, contention, run, streams_of
from megatron_ampipe.schedule import Direction, LaneOrder, Program, Schedule, Stage, needs_of
from megatron_ampipe.schedule.issue import merge_lanes, read_by_host
from megatron_ampipe.schedule.stage_kind import COMPUTE

Lanes = tuple[tuple[int, ...], ...]
"""The order of the stages of each lane; the first lane computes."""


@dataclass(frozen=True, slots=True)
class OrderProblem:
    """The stages of one direction, to be ordered.

    Attributes:
        stages: All stages, in topological order; the numbers below are positions in this tuple.
        durations: How long each takes alone.
        needs: For each stage its direct dependencies.
        followers: For each stage those that depend on it directly.
        lanes: Names of the lanes; the first is the compute lane.
        lane_of: For each stage the position of its lane in ``lanes``.
        ancestors: For each stage its direct and indirect dependencies, as a bit mask.
        host_needs: For each stage the one that the host waits for before issuing it, or -1.
        communicates: For each stage whether it is a transfer, not a computation.
        contended: See :class:`~.simulate.Compiled`.
        issue_us: The host's time to issue each stage; None for training on the CPU.
        latency_us: See :func:`~.simulate.run`.
        compute_slowdown: Factor on the time of a computation during a transfer.
        communication_slowdown: Factor on the time of a transfer during a computation.
        busy_latency_us: Added to a collective that begins during a computation.
    """

    stages: tuple[Stage, ...]
    durations: tuple[float, ...]
    needs: tuple[tuple[int, ...], ...]
    followers: tuple[tuple[int, ...], ...]
    lanes: tuple[str, ...]
    lane_of: tuple[int, ...]
    ancestors: tuple[int, ...]
    host_needs: tuple[int, ...]
    communicates: tuple[bool, ...]
    contended: tuple[int, ...]
    issue_us: tuple[float, ...] | None = None
    latency_us: tuple[float, ...] | None = None
    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0
    busy_latency_us: float = 0.0

    @classmethod
    def of(
        cls, predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...], direction: Direction
    ) -> OrderProblem:
        """The problem of one direction of a schedule on a cluster."""
        compiled, durations, issue = predictor.inputs(schedule, lengths, direction)
        needs = needs_of(schedule, predictor.layers, direction)
        times = dict(zip(compiled.stages, durations, strict=True))
        latency = predictor.latency(compiled)
        issues, latencies = (
            None if found is None else dict(zip(compiled.stages, found, strict=True))
            for found in (issue, latency)
        )
        return cls.from_graph(needs, times, issue_us=issues, latency_us=latencies, **predictor.slowdowns)

    @classmethod
    def from_graph(
        cls,
        graph: Mapping[Stage, Sequence[Stage]],
        times: Mapping[Stage, float],
        *,
        issue_us: Mapping[Stage, float] | None = None,
        latency_us: Mapping[Stage, float] | None = None,
        compute_slowdown: float = 1.0,
        communication_slowdown: float = 1.0,
        busy_latency_us: float = 0.0,
    ) -> OrderProblem:
        """The problem of any dependencies and times."""
        stages = _topological(graph)
        number = {stage: index for index, stage in enumerate(stages)}
        needs = [tuple(number[needed] for needed in graph[stage]) for stage in stages]
        ancestors = [0] * len(stages)
        followers: list[list[int]] = [[] for _ in stages]
        lanes = sorted({stage.kind.lane.name for stage in stages}, key=lambda lane: (lane != COMPUTE, lane))
        for index, earlier in enumerate(needs):
            for needed in earlier:
                ancestors[index] |= ancestors[needed] | 1 << needed
                followers[needed].append(index)
        return cls(
            stages=tuple(stages),
            durations=tuple(times[stage] for stage in stages),
            needs=tuple(needs),
            followers=tuple(map(tuple, followers)),
            lanes=tuple(lanes),
            lane_of=tuple(lanes.index(stage.kind.lane.name) for stage in stages),
            ancestors=tuple(ancestors),
            host_needs=tuple(
                -1 if (counts := read_by_host(stage, graph)) is None else number[counts] for stage in stages
            ),
            communicates=tuple(stage.is_communication for stage in stages),
            contended=contention(
                [
                    (lane, [number[stage] for stage in stages if stage.kind.lane.name == lane])
                    for lane in lanes
                ],
                stages,
            ),
            issue_us=None if issue_us is None else tuple(issue_us[stage] for stage in stages),
            latency_us=None if latency_us is None else tuple(latency_us[stage] for stage in stages),
            compute_slowdown=compute_slowdown,
            communication_slowdown=communication_slowdown,
            busy_latency_us=busy_latency_us,
        )

    def lanes_of(self, program: Program) -> Lanes:
        """The order of a program, with each stage in the lane of its kind (a program may use fewer lanes)."""
        number = {stage: index for index, stage in enumerate(self.stages)}
        order = [number[stage] for stage in program.stages]
        return tuple(
            tuple(stage for stage in order if self.lane_of[stage] == lane) for lane in range(len(self.lanes))
        )

    def program(self, lanes: Lanes) -> Program:
        """Convert an order into a program."""
        return Program(
            tuple(
                LaneOrder(name, tuple(self.stages[stage] for stage in order))
                for name, order in zip(self.lanes, lanes, strict=True)
            )
        )

    def time(self, lanes: Lanes) -> float:
        """The time of an order; infinite if its lanes deadlock."""
        return max(self.spans(lanes)[1])

    def spans(self, lanes: Lanes) -> tuple[list[float], list[float]]:
        """Start and end of every stage in an order; infinite if its lanes deadlock."""
        issued: tuple[int, ...] = ()
        positions = (-1,) * len(self.stages)
        if self.issue_us is not None:
            merged = merge_lanes(
                dict(zip(self.lanes, lanes, strict=True)),
                dict(enumerate(self.needs)),
                waits_before={stage for stage, needed in enumerate(self.host_needs) if needed >= 0},
                covers={stage for stage, one in enumerate(self.stages) if one.kind.covers_wait},
            )
            if merged is None:
                return [NOT_YET] * len(self.stages), [NOT_YET] * len(self.stages)
            issued = tuple(stage for _, stage in merged)
            placed = [0] * len(issued)
            for position, stage in enumerate(issued):
                placed[stage] = position
            positions = tuple(placed)
        named = tuple(zip(self.lanes, lanes, strict=True))
        compiled = Compiled(
            stages=self.stages,
            lanes=named,
            num_needs=tuple(map(len, self.needs)),
            followers=self.followers,
            communicates=self.communicates,
            contended=self.contended,
            reversed_lanes=tuple(order[::-1] for order in lanes),
            reversed_streams=() if self.issue_us is None else streams_of(named, self.stages),
            issued=issued,
            positions=positions,
            host_needs=self.host_needs,
        )
        return run(
            compiled,
            self.durations,
            issue_us=self.issue_us,
            latency_us=self.latency_us,
            compute_slowdown=self.compute_slowdown,
            communication_slowdown=self.communication_slowdown,
            busy_latency_us=self.busy_latency_us,
        )

    def tails(self) -> list[float]:
        """For each stage the length of the critical path from its start to the end of the pass."""
        found = [0.0] * len(self.stages)
        for stage in reversed(range(len(self.stages))):
            found[stage] = self.durations[stage] + max(
                (found[later] for later in self.followers[stage]), default=0.0
            )
        return found

    def keeps_order(self, order: Sequence[int], source: int, target: int) -> bool:
        """Whether moving a stage from ``source`` to ``target`` respects all dependencies."""
        stage = order[target]
        if target < source:
            return not any(self.ancestors[stage] >> passed & 1 for passed in order[target + 1 : source + 1])
        return not any(self.ancestors[passed] >> stage & 1 for passed in order[source:target])


def list_schedule(problem: OrderProblem, priority: Sequence[float]) -> Lanes:
    """The order in which a free lane always runs the ready stage with the highest priority."""
    waiting = [len(needed) for needed in problem.needs]
    lane_of, lanes = problem.lane_of, range(len(problem.lanes))
    ready: list[list[int]] = [[] for _ in lanes]
    for stage, count in enumerate(waiting):
        if not count:
            ready[lane_of[stage]].append(stage)
    orders: list[list[int]] = [[] for _ in lanes]
    free = [0.0 for _ in lanes]
    running: list[tuple[float, int]] = []
    now = 0.0
    while True:
        for lane in lanes:
            if ready[lane] and free[lane] <= now:
                stage = max(ready[lane], key=lambda one: (priority[one], -one))
                ready[lane].remove(stage)
                orders[lane].append(stage)
                free[lane] = now + problem.durations[stage]
                running.append((free[lane], stage))
        if not running:
            break
        running.sort()
        now, stage = running.pop(0)
        for follower in problem.followers[stage]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready[lane_of[follower]].append(follower)
    return tuple(map(tuple, orders))


def _topological(graph: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """All stages, each after its dependencies."""
    found: dict[Stage, None] = {}

    def visit(stage: Stage) -> None:
        if stage not in found:
            for needed in graph[stage]:
                visit(needed)
            found[stage] = None

    for stage in graph:
        visit(stage)
    return list(found)
