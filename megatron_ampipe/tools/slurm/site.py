"""Arguments of ``ampipe sbatch`` that are the same for all jobs of a site, and the file with their values.

The command line and the file take the same values, from one table. The file is YAML, and its keys are those
arguments without their dashes; the command line wins. Called by :mod:`megatron_ampipe.tools.sbatch_command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_ampipe.files.inputs import load
from megatron_ampipe.launch.config_files import Entry, ParserFlags
from megatron_ampipe.tools.whole_numbers import at_least

NONE = "none"
"""The value that removes the site's value, or the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One argument that a site's file may hold.

    Attributes:
        metavar: Of its value, for the help.
        help: What it is for.
        kind: Converts text to the value, or raises :class:`argparse.ArgumentTypeError`.
        default: The value if neither the command line nor the file gives one.
        repeats: Whether it can be given several times; the file's values come before the command line's.
    """

    metavar: str
    help: str
    kind: Callable[[str], Any] = str
    default: Any = None
    repeats: bool = False

    @property
    def full_help(self) -> str:
        """The help with the default."""
        if self.repeats:
            return f"{self.help}; can be repeated"
        return self.help if self.default is None else f"{self.help} (default: {self.default})"


OPTIONS: Mapping[str, Option] = {
    "account": Option(metavar="A", help="whom to charge"),
    "partition": Option(metavar="P", help="where to run"),
    "gpus-per-node": Option(metavar="N", kind=at_least(1), help="if no cluster file gives it"),
    "gres": Option(
        metavar="gpu[:TYPE]",
        help="ask for GPUs as --gres=gpu[:TYPE]:N in place of --gpus-per-node=N, for an older SLURM",
    ),
    "mem": Option(
        metavar="SIZE", default="0", help="memory of each node; 0 is all of it, none leaves it out"
    ),
    "exclude": Option(metavar="NODES", help="nodes not to run on, for example node[3,7-9]"),
    "time": Option(metavar="T", default="24:00:00", help="longest duration of the job: [DAYS-]HH:MM:SS"),
    "sbatch-option": Option(
        metavar="=--X=Y", repeats=True, help="a further line for #SBATCH, as in --sbatch-option=--qos=high"
    ),
    "setup": Option(
        metavar="LINE",
        repeats=True,
        help="a line of shell that each node runs first: 'module load cuda', 'source venv/bin/activate', "
        "'export NCCL_SOCKET_IFNAME=ib0'",
    ),
    "health-check": Option(
        metavar="COMMAND",
        help="each node runs this before training; where it fails, the job ends and names the node: "
        "'ampipe doctor --quick', 'dcgmi diag -r 1'",
    ),
    "container": Option(
        metavar="IMAGE", help="run in this image, by pyxis: registry#image:tag, or a file /... or ./..."
    ),
    "mount": Option(
        metavar="FROM:TO",
        repeats=True,
        help="mount this too; the folder, the files and the data that the job names are mounted anyway",
    ),
    "save-before-end": Option(
        metavar="S",
        kind=at_least(30),
        default=300,
        help="how many seconds before the job's end it is asked to save",
    ),
    "max-restarts": Option(
        metavar="N", kind=at_least(0), default=20, help="how often the job may go back to the queue"
    ),
}
_REMOVABLE = ("account", "partition", "gres", "mem", "exclude", "health-check", "container")


def add_options(parser: argparse._ActionsContainer, *names: str) -> None:
    """Declare some of the options; :func:`settle` fills in their defaults."""
    for name in names:
        option = OPTIONS[name]
        action = "append" if option.repeats else "store"
        parser.add_argument(
            f"--{name}", metavar=option.metavar, type=option.kind, action=action, help=option.full_help
        )


def settle(arguments: argparse.Namespace, path: Path | None) -> None:
    """Fill in what the command line does not give, from the site's file, else the default.

    Args:
        arguments: Changed in place.
        path: The site's file.

    Raises:
        BadInput: the file cannot be read, or a key or value in it is wrong.
    """
    found = {} if path is None else _read(path)
    for name, option in OPTIONS.items():
        key = name.replace("-", "_")
        own = getattr(arguments, key)
        if option.repeats:
            value: Any = [*found.get(name, ()), *(own or ())]
        else:
            value = own if own is not None else found.get(name, option.default)
        if name in _REMOVABLE and value == NONE:
            value = None
        setattr(arguments, key, value)


def _read(path: Path) -> dict[str, Any]:
    remedy = "Write one 'key: value' on each line, such as 'partition: gpu'; docs/slurm.md has an example."
    document = load(path, what="--site", remedy=remedy, scalars_as_text=True)
    parser = argparse.ArgumentParser(add_help=False)
    for name, option in OPTIONS.items():
        parser.add_argument(f"--{name}", dest=name, type=option.kind)
    flags = ParserFlags(parser)
    found: dict[str, Any] = {}
    for key, value in document.items():
        if value is None:
            continue
        entry = Entry(place=f"{path}:{document.lines[key]}", key=key, section="", value=value)
        flag = flags.flag_of(entry)
        repeats = OPTIONS[key].repeats
        entries = (
            [replace(entry, value=one) for one in value] if repeats and isinstance(value, list) else [entry]
        )
        values = [vars(parser.parse_args(flags.words_of(one, flag)))[key] for one in entries]
        found[key] = values if repeats else values[0]
    return found
