"""Where stages go that an order does not name: those that restore, run again, reduce, or were added later."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.graph import needs_of
from megatron_ampipe.schedule.issue import completed, issue_order
from megatron_ampipe.schedule.kinds import COMBINE, REDUCE, REDUCE_EXPERTS
from megatron_ampipe.schedule.run_again import with_stages_again
from megatron_ampipe.schedule.stage_kind import COMPUTE, Direction
from megatron_ampipe.schedule.types import LaneOrder, Program, Schedule, Stage


def placed(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """The schedule with the stages of its blocks that it lacks.

    Each is put right before the first stage that needs it; all stages that run again, where :mod:`.run_again`
    says; reductions of gradients where :func:`_with_reductions` says.
    """

    def program(direction: Direction) -> Program:
        needs = needs_of(schedule, layers, direction)
        known = schedule.program(direction)
        if needs.keys() <= set(known.stages):
            return known
        lane_of = {stage: order.lane for order in known.lanes for stage in order.stages}
        lanes: dict[str, list[Stage]] = {order.lane: [] for order in known.lanes}
        # Lanes that are cut out of one order which respects all dependencies never wait for each other.
        before = {stage: tuple(one for one in needs[stage] if one in lane_of) for stage in lane_of}
        order = [stage for _, stage in issue_order(known, before, host_waits=False)]
        if not any(stage.again for stage in order):
            order = with_stages_again(order, needs)
        in_one_chunk = schedule.degree_of(direction) == 1
        for stage in _with_reductions(completed(order, needs), needs, lane_of, in_one_chunk=in_one_chunk):
            own = COMPUTE if len(known.lanes) == 1 else stage.kind.lane.name
            lanes.setdefault(lane_of.get(stage, own), []).append(stage)
        return Program(tuple(LaneOrder(lane, tuple(stages)) for lane, stages in lanes.items()))

    return replace(schedule, forward=program(Direction.FORWARD), backward=program(Direction.BACKWARD))


def bound(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """The schedule with the rows of its blocks in place of the kinds that have their names."""

    def program(direction: Direction) -> Program:
        rows = {stage: stage for stage in needs_of(schedule, layers, direction)}
        return Program(
            tuple(
                LaneOrder(order.lane, tuple(rows.get(stage, stage) for stage in order.stages))
                for order in schedule.program(direction).lanes
            )
        )

    return replace(schedule, forward=program(Direction.FORWARD), backward=program(Direction.BACKWARD))


def _with_reductions(
    order: Sequence[Stage],
    needs: Mapping[Stage, Sequence[Stage]],
    known: Collection[Stage],
    *,
    in_one_chunk: bool,
) -> list[Stage]:
    """The order with what is of parameters after the last transfer of its block, unless its place is known.

    From there on, all that the block computes waits for none of its transfers. In one chunk, none can run
    while the experts compute either: what is complete before them is reduced there, if the gradients of the
    experts themselves come after the last transfer.
    """

    def is_before(one: Stage, reduction: Stage) -> bool:
        if in_one_chunk and reduction.kind == REDUCE and replace(reduction, kind=REDUCE_EXPERTS) in needs:
            return one.kind == COMBINE
        return one.is_communication

    missing = [stage for stage in needs if stage.kind.of_parameters and stage not in known]
    found = [stage for stage in order if stage not in missing]
    for stage in missing:
        place = 0
        for index, one in enumerate(found, 1):
            if one in needs[stage] or (one.layer == stage.layer and is_before(one, stage)):
                place = index
        found.insert(place, stage)
    return found
