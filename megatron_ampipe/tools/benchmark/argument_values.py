"""What the arguments of ``ampipe bench`` say: each read and checked, and those that exclude each other.

Imports no torch. Called by :mod:`megatron_ampipe.tools.bench_command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_ampipe.block.named_values import check_wire
from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import (
    SCHEDULE_NAMES,
    check_memory,
    of_chunks,
    parse_shares,
    parse_stack,
)
from megatron_ampipe.tools.measuring.link import Link
from megatron_ampipe.tools.measuring.variant import Cut

UNCHANGED = "none"
"""The value of ``--wire`` with which rows travel as they are."""

LAYERS_OF_TRAINING, ROUNDS = 2, 3
"""Of ``--end-to-end``, where they are not given."""


def cuts(degrees: str, chunks: Sequence[str]) -> tuple[Cut, ...]:
    """The values of ``--degrees`` and ``--chunks``, each once."""
    found = [_cut(word, degrees) for word in degrees.split(",")]
    for text in chunks:
        shares = parse_shares(text, flag="--chunks")
        found.append(Cut.of(len(shares), shares=shares))
    return tuple(dict.fromkeys(found))


def _cut(word: str, text: str) -> Cut:
    """One word of ``--degrees``: ``4``, or ``4:2``."""
    parts = word.split(":")
    if len(parts) > 2 or not all(map(_is_number, parts)):
        raise BadInput(
            "--degrees",
            text or "(empty)",
            rule="is not a list of whole numbers of at least 1",
            remedy="Use --degrees 1,2,4,8, or 4:2 for a backward pass of degree 2.",
        )
    forward, backward = int(parts[0]), int(parts[-1])
    if max(forward, backward) % min(forward, backward):
        raise BadInput(
            "--degrees", word, rule="one of the two must divide the other", remedy="Use for example 4:2."
        )
    return Cut(forward, backward)


def schedules(text: str) -> tuple[str, ...]:
    """The value of ``--schedules``, each once."""
    words = text.split(",")
    unknown = [word for word in words if word not in SCHEDULE_NAMES]
    if unknown:
        raise BadInput(
            "--schedules",
            unknown[0] or "(empty)",
            rule=f"is not one of {', '.join(SCHEDULE_NAMES)}",
            remedy="Use --schedules moe-only,ampipe.",
        )
    return tuple(dict.fromkeys(words))


def memories(text: str, cuts: Sequence[Cut]) -> tuple[str, ...]:
    """The value of ``--memory``, each once.

    Args:
        text: What the user wrote.
        cuts: What is measured; a word that names strategies of single chunks must be for one of them.
    """
    words = text.split(",")
    for word in words:
        degrees = {cut.backward_degree for cut in cuts}
        fits = len(of_chunks(word)) in {1, *degrees}
        check_memory(word, flag="--memory", backward_degree=None if fits else max(degrees))
    return tuple(dict.fromkeys(words))


def layers(arguments: argparse.Namespace) -> int:
    """The value of ``--layers``, or what it is without."""
    found: int | None = arguments.layers
    return found or (LAYERS_OF_TRAINING if arguments.end_to_end else 1)


def stacks(text: str | None, *, layers: int) -> tuple[int, ...]:
    """The value of ``--stack``, each once, ``all`` as a number.

    Args:
        text: What the user wrote; block by block and all layers together if None.
        layers: How many layers there are.

    Raises:
        BadInput: a word is no number of layers, or there are not as many layers.
    """
    found = []
    for word in (text if text is not None else "1,all").split(","):
        size = parse_stack(word, flag="--stack") or layers
        if size > layers:
            raise BadInput(
                "--stack",
                word,
                rule=f"is above the number of layers ({layers}), which cannot share a schedule with others",
                remedy=f"Use --layers {size}, or --stack all.",
            )
        found.append(size)
    return tuple(dict.fromkeys(found))


def wires(text: str) -> tuple[str | None, ...]:
    """The value of ``--wire``, each once; None for ``none``.

    Raises:
        BadInput: a word is no value of ``--ampipe-wire``.
    """
    words = dict.fromkeys(text.split(","))
    for word in words:
        if word != UNCHANGED:
            check_wire(word, flag="--wire")
    return tuple(None if word == UNCHANGED else word for word in words)


def _is_number(word: str) -> bool:
    """Whether it is a whole number of at least 1; Python does not read one of thousands of digits."""
    return word.isascii() and word.isdecimal() and len(word) < 10 and int(word) > 0


def check_gloo(*, link: Link, on_cuda: bool, pretended: bool) -> None:
    """Refuse ``--gloo-all-to-all`` where gloo's all-to-all does not take what it takes between real ranks.

    Raises:
        BadInput: the link is emulated, or gloo sends nothing.
    """
    if on_cuda or pretended or link.emulated:
        if on_cuda:
            rule = "is for CPUs: on GPUs, Megatron's and AMPipe's layers call NCCL's all-to-all"
        else:
            rule = f"has no effect with --link {link.text}, on which every all-to-all takes the same time"
        remedy = "Use --link 200mbit or, without GPUs, --link none; or leave it out."
        raise BadInput("--gloo-all-to-all", "", rule=rule, remedy=remedy)


def check_training(arguments: argparse.Namespace, link: Link) -> None:
    """What a flag needs or excludes, with and without ``--end-to-end``.

    Raises:
        BadInput: a flag could have no effect, or cannot be honoured.
    """
    if not arguments.end_to_end:
        if arguments.rounds is not None:
            rule = "belongs to --end-to-end: without it, nothing is trained"
            remedy = "Add --end-to-end, or leave --rounds out."
            raise BadInput("--rounds", arguments.rounds, rule=rule, remedy=remedy)
        return
    if link.emulated or arguments.pretend_peers:
        flag, value = ("--link", link.text) if link.emulated else ("--pretend-peers", "")
        raise BadInput(
            flag,
            value,
            rule="a training needs real ranks: what it learns depends on every token that arrives, and an "
            "emulated link would not slow its other collectives",
            remedy="Use --link 200mbit, or --link none.",
        )
    for flag, value in (
        ("--plot", arguments.plot),
        ("--from", arguments.source),
        ("--predict", arguments.predict),
        ("--planned", arguments.planned),
    ):
        if value is not None:
            rule = "works with results of blocks, not with --end-to-end"
            raise BadInput(flag, value, rule=rule, remedy=f"Leave {flag} out; --json holds every sample.")
