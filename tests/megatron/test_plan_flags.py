"""The flags that the planner reads exist in the installed Megatron; its other flags do not look like them."""

from __future__ import annotations

import argparse

from megatron_ampipe.files.spelling import meant
from megatron_ampipe.plan.model_file import SIZE_FLAGS


def test_the_flags_that_the_planner_reads_are_those_of_the_installed_megatron() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {flag.removeprefix("--") for action in parser._actions for flag in action.option_strings}
    assert set(SIZE_FLAGS) <= flags
    # Of about 840 flags, a note asks for two: moe-expert-rank-capacity-factor and fp4-format.
    asked = {flag for flag in flags if meant(flag, SIZE_FLAGS)}
    assert len(asked) <= 5, asked
