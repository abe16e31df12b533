"""What a layer costs the host over Megatron's layer, in counts that are the same every time."""

import json
import sys

import pytest

from tests.forked import completed

PARTIAL = "Megatron, graphs"
MOST = {
    "ampipe 2": (1.90, 2.10),
    "ampipe 4": (3.90, 4.05),
    "ampipe 8": (7.85, 8.00),
    "ampipe 4, stack 2": (3.90, 4.06),
    "moe-only 4": (2.75, 3.05),
    "lancet, uncut": (1.12, 1.40),
    "ampipe 2, graphs": (0.78, 1.18),
    "ampipe 4, graphs": (1.52, 2.17),
    "ampipe 4, stack 2, graphs": (1.52, 2.14),
    "ampipe 2, whole graphs": (0.05, 0.33),
    "ampipe 4, whole graphs": (0.05, 0.35),
    "ampipe 8, whole graphs": (0.05, 0.39),
    "ampipe 4, stack 2, whole graphs": (0.045, 0.33),
    "ampipe 4, stack 2, whole graphs, cut": (0.046, 0.335),
    PARTIAL: (0.39, 1.33),
}
"""Operators and Python calls, of which Megatron's and torch's functions, run for every chunk, are most.

With CUDA graphs of stages, what is left to the host are experts and transfers, as often as there are chunks.
With those of whole passes, copies of inputs, outputs and gradients are left, and launches. Megatron's own
graphs leave its experts and transfers, and check all arguments before a launch. The checks
for hooks and other changes of a script are about 0.02 of Megatron's calls (docs/log/2026-11-28.md).
"""


@pytest.fixture(scope="module")
def ratios() -> dict[str, list[float]]:
    run = completed(sys.executable, "-m", "tests.host_cost")
    found: dict[str, list[float]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", MOST)
def test_a_layer_costs_the_host_no_more_than_it_did(name: str, ratios: dict[str, list[float]]) -> None:
    operators, calls = ratios[name]
    assert operators <= MOST[name][0] and calls <= MOST[name][1]
    # Much less would be a mistake of the count.
    assert operators > 0.8 * MOST[name][0] and calls > 0.8 * MOST[name][1]


def test_whole_passes_cost_the_host_less_than_megatrons_layers_with_partial_graphs(
    ratios: dict[str, list[float]],
) -> None:
    """At four chunks at most as many operators, and at most 0.15 of those of layers without graphs."""
    of_megatron, _ = ratios[PARTIAL]
    whole, _ = ratios["ampipe 4, whole graphs"]
    assert whole <= 1.0 * of_megatron and whole <= 0.15
