"""``ampipe config``: the flags that a launch with these files gets, and where each value comes from.

Trains nothing and opens no data. Needs Megatron, whose parser checks the settings.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings

from megatron_ampipe.files.inputs import at_least

EPILOG = """\
examples:
  ampipe config --ampipe-config tiny quickstart                 as YAML, each value with its source
  ampipe config --ampipe-config mixtral-8x7b my/run.yaml --lr 1e-4 --format command
  ampipe config --ampipe-config tiny quickstart --mock-data --train-iters 100 --ranks 2
      also what a launch on 2 ranks checks

Not checked is whether data is there, and whether this machine could run it. Every other flag is one of
training: those of Megatron and --ampipe-*.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe config``; the flags of training pass through (see ``cli.parse``)."""
    # Otherwise --form would be read as --format, and never reach Megatron.
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--format", choices=("yaml", "command"), default="yaml", help="what to print (default: yaml)")
    ranks = "check everything that a launch on N ranks checks"
    add("--ranks", type=at_least(1), metavar="N", help=ranks)
    parser.set_defaults(training_flags=[])


def run(arguments: argparse.Namespace) -> int:
    """Resolve, check and print."""
    from megatron_ampipe.launch import config_files, flags

    # Some libraries print to standard output when they are imported.
    with contextlib.redirect_stdout(sys.stderr):
        flags.import_megatron()
        parser = flags.full_parser()
    resolved = config_files.resolve(arguments.training_flags, parser)
    flags.check_settings(resolved, parser)
    # Refuses words that are not flags.
    parser.parse_args(resolved.words)
    if arguments.ranks is not None:
        from megatron_ampipe.launch import pretrain

        os.environ |= {"WORLD_SIZE": str(arguments.ranks), "RANK": "0"}
        # The output of a launch is left out.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            pretrain.check_launch(resolved.words)
    text = config_files.as_yaml if arguments.format == "yaml" else config_files.as_command
    print(text(resolved), end="")
    return 0
