"""How many lines of Python a function executes, for tests that limit it: times vary on a shared machine."""

import sys
from collections.abc import Callable


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
