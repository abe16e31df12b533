"""Suggestions for a misspelt word, used by every message that refuses a name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def did_you_mean(word: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> str:
    """A question that names at most ``most`` similar known words; empty if none is similar.

    ``cutoff`` is how similar they must be, 0 to 1, as :func:`difflib.get_close_matches` counts.
    """
    near = difflib.get_close_matches(word, sorted(known), n=most, cutoff=cutoff)
    return f"Did you mean {' or '.join(near)}?" if near else ""


def meant(word: str, known: Collection[str]) -> str | None:
    """The known word from which ``word`` differs by a letter or two, hyphens aside; None if there is none."""
    plain = word.strip("-").replace("_", "-")
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.9)
    return near[0] if near and word not in known else None


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is most like ``word``, as a sentence; all known words, if none is similar."""
    choices = sorted(known)
    return did_you_mean(word, choices, cutoff=0.5) or f"Use one of {', '.join(choices)}."
