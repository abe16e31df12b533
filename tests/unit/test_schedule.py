"""Schedules of one block and of several: text form, checks, issue order, what is restored and runs again.

The orders themselves are golden texts (test_golden.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
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
    data_flow,
    dependencies,
    from_text,
    issue_order,
    kinds,
    needs_of,
    period,
    stream_of,
    to_text,
    unrolled,
    with_memory,
)
from megatron_ampipe.schedule.stage_kind import INTRA

PLAIN = BlockFeatures(chunked_qkv=True)
DENSE = BlockFeatures(dense=True, chunked_qkv=True)
EXPERTS = BlockFeatures(losses=True, shared=True, ordered_routing=True, chunked_qkv=True)

names = st.sampled_from(SCHEDULE_NAMES)
degrees = st.tuples(st.integers(1, 5), st.integers(1, 4)).flatmap(
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
        gathers_rows=block.gathers_rows and bool(block.row_links),
        reduces_experts=block.reduces and block.reduces_experts,
    )
)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockFeatures, ...]:
    """Consecutive blocks of one model, of which at least one has experts; dense ones stand anywhere."""
    block = draw(features)
    has_experts = draw(st.lists(st.booleans(), min_size=1, max_size=5).filter(any))
    return tuple(block if experts else block.without_experts for experts in has_experts)


@settings(deadline=None)
@given(names, degrees, blocks(), st.booleans())
def test_a_pipeline_schedules_any_blocks(
    name: str, degrees: tuple[int, int], layers: tuple[BlockFeatures, ...], host_waits: bool
) -> None:
    forward, backward = degrees
    schedule = Pipeline.of(forward, backward_degree=backward, schedule=name, stack=0).schedule_of(layers)
    assert not schedule.repeats and from_text(to_text(schedule)) == schedule
    for direction in Direction:
        needs = needs_of(schedule, layers, direction)
        order = issue_order(schedule.program(direction), needs, host_waits=host_waits)
        place = {stage: position for position, (_, stage) in enumerate(order)}
        assert len(place) == len(order) == len(needs)
        assert all(place[earlier] < place[stage] for stage, needed in needs.items() for earlier in needed)
        for lane in schedule.program(direction).lanes:
            assert [stage for name_, stage in order if name_ == lane.lane] == list(lane.stages)


@settings(deadline=None)
@given(names, degrees, features)
def test_a_period_of_one_block_is_its_schedule(
    name: str, degrees: tuple[int, int], block: BlockFeatures
) -> None:
    schedule = build(name, degree=degrees[0], backward_degree=degrees[1], features=block)
    repeating = period(schedule)
    assert unrolled(repeating, [block]) == unrolled(schedule, [block]) == schedule
    assert to_text(repeating).splitlines()[0].endswith(" repeats")
    assert from_text(to_text(repeating)) == repeating and period(repeating) is repeating


@settings(deadline=None)
@given(names, degrees, features)
def test_each_direction_has_its_own_degree(name: str, degrees: tuple[int, int], block: BlockFeatures) -> None:
    schedule = build(name, degree=degrees[0], backward_degree=degrees[1], features=block)
    for direction, degree in zip(Direction, degrees, strict=True):
        stages = schedule.program(direction).stages
        assert schedule.program(direction) == build(name, degree=degree, features=block).program(direction)
        dispatches = [stage for stage in stages if stage.kind == kinds.DISPATCH]
        assert len(dispatches) == degree
        of_chunks = [part.chunk for stage in dispatches for part in schedule.chunks_of(stage, direction)]
        assert sorted(of_chunks) == list(range(max(degrees)))
        ascending = of_chunks if direction is Direction.FORWARD else of_chunks[::-1]
        assert ascending == sorted(ascending)


@pytest.mark.parametrize("degrees", [(1, 2), (1, 4), (2, 4), (4, 1)])
def test_a_pipeline_knows_the_weights_of_its_own_backward_pass(degrees: tuple[int, int]) -> None:
    forward, backward = degrees
    pipeline = Pipeline.of(forward, backward_degree=backward, schedule="joined")
    schedule = pipeline.schedule_of([PLAIN])
    assert pipeline.joins_weights == schedule.joins_weights
    assert pipeline.splits_weights == bool(schedule.backward.weights)


def test_an_order_with_stages_of_rows_is_of_any_linear_layers() -> None:
    """As of a plan for Megatron's local ones that is run with Transformer Engine's."""
    rows = replace(PLAIN, row_links="network", gathers_rows=True)
    for layers in (1, 3):
        schedule = build("ampipe", degree=3, features=rows)
        schedule = unrolled(schedule if layers == 1 else period(schedule), [PLAIN] * layers)
        check(schedule, [PLAIN] * layers)
        assert "rows" not in to_text(schedule) and "norm" not in to_text(schedule)


def test_an_order_without_stages_of_rows_is_completed() -> None:
    """Of a plan from before there were any."""
    block = BlockFeatures(row_links="network")
    schedule = unrolled(build("ampipe", degree=3, features=BlockFeatures()), [block])
    check(schedule, [block])
    assert "attention.0 add-norm.0 route.0 attention.1 add-norm.1 route.1" in to_text(schedule)
    block = replace(PLAIN, row_links="node", gathers_rows=True)
    schedule = unrolled(period(build("ampipe", degree=3, features=PLAIN)), [block] * 3)
    check(schedule, [block] * 3)
    assert "input-norm.0@1 qkv.0@1 attention.0@1 add-norm.0@1 route.0@1" in to_text(schedule)


def test_counts_have_a_separate_stream() -> None:
    assert stream_of("comm", Stage(kinds.COUNTS, 1)) != stream_of("comm", Stage(kinds.DISPATCH, 0)) == "comm"
    assert stream_of("compute", Stage(kinds.COUNTS, 1)) == "compute"


def test_backward_is_the_reverse_of_forward() -> None:
    block = BlockFeatures(losses=True, shared=True)
    forward = dependencies([block], degree=3, whole_attention=False, direction=Direction.FORWARD)
    backward = dependencies([block], degree=3, whole_attention=False, direction=Direction.BACKWARD)
    edges = {(a, b) for b, needed in forward.items() for a in needed if kinds.COUNTS not in (a.kind, b.kind)}
    assert {(b, a) for b, needed in backward.items() for a in needed} == edges


def test_every_kind_is_a_row_of_some_block() -> None:
    everything = BlockFeatures(
        losses=True,
        shared=True,
        chooses=True,
        chunked_qkv=True,
        restored=(("rebuild", "redispatch"), ("offload", "redispatch"), ("rebuild", "offload_tokens")),
        condensed=True,
        reduces=True,
        reduces_experts=True,
        nodes=True,
        gathers=INTRA,
        row_links="network",
        gathers_rows=True,
        ring_ranks=2,
    )
    rows = {kind.row for block in (everything, DENSE) for kind in data_flow(block).kinds}
    assert rows == set(kinds.MOE_BLOCK)


def with_lane(schedule: Schedule, lane: str, stages: Sequence[Stage]) -> Schedule:
    lanes = {order.lane: order.stages for order in schedule.forward.lanes}
    return replace(schedule, forward=Program.of(lanes | {lane: stages}))


def test_a_wrong_order_is_refused() -> None:
    schedule = build("ampipe", degree=2, features=PLAIN)
    compute, comm = (order.stages for order in schedule.forward.lanes)
    # The combines wait for the experts, and the experts for dispatches that come later in the lane.
    turned = with_lane(schedule, "comm", comm[4:] + comm[:4])
    moved = with_lane(with_lane(schedule, "compute", compute[:-1]), "comm", (*comm, compute[-1]))
    for wrong, message in (
        (turned, r"can never finish.*comm waits at combine\.0 for expert\.0"),
        (moved, r"computes merge\.1 in the communication lane"),
        (with_lane(schedule, "compute", compute[:-1]), r"merge\.1 0 times"),
        (with_lane(schedule, "compute", (*compute, compute[-1])), r"merge\.1 2 times"),
        (with_lane(schedule, "compute", (*compute, Stage(kinds.LOSSES))), "losses that this block does not"),
    ):
        with pytest.raises(BadInput, match=message):
            check(wrong, [PLAIN])
    with pytest.raises(BadInput, match="losses 0 times"):
        check(schedule, [EXPERTS])
    other = build("ampipe", degree=3, features=PLAIN)
    with pytest.raises(BadInput, match="has degree 3, which neither divides the forward degree 4"):
        check(Schedule("mine", 4, schedule.forward, other.backward, 3), [PLAIN])


def test_routing_out_of_order_is_refused_with_a_capacity() -> None:
    schedule = build("sequential", degree=2, features=BlockFeatures())
    lane = schedule.forward.lanes[0].stages
    half = (len(lane) - 1) // 2
    turned = with_lane(schedule, "compute", (lane[0], *lane[1 + half :], *lane[1 : 1 + half]))
    check(turned, [BlockFeatures()])
    with pytest.raises(BadInput, match=r"can never finish"):
        check(turned, [BlockFeatures(ordered_routing=True)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("schedule mine degree 0", "line 1"),
        ("schedule mine degree two", "line 1"),
        ("schedule mine degree 2 repeated\nforward compute: qkv", "line 1"),
        ("schedule mine degree 2\nsideways compute: qkv", "line 2"),
        ("schedule mine degree 2\nforward compute qkv", "line 2"),
        *(
            (f"schedule mine degree 2\nforward compute: {stage}", f"{stage}: is not a stage")
            for stage in ("qkv.2", "expert", "expert.2", "expert.-1", "moe.0", "mlp")
        ),
    ],
)
def test_invalid_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_text(text)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(BadInput, match="ampipe, moe-only, lancet, joined, sequential"):
        build("fast", degree=2, features=BlockFeatures())


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("repeats", [False, True])
def test_an_incomplete_order_is_refused_and_not_completed(direction: Direction, repeats: bool) -> None:
    """Only what a period cannot know is added: stages of dense blocks."""
    schedule = build("ampipe", degree=2, features=PLAIN)
    whole = period(schedule) if repeats else schedule
    for stage in schedule.program(direction).stages:
        if repeats and stage.kind == kinds.MERGE:
            stage = replace(stage, layer=-1 if direction is Direction.FORWARD else 1)
        lanes = whole.program(direction).lanes
        rest = (LaneOrder(lane.lane, tuple(s for s in lane.stages if s != stage)) for lane in lanes)
        incomplete = replace(whole, **{direction.value: Program(tuple(rest))})
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


def test_how_many_layers_share_a_schedule() -> None:
    assert [Pipeline.of(4, stack=stack).stack_of(6) for stack in (0, 1, 4, 6, 9)] == [6, 1, 4, 6, 6]
    assert str(Pipeline.of(4, stack=0)) == "degree 4, schedule ampipe, layers that share a schedule all"
    assert str(Pipeline.of(4)) == "degree 4, schedule ampipe"


DEGREES = ((4, 4), (2, 4), (8, 4), (1, 4))


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_each_chunk_restores_what_its_strategy_does_not_keep(name: str) -> None:
    """A chunk of a forward pass with fewer chunks is stored if any of its parts is."""
    memory = "offload/redispatch/S3/keep"
    layers = [with_memory(layer, memory) for layer in (DENSE, EXPERTS, EXPERTS)]
    restored = [{"load"}, {"repermute", "redispatch", "rebuild"}, {"load-tokens", "rebuild"}, set()]
    stored = {
        8: {"store.0", "store.1", "store-tokens.4", "store-tokens.5"},
        4: {"store.0", "store-tokens.2"},
        2: {"store.0", "store-tokens.1"},
        1: {"store.0", "store-tokens.0"},
    }
    for forward, backward in DEGREES:
        pipeline = Pipeline.of(forward, backward_degree=backward, schedule=name, stack=0, memory=memory)
        schedule = pipeline.schedule_of(layers)
        for layer in (1, 2):
            restoring = {s.name for s in schedule.backward.stages if s.kind.restores and s.layer == layer}
            assert restoring == {f"{kind}.{chunk}" for chunk in range(4) for kind in restored[chunk]}
            storing = {s.name for s in schedule.forward.stages if s.kind.copies and s.layer == layer}
            assert storing == stored[forward]


@pytest.mark.parametrize("lane", ["comm", "comm.intra"])
def test_what_comes_back_is_gathered_once_more_and_what_was_kept_is_not(lane: str) -> None:
    """``rebuild`` keeps the gathered tokens; the others gather what was sent once more, or stored."""
    memory = "rebuild/redispatch/S2/S3"
    block = with_memory(replace(EXPERTS, gathers=lane), memory)
    schedule = Pipeline.of(4, memory=memory).schedule_of([block])
    needs = needs_of(schedule, [block], Direction.BACKWARD)
    assert needs[Stage(kinds.REBUILD, 0)] == ()
    for chunk, source, taker in (
        (1, kinds.REDISPATCH, kinds.REBUILD),
        (2, kinds.REDISPATCH, kinds.RESORT),
        (3, kinds.LOAD_TOKENS, kinds.REBUILD),
    ):
        assert needs[Stage(kinds.REGATHER, chunk)] == (Stage(source, chunk),)
        assert needs[Stage(taker, chunk)] == (Stage(kinds.REGATHER, chunk),)
    (own,) = (order for order in schedule.backward.lanes if order.lane == lane)
    assert {Stage(kinds.REGATHER, chunk) for chunk in (1, 2, 3)} <= set(own.stages)
    # What is stored is what has arrived, before it is gathered.
    stored = needs_of(schedule, [block], Direction.FORWARD)[Stage(kinds.STORE_TOKENS, 3)]
    assert stored == (Stage(kinds.DISPATCH, 3),)


@pytest.mark.parametrize(
    ("made_for", "run_as"),
    list(itertools.permutations([*STRATEGIES, "rebuild/keep", "redispatch/rebuild"], 2)),
)
def test_an_order_of_another_strategy_gets_the_stages_that_it_lacks(made_for: str, run_as: str) -> None:
    """A plan that was made by hand, and an evaluation, which restores nothing."""
    order = period(Pipeline.of(2, memory=made_for).schedule_of([with_memory(EXPERTS, made_for)]))
    layers = [with_memory(EXPERTS, run_as)] * 2
    check(unrolled(order, layers), layers)


def test_a_rebuild_after_its_experts_is_refused() -> None:
    block = with_memory(EXPERTS, "rebuild")
    text = to_text(Pipeline.of(2, schedule="sequential", memory="rebuild").schedule_of([block]))
    wrong = text.replace("rebuild.1 expert.1", "expert.1 rebuild.1")
    assert wrong != text
    with pytest.raises(BadInput, match=r"compute waits at expert\.1 for rebuild\.1"):
        check(from_text(wrong), [block])


def test_blocks_without_anything_to_restore_keep_their_features() -> None:
    for block in (DENSE, replace(EXPERTS, recomputed=True)):
        assert with_memory(block, "redispatch") == block
    with pytest.raises(BadInput, match="--ampipe-memory forget: is not one of keep, rebuild, redispatch"):
        Pipeline.of(4, memory="forget")
    with pytest.raises(BadInput, match=r"keep/rebuild: names strategies of 2 chunks, and the .* has 4"):
        Pipeline.of(2, backward_degree=4, memory="keep/rebuild")


RECOMPUTED = replace(EXPERTS, recomputed=True)
DENSE_AGAIN = replace(DENSE, recomputed=True)
STACKS = {
    "four": [RECOMPUTED] * 4,
    "dense first": [DENSE_AGAIN, DENSE_AGAIN, RECOMPUTED, RECOMPUTED],
    "some": [RECOMPUTED, RECOMPUTED, EXPERTS, EXPERTS],
    "whole projections": [replace(RECOMPUTED, chunked_qkv=False)] * 3,
}


@pytest.mark.parametrize("layers", STACKS.values(), ids=STACKS)
def test_recomputed_blocks_run_again_two_at_a_time(layers: list[BlockFeatures]) -> None:
    """All forward stages but two transfers; the router adds its losses only when it runs again."""
    plain = [replace(block, recomputed=False) for block in layers]
    for name, (forward, backward) in itertools.product(SCHEDULE_NAMES, (*DEGREES, (6, 3))):
        pipeline = Pipeline.of(forward, backward_degree=backward, schedule=name, stack=0)
        schedule = pipeline.schedule_of(layers)
        assert {stage for stage in schedule.backward.stages if stage.again} == {
            replace(stage, again=True)
            for stage in needs_of(schedule, plain, Direction.BACKWARD)
            # Counts run forward only; the backward of what a combine brings needs no more than its shape.
            if layers[stage.layer].recomputed and stage.kind != kinds.COMBINE and not stage.kind.weights_of
        }
        losses = {stage.layer for stage in schedule.forward.stages if stage.kind == kinds.LOSSES}
        assert losses == {
            layer for layer, block in enumerate(layers) if block.losses and not block.recomputed
        }
        needs = needs_of(schedule, layers, Direction.BACKWARD)
        order = [stage for _, stage in issue_order(schedule.backward, needs, host_waits=False)]
        for layer in range(len(layers) - 2):
            begin = [place for place, stage in enumerate(order) if stage.layer == layer and stage.again]
            above = [place for place, stage in enumerate(order) if stage.layer == layer + 2]
            assert not begin or max(above) < min(begin)


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
    with pytest.raises(BadInput, match="has a stage again:"):
        check(schedule, [DENSE] * 2)
