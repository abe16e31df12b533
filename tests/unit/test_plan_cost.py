"""The cost model: values computed by hand, and how times depend on sizes."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.chunk_rows import chunk_rows
from megatron_ampipe.plan.cluster import TransferCost
from megatron_ampipe.plan.cost import CostModel
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.schedule import (
    WEIGHTS,
    Direction,
    Exchange,
    SequenceLayout,
    Stage,
    build,
    chunk_sequence,
    even_chunks,
    kinds,
    needs_of,
)
from megatron_ampipe.tools.measuring.case_workload import workload_of_case
from megatron_ampipe.tools.measuring.grid import Case as GridCase
from tests.plan_cases import NONE, cluster, workload

MEASURED_MIB = {
    "fp32": {"stock": 300.6, "keep": 295.7, "rebuild": 108.7, "redispatch": 95.1},
    "bf16": {"stock": 175.0, "keep": 166.4, "rebuild": 73.6, "redispatch": 66.5},
}


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


def test_joined_weight_gradients_are_one_product() -> None:
    model = CostModel(workload(fused_gradients=False), cluster())
    kind = WEIGHTS[kinds.EXPERT]
    lengths = even_chunks(8192, 8)
    apart = model.stages(lengths, weights=[kind])
    joined = model.stages(lengths, weights=[kind], joined=[kind])
    assert joined.keys() == (apart.keys() | {Stage(kind)}) - {Stage(kind, chunk) for chunk in range(8)}
    # Sums of chunks cost more here than rows that are put together.
    assert joined[Stage(kind)].backward < sum(apart[Stage(kind, chunk)].backward for chunk in range(8))


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
    peaks = [peak_bytes(workload(topk=8), forward_degree=n, backward_degree=n) for n in (2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    plain, sums = (
        peak_bytes(workload(fused_gradients=fused), forward_degree=4, backward_degree=4)
        for fused in (True, False)
    )
    assert sums > plain


def test_predicted_peaks_are_those_that_were_measured() -> None:
    """Eight layers, two ranks: what ``ampipe bench --memory`` measured (docs/memory.md), within 5 %."""
    for dtype, found in MEASURED_MIB.items():
        case = GridCase(
            name=dtype, sequence_length=1024, batch=1, hidden=256, heads=4, experts=4, ffn=1024, topk=2,
            activation="gelu", dtype=dtype,
        )  # fmt: skip
        block = workload_of_case(case, num_ranks=2, fused_gradients=False)
        for memory, mib in found.items():
            degree, strategy = (1, "keep") if memory == "stock" else (4, memory)
            predicted = peak_bytes(
                block,
                forward_degree=degree,
                backward_degree=degree,
                num_layers=8,
                memory=strategy,
                local=True,
                gathers=True,
            )
            assert predicted / 2**20 == pytest.approx(mib, rel=0.05), (dtype, memory)


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
    with pytest.raises(BadInput, match="does not spread 16 expert-parallel ranks equally"):
        CostModel(block, dataclasses.replace(source, ranks_per_node=16))
