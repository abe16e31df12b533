"""A type of argument that several tools use: whole numbers of a range."""

from __future__ import annotations

import argparse
from collections.abc import Callable

LARGEST_SEED = 2**32 - 1
"""The largest that every library accepts."""


def at_least(minimum: int, *, at_most: int | None = None) -> Callable[[str], int]:
    """A type for ``argparse``: whole numbers from ``minimum`` on, up to ``at_most`` where it is given."""

    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {minimum}")
        if at_most is not None and value > at_most:
            raise argparse.ArgumentTypeError(f"{text!r} is more than {at_most}")
        return value

    return whole_number
