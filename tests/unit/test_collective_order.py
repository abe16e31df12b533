"""The comparison of the ranks' collectives, with sequences that are right and wrong."""

import pytest

pytest.importorskip("torch")

from tests.dist.collective_order import Issued, problems

ROW = ("torch.float32", 8)


def issued(group: str, *ranks: int, operation: str = "reduce", row: tuple[object, ...] = ROW) -> Issued:
    return Issued(group, ranks, operation, row)


def exchanged(sent: tuple[int, int], received: tuple[int, int]) -> Issued:
    return Issued("a", (0, 1), "all-to-all", ROW, sent, received)


A, B, C = issued("a", 0, 1), issued("b", 1, 2), issued("c", 2, 0)
BOTH = issued("d", 0, 1)


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([[A, BOTH, A], [A, BOTH, A]], ""),
        ([[A, C], [A, B], [B, C]], ""),
        ([[exchanged((1, 2), (1, 5))], [exchanged((5, 3), (2, 3))]], ""),
        ([[exchanged((1, 2), (1, 5))], [exchanged((4, 3), (2, 3))]], "collective 0 of ranks [0, 1]: [[1, 2]"),
        ([[A, A], [A]], "ranks [0, 1] issue [2, 1] collectives"),
        ([[A], []], "ranks [0, 1] issue [1, 0] collectives"),
        ([[A], [issued("a", 0, 1, operation="gather")]], "collective 0 of ranks [0, 1] differs"),
        ([[A], [issued("a", 0, 1, row=("torch.float32", 9))]], "collective 0 of ranks [0, 1] differs"),
        ([[A, BOTH], [BOTH, A]], "these wait for each other"),
        # Each two groups share one rank alone, so only all three together show it.
        ([[A, C], [B, A], [C, B]], "these wait for each other"),
    ],
)
def test_problems(by_rank: list[list[Issued]], expected: str) -> None:
    found = problems(by_rank)
    assert (not found) == (not expected)
    assert all(expected in problem for problem in found)
