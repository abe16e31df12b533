"""How gradients are reduced with a plan: buckets, a pass with reductions. Golden plans hold the figures."""

import json
import re
from pathlib import Path

import pytest

from megatron_ampipe.plan.gradients import ReducedPass, completed
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import build
from tests.conftest import Command
from tests.plan_cases import cluster, model_file, sized_block, without_device


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


def test_a_reduction_that_shares_the_network_doubles_the_time_of_each_transfer() -> None:
    """In one chunk nothing else overlaps: each of two layers waits for two transfers."""
    work = sized_block(replicas=8, expert=4, expert_replicas=2)
    predictor = Predictor(work, without_device(cluster()))
    schedule = build("ampipe", degree=1, features=predictor.features)
    transfer = next(
        span.end_us - span.begin_us
        for span in predictor.timeline(schedule, [work.rows]).spans
        if (span.kind, span.direction) == ("dispatch", "backward")
    )
    run = ReducedPass(predictor, schedule, [work.rows], num_layers=3)
    assert run.without_us == pytest.approx(3 * predictor.pass_us(schedule, [work.rows]).backward)

    def computed(others: float, experts: float = 0.0) -> float:
        """With reductions of the first of three layers."""
        return run.times([(experts, others), (0.0, 0.0), (0.0, 0.0)], overlapped=True)[0]

    endless = 1e9
    assert computed(endless) == pytest.approx(run.without_us + 2 * 2 * transfer)
    # Gradients of experts are complete before the second transfer of their layer.
    assert computed(0.0, endless) == pytest.approx(run.without_us + 5 * transfer)
    # The reduction and the transfer each get half of the network until the reduction has ended.
    assert computed(0.75 * transfer) - computed(0.5 * transfer) == pytest.approx(0.25 * transfer)


def test_the_plan_compares_ways_to_reduce(ampipe: Command, tmp_path: Path) -> None:
    command = ["plan", "--model", model_file(tmp_path), "--cluster", "a800x8-20gbps", "--stack", "1"]
    command += ["--degrees", "2"]
    found = [
        json.loads(ampipe(*command, "--json", "-", *more).out)["gradients"]["reduction_ms"]
        for more in ([], ["--set", "use-distributed-optimizer=true"])
    ]
    # A share of the optimizer: half of the reduction is left for the next forward pass.
    assert found == pytest.approx([0.25, 0.125], abs=0.005)
    shown = ampipe(*command, "--verbose").out
    assert re.search(r"gradients: .*placed \d+\.\d+ ms, stock \d+\.\d+ ms", shown)
    # Over two nodes, of whose all-gathers this cluster file says nothing.
    shown = ampipe(*command, "--ranks", "16", "--set", "expert-model-parallel-size=8").out
    assert "reductions of gradients are not predicted: inter.all_gather is missing" in shown
