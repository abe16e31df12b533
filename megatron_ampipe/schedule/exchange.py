"""How often a token is sent: the values of ``--ampipe-exchange``. Part of a :class:`~.pipeline.Pipeline`."""

from __future__ import annotations

from enum import StrEnum


class Exchange(StrEnum):
    """What the all-to-all of a chunk sends. Changes no result: sums are added in another order."""

    ROWS = "rows"
    """A row for each expert of a token, as Megatron's dispatcher does."""
    RANKS = "ranks"
    """A row for each rank that has experts of the token; the rank copies it and adds their outputs."""
