"""``ampipe config``: the flags that a launch with these files gets, where each value comes from, and the run
that they decide.

Trains nothing and opens no data. Needs Megatron, whose parser checks the settings.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import at_least
from megatron_ampipe.tools import progress

if TYPE_CHECKING:
    from megatron_ampipe.launch.config_files import Resolved
    from megatron_ampipe.launch.run import Run

EPILOG = """\
examples:
  ampipe config --ampipe-config tiny quickstart                 as YAML, each value with its source
  ampipe config --ampipe-config mixtral-8x7b my/run.yaml --lr 1e-4 --format command
  ampipe config --ampipe-config tiny quickstart --mock-data --train-iters 100 --ranks 2
      also what a launch on 2 ranks checks and decides
  ampipe config --ampipe-config tiny quickstart my/run.yaml --ranks 2 --ranks-per-node 1
      the same for 2 nodes: some plans, and --ampipe-exchange nodes, depend on how many ranks share a node

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
    per_node = "how many of them a node has, as torchrun tells a launch (default: not known)"
    add("--ranks-per-node", type=at_least(1), metavar="N", help=per_node)
    parser.set_defaults(training_flags=[])


def _set_ranks(arguments: argparse.Namespace) -> None:
    """Set the variables of a launcher for the ranks that are checked, in place of an outer launch's."""
    ranks, per_node = arguments.ranks, arguments.ranks_per_node
    if ranks is None:
        if per_node is not None:
            rule, remedy = "has no effect without --ranks", f"Add --ranks {per_node}, or leave it out."
            raise BadInput("--ranks-per-node", per_node, rule=rule, remedy=remedy)
        return
    if ranks % (per_node or 1):
        remedy = f"Use for example --ranks {-(-ranks // per_node) * per_node}: all nodes have as many."
        raise BadInput(
            "--ranks", ranks, rule=f"is not a multiple of --ranks-per-node {per_node}", remedy=remedy
        )
    os.environ |= {"WORLD_SIZE": str(ranks), "RANK": "0"}
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if per_node is not None:
        os.environ["LOCAL_WORLD_SIZE"] = str(per_node)


@contextlib.contextmanager
def _without_notes() -> Iterator[None]:
    """Leave out what libraries log for information; importing Megatron's training switches it on."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def run(arguments: argparse.Namespace) -> int:
    """Resolve, check and print."""
    from megatron_ampipe.launch import config_files

    with progress.shown("ampipe config: importing Megatron") as tell, _without_notes():
        resolved, run = _checked(arguments, tell)
        notes = _notes_of(run)
    if arguments.format == "yaml":
        print(config_files.as_yaml(resolved, notes=notes), end="")
    else:
        print(config_files.as_command(resolved), end="")
    return 0


def _notes_of(run: Run) -> list[str]:
    """What is decided of a run, and by what, in the rows of the start-up table."""
    from megatron_ampipe.launch import startup

    if run.environment is None:
        head = "Decided by flags and files; with --ranks N, also by what they resolve to:"
        rows = startup.requested_rows(run)
    else:
        head = f"The run on {run.environment.world_size} ranks, and what decides it:"
        rows = startup.decided_rows(run)
    rows += [("adjusted", flag, reason) for flag, reason in run.adjustments.items()]
    return [head, *(_note_of(*row) for row in rows)]


def _note_of(name: str, value: str, why: str = "") -> str:
    reason = f" ({why})" if why else ""
    return f"  {name}: {value}{reason}"


def _checked(arguments: argparse.Namespace, tell: progress.Told) -> tuple[Resolved, Run]:
    """The merged settings, after all checks, and the run; it is only resolved for a number of ranks."""
    from megatron_ampipe.launch import config_files, flags

    _set_ranks(arguments)
    # Some libraries print to standard output when they are imported.
    with contextlib.redirect_stdout(sys.stderr):
        flags.import_megatron()
        parser = flags.full_parser()
    resolved = config_files.resolve(arguments.training_flags, parser)
    run = flags.check_settings(resolved, parser)
    # Refuses words that are not flags.
    parser.parse_args(resolved.words)
    if arguments.ranks is not None:
        tell(f"ampipe config: checking a launch on {arguments.ranks} ranks")
        from megatron_ampipe.launch import pretrain

        # The output of a launch is left out.
        with (
            contextlib.redirect_stdout(io.StringIO()),
            warnings.catch_warnings(action="ignore"),
            resolved.locating_errors(),
        ):
            run = pretrain.check_launch(resolved.words)
    return resolved, run
