"""How gradients are reduced with a plan: buckets. Golden plans hold the figures."""

import json
import re
from pathlib import Path

import pytest

from megatron_ampipe.plan.gradients import completed
from tests.conftest import Command
from tests.plan_cases import model_file


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
