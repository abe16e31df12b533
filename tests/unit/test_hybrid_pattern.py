"""Which layers of a hybrid model are pipelined."""

import pytest

from megatron_ampipe.block.hybrid_pattern import runs_of_pairs


@pytest.mark.parametrize(
    ("layers", "runs"),
    [
        ("*E", [(0, 1)]),
        ("*E*E", [(0, 2)]),
        ("+EM+E", [(0, 1), (3, 1)]),
        ("M*E-*EE*", [(1, 1), (4, 1)]),
        # A dense pair shares the schedule of its neighbors only.
        ("*-*E*-", [(0, 3)]),
        ("*-M*E", [(3, 1)]),
        ("*-*-", []),
        ("E*M", []),
        ("**E", [(1, 1)]),
    ],
)
def test_runs_of_pairs(layers: str, runs: list[tuple[int, int]]) -> None:
    assert list(runs_of_pairs(layers)) == runs
