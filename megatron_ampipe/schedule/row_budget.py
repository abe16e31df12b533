"""How many rows a chunk may send to a rank with ``--ampipe-rows fixed``, whatever the router has chosen."""

from __future__ import annotations

import math

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
