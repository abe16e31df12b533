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
import shlex
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.flag_files import FlagFile, read_flag_file
from megatron_ampipe.files.inputs import at_least, several
from megatron_ampipe.launch import connections
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
  ampipe config --recipe bf16_32GPU_TP1PP1EP8.yaml --ampipe-degree 2
      the flags of a recipe of Megatron-LM, or of a job script, checked for as many ranks as it names
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
    recipe = "take the flags of this recipe (YAML with ARGS) or job script; nothing in it is run"
    add("--recipe", type=Path, metavar="FILE", help=recipe)
    without = "with --recipe: flags to leave out"
    add("--without", type=several(str), metavar="FLAG,FLAG", default=[], help=without)
    ranks = "check everything that a launch on N ranks checks (default with --recipe: as it says)"
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

    recipe = _recipe_of(arguments)
    with progress.shown("ampipe config: importing Megatron") as tell, _without_notes():
        resolved, run = _checked(arguments, recipe, tell)
        notes = _notes_of(run)
    if recipe is not None:
        notes += _notes_of_recipe(recipe)
        if arguments.format == "command":
            print("\n".join(_notes_of_recipe(recipe)), file=sys.stderr)
    if arguments.format == "yaml":
        print(config_files.as_yaml(resolved, notes=notes), end="")
    else:
        print(config_files.as_command(resolved), end="")
    return 0


def _recipe_of(arguments: argparse.Namespace) -> FlagFile | None:
    """The recipe of a command line; sets its variables, and its number of ranks if none is given."""
    if arguments.recipe is None:
        if arguments.without:
            raise BadInput(
                "--without",
                ",".join(arguments.without),
                rule="leaves out flags of a recipe",
                remedy="Add --recipe FILE.",
            )
        return None
    recipe = read_flag_file(arguments.recipe)
    if arguments.without:
        recipe = recipe.without(arguments.without, flag="--without")
    if arguments.ranks is None:
        arguments.ranks = recipe.ranks
    if arguments.ranks is not None and arguments.ranks_per_node is None:
        arguments.ranks_per_node = recipe.gpus_per_node
    os.environ.update(recipe.environment)
    return recipe


def _notes_of_recipe(recipe: FlagFile) -> list[str]:
    """Variables to export, and what was not read."""
    notes = [f"Of {recipe.path}:", *(f"  {note}" for note in recipe.notes)]
    exported = connections.without_one_queue(recipe.environment)
    notes += [f"  export {name}={shlex.quote(value)}" for name, value in exported.items()]
    if exported.keys() != recipe.environment.keys():
        notes.append(f"  {connections.VARIABLE} is left out: {connections.warning('1')}")
    return notes


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


def _checked(
    arguments: argparse.Namespace, recipe: FlagFile | None, tell: progress.Told
) -> tuple[Resolved, Run]:
    """The merged settings, after all checks, and the run; it is only resolved for a number of ranks."""
    from megatron_ampipe.launch import config_files, flags

    _set_ranks(arguments)
    # Some libraries print to standard output when they are imported.
    with contextlib.redirect_stdout(sys.stderr):
        flags.import_megatron()
        parser = flags.full_parser()
    resolved = config_files.resolve(arguments.training_flags, parser, recipe=recipe)
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
