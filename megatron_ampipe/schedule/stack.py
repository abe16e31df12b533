"""Schedules of several consecutive blocks: one period, repeated block after block without a boundary.

Attention is causal, so chunk ``c`` of a block needs the chunks up to ``c`` of the block below, and no more. A
period lists the stages of one block in every lane; a stage of it may belong to a block before or after
(``Stage.layer``). The last merges of a block then run between the first projections of the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.graph import needs_of
from megatron_ampipe.schedule.kinds import (
    INPUT_NORM,
    MERGE,
    MLP,
    OF_ROWS,
    QKV,
    REDUCE,
    REDUCE_EXPERTS,
    STORE,
    STORE_TOKENS,
)
from megatron_ampipe.schedule.placing import bound, placed
from megatron_ampipe.schedule.stage_kind import Direction, StageKind
from megatron_ampipe.schedule.types import LaneOrder, Program, Schedule, Stage


def period(schedule: Schedule) -> Schedule:
    """The schedule of one block as the period of a schedule of several.

    Merges of a chunk stand next to the projections of the same chunk in the next block: forward before them,
    backward, in the gradient of the block below, after them. Where the projections are of the whole sequence,
    blocks follow one another. Stages that run again are left out: :func:`unrolled` places them.
    """
    if schedule.repeats:
        return schedule
    forward, backward = schedule.forward, _without(schedule.backward, lambda stage: stage.again)
    if QKV not in forward.whole and len(forward.lanes) > 1:
        forward = _merging(forward, before_projections=-1)
        backward = _merging(backward, after_projections=1)
    return replace(schedule, forward=forward, backward=backward, repeats=True)


def _merging(
    program: Program, *, before_projections: int | None = None, after_projections: int | None = None
) -> Program:
    """The program with each merge next to the projections of its chunk, of a relative layer."""
    begins = INPUT_NORM if any(stage.kind == INPUT_NORM for stage in program.stages) else QKV

    def with_merges(stages: Sequence[Stage]) -> Iterator[Stage]:
        for stage in stages:
            if stage.kind != begins:
                yield stage
                continue
            if before_projections is not None:
                yield Stage(MERGE, stage.chunk, before_projections)
            yield stage
            if after_projections is not None:
                yield Stage(MERGE, stage.chunk, after_projections)

    left = _without(program, lambda stage: _ends_a_block(stage.kind))
    return Program(tuple(LaneOrder(lane.lane, tuple(with_merges(lane.stages))) for lane in left.lanes))


def _ends_a_block(kind: StageKind | None) -> bool:
    """Whether it is the merge, or a kind that was added after it, which :func:`unrolled` places."""
    return kind is not None and (kind == MERGE or _ends_a_block(kind.after))


def _without(program: Program, is_left_out: Callable[[Stage], bool]) -> Program:
    return Program(
        tuple(
            LaneOrder(lane.lane, tuple(stage for stage in lane.stages if not is_left_out(stage)))
            for lane in program.lanes
        )
    )


def unrolled(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """A schedule of one block, or a period, as the schedule of these blocks.

    Args:
        schedule: Its stages that a block does not have are left out: a pass without gradients has no losses.
        layers: The features of the blocks. What the period lacks of a dense block is put right before the
            first stage that needs it, and so are kinds of stages that were added, restore what was not kept
            or store it, and those in which tensor-parallel ranks scatter rows. If it runs no stage again, all
            that are to run again are placed, and so are reductions.
    """

    def program(direction: Direction) -> Program:
        needs = needs_of(schedule, layers, direction)
        return Program(
            tuple(
                LaneOrder(
                    lane.lane,
                    tuple(
                        stage
                        for stage in _repeated(lane.stages, num_layers=len(layers), direction=direction)
                        if stage in needs
                    ),
                )
                for lane in schedule.program(direction).lanes
            )
        )

    found = replace(
        schedule, forward=program(Direction.FORWARD), backward=program(Direction.BACKWARD), repeats=False
    )
    known = {direction: set(found.program(direction).stages) for direction in Direction}
    # An order can come from before there were stages of tensor-parallel ranks.
    added = {
        MLP,
        REDUCE,
        REDUCE_EXPERTS,
        STORE,
        STORE_TOKENS,
        *OF_ROWS,
        *(kind for features in layers for kind in features.added),
    }
    places_again = not any(stage.again for stage in known[Direction.BACKWARD])
    lacks_others = any(
        stage.kind not in added and stage.kind.restores is None and not (stage.again and places_again)
        for direction in Direction
        for stage in needs_of(found, layers, direction)
        if stage not in known[direction]
    )
    # What else is missing is an error in the order that was given, which :func:`~.check.check` reports.
    return bound(found if lacks_others else placed(found, layers), layers)


def _repeated(stages: Sequence[Stage], *, num_layers: int, direction: Direction) -> Iterator[Stage]:
    """The stages of a lane in one period, once for each layer in the order of the pass."""
    ahead = max((stage.layer for stage in stages), default=0)
    behind = min((stage.layer for stage in stages), default=0)
    for turn in range(-ahead, num_layers - behind):
        for stage in stages:
            passed = turn + stage.layer
            if 0 <= passed < num_layers:
                layer = passed if direction is Direction.FORWARD else num_layers - 1 - passed
                yield replace(stage, layer=layer)
