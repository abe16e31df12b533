"""How slow the core is, for tests that limit a time: a shared machine's speed varies by the minute."""

from __future__ import annotations

import time
from collections.abc import Callable


def cpu_seconds(function: Callable[[], object]) -> float:
    """Processor time of a call."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def slowness() -> float:
    """How much slower than one that sums 100,000 squares in 4 ms, by the fastest of 20 sums; at least 1."""
    return max(1.0, min(cpu_seconds(_sum_squares) for _ in range(20)) / 0.004)


def _sum_squares() -> int:
    return sum(number * number for number in range(100_000))
