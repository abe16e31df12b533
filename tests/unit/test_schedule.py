"""Schedules: the named ones, their text form, the checks, the issue order."""

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
)
from megatron_ampipe.schedule.stage_kind import INTRA

features = st.builds(
    BlockFeatures,
    losses=st.booleans(),
    shared=st.booleans(),
    ordered_routing=st.booleans(),
    chooses=st.booleans(),
    chunked_qkv=st.booleans(),
    nodes=st.booleans(),
    gathers=st.sampled_from(("", "comm", "comm.intra")),
    row_links=st.sampled_from(("", "network", "node")),
    gathers_rows=st.booleans(),
).map(lambda block: replace(block, gathers_rows=block.gathers_rows and bool(block.row_links)))
names = st.sampled_from(SCHEDULE_NAMES)
degrees = st.integers(1, 9)


def needs_of_block(
    schedule: Schedule, block: BlockFeatures, direction: Direction
) -> dict[Stage, tuple[Stage, ...]]:
    return needs_of(schedule, [block], direction)


@pytest.mark.parametrize("degrees", [(1, 2), (1, 4), (2, 4), (4, 1)])
def test_a_pipeline_knows_the_weights_of_its_own_backward_pass(degrees: tuple[int, int]) -> None:
    forward, backward = degrees
    pipeline = Pipeline.of(forward, backward_degree=backward, schedule="joined")
    schedule = pipeline.schedule_of([BlockFeatures(chunked_qkv=True)])
    assert pipeline.joins_weights == schedule.joins_weights
    assert pipeline.splits_weights == bool(schedule.backward.weights)


@settings(deadline=None)
@given(names, degrees, features, st.booleans())
def test_issue_order_respects_lanes_and_dependencies(
    name: str, degree: int, block: BlockFeatures, host_waits: bool
) -> None:
    schedule = build(name, degree=degree, features=block)
    for direction in Direction:
        needs = needs_of_block(schedule, block, direction)
        order = issue_order(schedule.program(direction), needs, host_waits=host_waits)
        place = {stage: position for position, (_, stage) in enumerate(order)}
        assert len(place) == len(order) == len(needs)
        assert all(place[earlier] < place[stage] for stage, found in needs.items() for earlier in found)
        for lane in schedule.program(direction).lanes:
            assert [stage for name_, stage in order if name_ == lane.lane] == list(lane.stages)


def test_an_order_with_these_stages_is_of_any_linear_layers() -> None:
    """As of a plan for Megatron's local ones that is run with Transformer Engine's."""
    rows = BlockFeatures(row_links="network", gathers_rows=True, chunked_qkv=True)
    without = BlockFeatures(chunked_qkv=True)
    for layers in (1, 3):
        found = build("ampipe", degree=3, features=rows)
        found = unrolled(found if layers == 1 else period(found), [without] * layers)
        check(found, [without] * layers)
        assert "rows" not in to_text(found) and "norm" not in to_text(found)


def test_an_order_without_these_stages_is_completed() -> None:
    """Of a plan from before there were any."""
    before = build("ampipe", degree=3, features=BlockFeatures())
    block = BlockFeatures(row_links="network")
    found = unrolled(before, [block])
    check(found, [block])
    assert "attention.0 add-norm.0 route.0 attention.1 add-norm.1 route.1" in to_text(found)
    before = period(build("ampipe", degree=3, features=BlockFeatures(chunked_qkv=True)))
    block = BlockFeatures(row_links="node", gathers_rows=True, chunked_qkv=True)
    found = unrolled(before, [block] * 3)
    check(found, [block] * 3)
    assert "input-norm.0@1 qkv.0@1 attention.0@1 add-norm.0@1 route.0@1" in to_text(found)


def test_counts_have_a_separate_stream() -> None:
    assert stream_of("comm", Stage(kinds.COUNTS, 1)) != stream_of("comm", Stage(kinds.DISPATCH, 0)) == "comm"
    assert stream_of("compute", Stage(kinds.COUNTS, 1)) == "compute"


def test_backward_is_the_reverse_of_forward() -> None:
    block = BlockFeatures(losses=True, shared=True)
    forward = dependencies([block], degree=3, whole_attention=False, direction=Direction.FORWARD)
    backward = dependencies([block], degree=3, whole_attention=False, direction=Direction.BACKWARD)
    edges = {(a, b) for b, found in forward.items() for a in found if kinds.COUNTS not in (a.kind, b.kind)}
    assert {(b, a) for b, found in backward.items() for a in found} == {(a, b) for a, b in edges}


def replace_lane(schedule: Schedule, lane: str, stages: tuple[Stage, ...]) -> Schedule:
    lanes = tuple(
        LaneOrder(order.lane, stages) if order.lane == lane else order for order in schedule.forward.lanes
    )
    return replace(schedule, forward=Program(lanes))


def test_a_schedule_with_a_deadlock_is_refused() -> None:
    schedule = build("ampipe", degree=2, features=BlockFeatures())
    comm = schedule.forward.lanes[1].stages
    # The combines wait for the experts, and the experts for dispatches that come later in the lane.
    turned = replace_lane(schedule, "comm", comm[4:] + comm[:4])
    with pytest.raises(BadInput, match=r"can never finish.*comm waits at combine\.0 for expert\.0"):
        check(turned, [BlockFeatures()])


def test_a_missing_a_repeated_and_an_unknown_stage_are_refused() -> None:
    schedule = build("ampipe", degree=2, features=BlockFeatures())
    compute = schedule.forward.lanes[0].stages
    with pytest.raises(BadInput, match=r"merge\.1 0 times"):
        check(replace_lane(schedule, "compute", compute[:-1]), [BlockFeatures()])
    with pytest.raises(BadInput, match=r"merge\.1 2 times"):
        check(replace_lane(schedule, "compute", (*compute, compute[-1])), [BlockFeatures()])
    with pytest.raises(BadInput, match="losses that this block does not have"):
        check(replace_lane(schedule, "compute", (*compute, Stage(kinds.LOSSES))), [BlockFeatures()])
    with pytest.raises(BadInput, match="losses 0 times"):
        check(schedule, [BlockFeatures(losses=True)])


def test_computation_in_the_communication_lane_is_refused() -> None:
    schedule = build("ampipe", degree=2, features=BlockFeatures())
    compute, comm = (order.stages for order in schedule.forward.lanes)
    moved = replace_lane(replace_lane(schedule, "compute", compute[:-1]), "comm", (*comm, compute[-1]))
    with pytest.raises(BadInput, match=r"computes merge\.1 in the communication lane"):
        check(moved, [BlockFeatures()])


def test_routing_out_of_order_is_refused_with_a_capacity() -> None:
    schedule = build("sequential", degree=2, features=BlockFeatures())
    lane = schedule.forward.lanes[0].stages
    half = (len(lane) - 1) // 2
    turned = replace_lane(schedule, "compute", (lane[0], *lane[1 + half :], *lane[1 : 1 + half]))
    check(turned, [BlockFeatures()])
    with pytest.raises(BadInput, match=r"can never finish"):
        check(turned, [BlockFeatures(ordered_routing=True)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1"),
        ("schedule mine degree 0", "line 1"),
        ("schedule mine degree two", "line 1"),
        ("schedule mine degree 2\nsideways compute: qkv", "line 2"),
        ("schedule mine degree 2\nforward compute qkv", "line 2"),
        ("schedule mine degree 2\nforward compute: qkv.2", r"qkv\.2"),
        ("schedule mine degree 2\nforward compute: expert", "expert: is not a stage"),
        ("schedule mine degree 2\nforward compute: expert.2", r"expert\.2: is not a stage"),
        ("schedule mine degree 2\nforward compute: expert.-1", r"expert\.-1: is not a stage"),
        ("schedule mine degree 2\nforward compute: moe.0", r"moe\.0: is not a stage"),
        ("schedule mine degree 2\nforward compute: mlp", "mlp: is not a stage"),
        ("schedule mine degree 2 repeated\nforward compute: qkv", "line 1"),
    ],
)
def test_invalid_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        from_text(text)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(BadInput, match="ampipe, moe-only, lancet, joined, sequential"):
        build("fast", degree=2, features=BlockFeatures())


pairs_of_degrees = st.tuples(st.integers(1, 6), st.integers(1, 4)).flatmap(
    lambda pair: st.sampled_from([(pair[0] * pair[1], pair[0]), (pair[0], pair[0] * pair[1])])
)


@settings(deadline=None)
@given(names, pairs_of_degrees, features)
def test_each_direction_has_its_own_degree(
    name: str, degrees_: tuple[int, int], block: BlockFeatures
) -> None:
    forward, backward = degrees_
    schedule = build(name, degree=forward, backward_degree=backward, features=block)
    check(schedule, [block])
    assert from_text(to_text(schedule)) == schedule
    for direction, degree in ((Direction.FORWARD, forward), (Direction.BACKWARD, backward)):
        stages = schedule.program(direction).stages
        assert schedule.program(direction) == build(name, degree=degree, features=block).program(direction)
        dispatches = [stage for stage in stages if stage.kind == kinds.DISPATCH]
        assert len(dispatches) == degree
        of_chunks = [part.chunk for stage in dispatches for part in schedule.chunks_of(stage, direction)]
        assert sorted(of_chunks) == list(range(max(degrees_)))
        ascending = of_chunks if direction is Direction.FORWARD else of_chunks[::-1]
        assert ascending == sorted(ascending)


def test_degrees_that_do_not_divide_each_other_are_refused() -> None:
    schedule = build("ampipe", degree=4, features=BlockFeatures())
    other = build("ampipe", degree=3, features=BlockFeatures())
    mixed = Schedule("mine", 4, schedule.forward, other.backward, 3)
    with pytest.raises(BadInput, match="has degree 3, which neither divides the forward degree 4"):
        check(mixed, [BlockFeatures()])


def test_every_kind_is_a_row_of_some_block() -> None:
    restored = (("rebuild", "redispatch"), ("offload", "redispatch"), ("rebuild", "offload_tokens"))
    everything = BlockFeatures(
        losses=True,
        shared=True,
        chooses=True,
        chunked_qkv=True,
        restored=restored,
        condensed=True,
        reduces=True,
        reduces_experts=True,
        nodes=True,
        gathers=INTRA,
        row_links="network",
        gathers_rows=True,
        ring_ranks=2,
    )
    found = {kind.row for block in (everything, BlockFeatures(dense=True)) for kind in data_flow(block).kinds}
    assert found == set(kinds.MOE_BLOCK)
