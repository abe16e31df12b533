"""Schedules of recomputed layers: which stages run again, after what, and how many layers are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.timeline import StageSpan, Timeline
from megatron_ampipe.schedule import (
    SCHEDULE_NAMES,
    BlockFeatures,
    Direction,
    Pipeline,
    Schedule,
    Stage,
    check,
    from_text,
    issue_order,
    needs_of,
    to_text,
    unrolled,
)

PLAIN = BlockFeatures(losses=True, shared=True, ordered_routing=True, chunked_qkv=True)
RECOMPUTED = replace(PLAIN, recomputed=True)
DENSE = BlockFeatures(dense=True, chunked_qkv=True, recomputed=True)
STACKS = {
    "one": [RECOMPUTED],
    "four": [RECOMPUTED] * 4,
    "dense first": [DENSE, DENSE, RECOMPUTED, RECOMPUTED],
    "block": [RECOMPUTED, RECOMPUTED, PLAIN, PLAIN],
    "whole projections": [replace(RECOMPUTED, chunked_qkv=False)] * 3,
}
DEGREES = ((4, 4), (2, 4), (6, 3), (4, 1))


def schedules(layers: Sequence[BlockFeatures]) -> list[Schedule]:
    return [
        Pipeline.of(degree, backward_degree=backward, schedule=name, stack=0).schedule_of(layers)
        for name in SCHEDULE_NAMES
        for degree, backward in DEGREES
    ]


@pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)
def test_all_forward_stages_but_two_transfers_run_again(layers: list[BlockFeatures]) -> None:
    plain = [replace(one, recomputed=False) for one in layers]
    for schedule in schedules(layers):
        again = {stage for stage in schedule.backward.stages if stage.again}
        expected = {
            replace(stage, again=True)
            for stage in needs_of(schedule, plain, Direction.BACKWARD)
            # Counts run forward only; the backward of what a combine brings needs no more than its shape.
            if layers[stage.layer].recomputed
            and stage.kind.name != "combine"
            and stage.kind.weights_of is None
        }
        assert again == expected
        assert "counts" not in {stage.kind.name for stage in again}
        assert not any(stage.again for stage in schedule.forward.stages)


@pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)
def test_the_router_adds_its_losses_only_when_it_runs_again(layers: list[BlockFeatures]) -> None:
    for schedule in schedules(layers):
        with_losses = {stage.layer for stage in schedule.forward.stages if stage.kind.name == "losses"}
        assert with_losses == {
            layer for layer, features in enumerate(layers) if features.losses and not features.recomputed
        }


@pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)
def test_at_most_two_recomputed_layers_are_kept_at_a_time(layers: list[BlockFeatures]) -> None:
    for schedule in schedules(layers):
        needs = needs_of(schedule, layers, Direction.BACKWARD)
        order = [stage for _, stage in issue_order(schedule.backward, needs, host_waits=False)]
        place = {stage: index for index, stage in enumerate(order)}
        for layer in range(len(layers) - 2):
            begin = [place[stage] for stage in order if stage.layer == layer and stage.again]
            above = [place[stage] for stage in order if stage.layer == layer + 2]
            if begin:
                assert max(above) < min(begin)


def test_a_period_says_where_the_layer_below_runs_again() -> None:
    text = """
        schedule mine degree 1 repeats
        forward compute: qkv.0 attention.0 mlp.0
        backward compute: again:qkv.0@1 mlp.0 again:attention.0@1 attention.0 again:mlp.0@1 qkv.0
    """
    schedule = unrolled(from_text(text), [DENSE] * 2)
    check(schedule, [DENSE] * 2)
    assert to_text(schedule).splitlines()[-1] == (
        "backward compute: again:qkv.0@1 again:attention.0@1 again:mlp.0@1 again:qkv.0 mlp.0@1 "
        "again:attention.0 attention.0@1 again:mlp.0 qkv.0@1 mlp.0 attention.0 qkv.0"
    )


def test_a_stage_that_should_run_again_and_does_not_is_refused() -> None:
    layers = [RECOMPUTED] * 2
    schedule = Pipeline.of(2, stack=0).schedule_of(layers)
    missing = next(stage for stage in schedule.backward.stages if stage.again and stage.kind.name == "expert")

    def without(stages: Sequence[Stage]) -> tuple[Stage, ...]:
        return tuple(stage for stage in stages if stage != missing)

    lanes = tuple(replace(order, stages=without(order.stages)) for order in schedule.backward.lanes)
    wrong = replace(schedule, backward=replace(schedule.backward, lanes=lanes))
    with pytest.raises(BadInput, match=f"runs {missing} 0 times instead of once"):
        check(wrong, layers)


def test_a_layer_that_is_not_recomputed_has_no_stage_again() -> None:
    features = BlockFeatures(chunked_qkv=True, recomputed=True)
    schedule = Pipeline.of(2).schedule_of([features])
    with pytest.raises(BadInput, match="has a stage again:"):
        check(schedule, [replace(features, recomputed=False)])


def test_a_stage_that_runs_again_is_found_in_a_timeline(tmp_path: Path) -> None:
    span = StageSpan("compute", "again:expert.2", "backward", 1, 1, 0.0, 5.0)
    assert (span.kind, span.chunk, span.runs_again) == ("expert", 2, True)
    file = tmp_path / "trace.json"
    Timeline(rank=0, spans=(span,)).write_chrome(file)
    assert Timeline.read_chrome(file).spans == (span,)
