"""``ampipe config``: what a launch with these files and flags would be told, and where each value comes from.

Trains nothing and opens no data. Needs Megatron, whose own parser is what the settings are held against.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_ampipe.errors import BadInput

if TYPE_CHECKING:
    from megatron_ampipe.launch.settings import Resolved

_EPILOG = """\
examples:
  ampipe config --ampipe-config tiny quickstart                 as YAML, each value with its source
  ampipe config --ampipe-config mixtral-8x7b my/run.yaml --lr 1e-4 --format command
  ampipe config --ampipe-config tiny quickstart --mock-data --train-iters 100 --ranks 2
      also what a launch on 2 ranks checks

What is checked: the name, type and choices of every setting, and AMPipe's own. With --ranks also what a
launch checks before its ranks find each other: Megatron's rules, and what AMPipe cannot combine. Not checked
is whether data is there, and whether this machine could run it.

Every other flag is one of training: those of Megatron and --ampipe-*.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe config``; the flags of training pass through (see ``cli.parse``)."""
    parser.description = "Show and check the configuration that files and flags make together."
    parser.epilog = _EPILOG
    # Or --form would be taken for --format, and never reach Megatron.
    parser.allow_abbrev = False
    parser.add_argument(
        "--format", choices=("yaml", "command"), default="yaml", help="what to print (default: yaml)"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="check everything that a launch on N ranks checks"
    )
    parser.set_defaults(passed_on=[])


def run(arguments: argparse.Namespace) -> int:
    """Resolve, check and print.

    Raises:
        EnvironmentMissing: torch or Megatron is not there.
        BadInput: a file or a flag is wrong.
    """
    from megatron_ampipe.launch import settings

    if arguments.ranks is not None and arguments.ranks < 1:
        raise BadInput(
            "--ranks", arguments.ranks, rule="must be a whole number, at least 1", remedy="Use --ranks 8."
        )
    resolved = check(arguments.passed_on, num_ranks=arguments.ranks)
    print(settings.as_yaml(resolved) if arguments.format == "yaml" else settings.as_command(resolved), end="")
    return 0


def check(words: Sequence[str], *, num_ranks: int | None) -> Resolved:
    """Resolve a command line of training, and check it.

    Args:
        words: Flags of Megatron and AMPipe, with ``--ampipe-config`` in them or not.
        num_ranks: For how many ranks a launch is checked as well; None for none.

    Raises:
        EnvironmentMissing: torch or Megatron is not there.
        BadInput: a file or a flag is wrong.
    """
    from megatron_ampipe.launch import command_line, settings

    # Some libraries greet on standard output when they are imported.
    with contextlib.redirect_stdout(sys.stderr):
        command_line.import_megatron()
        parser = command_line.full_parser()
    resolved = settings.resolve(words, parser)
    command_line.check_settings(resolved, parser)
    # Refuses what is no flag at all.
    parser.parse_args(resolved.words)
    if num_ranks is not None:
        _check_launch(resolved.words, num_ranks=num_ranks)
    return resolved


def _check_launch(words: Sequence[str], *, num_ranks: int) -> None:
    """What a launch checks; what it would print is left out."""
    from megatron_ampipe.launch import pretrain

    os.environ |= {"WORLD_SIZE": str(num_ranks), "RANK": "0"}
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        pretrain.check_launch(words)
