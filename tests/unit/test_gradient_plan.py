"""How gradients are reduced with a plan: buckets, the pass with reductions, the advice."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.plan.cluster import read_cluster
from megatron_ampipe.plan.gradients import (
    AFTER,
    PLACED,
    STOCK,
    GradientPlan,
    ReducedPass,
    completed,
    plan_gradients,
)
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import Direction, build, even_chunks, period
from megatron_ampipe.tools.measuring.grid import block_of_case, find_grid, read_grid
from tests.plan_cases import cluster, sized_block, without_device
from tests.unit.test_plan_block import PLAIN

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
    ],
)
def test_a_bucket_is_complete_with_a_layer(
    layers: list[list[float]], bucket_size: float, expected: list[list[float]]
) -> None:
    assert completed(layers, bucket_size) == expected


# The pass with reductions.


def reduced_pass(
    name: str, degree: int, *, together: bool = False, num_layers: int = 3, **changes: Any
) -> tuple[ReducedPass, Predictor, float]:
    """With the time of one transfer; no stage slows another down."""
    work = sized_block(**{"replicas": 8, "expert": 4, "expert_replicas": 2, **changes})
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
    computed, _ = run.times(of_layers(endless, 0.0, 0.0), overlapped=True)
    assert computed == pytest.approx(run.without_us + 2 * 2 * transfer)
    # Gradients of experts are complete before the second transfer of their layer.
    earlier, _ = run.times(of_layers(experts=(endless, 0.0, 0.0)), overlapped=True)
    assert earlier == pytest.approx(run.without_us + 5 * transfer)
    # The reduction and the transfer each get half of the network until the reduction has ended.
    longer, shorter = (
        run.times(of_layers(transfer * share, 0.0, 0.0), overlapped=True)[0] for share in (0.75, 0.5)
    )
    assert longer - shorter == pytest.approx(0.25 * transfer)


def of_layers(*others: float, experts: Sequence[float] = (0.0, 0.0, 0.0)) -> list[tuple[float, float]]:
    """Reductions of three layers."""
    return list(zip(experts, others or (0.0, 0.0, 0.0), strict=True))


@pytest.mark.parametrize(("num_layers", "tensor"), [(4, 1), (5, 2)])
def test_stacks_follow_one_another(num_layers: int, tensor: int) -> None:
    """Two layers share a schedule; of five, three do."""
    work = sized_block(replicas=8, tensor=tensor, recomputes=True)
    predictor = Predictor(work, cluster("dgx-h100"), num_layers=2)
    schedule = period(build("ampipe", degree=2, features=predictor.features))
    lengths = even_chunks(work.rows, 2)
    run = ReducedPass(predictor, schedule, lengths, num_layers=num_layers)
    each = [predictor.of_layers(count) for count in ((2,) * (num_layers // 2), (2, 3))[num_layers % 2]]
    assert run.without_us == pytest.approx(sum(one.pass_us(schedule, lengths).backward for one in each))
    assert run.times([(50.0, 0.0)] * num_layers, overlapped=False)[0] >= run.without_us


# The plan.


def of_cpu_layers(
    schedule: str, degree: int, *, layers: int = 4, dense: int = 4, experts: int = 2
) -> GradientPlan | None:
    (case,) = read_grid(find_grid("cpu-small"), only="top1")
    measured = replace(read_cluster(Path("docs/measured/profile-200mbit.yaml")), ranks_per_node=4)
    block = block_of_case(case, num_ranks=2, fused_gradients=True)
    block = replace(block, replicas=dense, expert_replicas=experts)
    predictor = Predictor(block, measured, num_layers=layers)
    order = build(schedule, degree=degree, features=predictor.features)
    return plan_gradients(predictor, order, even_chunks(block.rows, degree), num_layers=4)


@pytest.mark.parametrize(("schedule", "degree", "layers"), [("lancet", 1, 1), ("ampipe", 4, 4)])
def test_the_best_way_is_chosen(schedule: str, degree: int, layers: int) -> None:
    found = of_cpu_layers(schedule, degree, layers=layers)
    assert found is not None
    total = {way.name: way.pass_ms + way.left_ms for way in found.ways}
    assert total[AFTER] > total[STOCK] and total[AFTER] > total[PLACED]
    for way in found.ways:
        assert way.saves == pytest.approx(1 - total[way.name] / total[AFTER])
        # Those of experts are complete within the first layer.
        assert way.left_ms >= found.reduction_ms * 0.25
    assert total[found.chosen] * 0.99 <= min(total.values())


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    model = tmp_path / "model.yaml"
    model.write_text(PLAIN)
    return ["plan", "--model", str(model), "--cluster", "a800x8-20gbps", "--stack", "1", "--degrees", "2"]


def test_the_plan_compares_ways_to_reduce(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)["gradients"]
    assert [way["name"] for way in found["ways"]] == [AFTER, STOCK, PLACED]
    assert found["chosen"] in (AFTER, STOCK, PLACED)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert found["reduction_ms"] == pytest.approx(0.25, abs=0.005)
    for way in found["ways"]:
        assert re.search(rf"{way['name']} .* {way['pass_ms'] + way['left_ms']:.3f} ", shown)
    assert re.search(r"gradients: .*placed \d+\.\d+ ms, stock \d+\.\d+ ms", shown)
    # A share of the optimizer: half of the reduction is left for the next forward pass.
    assert main([*command, "--json", "-", "--set", "use-distributed-optimizer=true"]) == 0
    shares = json.loads(capsys.readouterr().out)["gradients"]
    ratio = shares["reduction_ms"] / found["reduction_ms"]
    assert ratio == pytest.approx(0.5, abs=0.01)
    # Over two nodes, of whose all-gathers this cluster file says nothing.
    assert main([*command, "--ranks", "16", "--set", "expert-model-parallel-size=8"]) == 0
    shown = capsys.readouterr().out
    assert "reductions of gradients are not predicted: inter.all_gather is missing" in shown
