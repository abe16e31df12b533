"""The YAML files that a job's launch is to read: model, cluster, run, and those named behind ``--``.

Called by :mod:`megatron_ampipe.tools.sbatch_command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.settings.resolve import CONFIG_FLAG, CONFIG_FOLDERS
from megatron_ampipe.shipped import find_config
from megatron_ampipe.tools.slurm.mounts import values_of_words
from megatron_ampipe.yaml_lines import LinedMapping, load

Files = dict[tuple[str, str], tuple[Path, LinedMapping]]
"""By the flag and the name that it gives, the file and what it says; in the order of the launch."""
_SET_BY_THE_SCRIPT = ("save", "load", "ckpt-step", "exit-signal", "exit-signal-handler")
_FORM = "Look at configs/models, configs/clusters and configs/runs for the form."


def gpus_per_node(arguments: argparse.Namespace) -> int | None:
    """What the command line says, which may be by a cluster file; None for nothing.

    Raises:
        BadInput: the file does not say it, or says something else than the argument.
    """
    own: int | None = arguments.gpus_per_node
    if arguments.cluster is None:
        return own
    path, document = _read("--cluster", arguments.cluster, "cluster")
    found = document.get("ranks_per_node")
    if not isinstance(found, int) or found < 1:
        raise BadInput(
            f"{path}:{document.lines.get('ranks_per_node', document.line)}:",
            f"ranks_per_node {found}",
            rule="is not a whole number of at least 1",
            remedy="Write the number of GPUs of a node, for example ranks_per_node: 8.",
        )
    if own is not None and own != found:
        raise BadInput(
            "--gpus-per-node",
            own,
            rule=f"differs from ranks_per_node {found} of {path}",
            remedy="Leave it out, or leave --cluster out.",
        )
    return found


def read_all(arguments: argparse.Namespace) -> Files:
    """What the launch is to read, in its order.

    Files of ours keep their name, which every node knows; others are named from where the job is submitted.

    Raises:
        BadInput: one cannot be read.
    """
    found: Files = {}
    for flag, text, what in (
        ("--model", arguments.model, "model"),
        ("--cluster", arguments.cluster, "cluster"),
        ("--run", arguments.run_file, "run"),
    ):
        if text is None:
            continue
        path, document = _read(flag, text, what)
        # A cluster file belongs to 'ampipe plan'; only its section of flags concerns a launch.
        if what != "cluster" or "flags" in document:
            found[flag, str(text)] = (path, document)
    for flag, text in values_of_words(arguments.flags):
        if f"--{flag}" == CONFIG_FLAG:
            path = find_config(text, folders=CONFIG_FOLDERS, flag=CONFIG_FLAG, what="configuration")
            found[CONFIG_FLAG, text] = (path, load(path, what="configuration", remedy=_FORM))
    return found


def _read(flag: str, text: str, what: str) -> tuple[Path, LinedMapping]:
    path = find_config(text, folders=[f"{what}s"], flag=flag, what=what)
    return path, load(path, what=what, remedy=_FORM)


def check_nothing_is_set_by_the_script(files: Files, flags: Sequence[str]) -> None:
    """Refuse what the job script says itself, in files and on the command line of the training run.

    Raises:
        BadInput: one of these is there, or the command line begins with what is no flag.
    """
    for path, document in files.values():
        for key in _SET_BY_THE_SCRIPT:
            if key in document:
                raise BadInput(
                    f"{path}:{document.lines[key]}:",
                    key,
                    rule="is set by the job script, which goes on from its own checkpoints",
                    remedy="Take it out of the file; --folder says where checkpoints go, and "
                    "pretrained-checkpoint begins from another run's.",
                )
    names = {f"--{key}" for key in (*_SET_BY_THE_SCRIPT, "save-interval")}
    if flags and not flags[0].startswith("--"):
        # It would follow the names of the files, and be taken for one more.
        raise BadInput("argument", flags[0], rule="belongs to no flag", remedy="Write each as --flag value.")
    for word in flags:
        if word.partition("=")[0] in names:
            raise BadInput(
                "flag",
                word,
                rule="is set by the job script, which goes on from its own checkpoints",
                remedy="Leave it out behind --; 'ampipe sbatch' has --folder and --save-interval before it.",
            )
