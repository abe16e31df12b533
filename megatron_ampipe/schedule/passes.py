"""Passes over an order of stages: the rows of its blocks, stages that it does not name, several blocks.

A schedule of several consecutive blocks is one period, repeated block after block without a boundary.
Attention is causal, so chunk ``c`` of a block needs the chunks up to ``c`` of the block below, and no more. A
period lists the stages of one block in every lane; a stage of it may belong to a block before or after
(``Stage.layer``). The last merges of a block then run between the first projections of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_ampipe.schedule.dataflow import needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.issue import completed, issue_order
from megatron_ampipe.schedule.kinds import (
    COMBINE,
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
from megatron_ampipe.schedule.program import Program, Schedule, Stage
from megatron_ampipe.schedule.stage_kind import COMPUTE, Direction


def period(schedule: Schedule) -> Schedule:
    """The schedule of one block as the period of a schedule of several.

    Merges of a chunk stand next to the projections of the same chunk in the next block: forward before them,
    backward, in the gradient of the block below, after them. Where the projections are of the whole sequence,
    blocks follow one another. Stages that run again are left out: :func:`unrolled` places them.
    """
    if schedule.repeats:
        return schedule
    forward = schedule.forward
    backward = schedule.backward.mapped(lambda stages: (stage for stage in stages if not stage.again))
    if QKV not in forward.whole and len(forward.lanes) > 1:
        forward, backward = _merging(forward, before=-1), _merging(backward, after=1)
    return replace(schedule, forward=forward, backward=backward, repeats=True)


def _merging(program: Program, *, before: int | None = None, after: int | None = None) -> Program:
    """The program with each merge next to the projections of its chunk, of a relative layer."""
    begins = INPUT_NORM if any(stage.kind == INPUT_NORM for stage in program.stages) else QKV

    def with_merges(stages: Sequence[Stage]) -> Iterator[Stage]:
        for stage in stages:
            if stage.kind == begins and before is not None:
                yield Stage(MERGE, stage.chunk, before)
            if stage.kind != MERGE:
                yield stage
            if stage.kind == begins and after is not None:
                yield Stage(MERGE, stage.chunk, after)

    return program.mapped(with_merges)


def unrolled(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """A schedule of one block, or a period, as the schedule of these blocks.

    Args:
        schedule: Its stages that a block does not have are left out: a pass without gradients has no losses.
        layers: The features of the blocks. What the period lacks of a dense block is put right before the
            first stage that needs it, and so are kinds of stages that restore what was not kept or store it,
            and those in which tensor-parallel ranks scatter rows. If it runs no stage again, all that are to
            run again are placed, and so are reductions.
    """

    def repeated(program: Program, direction: Direction) -> Program:
        needs = needs_of(schedule, layers, direction)
        return program.mapped(
            lambda stages: (stage for stage in _repeated(stages, len(layers), direction) if stage in needs)
        )

    whole = replace(schedule.mapped(repeated), repeats=False)
    # An order can come from before there were stages of tensor-parallel ranks.
    placeable = {MLP, REDUCE, REDUCE_EXPERTS, STORE, STORE_TOKENS, *OF_ROWS}
    runs_again = any(stage.again for stage in whole.backward.stages)
    lacks_others = any(
        stage.kind not in placeable and stage.kind.restores is None and (runs_again or not stage.again)
        for direction in Direction
        for stage in needs_of(whole, layers, direction).keys() - set(whole.program(direction).stages)
    )
    # What else is missing is an error in the order that was given, which :func:`~.text.check` reports.
    return bound(whole if lacks_others else placed(whole, layers), layers)


def _repeated(stages: Sequence[Stage], num_layers: int, direction: Direction) -> Iterator[Stage]:
    """The stages of a lane in one period, once for each layer in the order of the pass."""
    ahead = max((stage.layer for stage in stages), default=0)
    behind = min((stage.layer for stage in stages), default=0)
    for turn in range(-ahead, num_layers - behind):
        for stage in stages:
            passed = turn + stage.layer
            if 0 <= passed < num_layers:
                layer = passed if direction is Direction.FORWARD else num_layers - 1 - passed
                yield replace(stage, layer=layer)


def placed(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """The schedule with the stages of its blocks that it lacks.

    Each is put right before the first stage that needs it; stages that run again, where
    :func:`_with_stages_again` says; reductions of gradients where :func:`_with_reductions` says.
    """

    def completed_program(known: Program, direction: Direction) -> Program:
        needs = needs_of(schedule, layers, direction)
        if needs.keys() <= set(known.stages):
            return known
        lane_of = {stage: order.lane for order in known.lanes for stage in order.stages}
        lanes: dict[str, list[Stage]] = {order.lane: [] for order in known.lanes}
        # Lanes that are cut out of one order which respects all dependencies never wait for each other.
        before = {stage: tuple(one for one in needs[stage] if one in lane_of) for stage in lane_of}
        order = [stage for _, stage in issue_order(known, before, host_waits=False)]
        if not any(stage.again for stage in order):
            order = _with_stages_again(order, needs)
        in_one_chunk = schedule.degree_of(direction) == 1
        for stage in _with_reductions(completed(order, needs), needs, lane_of, in_one_chunk=in_one_chunk):
            own = COMPUTE if len(known.lanes) == 1 else stage.kind.lane.name
            lanes.setdefault(lane_of.get(stage, own), []).append(stage)
        return Program.of(lanes)

    return schedule.mapped(completed_program)


def bound(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """The schedule with the rows of its blocks in place of the kinds that have their names."""

    def of_rows(program: Program, direction: Direction) -> Program:
        rows = {stage: stage for stage in needs_of(schedule, layers, direction)}
        return program.mapped(lambda stages: (rows.get(stage, stage) for stage in stages))

    return schedule.mapped(of_rows)


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


def _with_stages_again(order: Sequence[Stage], needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """A backward order with the stages that run again.

    They run in the mirrored order of the backward stages of their block, spread evenly over those of the
    block above. A recomputed block is differentiated when the block above it has ended.

    ``order`` has each stage after what it needs, and may lack some. In what is returned, a stage may stand
    before one that it needs.
    """
    layers = {stage.layer for stage in needs if stage.again}
    if not layers:
        return list(order)
    plain = {
        stage: [one for one in needed if not one.again] for stage, needed in needs.items() if not stage.again
    }
    by_layer = sorted(
        completed(order, plain), key=lambda stage: sum(layer >= stage.layer for layer in layers)
    )
    after: dict[Stage, list[Stage]] = {}
    found: list[Stage] = []
    for layer in sorted(layers, reverse=True):
        again = _again(by_layer, layer, needs)
        above = _alone(by_layer, layer + 1)
        if not above:
            found += again
        for place, stage in enumerate(again if above else ()):
            after.setdefault(above[place * len(above) // len(again)], []).append(stage)
    for stage in by_layer:
        found += (stage, *after.get(stage, ()))
    return found


def _again(order: Sequence[Stage], layer: int, needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """The stages of a layer that run again; each transfer as soon as it can be started."""
    found_again = (
        Stage(stage.kind, stage.chunk, layer, again=True) for stage in reversed(order) if stage.layer == layer
    )
    mirrored = [stage for stage in found_again if stage in needs]
    transfers = [stage for stage in mirrored if stage.is_communication]
    found: dict[Stage, None] = {}
    for stage in mirrored:
        if stage.is_communication:
            continue
        found[stage] = None
        for transfer in transfers:
            if all(needed in found for needed in needs[transfer]):
                found.setdefault(transfer)
    return [*found, *(stage for stage in transfers if stage not in found)]


def _alone(order: Sequence[Stage], layer: int) -> list[Stage]:
    """The stages of a layer that stand after all of the layer above it."""
    first = max((place for place, stage in enumerate(order) if stage.layer == layer + 1), default=-1) + 1
    return [stage for stage in order[first:] if stage.layer == layer]
