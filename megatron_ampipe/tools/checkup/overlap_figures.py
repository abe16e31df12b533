"""Computes overlap from three times. Imports no torch. Called by :mod:`.overlap` and ``ampipe doctor``."""

from __future__ import annotations

OVERLAPS, PARTLY = 0.5, 0.2
"""From these hidden shares on, overlap happens, or happens in part."""


def hidden_share(communication_s: float, computation_s: float, together_s: float) -> float:
    """What running both together saved, of the shorter of the two; from 0 to 1."""
    saved = communication_s + computation_s - together_s
    return min(1.0, max(0.0, saved / min(communication_s, computation_s)))


def verdict(share: float) -> str:
    """A hidden share as a word."""
    if share >= OVERLAPS:
        return "overlaps"
    return "overlaps in part" if share >= PARTLY else "does not overlap"
