"""How many rows a chunk may send to a rank with ``--ampipe-rows fixed``, whatever the router has chosen.

Budgets are learned from the largest counts of a window of steps, times a margin (:class:`Margin`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# P expert-parallel ranks.

VARIATION = 4.0
"""How many times the square root of a count is added to its budget."""
_LARGEST = 3.1
"""Standard deviations between the mean of a count and its largest value in 256 steps, about."""


def rows_of_budget(count: float, *, margin: float) -> int:
    """The budget of the largest count of rows for a rank.

    The count of independent tokens varies by its square root, which matters for small counts: four times that
    is added. ``margin`` is a factor for what does not shrink with their number: a routing that changes, and
    similar tokens of a sequence.
    """
    return math.ceil(count * margin + VARIATION * math.sqrt(count))


def largest_count(mean: float, *, share: float) -> float:
    """The largest value of a count in the steps from which a budget is learned, for independent tokens.

    Each copy of a token goes to the rank with the probability ``share``.
    """
    return mean + _LARGEST * math.sqrt(mean * (1 - share))


@dataclass(frozen=True, slots=True)
class RowBudget:
    """How many rows each rank sends to each rank in one chunk, ``[P][P]``; all ranks of a group have it."""

    rows: tuple[tuple[int, ...], ...]

    def joined(self, other: RowBudget) -> RowBudget:
        """The larger number of rows of each pair."""
        return RowBudget(
            tuple(tuple(map(max, row, others)) for row, others in zip(self.rows, other.rows, strict=True))
        )

    def sent_by(self, rank: int) -> list[int]:
        """Rows to each rank."""
        return list(self.rows[rank])

    def received_by(self, rank: int) -> list[int]:
        """Rows from each rank."""
        return [row[rank] for row in self.rows]


Counts = Sequence[Sequence[int]]
"""Rows of each rank for each rank, ``[P][P]``."""


def budget_of(counts: Counts, *, margin: float) -> RowBudget:
    """The budget of the largest counts ``[P][P]``."""
    return RowBudget(tuple(tuple(rows_of_budget(count, margin=margin) for count in row) for row in counts))


WARM_UP = 2
"""Steps with exact rows before the first budget of a chunk is learned."""
WINDOW = 256
"""A budget can become smaller after so many steps, whose largest counts it is learned from.

For the same padding, recorded routings exceed budgets of long windows less often than those of short windows
with a wider margin, and CUDA graphs are captured again less often (docs/log/2026-11-29.md).
"""
_WIDER = 1.5
"""How much wider the margin becomes, above 1, after a window with several repeated steps."""
_LEAST_WIDENED, _WIDEST = 1.25, 4.0
"""The least and the largest factor that repeats lead to."""
_KEPT_SLACK = 0.75
"""A budget stays while it has this part of the rows that a learned one adds to the counts, for each pair."""
_KEPT_SIZE = 0.875
"""A budget stays while a learned one has at least this part of its rows in all."""


def is_near(budget: RowBudget, learned: RowBudget, counts: Counts) -> bool:
    """Whether a budget stays in place of one that was learned from these counts.

    Another budget costs the captures of the CUDA graphs of a stack. Largest counts vary a little from window
    to window, so budgets that follow them exactly would change every time.
    """
    for rows, learned_rows, row_counts in zip(budget.rows, learned.rows, counts, strict=True):
        for number, learned_number, count in zip(rows, learned_rows, row_counts, strict=True):
            if number < count + _KEPT_SLACK * (learned_number - count):
                return False
    return sum(map(sum, learned.rows)) >= _KEPT_SIZE * sum(map(sum, budget.rows))


def next_budget(budget: RowBudget | None, counts: Counts, *, margin: float, may_shrink: bool) -> RowBudget:
    """The budget that follows the present one, which stays if a learned one is near to it.

    Args:
        budget: The present one; None before the first.
        counts: The largest counts of the window.
        margin: Their factor.
        may_shrink: Whether numbers of rows can become smaller.
    """
    learned = budget_of(counts, margin=margin)
    if budget is None:
        return learned
    if not may_shrink:
        learned = learned.joined(budget)
    return budget if is_near(budget, learned, counts) else learned


class Margin:
    """The factor between counts and budgets, which follows how often steps are repeated.

    Args:
        given: The least factor, ``--ampipe-rows-margin``.
    """

    def __init__(self, given: float) -> None:
        self._given = given
        self.factor = given
        self._num_repeated = 0
        """In this window."""
        self._is_first = True

    def after_repeat(self) -> None:
        """A step was repeated."""
        self._num_repeated += 1

    def after_window(self) -> None:
        """A window is full. The first one says nothing: it begins with budgets of the warm-up alone."""
        if self._num_repeated > 1 and not self._is_first:
            wider = max(_LEAST_WIDENED, 1 + _WIDER * (self.factor - 1))
            self.factor = max(self._given, min(wider, _WIDEST))
        elif self._num_repeated == 0:
            self.factor = max(self._given, 1 + (self.factor - 1) / _WIDER)
        self._num_repeated = 0
        self._is_first = False
