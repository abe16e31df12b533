"""The list of Megatron's flags that the planner uses is that of the installed parser."""

from __future__ import annotations

import argparse

from megatron_ampipe.plan.flags import known_flags


def test_the_flags_are_those_of_the_installed_megatron() -> None:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = {flag.removeprefix("--") for action in parser._actions for flag in action.option_strings}
    assert known_flags() == flags - {"help", "-h"}
