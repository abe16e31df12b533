"""What the arguments of ``ampipe bench`` and ``ampipe profile`` have in common. No torch."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable


def cores_of(num_ranks: int) -> tuple[int, ...]:
    """A core for each rank where there are enough, else none is pinned."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    usable = sorted(os.sched_getaffinity(0))
    return tuple(usable[:num_ranks]) if len(usable) >= num_ranks else ()


def at_least(minimum: int) -> Callable[[str], int]:
    """A type for ``argparse``: whole numbers from ``minimum`` on."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        return value

    return whole_number
