"""Partners: the backward pass of one micro-batch and the forward pass of the next one in one program.

Each lane runs the stages of both passes, each pass in its own order. One micro-batch computes while the
tokens of the other are sent, even if neither is cut into chunks. DualPipe and Megatron's
``--overlap-moe-expert-parallel-comm`` do the same in one fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

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
        degree: Number of chunks of both passes.
        schedule: Name of the schedule of each pass.
        order: How the stages of both share the lanes, one of ``PARTNER_ORDERS``. None: ``listed`` if they
            are cut into chunks, else the order of Megatron's layers.
        period: A joint order from the planner, for one layer of each pass, with stages as in
            ``Schedule.repeats``; None without.
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
        """Whether list scheduling decides the joint order."""
        return self.period is None and (self.order == LISTED or (self.order is None and self.degree > 1))

    def __str__(self) -> str:
        degree = "uncut" if self.degree == 1 else f"degree {self.degree}"
        order = LISTED if self.is_listed else MEGATRON if self.period is None else "searched"
        return f"{degree}, {self.schedule}, {order}"


def merge_passes[S](
    lanes: Mapping[tuple[str, bool], Sequence[S]],
    needs: Mapping[S, Sequence[S]],
    times: Mapping[S, float],
    rank: Mapping[S, float],
) -> dict[str, list[S]]:
    """The joint order of the stages of each lane, by list scheduling.

    Two stages can be next in a lane, one of each pass. The one that can begin earlier goes first; if both can
    begin at the same time, the one with the smaller rank.

    Args:
        lanes: The stages of each lane and pass, in their order.
        needs: For each stage, the stages that must have ended before.
        times: The time of each stage alone, in any unit; if empty, only ranks count.
        rank: The rank of each stage; all ranks differ.
    """
    left = {key: list(reversed(stages)) for key, stages in lanes.items()}
    free = dict.fromkeys((lane for lane, _ in lanes), 0.0)
    ends: dict[S, float] = {}
    order: dict[str, list[S]] = {lane: [] for lane in free}
    while any(left.values()):
        ready = []
        for (lane, is_next), stages in left.items():
            if not stages:
                continue
            head = stages[-1]
            if all(needed in ends for needed in needs[head]):
                begin = max([free[lane], *(ends[needed] for needed in needs[head])])
                ready.append((begin, rank[head], lane, is_next))
        assert ready, "a pass waits for itself"
        begin, _, lane, is_next = min(ready)
        stage = left[lane, is_next].pop()
        end = begin + times.get(stage, 0.0)
        ends[stage] = free[lane] = end
        order[lane].append(stage)
    return order


_TRANSFER, _SMALL = 4.0, 0.2
_TIMES = {kinds.QKV: 1.0, kinds.ATTENTION: 2.0, kinds.EXPERT: 4.0, kinds.SHARED: 1.0, kinds.MLP: 3.0}


def typical_time(stage: Stage, *, delay_wgrad: bool) -> float:
    """A rough time of a stage that nobody has measured or predicted, in any unit.

    The transfers of a block take about half as long as its computation.
    """
    if stage.is_communication:
        return _TRANSFER
    forward_time = _TIMES.get(stage.kind.weights_of or stage.kind, _SMALL)
    is_backward = not stage.of_next_microbatch and not stage.computes_values
    computes_both_gradients = is_backward and stage.kind.weights_of is None and not delay_wgrad
    # Input gradients and weight gradients each take as long as the forward pass.
    return 2 * forward_time if computes_both_gradients else forward_time


def shared_lanes(
    stages: Sequence[tuple[str, Stage]], needs: Mapping[Stage, Sequence[Stage]], partner: Partner
) -> dict[str, list[Stage]]:
    """The joint order of each lane, for a backward pass and the forward pass of the next micro-batch.

    Args:
        stages: Lanes and stages, in the issue order of each pass.
        needs: For each stage, the stages that it waits for.
        partner: How to order them. Each pass keeps its own order, see :func:`in_order_of`.
    """
    lanes: dict[tuple[str, bool], list[Stage]] = {}
    for lane, stage in stages:
        lanes.setdefault((lane, stage.of_next_microbatch), []).append(stage)
    if partner.is_listed:
        apart = {stage.kind.weights_of for _, stage in stages}
        times = {stage: typical_time(stage, delay_wgrad=stage.kind in apart) for _, stage in stages}
        order = _longest_first([stage for _, stage in stages], list(lanes.values()), needs, times)
    else:
        lane_of = {stage: lane for lane, stage in stages}
        times, order = {}, _in_period(_period_of(partner, lane_of), lane_of, needs)
    return merge_passes(lanes, needs, times, {stage: place for place, stage in enumerate(order)})


def _longest_first(
    stages: Sequence[Stage],
    lanes: Sequence[Sequence[Stage]],
    needs: Mapping[Stage, Sequence[Stage]],
    times: Mapping[Stage, float],
) -> list[Stage]:
    """The stages, sorted by the time of the longest chain after each, those of a lane being one chain."""
    followers: dict[Stage, list[Stage]] = {stage: [] for stage in stages}
    for stage in stages:
        for needed in needs[stage]:
            followers[needed].append(stage)
    for lane in lanes:
        for earlier, later in pairwise(lane):
            followers[earlier].append(later)
    chain: dict[Stage, float] = {}
    # Followers come later in ``stages``, which is in issue order.
    for stage in reversed(stages):
        chain[stage] = times[stage] + max((chain[later] for later in followers[stage]), default=0.0)
    return sorted(stages, key=lambda stage: -chain[stage])


def in_order_of(
    partner: Partner, schedule: Schedule, layers: Sequence[BlockFeatures], direction: Direction
) -> Schedule:
    """Put one pass of a schedule into the order that it has when it runs together with a partner.

    Which slots a pass keeps and frees depends on its order, so :func:`shared_lanes` does not change that.
    """
    if partner.is_listed:
        return schedule
    forward = direction is Direction.FORWARD
    needs = {
        replace(stage, of_next_microbatch=forward): tuple(
            replace(needed, of_next_microbatch=forward) for needed in all_needed
        )
        for stage, all_needed in needs_of(schedule, layers, direction).items()
    }
    own = schedule.program(direction).lanes
    lane_of = {replace(stage, of_next_microbatch=forward): lane for lane, stages in own for stage in stages}
    lanes: dict[str, list[Stage]] = {lane: [] for lane, _ in own}
    for stage in _in_period(_period_of(partner, lane_of), lane_of, needs):
        lanes[lane_of[stage]].append(replace(stage, of_next_microbatch=False))
    program = Program.of(lanes)
    return replace(schedule, forward=program) if forward else replace(schedule, backward=program)


def _period_of(partner: Partner, lane_of: Mapping[Stage, str]) -> Program:
    if partner.period is not None:
        return partner.period
    return megatron_period({replace(stage, layer=0): lane for stage, lane in lane_of.items()})


def _in_period(
    period: Program, lane_of: Mapping[Stage, str], needs: Mapping[Stage, Sequence[Stage]]
) -> list[Stage]:
    """The stages in the issue order of a repeated period.

    A stage that the period lacks is put right before the first stage that needs it.
    """
    num_layers = 1 + max(stage.layer for stage in lane_of)
    known = {
        lane: [stage for stage in repeated(order, num_layers, Direction.BACKWARD) if stage in lane_of]
        for lane, order in period.lanes
    }
    placed = {stage for stages in known.values() for stage in stages}
    among = {stage: [needed for needed in needs[stage] if needed in placed] for stage in placed}
    return completed([stage for _, stage in merge_lanes(known, among)], needs)


_ROWS = {kind.name: place for place, kind in enumerate(kinds.ALL_KINDS)}
_FORWARD = {"after": 1, "before": 2, "dispatch": 3, "experts": 5, "combine": 6}
_BACKWARD = {"after": 0, "combine": 0, "experts": 4, "dispatch": 5, "before": 7}


def megatron_period(lane_of: Mapping[Stage, str]) -> Program:
    """The order of Megatron's ``TransformerLayerSchedulePlan.run``, as a period of one layer of each pass.

    The backward combine of a layer overlaps attention of the forward pass, and so on in turns.

    Args:
        lane_of: The stages of one layer in both passes, with their lanes.
    """

    def place(stage: Stage) -> int:
        kind = stage.kind
        if stage.of_next_microbatch:
            return _FORWARD[_part(kind)]
        if kind.weights_of is not None:
            return 5 if _part(kind.weights_of) == "experts" else 8
        if kind.of_parameters:
            return 9
        return -1 if stage.is_recompute else 0 if kind.restores is not None else _BACKWARD[_part(kind)]

    lanes: dict[str, list[Stage]] = {}
    for stage in sorted(lane_of, key=place):
        # Stages after the combine belong to the next turn, in which another layer has begun its backward.
        late = stage.of_next_microbatch and _part(stage.kind) == "after"
        lanes.setdefault(lane_of[stage], []).append(replace(stage, layer=-1 if late else 0))
    return Program.of(lanes)


def _part(kind: StageKind) -> str:
    """The part of Megatron's layer that a kind belongs to."""
    if kind in (kinds.SHARED, kinds.EXPERT, kinds.STORE):
        return "experts"
    row = _ROWS[kind.row.name]
    if kind == kinds.MLP or row < _ROWS[kinds.COUNTS.name]:
        return "before"
    if row < _ROWS[kinds.EXPERT.name]:
        return "dispatch"
    return "combine" if row < _ROWS[kinds.EXPAND.name] else "after"
