"""The commands that ``ampipe --help`` and ``ampipe COMMAND --help`` show as examples. Used by tests."""

from __future__ import annotations

import argparse
import re
import shlex

from megatron_ampipe.cli import build_parser


def help_examples(tool: str | None) -> list[list[str]]:
    """The arguments after ``ampipe`` of every example in a tool's help; for None, in ``ampipe --help``."""
    parser = build_parser(tool)
    if tool is not None:
        (commands,) = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
        parser = commands.choices[tool]
    lines = [line.strip() for line in str(parser.epilog).partition("examples:\n")[2].splitlines()]
    commands = [line for line in lines if re.match(r"(ampipe|torchrun .* -m megatron_ampipe\.cli) ", line)]
    # The text after two spaces is a description of the command.
    found = [part for line in commands for part in re.split(r"\s{2,}", line)[0].split(" && ")]
    return [_after_the_program(shlex.split(command)) for command in found]


def _after_the_program(words: list[str]) -> list[str]:
    return words[1:] if words[0] == "ampipe" else words[words.index("megatron_ampipe.cli") + 1 :]
