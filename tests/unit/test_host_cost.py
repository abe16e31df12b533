"""What a layer costs the host over Megatron's layer, in counts that are the same every time."""

import json
import sys

import pytest

from tests.forked import completed

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
}
"""Operators and Python calls, of which Megatron's and torch's functions, run for every chunk, are most.

With CUDA graphs, what is left to the host are experts and transfers, as often as there are chunks. The checks
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
