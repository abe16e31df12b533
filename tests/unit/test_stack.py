"""Schedules of several blocks, and of blocks that do not keep all that their backward needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.timeline import StageSpan, Timeline
from megatron_ampipe.schedule import (
    SCHEDULE_NAMES,
    STRATEGIES,
    BlockFeatures,
    Direction,
    LaneOrder,
    Pipeline,
    Program,
    Schedule,
    Stage,
    build,
    check,
    from_text,
    issue_order,
    kinds,
    needs_of,
    of_chunks,
    period,
    to_text,
    unrolled,
    with_memory,
)

PLAIN = BlockFeatures(chunked_qkv=True)
DENSE = BlockFeatures(dense=True, chunked_qkv=True)

names = st.sampled_from(SCHEDULE_NAMES)
degrees = st.tuples(st.integers(1, 4), st.integers(1, 3)).flatmap(
    lambda pair: st.sampled_from([(pair[0] * pair[1], pair[0]), (pair[0], pair[0] * pair[1])])
)
features = st.builds(
    BlockFeatures,
    losses=st.booleans(),
    shared=st.booleans(),
    ordered_routing=st.booleans(),
    chooses=st.booleans(),
    chunked_qkv=st.booleans(),
    reduces=st.booleans(),
    reduces_experts=st.booleans(),
    nodes=st.booleans(),
    gathers=st.sampled_from(("", "comm", "comm.intra")),
    row_links=st.sampled_from(("", "network", "node")),
    gathers_rows=st.booleans(),
).map(
    lambda block: replace(
        block,
        gathers_rows=block.gathers_rows and block.scatters_rows,
        reduces_experts=block.reduces and block.reduces_experts,
    )
)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockFeatures, ...]:
    """Consecutive blocks of one model, of which at least one has experts; dense ones stand anywhere."""
    block = draw(features)
    dense = BlockFeatures(
        dense=True,
        chunked_qkv=block.chunked_qkv,
        reduces=block.reduces,
        row_links=block.row_links,
        gathers_rows=block.gathers_rows,
    )
    kinds_of = draw(st.lists(st.booleans(), min_size=1, max_size=5).filter(any))
    return tuple(block if has_experts else dense for has_experts in kinds_of)


def repeated(name: str, degrees: tuple[int, int], layers: Sequence[BlockFeatures]) -> Schedule:
    block = next((one for one in layers if one.experts), layers[0])
    return period(build(name, degree=degrees[0], backward_degree=degrees[1], features=block))


@settings(deadline=None)
@given(names, degrees, blocks())
def test_a_period_becomes_a_schedule_of_any_blocks(
    name: str, degrees: tuple[int, int], layers: tuple[BlockFeatures, ...]
) -> None:
    found = repeated(name, degrees, layers)
    assert found.repeats
    schedule = unrolled(found, layers)
    assert not schedule.repeats
    check(schedule, layers)
    # What a pipeline makes of blocks, before it was cut into its steps.
    if len(layers) > 1:
        pipeline = Pipeline.of(degrees[0], backward_degree=degrees[1], schedule=name, stack=0)
        assert pipeline.schedule_of(layers) == schedule
    for direction in Direction:
        needs = needs_of(schedule, layers, direction)
        order = issue_order(schedule.program(direction), needs, host_waits=True)
        assert len(order) == len(needs)


@settings(deadline=None)
@given(names, degrees, features)
def test_of_one_block_it_is_the_schedule_of_one_block(
    name: str, degrees: tuple[int, int], block: BlockFeatures
) -> None:
    one = build(name, degree=degrees[0], backward_degree=degrees[1], features=block)
    assert unrolled(period(one), [block]) == unrolled(one, [block]) == one
    assert (
        Pipeline.of(degrees[0], backward_degree=degrees[1], schedule=name, stack=0).schedule_of([block])
        == one
    )


@settings(deadline=None)
@given(names, degrees, features)
def test_text_keeps_that_a_schedule_repeats(
    name: str, degrees: tuple[int, int], block: BlockFeatures
) -> None:
    found = repeated(name, degrees, [block])
    text = to_text(found)
    assert text.splitlines()[0].endswith(" repeats")
    assert from_text(text) == found
    assert period(found) is found
    schedule = unrolled(found, [block] * 3)
    assert from_text(to_text(schedule)) == schedule


def without(schedule: Schedule, direction: Direction, *lacking: Stage) -> Schedule:
    program = Program(
        tuple(
            LaneOrder(order.lane, tuple(stage for stage in order.stages if stage not in lacking))
            for order in schedule.program(direction).lanes
        )
    )
    return replace(schedule, **{direction.value: program})


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("repeats", [False, True])
def test_an_incomplete_order_is_refused_and_not_completed(direction: Direction, repeats: bool) -> None:
    """Only what a period cannot know is added: stages of dense blocks."""
    one = build("ampipe", degree=2, features=PLAIN)
    for stage in one.program(direction).stages:
        whole = period(one) if repeats else one
        at_period = replace(stage, layer=-1 if direction is Direction.FORWARD else 1)
        incomplete = without(whole, direction, at_period if repeats and stage.kind == kinds.MERGE else stage)
        for layers in ([PLAIN], [PLAIN, DENSE]) if repeats else ([PLAIN],):
            with pytest.raises(BadInput, match="0 times instead of once"):
                check(unrolled(incomplete, layers), layers)


def test_an_order_of_a_later_block_is_not_refused_for_what_only_it_has() -> None:
    """The dense block's ``mlp`` is placed before the first stage that needs it."""
    layers = (DENSE, PLAIN)
    schedule = unrolled(period(build("ampipe", degree=2, features=PLAIN)), layers)
    check(schedule, layers)
    compute = schedule.forward.lanes[0].stages
    for chunk in range(2):
        assert compute.index(Stage(kinds.MLP, chunk)) == compute.index(Stage(kinds.QKV, chunk, 1)) - 1


@settings(deadline=None)
@given(names, st.integers(1, 4), st.integers(2, 5))
def test_every_turn_of_a_period_is_the_same(name: str, degree: int, count: int) -> None:
    """A longer stack repeats what a shorter one does: every layer has the same order."""
    found = repeated(name, (degree, degree), [PLAIN])
    shorter, longer = unrolled(found, [PLAIN] * count), unrolled(found, [PLAIN] * (count + 1))
    for below, above in zip(shorter.forward.lanes, longer.forward.lanes, strict=True):
        # Without the last turn, in which only the layer that ends has stages.
        kept = [stage for stage in below.stages if stage.layer < count - 1]
        assert [stage for stage in above.stages if stage.layer < count - 1] == kept
    for below, above in zip(shorter.backward.lanes, longer.backward.lanes, strict=True):
        moved = [replace(stage, layer=stage.layer - 1) for stage in above.stages if stage.layer > 1]
        assert moved == [stage for stage in below.stages if stage.layer > 0]


def test_how_many_layers_share_a_schedule() -> None:
    assert [Pipeline.of(4, stack=stack).stack_of(6) for stack in (0, 1, 4, 6, 9)] == [6, 1, 4, 6, 6]
    assert str(Pipeline.of(4, stack=0)) == "degree 4, schedule ampipe, layers that share a schedule all"
    assert str(Pipeline.of(4)) == "degree 4, schedule ampipe"


EXPERTS = BlockFeatures(losses=True, shared=True, ordered_routing=True, chunked_qkv=True)
RESTORING = {
    "keep": set(),
    "rebuild": {kinds.REBUILD},
    "redispatch": {kinds.REPERMUTE, kinds.REDISPATCH, kinds.REBUILD},
    "offload": {kinds.LOAD},
    "S2": {kinds.REPERMUTE, kinds.REDISPATCH, kinds.RESORT, kinds.LOAD},
    "S3": {kinds.LOAD_TOKENS, kinds.REBUILD},
}
STORING = {"offload": {kinds.STORE}, "S2": {kinds.STORE}, "S3": {kinds.STORE_TOKENS}}
DEGREES = ((4, 4), (2, 4), (6, 3), (4, 1), (1, 1))
MIXED = {4: "offload/redispatch/S3/keep", 3: "rebuild/S2/keep"}


def stacks_of(memory: str) -> list[list[BlockFeatures]]:
    one = with_memory(EXPERTS, memory)
    return [[one], [one] * 3, [with_memory(DENSE, memory), one, one], [replace(one, chunked_qkv=False)] * 2]


def schedules(layers: list[BlockFeatures], memory: str) -> list[Schedule]:
    return [
        Pipeline.of(degree, backward_degree=backward, schedule=name, stack=0, memory=memory).schedule_of(
            layers
        )
        for name in SCHEDULE_NAMES
        for degree, backward in DEGREES
        if len(of_chunks(memory)) in (1, backward)
    ]


@pytest.mark.parametrize("memory", [*STRATEGIES, *MIXED.values()])
def test_what_restores_runs_in_the_backward_pass_of_every_chunk(memory: str) -> None:
    for layers in stacks_of(memory):
        for schedule in schedules(layers, memory):
            names = of_chunks(memory) * (schedule.backward_degree if memory in STRATEGIES else 1)
            found = [stage for stage in schedule.backward.stages if stage.kind.restores is not None]
            assert set(found) == {
                Stage(kind, chunk, layer)
                for layer, features in enumerate(layers)
                if features.experts
                for chunk, name in enumerate(names)
                for kind in RESTORING[name]
            }
            assert not any(stage.kind.restores for stage in schedule.forward.stages)
            # A chunk of a pass with fewer chunks is stored if any of its parts is.
            assert {stage for stage in schedule.forward.stages if stage.kind.copies} == {
                Stage(kind, chunk * schedule.degree // len(names), layer)
                if schedule.degree <= len(names)
                else Stage(kind, part, layer)
                for layer, features in enumerate(layers)
                if features.experts
                for chunk, name in enumerate(names)
                for kind in STORING.get(name, ())
                for part in range(schedule.degree)
                if part * len(names) // schedule.degree == chunk or schedule.degree <= len(names)
            }
            assert from_text(to_text(schedule)) == schedule


@pytest.mark.parametrize("lane", ["comm", "comm.intra"])
def test_what_comes_back_is_gathered_once_more_and_what_was_kept_is_not(lane: str) -> None:
    """``rebuild`` keeps the gathered tokens; the others gather what was sent once more, or stored."""
    memory = "rebuild/redispatch/S2/S3"
    features = with_memory(replace(EXPERTS, gathers=lane), memory)
    schedule = Pipeline.of(4, memory=memory).schedule_of([features])
    needs = needs_of(schedule, [features], Direction.BACKWARD)
    again = kinds.REGATHER
    assert needs[Stage(kinds.REBUILD, 0)] == ()
    for chunk, source, taker in (
        (1, kinds.REDISPATCH, kinds.REBUILD),
        (2, kinds.REDISPATCH, kinds.RESORT),
        (3, kinds.LOAD_TOKENS, kinds.REBUILD),
    ):
        assert needs[Stage(again, chunk)] == (Stage(source, chunk),)
        assert needs[Stage(taker, chunk)] == (Stage(again, chunk),)
    assert {one.lane for one in schedule.backward.lanes} - {"comm.intra"} == {"compute", "comm", "copy"}
    (own,) = (one for one in schedule.backward.lanes if one.lane == lane)
    assert {Stage(again, chunk) for chunk in (1, 2, 3)} <= set(own.stages)
    # What is stored is what has arrived, before it is gathered.
    stored = needs_of(schedule, [features], Direction.FORWARD)[Stage(kinds.STORE_TOKENS, 3)]
    assert stored == (Stage(kinds.DISPATCH, 3),)


@pytest.mark.parametrize(
    ("made_for", "run_as"), itertools.permutations([*STRATEGIES, "rebuild/keep", "redispatch/rebuild"], 2)
)
def test_an_order_of_another_strategy_gets_the_stages_that_it_lacks(made_for: str, run_as: str) -> None:
    """A plan that was made by hand, and an evaluation, which restores nothing."""
    order = period(Pipeline.of(2, memory=made_for).schedule_of([with_memory(EXPERTS, made_for)]))
    layers = [with_memory(EXPERTS, run_as)] * 2
    found = unrolled(order, layers)
    check(found, layers)
    for direction in Direction:
        program = found.program(direction)
        issue_order(program, needs_of(found, layers, direction), host_waits=True)


def test_a_rebuild_after_its_experts_is_refused() -> None:
    features = with_memory(EXPERTS, "rebuild")
    text = to_text(Pipeline.of(2, schedule="sequential", memory="rebuild").schedule_of([features]))
    wrong = text.replace("rebuild.1 expert.1", "expert.1 rebuild.1")
    assert wrong != text
    with pytest.raises(BadInput, match=r"compute waits at expert\.1 for rebuild\.1"):
        check(from_text(wrong), [features])


def test_blocks_without_anything_to_restore_keep_their_features() -> None:
    for features in (DENSE, replace(EXPERTS, recomputed=True)):
        assert with_memory(features, "redispatch") == features
    with pytest.raises(BadInput, match="--ampipe-memory forget: is not one of keep, rebuild, redispatch"):
        Pipeline.of(4, memory="forget")
    with pytest.raises(BadInput, match=r"keep/rebuild: names strategies of 2 chunks, and the .* has 4"):
        Pipeline.of(2, backward_degree=4, memory="keep/rebuild")


RECOMPUTED = replace(EXPERTS, recomputed=True)
DENSE_AGAIN = BlockFeatures(dense=True, chunked_qkv=True, recomputed=True)
STACKS = {
    "one": [RECOMPUTED],
    "four": [RECOMPUTED] * 4,
    "dense first": [DENSE_AGAIN, DENSE_AGAIN, RECOMPUTED, RECOMPUTED],
    "block": [RECOMPUTED, RECOMPUTED, EXPERTS, EXPERTS],
    "whole projections": [replace(RECOMPUTED, chunked_qkv=False)] * 3,
}
DEGREES_AGAIN = ((4, 4), (2, 4), (6, 3), (4, 1))


def schedules_again(layers: Sequence[BlockFeatures]) -> list[Schedule]:
    return [
        Pipeline.of(degree, backward_degree=backward, schedule=name, stack=0).schedule_of(layers)
        for name in SCHEDULE_NAMES
        for degree, backward in DEGREES_AGAIN
    ]


@pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)
def test_all_forward_stages_but_two_transfers_run_again(layers: list[BlockFeatures]) -> None:
    plain = [replace(one, recomputed=False) for one in layers]
    for schedule in schedules_again(layers):
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
    for schedule in schedules_again(layers):
        with_losses = {stage.layer for stage in schedule.forward.stages if stage.kind.name == "losses"}
        assert with_losses == {
            layer for layer, features in enumerate(layers) if features.losses and not features.recomputed
        }


@pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)
def test_at_most_two_recomputed_layers_are_kept_at_a_time(layers: list[BlockFeatures]) -> None:
    for schedule in schedules_again(layers):
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
    schedule = unrolled(from_text(text), [DENSE_AGAIN] * 2)
    check(schedule, [DENSE_AGAIN] * 2)
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
