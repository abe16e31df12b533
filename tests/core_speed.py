"""What a function costs, for tests that limit it: a shared machine's speed varies by the minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def cpu_seconds(function: Callable[[], object]) -> float:
    """Processor time of a call."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def executed_lines(function: Callable[[], object]) -> int:
    """The number of lines of Python that a call executes: the same on every machine."""
    count, monitoring = 0, sys.monitoring
    tool, line = monitoring.PROFILER_ID, monitoring.events.LINE

    def add(*_: object) -> None:
        nonlocal count
        count += 1

    monitoring.use_tool_id(tool, __name__)
    monitoring.register_callback(tool, line, add)
    monitoring.set_events(tool, line)
    try:
        function()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, line, None)
        monitoring.free_tool_id(tool)
    return count


def slowness() -> float:
    """How much slower than one that sums 100,000 squares in 4 ms, by the fastest of 20 sums; at least 1."""
    return max(1.0, min(cpu_seconds(_sum_squares) for _ in range(20)) / 0.004)


def _sum_squares() -> int:
    return sum(number * number for number in range(100_000))
