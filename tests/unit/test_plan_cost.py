"""The cost model: values computed by hand, and how times depend on sizes."""

import dataclasses
from typing import Any
from unittest import mock

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.block import Block, chunk_rows, even_rows
from megatron_ampipe.plan.cluster import Cluster, Overhead
from megatron_ampipe.plan.host_times import with_host_times
from megatron_ampipe.plan.kept import equation_10
from megatron_ampipe.plan.operation_times import GRADIENT_BYTES, OperationTimes, Pair, expert_products
from megatron_ampipe.plan.predict import GRAPH_LAUNCH_US, GRAPHED_SHARE, Predictor
from megatron_ampipe.plan.stage_costs import COSTS, FACTS
from megatron_ampipe.schedule import (
    ALL_KINDS,
    WEIGHTS,
    Direction,
    Exchange,
    Pipeline,
    SequenceLayout,
    Stage,
    StageKind,
    build,
    chunk_sequence,
    even_chunks,
    kinds,
)
from tests.plan_cases import NONE, cluster, sized_block, with_copies, without_device


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
    block = sized_block(sequence_length=length, tensor=tensor, context=context, window=window)
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


@pytest.mark.parametrize("parts", [1, 2])
def test_weight_gradients_are_about_half_of_a_backward_stage(parts: int) -> None:
    model, lengths, experts = Predictor(sized_block(), cluster()), even_chunks(8192, 4), WEIGHTS[kinds.EXPERT]
    together = model.stages(lengths, parts=parts)[Stage(kinds.EXPERT, 0)]
    apart = model.stages(lengths, parts=parts, weights=[experts])
    assert apart[Stage(experts, 0)].forward == 0
    assert 0.3 < apart[Stage(experts, 0)].backward / together.backward < 0.7
    both = sum(apart[Stage(kind, 0)].backward for kind in (kinds.EXPERT, experts))
    assert both == pytest.approx(together.backward)


def test_a_copy_takes_the_time_of_its_bytes_and_needs_a_figure() -> None:
    plain = cluster()
    known = with_copies(plain, alpha_us=10.0, us_per_mb=40.0)
    block = sized_block(sequence_length=4096, topk=2)
    costs = Predictor(block, known, memory="S3").stages((1024,) * 4)
    # 1024 rows to 2 experts each, with a probability of 4 bytes.
    expected = 10 + 40e-6 * 2 * 1024 * (2 * block.hidden + 4)
    assert costs[Stage(kinds.STORE_TOKENS, 0)].forward == pytest.approx(expected)
    assert costs[Stage(kinds.LOAD_TOKENS, 0)].backward == pytest.approx(expected)
    all_kept = Predictor(block, known, memory="offload").stages((1024,) * 4)[Stage(kinds.STORE, 0)].forward
    assert all_kept == pytest.approx(expected + 40e-6 * 2 * 1024 * 2 * 2 * block.ffn)
    with pytest.raises(BadInput, match=r"a800x8-20gbps\.yaml:\d+: compute\.copy: is missing"):
        Predictor(block, plain, memory="offload").stages((1024,) * 4)


def test_two_hops_need_several_nodes() -> None:
    """Which rows travel over which link is in the golden plans."""
    source = dataclasses.replace(cluster("dgx-h100"), ranks_per_node=16)
    block = sized_block(expert=16, experts=64, topk=8, exchange=Exchange.NODES)
    with pytest.raises(BadInput, match="does not spread 16 expert-parallel ranks equally"):
        Predictor(block, source)


def test_deepep_counts_unless_all_ranks_are_in_a_node() -> None:
    """Its exchange over several nodes is in the golden plans and in docs/planner.md."""
    block = sized_block(experts=64, topk=8, expert=32, dispatcher="deepep")
    near, nodes = dataclasses.replace(block, expert=8), cluster("dgx-h100")
    assert block.features.flex and not near.features.flex
    size = 4096 * even_rows(64, 8, 8) * 7 / 8 * (1024 * 2 + 8 * 4)
    expected = nodes.collective("deepep", across_nodes=False).time_us(size)
    assert OperationTimes(near, nodes, near.features).flex_us(4096) == pytest.approx(expected)
    with pytest.raises(BadInput, match=r"aws-p5-efa\.yaml:\d+: inter\.deepep: is missing, .* DeepEP's own"):
        Predictor(block, cluster("aws-p5-efa")).stock()


def test_a_reduction_over_nodes_uses_all_adapters_of_its_ranks() -> None:
    """Of four nodes of eight: by the adapters of one GPU the same bytes take 25 microseconds per MB."""
    nodes, mb = cluster("dgx-h100"), 100.0

    def reduced(**changes: object) -> float:
        """Microseconds per MB that leave a rank, without the fixed time, of experts if there are any."""
        block = sized_block(experts=64, **changes)
        times = OperationTimes(block, nodes, block.features)
        experts = block.expert_replicas > 1
        ranks = block.expert_replicas if experts else block.replicas
        return (times.reduction_us(mb * 1e6 / GRADIENT_BYTES, experts=experts) / 2 - 40) / (
            mb * (ranks - 1) / ranks
        )

    # All ranks of the nodes: NVLink, 3.1746, is slower than 25 / 8.
    assert reduced(replicas=32) == pytest.approx(3.1746)
    # Tensor-parallel ranks have separate groups, which share the adapters.
    assert reduced(replicas=16, tensor=2) == pytest.approx(25 / 4, rel=0.1)
    assert reduced(replicas=4, tensor=8) == pytest.approx(25)
    # An expert on one GPU of each node, on one of every other GPU, or of every GPU of a node.
    assert reduced(expert_replicas=4, expert=8) == pytest.approx(25)
    assert reduced(expert_replicas=8, expert=4) == pytest.approx(25 / 2, rel=0.1)
    assert reduced(expert_replicas=4, expert=16) == pytest.approx(25)


def test_a_predicted_all_reduce_is_near_one_that_was_measured() -> None:
    """nccl-tests on four nodes of eight H100 with 3200 Gbit/s: 280 GB/s of 1 GiB as it counts them."""
    block = sized_block(replicas=32)
    for name in ("dgx-h100", "aws-p5-efa", "h100-roce-400g"):
        nodes = cluster(name)
        time_us = OperationTimes(block, nodes, block.features).reduction_us(2**30 / 4, experts=False)
        assert 2 * 31 / 32 * 2**30 / time_us / 1e3 == pytest.approx(280, rel=0.15), name


@pytest.mark.parametrize(
    ("transfer", "copy", "expected"),
    [
        # Transfers take longest: an extra product is free, an extra transfer is not.
        (4.0, 0.1, {"S1": 16.0, "S2": 20.0, "S3": 16.0, "S4": 20.0}),
        # Products do: an extra transfer is free, and copies save a product.
        (0.5, 0.1, {"S1": 6.0, "S2": 6.0, "S3": 7.0, "S4": 7.0}),
        (1.0, None, {"S4": 7.0}),
    ],
)
def test_equation_10_weighs_products_transfers_and_copies(
    transfer: float, copy: float | None, expected: dict[str, float]
) -> None:
    assert equation_10(product=1.0, transfer=transfer, copy=copy) == pytest.approx(expected)


def test_collectives_that_begin_during_a_computation_are_delayed() -> None:
    """By the latency of a busy processor, or until the computation has ended."""
    usual = without_device(cluster())

    def times_us(name: str, latency_us: float) -> dict[str, float]:
        overlap = dataclasses.replace(usual.overlap, latency_us=latency_us)
        predictor = Predictor(sized_block(), dataclasses.replace(usual, overlap=overlap))
        schedule = build(name, degree=2, features=predictor.features)
        spans = predictor.timeline(schedule, even_chunks(8192, 2)).spans
        return {span.stage: span.end_us - span.begin_us for span in spans if span.direction == "forward"}

    # In turn, nothing computes meanwhile.
    assert times_us("sequential", 3.0) == pytest.approx(times_us("sequential", 0.0))
    at_once, late, very_late = (times_us("ampipe", latency_us) for latency_us in (0.0, 3.0, 1e9))
    transfers = ("counts", "dispatch", "combine")
    assert late == pytest.approx(
        {stage: time + 3.0 * stage.startswith(transfers) for stage, time in at_once.items()}
    )
    # The counts of the first chunk begin with the projections of the second.
    assert very_late["counts.0"] == pytest.approx(at_once["counts.0"] + at_once["qkv.1"])


def fixed(**changes: Any) -> Block:
    """A block of local layers with fixed rows, four experts on each rank."""
    return sized_block(**({"experts": 32, "rows_margin": 1.25, "local": True} | changes))


def test_fixed_rows_send_and_copy_their_padding_and_multiply_what_is_counted() -> None:
    block, source = fixed(), cluster()
    exact = dataclasses.replace(block, rows_margin=None, grouped=True)
    (rows, *_) = chunk_rows(block, even_chunks(8192, 4))
    # 2048 tokens to two experts each: 512 for each of 8 ranks, on average.
    assert block.received(2048) == 4096 and block.arriving(2048) == 8 * 819
    times, others = (OperationTimes(one, source, one.features) for one in (block, exact))
    assert times.sent(rows) == times.padded(rows) == 6552 and others.sent(rows) == others.padded(rows) == 4096
    assert expert_products(block, 2048)[0]._replace(adds_apart=False) == expert_products(exact, 2048)[0]
    sent, before = (
        Predictor(one, source).stages((2048,) * 4)[Stage(kinds.DISPATCH, 0)] for one in (block, exact)
    )
    figure = source.collective("all_to_all", across_nodes=False)
    row_bytes = 2 * 1024 + 4
    assert sent.forward == pytest.approx(
        figure.alpha_us + 7 / 8 * 6552 * row_bytes * 1e-6 * figure.beta_us_per_mb
    )
    assert sent.forward - figure.alpha_us == pytest.approx(6552 / 4096 * (before.forward - figure.alpha_us))
    # Two chunks in one transfer have the budget of each, which is more than that of all their rows.
    together = Predictor(block, source).stages((2048,) * 4, parts=2)[Stage(kinds.DISPATCH, 0)]
    assert together.forward - figure.alpha_us == pytest.approx(2 * (sent.forward - figure.alpha_us))
    assert block.arriving(4096) < 2 * block.arriving(2048)
    # The experts of a rank that shares them: the same with both ranks' rows.
    shared = fixed(expert_tensor=2, tensor=2, sequence_length=16384)
    assert OperationTimes(shared, source, shared.features).padded(rows) == 2 * 6552


@pytest.mark.parametrize("fused", [False, True])
def test_grouped_experts_differ_from_single_ones_in_launches_alone(fused: bool) -> None:
    """The weights of all four are read, and their gradients summed."""
    blocks = [
        sized_block(experts=32, grouped=grouped, fused_gradients=fused, dtype="bf16")
        for grouped in (True, False)
    ]
    source = cluster()
    grouped, single = (
        OperationTimes(block, source, block.features).all_products(expert_products(block, 2048), chunked=True)
        for block in blocks
    )
    launch_us = source.figure("compute.gemm", source.compute.gemm, "bf16").alpha_us
    assert launch_us > 0 and grouped.forward > 0
    # Two linear layers, and twice as many products in the backward pass.
    assert single.forward - grouped.forward == pytest.approx(2 * 3 * launch_us)
    assert single.backward - grouped.backward == pytest.approx(4 * 3 * launch_us)


def test_fixed_rows_are_sorted_on_the_device() -> None:
    """That costs something, in proportion to the rows. Weights are copied once in a pass of all chunks."""
    source = cluster()
    exact = dataclasses.replace(fixed(), rows_margin=None, grouped=True)

    def extra(block: Block, kind: StageKind, degree: int) -> Pair:
        """What a chunk's stage takes longer than with exact rows of the same number."""
        with mock.patch.object(OperationTimes, "padded", lambda self, rows: self.block.received(rows.hidden)):
            lengths = even_chunks(block.rows, degree)
            now, before = (Predictor(one, source).stages(lengths)[Stage(kind, 0)] for one in (block, exact))
        return Pair(now.forward - before.forward, now.backward - before.backward)

    for kind in (kinds.ROUTE, kinds.EXPERT):
        assert extra(fixed(), kind, 2).forward > extra(fixed(), kind, 4).forward > 0
    # Nothing fills padding, or sets its gradients to zero.
    assert extra(fixed(), kinds.MERGE, 2) == (0, 0) and extra(fixed(), kinds.ROUTE, 2).backward == 0
    # Transformer Engine's products take the weights where they are, and add gradients to what is there.
    local, engine = (extra(fixed(local=local), kinds.EXPERT, 4) for local in (True, False))
    weights_mb = 1e-6 * 4 * 2 * 1024 * 4096
    memory = source.compute.memory
    copied_us = (memory.alpha_us + 2 * 2 * weights_mb * memory.beta_us_per_mb) / 4
    assert local.forward - engine.forward == pytest.approx(copied_us)
    sums_us = 2 * memory.alpha_us + 10 * weights_mb * memory.beta_us_per_mb
    assert local.backward - engine.backward == pytest.approx(copied_us + sums_us)


def test_the_host_does_not_wait_for_the_counts_of_fixed_rows() -> None:
    """If these take long, it issues other stages meanwhile, and has issued all when they arrive."""
    source = cluster("dgx-h100")
    assert source.intra is not None
    late = dataclasses.replace(source.intra["all_gather"], alpha_us=5000.0)
    source = dataclasses.replace(source, intra={**source.intra, "all_gather": late})
    # Without padding and index arithmetic, so that nothing else differs.
    exact, block = sized_block(), sized_block(rows_margin=1.25)
    schedule = build("ampipe", degree=2, features=block.features)
    ends = []
    for one in (exact, block):
        timed = Predictor(one, source).timed(schedule, (4096, 4096), Direction.FORWARD)
        assert timed.host_waits == (one is exact)
        same = Predictor(exact, source).timed(schedule, (4096, 4096), Direction.FORWARD)
        ends.append(dataclasses.replace(same, host_waits=timed.host_waits).end_us)
    issue_us = source.host.issue.forward_us
    assert ends[0] > ends[1] + issue_us
    # Both wait on the device.
    assert ends[1] > 5000


def test_the_graph_of_a_pass_is_one_launch_whatever_the_host_needs_for_a_stage() -> None:
    source, block = cluster("dgx-h100"), fixed(captures_passes=True, sequence_length=4096)
    alone = dataclasses.replace(block, captures_passes=False)
    host = dataclasses.replace(source.host, graph=Overhead(forward_us=7, backward_us=9, **NONE))
    fast, slow, free = (
        with_host_times(dataclasses.replace(source, host=host), factor) for factor in (1.0, 50.0, 1e-6)
    )

    def times(one: Block, machine: Cluster, num_layers: int = 2) -> Pair:
        predictor = Predictor(one, machine, num_layers=num_layers)
        schedule = Pipeline.of(4).schedule_of(predictor.layers)
        assert predictor.least_us(schedule, (1024,) * 4) <= predictor.pass_us(schedule, (1024,) * 4).total
        return predictor.pass_us(schedule, (1024,) * 4)

    # The device's time, of which a launch is not a part.
    of_device = times(alone, free)
    launched = times(block, fast)
    for way in Direction:
        assert launched.of(way) == pytest.approx(of_device.of(way) + GRAPH_LAUNCH_US, rel=1e-3)
        # What the host does meanwhile counts once it takes longer.
        calls_us = 2 * source.host.block.of(way) + GRAPH_LAUNCH_US
        in_graph_us = 2 * 50 * host.graph.of(way) if host.graph else 0.0
        assert times(block, slow).of(way) == pytest.approx(max(launched.of(way), calls_us + in_graph_us))
        assert times(alone, slow).of(way) > 5 * launched.of(way)
    # Without a figure, it is a share of the time to issue Megatron's layers.
    slowest = with_host_times(source, 1000.0)
    stock_us = Predictor(alone, slowest, num_layers=2).stock()
    assert times(block, slowest).total == pytest.approx(GRAPHED_SHARE * stock_us.total, rel=1e-3)
    assert Predictor(block, slowest, num_layers=2).stock() == stock_us, "Megatron's layers have no graphs"
