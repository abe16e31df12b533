"""Passes that transform an order of stages: they add missing stages, and repeat it for several blocks.

A schedule of several consecutive blocks is one period, repeated block after block without a boundary. This
works because attention is causal: chunk ``c`` of a block needs only chunks up to ``c`` of the block below. A
period lists the stages of one block in every lane; a stage may belong to the block before or after
(``Stage.layer``). The last merges of a block then run between the first projections of the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.dataflow import needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.program import Program, Schedule, Stage, completed, issue_order
from megatron_ampipe.schedule.stage_kind import COMPUTE, Direction

_PLACEABLE = {
    *(kinds.MLP, kinds.REDUCE, kinds.REDUCE_EXPERTS, kinds.STORE, kinds.STORE_TOKENS),
    *(kinds.INPUT_NORM, kinds.GATHER_ROWS, kinds.REGATHER_ROWS, kinds.SCATTER_ROWS, kinds.ADD_NORM),
}
"""Kinds that :func:`unrolled` adds if an order lacks them, as it does all kinds that restore activations."""


def period(schedule: Schedule) -> Schedule:
    """Turn the schedule of one block into the period of a schedule of several blocks.

    The merge of a chunk is placed next to the projection of the same chunk in the next block: before it in
    the forward pass, after it in the backward pass. If the projections cover the whole sequence, blocks run
    one after another. Stages that run again are left out, because :func:`unrolled` adds them.
    """
    if schedule.repeats:
        return schedule
    forward = schedule.forward
    backward = schedule.backward.mapped(lambda stages: (stage for stage in stages if not stage.is_recompute))
    if kinds.QKV not in forward.whole and len(forward.lanes) > 1:
        forward, backward = _merging(forward, -1), _merging(backward, 1)
    return replace(schedule, forward=forward, backward=backward, repeats=True)


def _merging(program: Program, layer: int) -> Program:
    """Move each merge, as one of this relative layer, next to the projections of its chunk."""
    has_norms = any(stage.kind == kinds.INPUT_NORM for stage in program.stages)
    begins = kinds.INPUT_NORM if has_norms else kinds.QKV

    def with_merges(stages: Sequence[Stage]) -> Iterator[Stage]:
        for stage in stages:
            around = [stage] if stage.kind != kinds.MERGE else []
            if stage.kind == begins:
                around.insert(0 if layer < 0 else 1, Stage(kinds.MERGE, stage.chunk, layer))
            yield from around

    return program.mapped(with_merges)


def unrolled(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """Turn a schedule of one block, or a period, into the schedule of these blocks.

    Args:
        schedule: The schedule. Its stages that a block does not have are left out, such as losses in a pass
            without gradients.
        layers: The features of the blocks. Missing stages of dense blocks, stages that store or restore
            activations, and transfers of rows are added right before the first stage that needs them. If
            no stage runs again in ``schedule``, the stages that must run again and the reductions are added.
    """

    def unroll(program: Program, direction: Direction) -> Program:
        needs = needs_of(schedule, layers, direction)
        return program.mapped(
            lambda stages: (stage for stage in repeated(stages, len(layers), direction) if stage in needs)
        )

    whole = replace(schedule.mapped(unroll), repeats=False)
    runs_again = any(stage.is_recompute for stage in whole.backward.stages)
    lacks_others = any(
        stage.kind not in _PLACEABLE
        and stage.kind.restores is None
        and (runs_again or not stage.is_recompute)
        for direction in Direction
        for stage in needs_of(whole, layers, direction).keys() - set(whole.program(direction).stages)
    )
    # Any other missing stage is an error in the given order, which :func:`~.text.check` reports.
    return whole if lacks_others else placed(whole, layers)


def repeated(stages: Sequence[Stage], num_layers: int, direction: Direction) -> Iterator[Stage]:
    """Repeat a lane's stages of one period for each layer, in the layer order of the pass.

    Stages of the next micro-batch's forward pass (``of_next_microbatch``) go through the layers in the
    opposite order.
    """
    for index, passed in repeat_period([stage.layer for stage in stages], num_layers):
        stage = stages[index]
        goes_up = direction is Direction.FORWARD or stage.of_next_microbatch
        yield replace(stage, layer=passed if goes_up else num_layers - 1 - passed)


def repeat_period(relative_layers: Sequence[int], num_layers: int) -> list[tuple[int, int]]:
    """Repeat the stages of a lane in one period for each layer.

    Args:
        relative_layers: The relative layer of each stage (``Schedule.repeats``).
        num_layers: The number of layers.

    Returns:
        The order of the lane: for each stage, its index in the period, and how many layers the pass has gone
        through before its layer.
    """
    first_turn = -max(relative_layers, default=0)
    end = num_layers - min(relative_layers, default=0)
    return [
        (index, turn + relative)
        for turn in range(first_turn, end)
        for index, relative in enumerate(relative_layers)
        if 0 <= turn + relative < num_layers
    ]


def placed(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """Add the stages that a schedule lacks, and replace kinds by the rows of its blocks.

    A stage is put right before the first stage that needs it, except stages that run again and reductions.
    """

    def complete(program: Program, direction: Direction) -> Program:
        needs = needs_of(schedule, layers, direction)
        if not needs.keys() <= set(program.stages):
            program = _completed(program, needs, in_one_chunk=schedule.degree_of(direction) == 1)
        rows = {stage: stage for stage in needs}
        return program.mapped(lambda stages: (rows.get(stage, stage) for stage in stages))

    return schedule.mapped(complete)


def _completed(program: Program, needs: Mapping[Stage, Sequence[Stage]], *, in_one_chunk: bool) -> Program:
    lane_of = {stage: lane for lane, stages in program.lanes for stage in stages}
    lanes: dict[str, list[Stage]] = {lane: [] for lane, _ in program.lanes}
    # Lanes that are taken from one order that respects all dependencies cannot deadlock.
    before = {stage: tuple(other for other in needs[stage] if other in lane_of) for stage in lane_of}
    order = [stage for _, stage in issue_order(program, before, host_waits=False)]
    if not any(stage.is_recompute for stage in order):
        order = _with_stages_again(order, needs)
    for stage in _with_reductions(completed(order, needs), needs, lane_of, in_one_chunk=in_one_chunk):
        own = COMPUTE if len(program.lanes) == 1 else stage.kind.lane.name
        lanes.setdefault(lane_of.get(stage, own), []).append(stage)
    return Program.of(lanes)


def _with_reductions(
    order: Sequence[Stage],
    needs: Mapping[Stage, Sequence[Stage]],
    known: Collection[Stage],
    *,
    in_one_chunk: bool,
) -> list[Stage]:
    """Add each reduction after the last transfer of its block, unless ``known`` already places it."""

    def is_before(other: Stage, reduction: Stage) -> bool:
        # With one chunk, no transfer runs while the experts compute, so a reduction is placed there.
        expert_reduction = replace(reduction, kind=kinds.REDUCE_EXPERTS)
        if in_one_chunk and reduction.kind == kinds.REDUCE and expert_reduction in needs:
            return other.kind == kinds.COMBINE
        return other.is_communication

    missing = [stage for stage in needs if stage.kind.of_parameters and stage not in known]
    completed_order = [stage for stage in order if stage not in missing]
    for stage in missing:
        place = 0
        for index, other in enumerate(completed_order, 1):
            if other in needs[stage] or (other.layer == stage.layer and is_before(other, stage)):
                place = index
        completed_order.insert(place, stage)
    return completed_order


def _with_stages_again(order: Sequence[Stage], needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """Add the stages that run again to a backward order, spread evenly over the stages of the block above.

    A stage may be placed before one that it needs.
    """
    layers = {stage.layer for stage in needs if stage.is_recompute}
    if not layers:
        return list(order)
    plain = {
        stage: [other for other in needed if not other.is_recompute]
        for stage, needed in needs.items()
        if not stage.is_recompute
    }
    by_layer = sorted(
        completed(order, plain), key=lambda stage: sum(layer >= stage.layer for layer in layers)
    )
    after: dict[Stage, list[Stage]] = {}
    spread: list[Stage] = []
    for layer in sorted(layers, reverse=True):
        again = _again(by_layer, layer, needs)
        # The stages of the block above that come after all stages of the second block above.
        ends = (place for place, stage in enumerate(by_layer) if stage.layer == layer + 2)
        alone = by_layer[max(ends, default=-1) + 1 :]
        above = [stage for stage in alone if stage.layer == layer + 1]
        if not above:
            spread += again
        for place, stage in enumerate(again if above else ()):
            after.setdefault(above[place * len(above) // len(again)], []).append(stage)
    for stage in by_layer:
        spread += (stage, *after.get(stage, ()))
    return spread


def _again(order: Sequence[Stage], layer: int, needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """The stages of a layer that run again, with each transfer as early as possible."""
    again = (replace(stage, is_recompute=True) for stage in reversed(order) if stage.layer == layer)
    mirrored = [stage for stage in again if stage in needs]
    transfers = [stage for stage in mirrored if stage.is_communication]
    started: dict[Stage, None] = {}
    for stage in mirrored:
        if stage.is_communication:
            continue
        started[stage] = None
        for transfer in transfers:
            if all(needed in started for needed in needs[transfer]):
                started.setdefault(transfer)
    return [*started, *(stage for stage in transfers if stage not in started)]
