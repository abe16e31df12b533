"""Partners: the backward pass of one micro-batch and the forward pass of the next one in one program.

Each lane runs the stages of both passes, each pass in its own order: while the tokens of one micro-batch
travel, the other one computes, also where neither is cut into chunks (DualPipe and Megatron's
``--overlap-moe-expert-parallel-comm`` do the same in one fixed order).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from megatron_ampipe.block.settings import PARTNER_ORDERS, SETTING
from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.dataflow import needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.orders import IN_ONE_CHUNK
from megatron_ampipe.schedule.passes import repeated
from megatron_ampipe.schedule.program import Program, Schedule, Stage, completed, merge_lanes
from megatron_ampipe.schedule.stage_kind import Direction, StageKind

LISTED, MEGATRON = PARTNER_ORDERS


@dataclass(frozen=True, slots=True)
class Partner:
    """How a backward pass and the forward pass of the next micro-batch run as one (:mod:`.partners`).

    Attributes:
        degree: Into how many chunks both are cut.
        schedule: Name of the order of the stages of each of them.
        order: How their stages share the lanes: one of ``PARTNER_ORDERS``. If None, as Megatron's layers do,
            or listed where they are cut.
        period: An order that a planner found, of one layer of each pass; its stages as in
            ``Schedule.repeats``.
    """

    degree: int = 1
    schedule: str = IN_ONE_CHUNK
    order: str | None = None
    period: Program | None = None

    def __post_init__(self) -> None:
        if self.order == MEGATRON and self.degree > 1:
            rule, remedy = "is an order of uncut layers", "Leave it out, or --ampipe-partner-degree."
            raise SETTING["partner_order"].refuse(self.order, rule, remedy)

    @property
    def is_listed(self) -> bool:
        """Whether list scheduling orders both passes."""
        return self.period is None and (self.order == LISTED or (self.order is None and self.degree > 1))

    def __str__(self) -> str:
        degree = "uncut" if self.degree == 1 else f"degree {self.degree}"
        order = LISTED if self.is_listed else MEGATRON if self.period is None else "searched"
        return f"{degree}, {self.schedule}, {order}"


class Task(NamedTuple):
    """A stage of one of two passes that share a program.

    Attributes:
        lane: Where it runs.
        needs: Numbers of the tasks that must have ended before.
        time: How long it takes alone, in any unit.
        ahead: It is of the forward pass.
    """

    lane: str
    needs: tuple[int, ...]
    time: float
    ahead: bool


def together(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """For each lane the order of its tasks, by list scheduling.

    The tasks of each pass stay in their order in every lane. Of the two that may be next in a lane, the one
    that can begin earlier does; if both can, the one after which more has to follow.
    """
    queues: dict[tuple[str, bool], list[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault((task.lane, task.ahead), []).append(number)
    follow = _longest_after(tasks, list(queues.values()))
    next_in = dict.fromkeys(queues, 0)
    ends: dict[int, float] = {}
    free = dict.fromkeys((task.lane for task in tasks), 0.0)
    order: dict[str, list[int]] = {lane: [] for lane in free}
    while len(ends) < len(tasks):
        best = None
        for key, queue in queues.items():
            if next_in[key] == len(queue):
                continue
            number = queue[next_in[key]]
            needs = tasks[number].needs
            if all(needed in ends for needed in needs):
                begin = max([free[key[0]], *(ends[needed] for needed in needs)])
                candidate = (begin, -follow[number], number, key)
                best = candidate if best is None else min(best, candidate)
        assert best is not None, "a pass waits for itself"
        begin, _, number, key = best
        next_in[key] += 1
        ends[number] = free[key[0]] = begin + tasks[number].time
        order[key[0]].append(number)
    return order


def _longest_after(tasks: Sequence[Task], queues: Sequence[Sequence[int]]) -> list[float]:
    """For each task the time of the longest chain that it begins."""
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for needed in task.needs:
            followers[needed].append(number)
    for queue in queues:
        for earlier, later in pairwise(queue):
            followers[earlier].append(later)
    follow = [0.0] * len(tasks)
    # What follows has a higher number: tasks are listed in the order in which each pass is issued.
    for number in reversed(range(len(tasks))):
        rest = max((follow[later] for later in followers[number]), default=0.0)
        follow[number] = tasks[number].time + rest
    return follow


_TRANSFER, _SMALL = 4.0, 0.2
_TIMES = {kinds.QKV: 1.0, kinds.ATTENTION: 2.0, kinds.EXPERT: 4.0, kinds.SHARED: 1.0, kinds.MLP: 3.0}


def usual_time(stage: Stage, *, weights_apart: bool) -> float:
    """About how long a stage takes, where nobody has measured or predicted it, in any unit.

    Chosen so that the transfers of a block take about as long as half of its computation.
    """
    if stage.is_communication:
        return _TRANSFER
    time = _TIMES.get(stage.kind.weights_of or stage.kind, _SMALL)
    # Gradients of inputs and of weights take as long as the forward pass each.
    whole = not stage.ahead and not stage.computes_values and stage.kind.weights_of is None
    return time if not whole or weights_apart else 2 * time


def shared_lanes(
    stages: Sequence[tuple[str, Stage]], needs: Mapping[Stage, Sequence[Stage]], partner: Partner
) -> dict[str, list[Stage]]:
    """For each lane the order of its stages, of a backward pass and of the forward pass ahead.

    Args:
        stages: Lanes and stages, in the order in which each pass is issued.
        needs: For each stage those that it waits for.
        partner: How the order is found. Each pass keeps its own, see :func:`in_order_of`.
    """
    if partner.is_listed:
        return _listed(stages, needs)
    lane_of = {stage: lane for lane, stage in stages}
    period = _period_of(partner, lane_of)
    rank = {stage: place for place, stage in enumerate(_in_period(period, lane_of, needs))}
    queues: dict[tuple[str, bool], list[Stage]] = {}
    for lane, stage in stages:
        queues.setdefault((lane, stage.ahead), []).append(stage)
    lanes: dict[str, list[Stage]] = {lane: [] for lane, _ in stages}
    done: set[Stage] = set()
    left = {key: queue[::-1] for key, queue in queues.items()}
    while len(done) < len(stages):
        ready = [
            (rank[queue[-1]], key)
            for key, queue in left.items()
            if queue and done.issuperset(needs[queue[-1]])
        ]
        _, key = min(ready)
        stage = left[key].pop()
        done.add(stage)
        lanes[key[0]].append(stage)
    return lanes


def in_order_of(
    partner: Partner, schedule: Schedule, layers: Sequence[BlockFeatures], direction: Direction
) -> Schedule:
    """A schedule of these blocks with one pass in the order that it has together with a partner.

    What a pass keeps and frees depends on its order, so :func:`shared_lanes` does not change it.
    """
    if partner.is_listed:
        return schedule
    forward = direction is Direction.FORWARD
    of_pass = {
        replace(stage, ahead=forward): tuple(replace(needed, ahead=forward) for needed in all_needed)
        for stage, all_needed in needs_of(schedule, layers, direction).items()
    }
    lane_of = {
        replace(stage, ahead=forward): order.lane
        for order in schedule.program(direction).lanes
        for stage in order.stages
    }
    lanes: dict[str, list[Stage]] = {order.lane: [] for order in schedule.program(direction).lanes}
    for stage in _in_period(_period_of(partner, lane_of), lane_of, of_pass):
        lanes[lane_of[stage]].append(replace(stage, ahead=False))
    program = Program.of(lanes)
    return replace(schedule, forward=program) if forward else replace(schedule, backward=program)


def _period_of(partner: Partner, lane_of: Mapping[Stage, str]) -> Program:
    if partner.period is not None:
        return partner.period
    return megatron_period({replace(stage, layer=0): lane for stage, lane in lane_of.items()})


def _in_period(
    period: Program, lane_of: Mapping[Stage, str], needs: Mapping[Stage, Sequence[Stage]]
) -> list[Stage]:
    """The stages in the order in which a repeated period issues them.

    What it lacks is put before the first stage that needs it.
    """
    num_layers = 1 + max(stage.layer for stage in lane_of)
    known = {
        order.lane: [
            stage for stage in repeated(order.stages, num_layers, Direction.BACKWARD) if stage in lane_of
        ]
        for order in period.lanes
    }
    placed = {stage for of_lane in known.values() for stage in of_lane}
    among = {stage: [needed for needed in needs[stage] if needed in placed] for stage in placed}
    return completed([stage for _, stage in merge_lanes(known, among)], needs)


def _listed(
    stages: Sequence[tuple[str, Stage]], needs: Mapping[Stage, Sequence[Stage]]
) -> dict[str, list[Stage]]:
    """The order by list scheduling with usual times."""
    number = {stage: place for place, (_, stage) in enumerate(stages)}
    apart = {stage.kind.weights_of for stage in number}
    tasks = [
        Task(
            lane,
            tuple(number[needed] for needed in needs[stage]),
            usual_time(stage, weights_apart=stage.kind in apart),
            stage.ahead,
        )
        for lane, stage in stages
    ]
    return {lane: [stages[place][1] for place in places] for lane, places in together(tasks).items()}


_ROWS = {kind.name: place for place, kind in enumerate(kinds.ALL_KINDS)}
_FORWARD = {"after": 1, "before": 2, "dispatch": 3, "experts": 5, "combine": 6}
_BACKWARD = {"after": 0, "combine": 0, "experts": 4, "dispatch": 5, "before": 7}


def megatron_period(lane_of: Mapping[Stage, str]) -> Program:
    """The order of Megatron's ``TransformerLayerSchedulePlan.run``, as a period of one layer of each pass.

    The layer's backward begins with its combine, while the forward one attends; and so on in turns.

    Args:
        lane_of: The stages of one layer in either pass, with their lanes.
    """

    def place(stage: Stage) -> int:
        kind = stage.kind
        if stage.ahead:
            return _FORWARD[_part(kind)]
        if kind.weights_of is not None:
            return 5 if _part(kind.weights_of) == "experts" else 8
        if kind.of_parameters:
            return 9
        return -1 if stage.again else 0 if kind.restores is not None else _BACKWARD[_part(kind)]

    lanes: dict[str, list[Stage]] = {}
    for stage in sorted(lane_of, key=place):
        # What follows the combine stands in the next turn, where another layer has begun its backward.
        late = stage.ahead and _part(stage.kind) == "after"
        lanes.setdefault(lane_of[stage], []).append(replace(stage, layer=-1 if late else 0))
    return Program.of(lanes)


def _part(kind: StageKind) -> str:
    """Which of Megatron's parts of a layer a kind is in."""
    if kind in (kinds.SHARED, kinds.EXPERT, kinds.STORE):
        return "experts"
    row = _ROWS[kind.row.name]
    if kind == kinds.MLP or row < _ROWS[kinds.COUNTS.name]:
        return "before"
    if row < _ROWS[kinds.EXPERT.name]:
        return "dispatch"
    return "combine" if row < _ROWS[kinds.EXPAND.name] else "after"
