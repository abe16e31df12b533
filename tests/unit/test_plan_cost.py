"""The cost model: values computed by hand, and how times depend on sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.cluster import TransferCost
from megatron_ampipe.plan.cost import CostModel
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.operation_times import Product
from megatron_ampipe.plan.operation_times import is_one_product as planned_as_one
from megatron_ampipe.plan.stage_costs import COSTS, FACTS
from megatron_ampipe.plan.workload import chunk_rows
from megatron_ampipe.runtime.segment import is_one_product
from megatron_ampipe.schedule import (
    ALL_KINDS,
    WEIGHTS,
    Direction,
    Exchange,
    Pipeline,
    SequenceLayout,
    Stage,
    build,
    chunk_sequence,
    even_chunks,
    kinds,
    needs_of,
)
from megatron_ampipe.schedule.kinds import step_of
from tests.plan_cases import NONE, cluster, workload


def test_every_kind_has_a_cost() -> None:
    """Its own function, or for gradients of weights the products of the kind whose weights they are."""
    lacking = [
        kind.name
        for kind in ALL_KINDS
        if kind not in COSTS and (kind.weights_of is None or FACTS[kind.weights_of].products is None)
    ]
    assert lacking == [], "add a function with @CostOf(kinds.NAME) to plan/stage_costs.py"
    assert {kind for kind in FACTS if FACTS[kind].products} == set(WEIGHTS)


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize(("tensor", "context"), [(1, 1), (2, 1), (1, 2), (2, 4)])
@pytest.mark.parametrize("degree", [1, 3, 4])
def test_pairs_equal_those_of_the_chunks_of_a_run(
    degree: int, tensor: int, context: int, window: int | None
) -> None:
    """Counted row by row over the spans of ``schedule.chunk_sequence``, on the rank with the most pairs."""
    length = 192
    block = workload(sequence_length=length, tensor=tensor, context=context, window=window)
    found = chunk_rows(block, even_chunks(block.rows, degree))
    counted = []
    for rank in range(context):
        layout = SequenceLayout(tensor_ranks=tensor, context_ranks=context, context_rank=rank)
        counted.append(
            [
                sum(
                    min(row + 1, length if window is None else window + 1)
                    for span in chunk.queries
                    for row in range(span.global_start, span.global_end)
                )
                for chunk in chunk_sequence(length, degree=degree, layout=layout)
            ]
        )
    assert [rows.pairs for rows in found] == [max(ranks) for ranks in zip(*counted, strict=True)]
    if context == 1 and window is None:
        # Query rows are gathered over the tensor-parallel ranks.
        assert sum(rows.pairs for rows in found) == length * (length + 1) // 2


def test_dispatch_equals_a_value_by_hand() -> None:
    # 1024 rows, each sent to 2 of 8 experts, 7 of 8 of them on other ranks; a row has 1024 numbers of 2 bytes
    # and a probability of 4 bytes. 20 us and 50 us per MB.
    model = CostModel(workload(sequence_length=4096), cluster())
    costs = model.stages(even_chunks(4096, 4))
    size = 1024 * 2 * 7 / 8 * (2048 + 4)
    assert costs[Stage(kinds.DISPATCH, 0)].forward == pytest.approx(20 + 50e-6 * size)
    assert costs[Stage(kinds.COMBINE, 3)].backward == pytest.approx(20 + 50e-6 * size)


def test_expert_equals_a_value_by_hand() -> None:
    source = cluster()
    model = CostModel(workload(sequence_length=4096, topk=1), source)
    found = model.stages((4096,))[Stage(kinds.EXPERT, 0)]
    gemm, memory = source.gemm("bf16"), source.compute.memory
    products = 2 * gemm.alpha_us + 2 * 2e-9 * 4096 * 1024 * 4096 * gemm.beta_us_per_gflop
    products += 2 * 1.024 * 4.096 * gemm.weights_us_per_million
    activation = memory.time_us(4096 * (4096 + 4096) * 2)
    assert found.forward == pytest.approx(products + activation + source.stage_overhead("expert").forward_us)


def test_attention_of_later_causal_chunks_takes_longer() -> None:
    costs = CostModel(workload(), cluster()).stages(even_chunks(8192, 8))
    attention = [costs[Stage(kinds.ATTENTION, chunk)] for chunk in range(8)]
    assert all(a.forward < b.forward and a.backward < b.backward for a, b in itertools.pairwise(attention))
    assert costs[Stage(kinds.EXPERT, 0)] == costs[Stage(kinds.EXPERT, 7)]


def test_expert_parallelism_across_nodes_uses_the_links_between_nodes() -> None:
    source = cluster("dgx-h100")
    inside = CostModel(workload(), source).stages((8192,))[Stage(kinds.DISPATCH, 0)].forward
    across = (
        CostModel(workload(experts=16, expert=16), source).stages((8192,))[Stage(kinds.DISPATCH, 0)].forward
    )
    size = 8192 * 2 * 8 / 16 * 2052
    assert source.inter is not None
    assert across == pytest.approx(source.inter["all_to_all"].time_us(size))
    assert across > 2 * inside


def test_a_capacity_limits_the_tokens_sent_and_padding_fills_it() -> None:
    def dispatch(**changes: object) -> float:
        model = CostModel(workload(**changes), cluster())
        return model.stages((8192,))[Stage(kinds.DISPATCH, 0)].forward - 20

    even = dispatch()
    assert dispatch(imbalance=1.5) == pytest.approx(1.5 * even)
    assert dispatch(imbalance=1.5, capacity=1.25) == pytest.approx(1.25 * even)
    assert dispatch(capacity=0.5) == pytest.approx(0.5 * even)
    # AMPipe sends only the tokens that are not dropped; Megatron's own layer also sends the padding.
    assert dispatch(capacity=2.0, padded=True) == pytest.approx(even)
    stock = [
        CostModel(workload(capacity=2.0, padded=padded), cluster()).stock().forward
        for padded in (False, True)
    ]
    assert stock[1] > stock[0]


def test_no_communication_without_expert_parallelism() -> None:
    costs = CostModel(workload(expert=1), cluster()).stages((8192,))
    assert all(cost.forward == cost.backward == 0 for stage, cost in costs.items() if stage.is_communication)


def test_the_figure_stock_all_to_all_is_used_only_for_stock() -> None:
    source = cluster()
    assert source.intra is not None
    slow = TransferCost(alpha_us=40, beta_us_per_mb=100, **NONE)
    other = dataclasses.replace(source, intra={**source.intra, "stock_all_to_all": slow})
    plain, slower = CostModel(workload(), source), CostModel(workload(), other)
    assert plain.stages((4096, 4096)) == slower.stages((4096, 4096))
    exchange = source.intra["all_to_all"].time_us(8192 * 2 * 7 / 8 * 2052)
    assert slower.stock().forward - plain.stock().forward == pytest.approx(2 * exchange)


def test_grouped_chunks_share_a_collective() -> None:
    model = CostModel(workload(shared_ffn=2048, losses=True), cluster())
    fine, coarse = model.stages(even_chunks(8192, 4)), model.stages(even_chunks(8192, 4), parts=2)
    for kind in (
        kinds.QKV,
        kinds.ATTENTION,
        kinds.ROUTE,
        kinds.SHARED,
        kinds.EXPERT,
        kinds.MERGE,
    ):
        together = fine[Stage(kind, 2)] + fine[Stage(kind, 3)]
        assert coarse[Stage(kind, 1)].forward == pytest.approx(together.forward)
        assert coarse[Stage(kind, 1)].backward == pytest.approx(together.backward)
    # One fixed time less.
    separate = fine[Stage(kinds.DISPATCH, 0)].forward + fine[Stage(kinds.DISPATCH, 1)].forward
    assert coarse[Stage(kinds.DISPATCH, 0)].forward == pytest.approx(separate - 20)
    assert coarse[Stage(kinds.LOSSES)] == fine[Stage(kinds.LOSSES)]


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor": 2},
        {"tensor": 4, "expert_tensor": 4, "expert": 2},
        {"context": 2},
        {"dispatcher": "allgather"},
        {"latent": True},
        {"gated": True, "shared_ffn": 1024, "losses": True, "grouped": True},
        {"expert": 4, "capacity": 1.25},
    ],
    ids=str,
)
def test_every_layout_has_every_stage_at_every_degree(changes: dict[str, object]) -> None:
    from megatron_ampipe.schedule import Direction, dependencies

    block = workload(**changes)
    model = CostModel(block, cluster())
    assert min(model.stock().forward, model.stock().backward) > 0
    for degree, whole in itertools.product((1, 2, 4), (False, True)):
        costs = model.stages(even_chunks(block.rows, degree), whole_attention=whole)
        needs = dependencies(
            [block.features], degree=degree, whole_attention=whole, direction=Direction.FORWARD
        )
        assert costs.keys() == needs.keys()
        assert all(cost.forward > 0 for cost in costs.values())


def test_the_steps_of_a_ring_compute_what_gathered_keys_do() -> None:
    size = {"sequence_length": 65536, "context": 4}
    gathers, ring = (CostModel(workload(**size, ring=ring), cluster()) for ring in (False, True))
    rows = gathers.workload.rows
    at_once, in_steps = gathers.stages((rows,)), ring.stages((rows,))
    core = at_once[Stage(kinds.ATTENTION, 0)].forward - in_steps[Stage(kinds.ATTENTION, 0)].forward
    steps = [Stage(step_of(kinds.ATTEND, step), 0) for step in range(4)]
    assert sum(in_steps[step].forward for step in steps) == pytest.approx(core, rel=0.05)
    # No gather, and at one time the keys of one rank.
    assert in_steps[Stage(kinds.QKV)].forward < at_once[Stage(kinds.QKV)].forward
    sent = in_steps[Stage(step_of(kinds.RING, 1))]
    assert sent.forward == sent.backward == in_steps[Stage(step_of(kinds.RERING, 3))].backward > 0
    assert ring.stock() == gathers.stock()
    for name, degree in itertools.product(("ampipe", "moe-only", "lancet"), (1, 3)):
        schedule = build(name, degree=degree, features=ring.features)
        weights = schedule.backward.weights
        costs = ring.stages(
            even_chunks(rows, degree), whole_attention=schedule.whole_attention, weights=weights
        )
        for direction in Direction:
            assert needs_of(schedule, [ring.features], direction).keys() <= costs.keys()


@pytest.mark.parametrize(
    "changes", [{}, {"shared_ffn": 512, "dense_ffn": 512}, {"fused_gradients": False}], ids=str
)
def test_weight_gradients_apart_take_as_long_as_together(changes: dict[str, object]) -> None:
    block = workload(**changes)
    model = CostModel(block, cluster())
    for degree, parts in ((1, 1), (4, 1), (4, 2)):
        lengths = even_chunks(block.rows, degree)
        together = model.stages(lengths, parts=parts)
        apart = model.stages(lengths, parts=parts, weights=WEIGHTS.values())
        schedule = build("lancet", degree=degree // parts, features=block.features)
        assert set(needs_of(schedule, [block.features], Direction.BACKWARD)) <= set(apart)
        assert sum(pair.backward for pair in apart.values()) == pytest.approx(
            sum(pair.backward for pair in together.values())
        )
        assert min(pair.backward for pair in apart.values()) >= 0
        of_experts = apart[Stage(WEIGHTS[kinds.EXPERT], 0)]
        assert of_experts.forward == 0
        assert 0.3 < of_experts.backward / together[Stage(kinds.EXPERT, 0)].backward < 0.7


@pytest.mark.parametrize("rows", [4096, 16384], ids=["together", "by chunk"])
def test_joined_weight_gradients_cost_what_moves_less(rows: int) -> None:
    block = workload(fused_gradients=False, sequence_length=rows)
    model = CostModel(block, cluster())
    kind = WEIGHTS[kinds.EXPERT]
    lengths = even_chunks(block.rows, 8)
    apart = model.stages(lengths, weights=[kind])
    joined = model.stages(lengths, weights=[kind], joined=[kind])
    assert joined.keys() == (apart.keys() | {Stage(kind)}) - {Stage(kind, chunk) for chunk in range(8)}
    by_chunk = sum(apart[Stage(kind, chunk)].backward for chunk in range(8))
    if rows == 4096:
        # Sums of chunks cost more here than rows that are put together.
        assert joined[Stage(kind)].backward < by_chunk
    else:
        assert joined[Stage(kind)].backward == pytest.approx(by_chunk)


@given(
    rows=st.lists(st.integers(0, 4096), min_size=1, max_size=8),
    inputs=st.integers(1, 4096),
    outputs=st.integers(1, 4096),
    element_bytes=st.sampled_from([2, 4]),
)
def test_the_planner_joins_what_the_runtime_joins(
    rows: list[int], inputs: int, outputs: int, element_bytes: int
) -> None:
    product = Product(sum(rows), inputs, outputs)
    joined = planned_as_one(product, len(rows), element_bytes=element_bytes)
    assert joined == is_one_product(rows, inputs, outputs, element_bytes=element_bytes)


def test_tensor_parallelism_divides_attention() -> None:
    def attention(tensor: int) -> float:
        block = workload(tensor=tensor)
        return CostModel(block, cluster()).stages((block.rows,))[Stage(kinds.ATTENTION, 0)].forward

    # Not exactly divided: there are a collective of the output projection and undivided operations.
    assert attention(4) < attention(2) < attention(1)


def test_fp8_needs_a_figure_and_uses_attention_in_bf16() -> None:
    with pytest.raises(BadInput, match=r"compute\.gemm\.fp8: is missing"):
        CostModel(workload(dtype="fp8"), cluster())
    wide, narrow = (
        CostModel(workload(dtype=dtype), cluster("dgx-h100")).stages((8192,)) for dtype in ("bf16", "fp8")
    )
    assert narrow[Stage(kinds.EXPERT, 0)].forward < 0.7 * wide[Stage(kinds.EXPERT, 0)].forward
    # Activations are sent in 16 bits in both.
    assert narrow[Stage(kinds.DISPATCH, 0)] == wide[Stage(kinds.DISPATCH, 0)]


def test_peak_memory_falls_with_the_degree_and_grows_with_fp32_sums() -> None:
    peaks = [peak_bytes(workload(topk=8), Pipeline.of(degree)) for degree in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    plain, sums = (peak_bytes(workload(fused_gradients=fused), Pipeline.of(4)) for fused in (True, False))
    assert sums > plain


def test_a_copy_takes_the_time_of_its_bytes_and_needs_a_figure() -> None:
    copy = TransferCost(alpha_us=10.0, beta_us_per_mb=40.0, basis="derived", source="this test")
    plain = cluster()
    known = dataclasses.replace(plain, compute=dataclasses.replace(plain.compute, copy=copy))
    block = workload(sequence_length=4096, topk=2)
    costs = CostModel(block, known, memory="S3").stages((1024,) * 4)
    # 1024 rows to 2 experts each, with a probability of 4 bytes.
    expected = 10 + 40e-6 * 2 * 1024 * (2 * block.hidden + 4)
    assert costs[Stage(kinds.STORE_TOKENS, 0)].forward == pytest.approx(expected)
    assert costs[Stage(kinds.LOAD_TOKENS, 0)].backward == pytest.approx(expected)
    all_kept = CostModel(block, known, memory="offload").stages((1024,) * 4)[Stage(kinds.STORE, 0)].forward
    assert all_kept == pytest.approx(expected + 40e-6 * 2 * 1024 * 2 * 2 * block.ffn)
    with pytest.raises(BadInput, match=r"compute\.copy: is missing"):
        CostModel(block, plain, memory="offload").stages((1024,) * 4)


@pytest.mark.parametrize(
    ("expert", "experts", "topk", "left"),
    # The share of copies that is left under even routing: once per rank of these numbers.
    [(2, 4, 2, 0.83), (8, 128, 8, 0.67), (2, 32, 8, 0.25), (8, 8, 2, 1.0)],
)
def test_rows_of_an_exchange_once_per_rank(expert: int, experts: int, topk: int, left: float) -> None:
    block = workload(expert=expert, experts=experts, topk=topk)
    once = dataclasses.replace(block, exchange=Exchange.RANKS)
    assert block.rows_per_token == topk
    assert once.rows_per_token / block.rows_per_token == pytest.approx(left, abs=0.005)
    assert block.exchanges(8) == (Exchange.ROWS, Exchange.RANKS)[: 1 + (left < 1)]


def test_an_exchange_once_per_rank_changes_what_is_sent_and_moved_alone() -> None:
    """32 experts on 2 ranks, top-8: almost always one row of a token goes to the other rank, not four."""
    block = workload(sequence_length=4096, expert=2, experts=32, topk=8)
    rows, once = (
        CostModel(dataclasses.replace(block, exchange=exchange), cluster())
        for exchange in (Exchange.ROWS, Exchange.RANKS)
    )
    costs, costs_once = rows.stages((4096,)), once.stages((4096,))
    bytes_once = 4096 * block.rows_per_token / 8 * 0.999796 * (2048 + 16 * 4)
    assert costs_once[Stage(kinds.DISPATCH, 0)].forward == pytest.approx(20 + 50e-6 * bytes_once, rel=1e-3)
    for kind in (kinds.ROUTE, kinds.MERGE):
        assert costs_once[Stage(kind, 0)].forward < costs[Stage(kind, 0)].forward
    for kind in (kinds.EXPERT, kinds.ATTENTION, kinds.COUNTS):
        assert costs_once[Stage(kind, 0)] == costs[Stage(kind, 0)]
    assert once.stock() == rows.stock() and once.stock_exchanges() == rows.stock_exchanges()


@pytest.mark.parametrize("ranks_per_node", [8, 16])
def test_ranks_that_share_an_expert_gather_as_stages(ranks_per_node: int) -> None:
    """2 ranks for each of 8 experts: on two nodes the gathers use other links than the dispatches."""
    source = cluster("dgx-h100")
    compute = dataclasses.replace(source.compute, copy=source.compute.permute)
    source = dataclasses.replace(source, ranks_per_node=ranks_per_node, compute=compute)
    block = workload(expert_tensor=2, ranks_per_node=ranks_per_node)
    model = CostModel(block, source, memory="S3")
    costs = model.stages((4096, 4096))
    lane = "comm.intra" if ranks_per_node == 8 else "comm"
    found = {stage.kind.name: stage.kind for stage in costs}
    assert {found[name].lane.name for name in ("gather", "scatter", "regather")} == {lane}
    gather, scatter = (
        source.collective(name, across_nodes=False) for name in ("all_gather", "reduce_scatter")
    )
    # Each of 4096 tokens arrives twice, and goes to one other rank.
    with_probabilities, alone = 4096 * 2 * (2048 + 4), 4096 * 2 * 2048
    for name, forward, backward in (
        ("gather", gather.time_us(with_probabilities), scatter.time_us(with_probabilities)),
        ("scatter", scatter.time_us(alone), gather.time_us(alone)),
        ("regather", 0.0, gather.time_us(with_probabilities)),
    ):
        assert costs[Stage(found[name], 1)] == (pytest.approx(forward), pytest.approx(backward))
    assert model.latency(found["gather"]) == gather.alpha_us
    assert model.latency(found["scatter"]) == scatter.alpha_us
    # The experts take as long as whole ones with as many operations, and copies are of what arrived.
    whole = CostModel(dataclasses.replace(block, expert_tensor=1), source, memory="S3")
    stored = Stage(kinds.STORE_TOKENS, 0)
    assert costs[stored] == whole.stages((4096, 4096))[stored]
    # Megatron's own layer gathers and scatters as well: each pass has one reduce-scatter.
    assert source.intra is not None
    slow = dataclasses.replace(scatter, alpha_us=scatter.alpha_us + 100)
    slower = dataclasses.replace(source, intra={**source.intra, "reduce_scatter": slow})
    stock, with_slow = model.stock(), CostModel(block, slower).stock()
    assert with_slow == (pytest.approx(stock.forward + 100), pytest.approx(stock.backward + 100))


@pytest.mark.parametrize("ranks_per_node", [4, 8])
def test_rows_of_tensor_parallel_attention_travel_in_stages(ranks_per_node: int) -> None:
    """Together they take as long as the stages of linear layers that gather and scatter inside."""
    source = dataclasses.replace(cluster("dgx-h100"), ranks_per_node=ranks_per_node)
    inside = workload(tensor=2, ranks_per_node=ranks_per_node)
    block = dataclasses.replace(inside, local=True)
    assert CostModel(block, source).stock() == CostModel(inside, source).stock()
    for shares, gathers in ((False, set()), (True, {"gather-rows", "regather-rows"})):
        model = CostModel(block, source, shares_schedule=shares)
        costs = {
            stage: pair for stage, pair in model.stages((2048, 2048)).items() if stage.chunk in (None, 1)
        }
        rows = {stage.kind.name: stage for stage in costs if "rows" in str(stage.kind)}
        assert rows.keys() == gathers | {"scatter-rows"}
        resource = "node" if ranks_per_node == 4 else "network"
        assert {stage.kind.lane.resource for stage in rows.values()} == {resource}
        one_way = 2048 * 2048
        gather, scatter = (
            source.collective(name, across_nodes=False) for name in ("all_gather", "reduce_scatter")
        )
        there, back = gather.time_us(one_way), scatter.time_us(one_way)
        expected = {
            "scatter-rows": (back, there),
            "gather-rows": (there, back),
            "regather-rows": (0.0, there),
        }
        for name, stage in rows.items():
            assert costs[stage] == pytest.approx(expected[name])
            assert model.latency(stage.kind) == (scatter if name == "scatter-rows" else gather).alpha_us
        with_inside = CostModel(inside, source, shares_schedule=shares).stages((2048, 2048))
        parts = {kinds.ATTENTION: (kinds.ATTENTION, kinds.ADD_NORM, kinds.SCATTER_ROWS)}
        if shares:
            parts[kinds.QKV] = (kinds.QKV, kinds.INPUT_NORM, kinds.GATHER_ROWS)
        # One computed stage more has its overhead.
        extra = source.stage_overhead("merge")
        for whole, of in parts.items():
            alone = [pair for stage, pair in costs.items() if stage.kind in of]
            forward, backward = (sum(each) for each in zip(*alone, strict=True))
            expected_whole = (forward - extra.forward_us, backward - extra.backward_us)
            assert with_inside[Stage(whole, 1)] == pytest.approx(expected_whole)


def test_an_exchange_once_per_node_has_two_hops() -> None:
    """8 of 64 experts on 4 nodes of 4 ranks: 3.66 rows of a token for nodes, 6.75 for ranks."""
    source = dataclasses.replace(cluster("dgx-h100"), ranks_per_node=4)
    block = workload(sequence_length=4096, expert=16, experts=64, topk=8, exchange=Exchange.NODES)
    model = CostModel(block, source)
    costs = model.stages((4096,))
    to_nodes, to_ranks = 4 * (1 - math.comb(48, 8) / math.comb(64, 8)), block.rows_per_token
    assert (to_nodes, to_ranks) == (pytest.approx(3.66, abs=0.01), pytest.approx(6.75, abs=0.01))
    figure = source.collective("all_to_all", across_nodes=True)
    crossing = figure.time_us(4096 * to_nodes * 3 / 4 * (2048 + 4 * 16))
    for kind in (kinds.DISPATCH, kinds.COMBINE):
        assert costs[Stage(kind, 0)].forward == pytest.approx(crossing)
        assert model.latency(kind) == figure.alpha_us
    inside = source.collective("all_to_all", across_nodes=False)
    handed_on = inside.time_us(4096 * to_ranks * 3 / 4 * (2048 + 4 * 4))
    copied = source.compute.permute.time_us(2 * 4096 * to_ranks * 2048)
    for kind in (kinds.SPREAD, kinds.COLLECT):
        assert costs[Stage(kind, 0)] == (pytest.approx(handed_on + copied),) * 2
        assert model.latency(kind) == inside.alpha_us
    rows = CostModel(dataclasses.replace(block, exchange=Exchange.ROWS), source)
    assert model.stock() == rows.stock()
    assert costs[Stage(kinds.DISPATCH, 0)].forward < rows.stages((4096,))[Stage(kinds.DISPATCH, 0)].forward
    # Every copy over the same hops: as many bytes between nodes as with rows, one probability for a row.
    copies = CostModel(dataclasses.replace(block, exchange=Exchange.TWO_DIMENSIONAL), source)
    costs = copies.stages((4096,))
    crossing = figure.time_us(4096 * 8 * 3 / 4 * (2048 + 4))
    handed_on = inside.time_us(4096 * 8 * 3 / 4 * (2048 + 4)) + source.compute.permute.time_us(
        2 * 4096 * 8 * 2048
    )
    for first, second in ((kinds.DISPATCH, kinds.SPREAD), (kinds.COMBINE, kinds.COLLECT)):
        assert costs[Stage(first, 0)] == (pytest.approx(crossing),) * 2
        assert costs[Stage(second, 0)] == (pytest.approx(handed_on),) * 2
    for kind in (kinds.ROUTE, kinds.EXPERT, kinds.MERGE):
        assert costs[Stage(kind, 0)] == rows.stages((4096,))[Stage(kind, 0)]
    # Where a direct all-to-all has no figure, many messages are assumed to take as long as few.
    assert costs[Stage(kinds.DISPATCH, 0)] == rows.stages((4096,))[Stage(kinds.DISPATCH, 0)]
    with pytest.raises(BadInput, match="does not spread 16 expert-parallel ranks equally"):
        CostModel(block, dataclasses.replace(source, ranks_per_node=16))
