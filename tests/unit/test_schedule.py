"""Schedules: the named ones, their text form, the checks, the issue order."""

import itertools
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
    Source,
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
from megatron_ampipe.schedule.stage_kind import COMM, INTRA, INTRA_LANE

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
).map(lambda block: replace(block, gathers_rows=block.gathers_rows and block.scatters_rows))
names = st.sampled_from(SCHEDULE_NAMES)
degrees = st.integers(1, 9)

AMPIPE_OF_TWO = """\
schedule ampipe degree 2
forward compute: qkv attention.0 route.0 attention.1 route.1 expert.0 expert.1 merge.0 merge.1
forward comm: counts.0 dispatch.0 counts.1 dispatch.1 combine.0 combine.1
backward compute: merge.1 merge.0 expert.1 expert.0 route.1 attention.1 route.0 attention.0 qkv
backward comm: combine.1 combine.0 dispatch.1 dispatch.0
"""


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


def test_text_form_of_the_order_of_the_paper() -> None:
    assert to_text(build("ampipe", degree=2, features=BlockFeatures())) == AMPIPE_OF_TWO


@settings(deadline=None)
@given(names, degrees, features)
def test_named_schedules_pass_the_checks_and_are_read_back_from_text(
    name: str, degree: int, block: BlockFeatures
) -> None:
    schedule = build(name, degree=degree, features=block)
    check(schedule, [block])
    assert from_text(to_text(schedule)) == schedule


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


GATHERED_ON_ITS_LANE = """\
schedule ampipe degree 2
forward compute: qkv attention.0 route.0 attention.1 route.1 expert.0 expert.1 merge.0 merge.1
forward comm: counts.0 dispatch.0 counts.1 dispatch.1 combine.0 combine.1
forward comm.intra: gather.0 gather.1 scatter.0 scatter.1
backward compute: merge.1 merge.0 expert.1 expert.0 route.1 attention.1 route.0 attention.0 qkv
backward comm: combine.1 combine.0 dispatch.1 dispatch.0
backward comm.intra: scatter.1 scatter.0 gather.1 gather.0
"""


def test_ranks_that_share_an_expert_gather_on_the_lane_of_their_links() -> None:
    assert to_text(build("ampipe", degree=2, features=BlockFeatures(gathers=INTRA))) == GATHERED_ON_ITS_LANE
    same_links = to_text(build("ampipe", degree=2, features=BlockFeatures(gathers=COMM)))
    assert "comm.intra" not in same_links
    assert "forward comm: counts.0 dispatch.0 gather.0 counts.1 dispatch.1 gather.1 scatter.0" in same_links
    assert "backward comm: combine.1 scatter.1 combine.0 scatter.0 gather.1 dispatch.1" in same_links
    # What comes from another node is handed on there, and then gathered.
    handed_on = to_text(build("ampipe", degree=1, features=BlockFeatures(gathers=COMM, nodes=True)))
    assert "forward comm.intra: spread.0 gather.0 scatter.0 collect.0" in handed_on
    assert "backward comm.intra: collect.0 scatter.0 gather.0 spread.0" in handed_on
    assert kinds.GATHER not in data_flow(BlockFeatures(dense=True)).kinds


def test_a_gather_waits_for_what_arrives_and_the_experts_for_it() -> None:
    block = BlockFeatures(gathers=INTRA)
    needs = needs_of_block(build("ampipe", degree=2, features=block), block, Direction.FORWARD)
    chain = (kinds.DISPATCH, kinds.GATHER, kinds.EXPERT, kinds.SCATTER, kinds.COMBINE)
    for earlier, later in itertools.pairwise(chain):
        assert needs[Stage(later, 1)] == (Stage(earlier, 1),)
    # Its result is added in a linear function: it does not run again in a recomputed block.
    once = data_flow(replace(block, recomputed=True)).once
    assert {kinds.SCATTER, kinds.COMBINE} <= once and kinds.GATHER not in once


ROWS_ON_THEIR_LANE = """\
schedule ampipe degree 3
forward compute: qkv attention.0 add-norm.0 route.0 attention.1 attention.2 add-norm.1 route.1 add-norm.2 \
route.2 expert.0 expert.1 expert.2 merge.0 merge.1 merge.2
forward comm: counts.0 dispatch.0 counts.1 dispatch.1 counts.2 dispatch.2 combine.0 combine.1 combine.2
forward comm.tensor: scatter-rows.0 scatter-rows.1 scatter-rows.2
backward compute: merge.2 merge.1 merge.0 expert.2 expert.1 route.2 add-norm.2 expert.0 route.1 add-norm.1 \
attention.2 route.0 add-norm.0 attention.1 attention.0 qkv
backward comm: combine.2 combine.1 dispatch.2 combine.0 dispatch.1 dispatch.0
backward comm.tensor: scatter-rows.2 scatter-rows.1 scatter-rows.0
"""


def test_rows_of_a_chunk_are_scattered_while_another_chunk_is_computed() -> None:
    block = BlockFeatures(row_links="network")
    assert to_text(build("ampipe", degree=3, features=block)) == ROWS_ON_THEIR_LANE
    # Where chunks project their queries, the next ones do so meanwhile, and the first dispatch comes earlier.
    chunked = to_text(build("ampipe", degree=3, features=replace(block, chunked_qkv=True)))
    assert "qkv.0 attention.0 qkv.1 add-norm.0 route.0 attention.1 qkv.2 add-norm.1 route.1" in chunked
    assert "add-norm.1 attention.2 qkv.2 route.0 add-norm.0 attention.1 qkv.1" in chunked
    # A router that sees all rows waits for all attention.
    choosing = to_text(build("ampipe", degree=3, features=replace(block, chooses=True)))
    assert "attention.0 attention.1 add-norm.0 attention.2 add-norm.1 add-norm.2 choose" in choosing
    assert "choose add-norm.2 add-norm.1 attention.2 add-norm.0 attention.1 attention.0" in choosing
    whole = to_text(build("moe-only", degree=3, features=replace(block, row_links="node")))
    assert "forward comm.tensor: scatter-rows\n" in whole


def test_what_a_row_takes_and_gives_where_rows_are_scattered() -> None:
    block = BlockFeatures(row_links="network")
    flow = data_flow(block)
    assert [value.name for value in flow.kinds[flow.kinds.index(kinds.ATTENTION)].takes][-1] == "context"
    assert flow.taken[kinds.ADD_NORM][1][1] == Source(None, "hidden")
    needs = needs_of_block(build("ampipe", degree=2, features=block), block, Direction.FORWARD)
    for earlier, later in itertools.pairwise((kinds.ATTENTION, kinds.SCATTER_ROWS, kinds.ADD_NORM)):
        assert needs[Stage(later, 1)] == (Stage(earlier, 1),)
    # The norm keeps its input, so a recomputed block scatters again.
    assert kinds.SCATTER_ROWS not in data_flow(replace(block, recomputed=True)).once
    # Resources: of ranks of a node, other links than those of the transfers between nodes.
    intra = data_flow(replace(block, row_links="node")).kinds
    (scatter,) = (kind for kind in intra if kind == kinds.SCATTER_ROWS)
    assert scatter.lane.resource == INTRA_LANE.resource != kinds.SCATTER_ROWS.lane.resource
    assert kinds.ADD_NORM in data_flow(BlockFeatures(dense=True, row_links="node")).kinds


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


@pytest.mark.parametrize("chunked_qkv", [False, True])
def test_the_next_attention_is_issued_before_the_host_waits(chunked_qkv: bool) -> None:
    """Not only the next stage: the projection of a chunk ends before the counts have arrived."""
    block = BlockFeatures(chunked_qkv=chunked_qkv)
    schedule = build("ampipe", degree=4, features=block)
    needs = needs_of_block(schedule, block, Direction.FORWARD)
    order = [stage for _, stage in issue_order(schedule.forward, needs, host_waits=True)]
    for chunk in range(3):
        dispatch, next_attention = Stage(kinds.DISPATCH, chunk), Stage(kinds.ATTENTION, chunk + 1)
        assert order.index(next_attention) < order.index(dispatch)
        # And no more than that: tokens are dispatched after one attention, not after all.
        assert order.index(dispatch) < order.index(Stage(kinds.ROUTE, chunk + 1))


@settings(deadline=None)
@given(names, degrees, features)
def test_the_backward_issue_order_does_not_depend_on_host_waits(
    name: str, degree: int, block: BlockFeatures
) -> None:
    """The split sizes are known, so the host does not wait."""
    schedule = build(name, degree=degree, features=block)
    needs = needs_of_block(schedule, block, Direction.BACKWARD)
    waiting, running = (
        issue_order(schedule.backward, needs, host_waits=host_waits) for host_waits in (True, False)
    )
    assert waiting == running


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


@pytest.mark.parametrize("header", ["schedule mine degree 4 backward", "schedule mine degree 4 backward 0"])
def test_a_bad_backward_degree_in_text_is_refused(header: str) -> None:
    with pytest.raises(BadInput, match="schedule line 1"):
        from_text(header)


def test_a_training_order_is_restricted_to_a_pass_without_losses() -> None:
    training = BlockFeatures(losses=True, shared=True)
    evaluation = BlockFeatures(shared=True)
    restricted = unrolled(build("ampipe", degree=3, features=training), [evaluation])
    check(restricted, [evaluation])
    assert restricted == build("ampipe", degree=3, features=evaluation)


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


@pytest.mark.parametrize(
    "name", ["gather-rows", "regather-rows", "scatter-rows", "gather", "regather", "scatter"]
)
def test_a_plan_with_the_former_name_of_a_kind_is_read(name: str) -> None:
    text = "schedule mine degree 1\nforward comm.intra: {}.0\n"
    assert from_text(text.format(f"{name}-intra")) == from_text(text.format(name))
