"""The exceptions that are shown to users, and the exit code of each.

Any module may raise them; :mod:`megatron_ampipe.cli` and the training entry points print the message without
a traceback and exit with the code. Internal invariants are checked with ``assert`` instead.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable

INTERRUPTED = 130
"""The exit code after Ctrl-C (128 + SIGINT)."""


class AMPipeError(Exception):
    """Base class of all errors that are shown to users."""

    exit_code = 3


class EnvironmentMissing(AMPipeError):
    """Something outside the package is missing or too old: Python, torch, Megatron, a device."""

    exit_code = 1


class BadInput(AMPipeError, ValueError):
    """An argument, a file or a combination of settings that is not valid.

    ``name`` is the flag, file or key as the user wrote it. ``rule`` says why its value is refused, as one
    clause without a full stop. ``remedy`` says what to do instead, with a value that would work.
    """

    exit_code = 2

    def __init__(self, name: str, value: object, *, rule: str, remedy: str) -> None:
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy
        # A flag without a value has an empty string as its value.
        given = f"{name} {value}".removesuffix(" ")
        super().__init__(f"{given}: {rule}. {remedy}")


class RunFailed(AMPipeError):
    """The command started its work but could not finish it."""


class DifferenceFound(AMPipeError):
    """A check that compares two results found a difference."""

    exit_code = 4


def global_rank() -> int:
    """The rank of this process, as torchrun sets it; 0 without torchrun. Rank 0 prints what all would say."""
    return int(os.environ.get("RANK", "0"))


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A question that names the known word most similar to ``word``; empty if none reaches ``cutoff``."""
    near = difflib.get_close_matches(word, sorted(known), n=1, cutoff=cutoff)
    return f"Did you mean {near[0]}?" if near else ""


def meant(word: str, known: Collection[str]) -> str | None:
    """The known word that ``word`` misspells by a letter or two, hyphens aside; None if there is none."""
    plain = word.strip("-").replace("_", "-")
    near = difflib.get_close_matches(plain, known, n=1, cutoff=0.9)
    return near[0] if near and word not in known else None


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence with the known word most similar to ``word``; with all known words, if none is similar."""
    choices = sorted(known)
    return did_you_mean(word, choices, cutoff=0.5) or f"Use one of {', '.join(choices)}."
