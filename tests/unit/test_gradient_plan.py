"""How gradients are reduced with a plan: buckets, the pass with reductions, the advice."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ampipe.cli import main
from megatron_ampipe.plan.gradients import (
    ReducedPass,
    completed,
)
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import build, even_chunks, period
from tests.plan_cases import cluster, sized_block, without_device
from tests.unit.test_plan_block import PLAIN

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


def test_a_reduction_that_shares_the_network_doubles_the_time_of_each_transfer() -> None:
    """In one chunk nothing else overlaps: each of two layers waits for two transfers."""
    work = sized_block(replicas=8, expert=4, expert_replicas=2)
    predictor = Predictor(work, without_device(cluster()))
    schedule = build("ampipe", degree=1, features=predictor.features)
    run = ReducedPass(predictor, schedule, [work.rows], num_layers=3)
    assert run.without_us == pytest.approx(3 * predictor.pass_us(schedule, [work.rows]).backward)
    spans = predictor.timeline(schedule, [work.rows]).spans
    of_dispatch = [span for span in spans if (span.kind, span.direction) == ("dispatch", "backward")]
    transfer = of_dispatch[0].end_us - of_dispatch[0].begin_us
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


def test_the_plan_compares_ways_to_reduce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(PLAIN)
    command = ["plan", "--model", str(model), "--cluster", "a800x8-20gbps", "--stack", "1", "--degrees", "2"]
    found = []
    for more in ([], ["--set", "use-distributed-optimizer=true"]):
        assert main([*command, "--json", "-", *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["gradients"]["reduction_ms"])
    # A share of the optimizer: half of the reduction is left for the next forward pass.
    assert found == pytest.approx([0.25, 0.125], abs=0.005)
    assert main(command) == 0
    assert re.search(r"gradients: .*placed \d+\.\d+ ms, stock \d+\.\d+ ms", capsys.readouterr().out)
    # Over two nodes, of whose all-gathers this cluster file says nothing.
    assert main([*command, "--ranks", "16", "--set", "expert-model-parallel-size=8"]) == 0
    shown = capsys.readouterr().out
    assert "reductions of gradients are not predicted: inter.all_gather is missing" in shown
