"""Schedules of several consecutive blocks: one period, repeated block after block without a boundary.

Attention is causal, so chunk ``c`` of a block needs the chunks up to ``c`` of the block below, and no more. A
period lists the stages of one block in every lane; a stage of it may belong to a block before or after
(``Stage.layer``). The last merges of a block then run between the first projections of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_ampipe.schedule.build import placed
from megatron_ampipe.schedule.graph import BlockFeatures, needs_of
from megatron_ampipe.schedule.kinds import COMPUTE, MERGE, MLP, QKV, Direction
from megatron_ampipe.schedule.types import LaneOrder, Program, Schedule, Stage


def period(schedule: Schedule) -> Schedule:
    """The schedule of one block as the period of a schedule of several.

    Merges of a chunk stand next to the projections of the same chunk in the next block: forward before them,
    backward, in the gradient of the block below, after them. Where the projections are of the whole sequence,
    blocks follow one another. Stages that run again are left out: :func:`unrolled` places them.
    """
    if schedule.repeats:
        return schedule
    backward = Program(
        tuple(
            LaneOrder(lane.lane, tuple(stage for stage in lane.stages if not stage.again))
            for lane in schedule.backward.lanes
        )
    )
    if QKV in schedule.forward.whole or len(schedule.forward.lanes) == 1:
        return replace(schedule, backward=backward, repeats=True)
    return replace(
        schedule,
        forward=_with_merges_of_the_last_block(schedule.forward),
        backward=_with_merges_of_the_next_block(backward),
        repeats=True,
    )


def _with_merges_of_the_last_block(program: Program) -> Program:
    def order(stages: Sequence[Stage]) -> Iterator[Stage]:
        for stage in stages:
            if stage.kind is QKV:
                yield Stage(MERGE, stage.chunk, -1)
            if stage.kind is not MERGE:
                yield stage

    return _with_compute(program, order)


def _with_merges_of_the_next_block(program: Program) -> Program:
    def order(stages: Sequence[Stage]) -> Iterator[Stage]:
        for stage in stages:
            if stage.kind is not MERGE:
                yield stage
            if stage.kind is QKV:
                yield Stage(MERGE, stage.chunk, 1)

    return _with_compute(program, order)


def _with_compute(program: Program, order) -> Program:  # type: ignore[no-untyped-def]
    return Program(
        tuple(
            LaneOrder(lane.lane, tuple(order(lane.stages))) if lane.lane == COMPUTE else lane
            for lane in program.lanes
        )
    )


def unrolled(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """A schedule of one block, or a period, as the schedule of these blocks.

    Args:
        schedule: Its stages that a block does not have are left out: a pass without gradients has no losses.
        layers: The features of the blocks. What the period lacks of a dense block is put right before the
            first stage that needs it, and so are kinds of stages that were added. If it runs no stage again,
            all that are to run again are placed.
    """

    def program(direction: Direction) -> Program:
        period = schedule.program(direction)
        needs = needs_of(schedule, layers, direction)
        return Program(
            tuple(
                LaneOrder(
                    lane.lane, tuple(stage for stage in _repeated(lane.stages, direction) if stage in needs)
                )
                for lane in period.lanes
            )
        )

    def _repeated(stages: Sequence[Stage], direction: Direction) -> Iterator[Stage]:
        last = len(layers) - 1
        ahead = max((stage.layer for stage in stages), default=0)
        behind = min((stage.layer for stage in stages), default=0)
        for turn in range(-ahead, len(layers) - behind):
            for stage in stages:
                layer = turn + stage.layer
                if 0 <= layer <= last:
                    place = layer if direction is Direction.FORWARD else last - layer
                    yield Stage(stage.kind, stage.chunk, place, stage.again)

    found = replace(
        schedule, forward=program(Direction.FORWARD), backward=program(Direction.BACKWARD), repeats=False
    )
    known = {direction: set(found.program(direction).stages) for direction in Direction}
    added = {MLP, *(kind for features in layers for kind in features.added)}
    places_again = not any(stage.again for stage in known[Direction.BACKWARD])
    lacks_others = any(
        stage.kind not in added and not (stage.again and places_again)
        for direction in Direction
        for stage in needs_of(found, layers, direction)
        if stage not in known[direction]
    )
    # What else is missing is an error in the order that was given, which :func:`~.check.check` reports.
    return found if lacks_others else placed(found, layers)
