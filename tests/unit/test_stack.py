"""Schedules of several blocks: periods, what they become for given blocks, and orders that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import (
    SCHEDULE_NAMES,
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
    period,
    to_text,
    unrolled,
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
    assert str(Pipeline.of(4, stack=0)) == "degree 4, schedule ampipe, all layers together"
    assert str(Pipeline.of(4)) == "degree 4, schedule ampipe"
