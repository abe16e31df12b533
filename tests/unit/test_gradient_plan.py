"""How gradients are reduced with a plan: buckets, the pass with reductions, FSMoE's steps, the advice."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ampipe.cli import main
from megatron_ampipe.plan.cluster import read_cluster
from megatron_ampipe.plan.fsmoe_partition import EARLINESS, StageGraph, first_step, second_step
from megatron_ampipe.plan.gradient_buckets import (
    LayerReductions,
    LayerTensors,
    completed,
    reductions_us,
    tensors_of,
)
from megatron_ampipe.plan.gradient_plan import (
    AFTER,
    BOTH_STEPS,
    FIRST_STEP,
    PLACED,
    STOCK,
    GradientPlan,
    plan_gradients,
)
from megatron_ampipe.plan.operation_times import GRADIENT_BYTES, OperationTimes
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.reduced_pass import ReducedPass
from megatron_ampipe.schedule import Direction, build, even_chunks, period
from megatron_ampipe.timeline import Timeline
from megatron_ampipe.tools.measuring.case_workload import workload_of_case
from megatron_ampipe.tools.measuring.grid import find_grid, read_grid
from tests.plan_cases import cluster, without_device, workload
from tests.unit.test_plan_workload import PLAIN

ATTENTION, EXPERTS = 4 * 256**2, 2 * 2 * 256 * 1024
"""Parameters of a layer on a rank of ``cpu-small`` with two of its four experts."""

# Buckets.


@pytest.mark.parametrize(
    ("layers", "bucket_size", "expected"),
    [
        # One bucket for each layer, of the size of the layer.
        ([[3, 1], [3, 1], [3, 1]], 4, [[4], [4], [4]]),
        # A tensor is never divided.
        ([[3, 1], [3, 1]], 1, [[3, 1], [3, 1]]),
        ([[3, 1], [3, 1]], 2, [[3], [4, 1]]),
        # Larger than a layer: complete with a later one, and what is left with the last.
        ([[3, 1], [3, 1], [3, 1]], 6, [[], [7], [5]]),
        ([[3, 1], [], [3, 1]], 100, [[], [], [8]]),
        ([], 1, []),
    ],
)
def test_a_bucket_is_complete_with_a_layer(
    layers: list[list[float]], bucket_size: float, expected: list[list[float]]
) -> None:
    assert completed(layers, bucket_size) == expected


def test_tensors_that_other_ranks_have() -> None:
    work = workload(shared_ffn=512, dense_ffn=2048, gated=True, tensor=2, expert=2, experts=4)
    both = replace(work, replicas=4, expert_replicas=2)
    experts = (1024 * 2 * 4096, 4096 * 1024) * 2
    attention = (1024 * 3072 / 2, 1024 * 1024 / 2)
    assert tensors_of(both, dense=False) == (experts, (*attention, 1024 * 512, 1024 * 256))
    assert tensors_of(both, dense=True) == ((), (*attention, 1024 * 2048, 1024 * 1024))
    assert tensors_of(replace(both, expert_replicas=1), dense=False).experts == ()
    assert tensors_of(work, dense=False).parameters == 0


def test_a_reduction_goes_over_the_links_of_its_ranks() -> None:
    figures = cluster("dgx-h100")
    inside = workload(replicas=8, expert_replicas=1)
    layers = [LayerTensors((2e6,), (1e6, 1e6)), LayerTensors((), (1e6,))]
    one_us = 2 * figures.collective("all_gather", across_nodes=False).time_us(1e6 * GRADIENT_BYTES * 7 / 8)
    times = OperationTimes(inside, figures)
    assert reductions_us(times, layers, 1) == [(0.0, 2 * one_us), (0.0, one_us)]
    whole = figures.collective("all_gather", across_nodes=False).time_us(2e6 * GRADIENT_BYTES * 7 / 8)
    assert reductions_us(times, layers) == [(0.0, 2 * whole), (0.0, one_us)]
    # Two ranks have an expert, each on another node.
    across = workload(replicas=16, expert_replicas=2, shards_optimizer=True)
    expected = figures.collective("reduce_scatter", across_nodes=True).time_us(2e6 * GRADIENT_BYTES / 2)
    assert OperationTimes(across, figures).reduction_us(2e6, experts=True) == expected


# The pass with reductions.


def reduced_pass(
    name: str, degree: int, *, together: bool = False, num_layers: int = 3, **changes: Any
) -> tuple[ReducedPass, Predictor, float]:
    """With the time of one transfer; no stage slows another down."""
    work = workload(**{"replicas": 8, "expert": 4, "expert_replicas": 2, **changes})
    predictor = Predictor(work, without_device(cluster()), num_layers=num_layers if together else 1)
    schedule = build(name, degree=degree, features=predictor.features)
    lengths = even_chunks(work.rows, degree)
    found = ReducedPass(predictor, schedule, lengths, num_layers=num_layers)
    without = predictor.pass_us(schedule, lengths).backward * (1 if together else num_layers)
    assert found.without_us == pytest.approx(without)
    timeline = predictor.timeline(schedule, lengths)
    transfers = [
        span.end_us - span.begin_us
        for span in timeline.spans
        if span.kind in ("dispatch", "combine") and span.direction == Direction.BACKWARD.value
    ]
    return found, predictor, transfers[0]


def test_a_reduction_that_shares_the_network_doubles_the_time_of_each_transfer() -> None:
    """In one chunk nothing else overlaps: each of two layers waits for two transfers."""
    run, _, transfer = reduced_pass("ampipe", 1)
    endless = 1e9
    found = run.overlapped(of_layers(endless, 0.0, 0.0))
    assert found.computed == pytest.approx(run.without_us + 2 * 2 * transfer)
    # Gradients of experts are complete before the second transfer of their layer.
    earlier = run.overlapped(of_layers(experts=(endless, 0.0, 0.0)))
    assert earlier.computed == pytest.approx(run.without_us + 5 * transfer)
    # The reduction and the transfer each get half of the network until the reduction has ended.
    longer, shorter = (
        run.overlapped(of_layers(transfer * share, 0.0, 0.0)).computed for share in (0.75, 0.5)
    )
    assert longer - shorter == pytest.approx(0.25 * transfer)


def of_layers(*others: float, experts: Sequence[float] = (0.0, 0.0, 0.0)) -> list[LayerReductions]:
    """Reductions of three layers."""
    return [LayerReductions(*both) for both in zip(experts, others or (0.0, 0.0, 0.0), strict=True)]


def test_placed_reductions_of_experts_are_in_their_own_layer_others_in_the_next() -> None:
    run, _, transfer = reduced_pass("ampipe", 1)
    gap = run.gaps()[0]
    of_experts = run.placed_when_complete(of_layers(experts=(gap, 0.0, 0.0)))
    assert of_experts.computed == pytest.approx(run.without_us)
    delayed = run.placed_when_complete(of_layers(experts=(gap + transfer, 0.0, 0.0)))
    assert delayed.computed == pytest.approx(run.without_us + transfer)
    # Others run while the experts of the next layer compute; those of the last one come after the pass.
    others = run.placed_when_complete(of_layers(1.0, 1.0, 1e6))
    assert others.computed == others.reduced == pytest.approx(run.without_us)
    last = run.placed_when_complete(of_layers(experts=(0.0, 0.0, gap)))
    assert last.reduced == pytest.approx(run.without_us)


def test_reductions_between_nodes_and_transfers_within_one_use_different_links() -> None:
    run, _, _ = reduced_pass("ampipe", 1)
    apart = workload(replicas=16, expert_replicas=2)
    predictor = Predictor(apart, without_device(cluster("dgx-h100")))
    schedule = build("ampipe", degree=1, features=predictor.features)
    other = ReducedPass(predictor, schedule, (apart.rows,), num_layers=3)
    assert other.overlapped(of_layers(1e9, 0.0, 0.0)).computed == pytest.approx(other.without_us)
    assert run.overlapped(of_layers(1e9, 0.0, 0.0)).computed > run.without_us


def test_without_transfers_reductions_follow_one_another() -> None:
    run, _, transfer = reduced_pass("ampipe", 1, expert=1)
    assert not transfer
    layer = run.without_us / 3
    found = run.overlapped(of_layers(2 * layer, 0.25 * layer, 7.0))
    assert found.computed == pytest.approx(3 * layer)
    # The first one begins when its layer has ended; the last one is left for after the pass. A pass is longer
    # than its stages by what entering three blocks takes.
    entered = 3 * cluster().host.block.backward_us
    assert found.reduced == pytest.approx(entered + (3 * layer - entered) / 3 + 2.25 * layer)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("name", "degree"), [("ampipe", 1), ("ampipe", 4), ("moe-only", 2)])
def test_a_layer_can_reduce_for_as_long_as_its_gap_and_delays_nothing(
    name: str, degree: int, together: bool
) -> None:
    run, _, _ = reduced_pass(name, degree, together=together)
    gaps = run.gaps()
    assert len(gaps) == 3 and max(gaps) > 0
    assert run.placed(gaps).reduced == pytest.approx(run.without_us)
    assert run.placed([gap + 100.0 for gap in gaps]).reduced > run.without_us + 50.0


@pytest.mark.parametrize(("num_layers", "tensor"), [(2, 1), (4, 1), (5, 1), (5, 2)])
def test_stacks_follow_one_another(num_layers: int, tensor: int) -> None:
    """Two layers share a schedule; of five, three do."""
    work = workload(replicas=8, tensor=tensor, recomputes=True)
    predictor = Predictor(work, cluster("dgx-h100"), num_layers=2)
    schedule = period(build("ampipe", degree=2, features=predictor.features))
    lengths = even_chunks(work.rows, 2)
    run = ReducedPass(predictor, schedule, lengths, num_layers=num_layers)
    each = [predictor.of_layers(count) for count in ((2,) * (num_layers // 2), (2, 3))[num_layers % 2]]
    assert run.without_us == pytest.approx(sum(one.pass_us(schedule, lengths).backward for one in each))
    assert len(run.gaps()) == num_layers
    reductions = [0.0] + [50.0] * (num_layers - 1)
    assert run.placed(reductions).computed >= run.without_us
    assert length(run.graph(), reductions) <= run.placed(reductions).reduced + 1e-6


def test_blocks_alone_end_with_their_reductions() -> None:
    run, _, _ = reduced_pass("ampipe", 4)
    gap = run.gaps()[1]
    found = run.placed([0.0, gap + 30.0, gap + 500.0])
    # The second one delays the third layer; the third one is all that is left to wait for.
    assert found.computed == pytest.approx(run.without_us + 30.0)
    assert found.reduced == pytest.approx(run.without_us + 530.0)


def test_stages_that_reduce_have_a_time_and_are_drawn() -> None:
    work = workload(replicas=4, expert=2, expert_replicas=2, shared_ffn=64, dense_ffn=512)
    predictor = Predictor(work, cluster(), num_layers=3, dense=[2]).with_reductions()
    schedule = build("ampipe", degree=2, features=predictor.features)
    spans = predictor.timeline(schedule, even_chunks(work.rows, 2)).spans
    own, above = (
        {span.layer: span.end_us - span.begin_us for span in spans if span.kind == kind}
        for kind in ("reduce-experts", "reduce")
    )
    times = OperationTimes(work, cluster())
    dense, experts = (reductions_us(times, [tensors_of(work, dense=one)])[0] for one in (True, False))
    slowdown = cluster().overlap.communication_slowdown * 1.001
    # The third layer has no experts, and there is none above it.
    assert 3 not in own and above[3] == dense.experts == 0
    for layer in (1, 2):
        assert experts.experts <= own[layer] <= experts.experts * slowdown
    assert dense.others <= above[2] <= dense.others * slowdown
    assert experts.others <= above[1] <= experts.others * slowdown


# FSMoE's partitioning.


@pytest.mark.parametrize(
    ("gradients", "gaps", "placed"),
    [
        # Each layer hides the gradients of the layer before it.
        ([2.0, 2.0, 2.0], [3.0, 3.0, 3.0], [0.0, 2.0, 2.0]),
        # What does not fit waits for the next gap (equation 4).
        ([5.0, 1.0, 1.0], [9.0, 4.0, 4.0], [0.0, 4.0, 2.0]),
        ([2.0, 2.0], [0.0, 0.0], [0.0, 0.0]),
        ([], [], []),
    ],
)
def test_the_first_step_fills_the_gaps(
    gradients: list[float], gaps: list[float], placed: list[float]
) -> None:
    assert first_step(gradients, gaps) == placed


def length(graph: StageGraph, reductions: Sequence[float]) -> float:
    """Of the pass: its longest chain of stages."""
    end: dict[int, float] = {}
    for stage in TopologicalSorter(dict(enumerate(graph.before))).static_order():
        time = graph.times[stage]
        if stage in graph.reductions:
            time = reductions[graph.reductions.index(stage)]
        end[stage] = max([graph.issued[stage], *(end[one] for one in graph.before[stage])]) + time
    return max(end.values())


def partitions(gradients: Sequence[int], first: Sequence[int]) -> list[tuple[int, ...]]:
    """All whole ones: what is complete before a layer, divided between it and those that follow."""
    complete = list(itertools.accumulate([0, *gradients[:-1]]))
    found: list[tuple[int, ...]] = [()]
    for least, limit in zip(first, complete, strict=True):
        found = [
            (*one, more)
            for one in found
            for more in range(least, limit - sum(one) + 1)
            if sum(one) + more <= limit
        ]
    return found


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_no_partition_is_shorter_than_that_of_the_second_step(data: st.DataObject) -> None:
    """Compared with all whole ones; with whole times, one of them is an optimum of the linear program."""
    num_layers, times = data.draw(st.integers(2, 4)), st.integers(0, 6)
    before: list[list[int]] = []
    stage_times: list[float] = []
    reductions: list[int] = []
    lanes: dict[str, int] = {}
    for _ in range(num_layers):
        lanes_of_layer = st.lists(st.sampled_from(["compute", "comm"]), max_size=4)
        for lane in (*data.draw(lanes_of_layer), "reduce"):
            number = len(before)
            own = "comm" if lane == "reduce" else lane
            needs = {lanes[own]} if own in lanes else set()
            if number and lane != "reduce":
                needs |= {data.draw(st.integers(0, number - 1))}
            if lane == "reduce":
                reductions.append(number)
            before.append(sorted(needs))
            stage_times.append(0 if lane == "reduce" else data.draw(times))
            lanes[own] = number
    issued = sorted(data.draw(st.lists(times, min_size=len(before), max_size=len(before))))
    graph = StageGraph(before, stage_times, [float(one) for one in issued], reductions)
    gradients = data.draw(st.lists(st.integers(0, 5), min_size=num_layers, max_size=num_layers))
    found = second_step(graph, gradients, [0.0] * num_layers)
    complete = itertools.accumulate([0, *gradients[:-1]])
    for placed, limit in zip(itertools.accumulate(found), complete, strict=True):
        assert placed <= limit + 1e-6
    total = length(graph, found) + sum(gradients) - sum(found)
    least = min(
        length(graph, one) + sum(gradients) - sum(one) for one in partitions(gradients, [0] * num_layers)
    )
    # Those partitions are of whole units; a shorter one may divide them.
    assert total <= least + 2 * EARLINESS * sum(gradients) + 1e-6


def test_the_second_step_keeps_what_the_first_one_has_placed_and_waits_for_the_larger_gap() -> None:
    """Two layers after the first: the transfer of the second is late because of its computation."""
    #       reduce  reduce  compute  transfer  reduce
    graph = StageGraph([[], [0], [], [1, 2], [3]], [0, 0, 6, 1, 0], [0.0] * 5, [0, 1, 4])
    # Four units fit before the transfer; the fifth delays it by one, which the end of the pass would too.
    assert second_step(graph, [5, 2, 1], [0, 1, 0]) == pytest.approx([0, 5, 0], abs=1e-6)
    assert second_step(graph, [9, 2, 1], [0, 1, 0])[1] == pytest.approx(6, abs=1e-6)
    assert second_step(graph, [0, 2, 1], [0, 0, 0]) == pytest.approx([0, 0, 0], abs=1e-6)


# The advice.


def of_cpu_layers(
    schedule: str, degree: int, *, layers: int = 4, dense: int = 4, experts: int = 2
) -> GradientPlan | None:
    (case,) = read_grid(find_grid("cpu-small")).only("top1").cases
    measured = replace(read_cluster(Path("docs/measured/profile-200mbit.yaml")), ranks_per_node=4)
    block = workload_of_case(case, num_ranks=2, fused_gradients=True)
    block = replace(block, replicas=dense, expert_replicas=experts)
    predictor = Predictor(block, measured, num_layers=layers)
    order = build(schedule, degree=degree, features=predictor.features)
    return plan_gradients(predictor, order, even_chunks(block.rows, degree), num_layers=4)


def test_reductions_take_as_long_as_measured() -> None:
    found = of_cpu_layers("lancet", 1)
    assert found is not None and found.parameters == ATTENTION + EXPERTS
    ways = {way.name: way for way in found.ways}
    layer_ms = found.layers[0].reduction_ms
    assert ways[AFTER].left_ms == pytest.approx(4 * layer_ms, rel=0.01)
    assert ways[AFTER].pass_ms == found.without_ms
    # Measured: 998 ms for the gradients of four layers and the table of words (docs/reductions.md).
    alone = of_cpu_layers("lancet", 1, experts=1)
    assert alone is not None
    assert 4 * layer_ms + 98_304 / ATTENTION * alone.layers[0].reduction_ms == pytest.approx(998, rel=0.1)


@pytest.mark.parametrize(("schedule", "degree"), [("lancet", 1), ("ampipe", 4)])
@pytest.mark.parametrize("layers", [1, 4])
def test_each_step_saves_more_and_the_best_is_chosen(schedule: str, degree: int, layers: int) -> None:
    found = of_cpu_layers(schedule, degree, layers=layers)
    assert found is not None and [one.layer for one in found.layers] == [4, 3, 2, 1]
    total = {way.name: way.pass_ms + way.left_ms for way in found.ways}
    assert total[AFTER] >= total[FIRST_STEP] > total[BOTH_STEPS] - 0.01 * total[AFTER]
    for way in found.ways:
        assert way.saves == pytest.approx(1 - total[way.name] / total[AFTER])
        # Those of experts are complete within the first layer.
        least = 0.97 if way.name in (FIRST_STEP, BOTH_STEPS) else 0.25
        assert way.left_ms >= found.layers[-1].reduction_ms * least
    best = min(total[name] for name in (AFTER, STOCK, PLACED))
    assert total[found.chosen] * 0.99 <= best
    reduced = sum(one.first_step_ms + one.second_step_ms for one in found.layers)
    both = next(way for way in found.ways if way.name == BOTH_STEPS)
    assert found.layers[0].first_step_ms == found.layers[0].second_step_ms == 0
    assert reduced + both.left_ms >= 4 * found.layers[0].reduction_ms * 0.97


def test_a_reduction_that_fits_delays_nothing() -> None:
    found = of_cpu_layers("lancet", 1, dense=2, experts=1)
    assert found is not None and found.parameters == ATTENTION
    placed = next(way for way in found.ways if way.name == PLACED)
    # Computations are slower during a transfer.
    assert placed.pass_ms == pytest.approx(found.without_ms, rel=0.03)
    assert [one.second_step_ms for one in found.layers] == pytest.approx([0.0] * 4, abs=1e-3)


def test_without_data_parallelism_nothing_is_reduced() -> None:
    assert of_cpu_layers("lancet", 1, dense=1, experts=1) is None


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    model = tmp_path / "model.yaml"
    model.write_text(PLAIN)
    return ["plan", "--model", str(model), "--cluster", "a800x8-20gbps", "--stack", "1", "--degrees", "2"]


def test_the_plan_compares_ways_to_reduce(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["gradients"]
    assert [way["name"] for way in found["ways"]] == [AFTER, STOCK, FIRST_STEP, BOTH_STEPS, PLACED]
    assert [row["layer"] for row in found["layers"]] == list(range(12, 0, -1))
    assert found["chosen"] in (AFTER, STOCK, PLACED)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert re.search(r"11-1 │ +0\.25 │", shown)
    for way in found["ways"]:
        assert re.search(rf"{way['name']} .* {way['pass_ms'] + way['left_ms']:.3f} ", shown)
    assert re.search(r"gradients: .*placed \d+\.\d+ ms, stock \d+\.\d+ ms", shown)
    # A share of the optimizer: half of the reduction is left for the next forward pass.
    assert main([*command, "--json", "-", "--set", "use-distributed-optimizer=true"]) == 0
    shares = json.loads(capsys.readouterr().out)["gradients"]
    ratio = shares["layers"][0]["reduction_ms"] / found["layers"][0]["reduction_ms"]
    assert ratio == pytest.approx(0.5, abs=0.01)
    # Over two nodes, of whose all-gathers this cluster file says nothing.
    assert main([*command, "--ranks", "16", "--set", "expert-model-parallel-size=8"]) == 0
    shown = capsys.readouterr().out
    assert "reductions of gradients are not predicted: inter.all_gather is missing" in shown


def test_the_timeline_shows_reductions_if_asked_to(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    assert main([*command, "--trace", str(trace), "--grad-reduce", "placed"]) == 0
    (span,) = [span for span in Timeline.read_chrome(trace).spans if span.kind == "reduce"]
    assert span.lane == "comm" and 250 <= span.end_us - span.begin_us < 300
    assert main([*command, "--grad-reduce", "placed"]) == 2
    assert "--grad-reduce placed: chooses the timeline that is written" in capsys.readouterr().err
    alone = ("--ranks", "1", "--set", "expert-model-parallel-size=1")
    assert main([*command, *alone, "--trace", str(trace), "--grad-reduce", "placed"]) == 2
    assert "--grad-reduce placed: shows reductions of gradients" in capsys.readouterr().err
