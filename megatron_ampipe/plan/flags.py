"""The names of Megatron's flags, as plain data, so that a model file can be checked without Megatron."""

from __future__ import annotations

import functools
from importlib import resources

from megatron_ampipe.config import SETTING_NAMES


@functools.cache
def known_flags() -> frozenset[str]:
    """Every flag of Megatron's GPT pretraining without its dashes: ``hidden-size``.

    From ``megatron_flags.txt``; ``tests/megatron/test_plan_flags.py`` holds it against the installed parser.
    """
    text = resources.files("megatron_ampipe.plan").joinpath("megatron_flags.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.splitlines() if not line.startswith("#"))


def ampipe_keys() -> frozenset[str]:
    """What may stand in the section ``ampipe:`` of a model file: the settings, as their flags are written."""
    return frozenset(SETTING_NAMES)
