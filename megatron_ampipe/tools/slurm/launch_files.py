"""The YAML files that the training run of a job will read: model, cluster, run, and those given after ``--``.

Called by :mod:`megatron_ampipe.tools.sbatch_command`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import LinedMapping, load
from megatron_ampipe.files.shipped import find_config
from megatron_ampipe.launch.config_files import CONFIG_FLAG, CONFIG_FOLDERS
from megatron_ampipe.tools.slurm.mounts import values_of_words

Files = dict[tuple[str, str], tuple[Path, LinedMapping]]
"""Path and contents of each file, by flag and name; in the order in which the run reads them."""
_SET_BY_THE_SCRIPT = ("save", "load", "ckpt-step", "exit-signal", "exit-signal-handler")
_FORM = "Look at configs/models, configs/clusters and configs/runs for the format."


def gpus_per_node(arguments: argparse.Namespace) -> int | None:
    """The number of GPUs per node, from the argument or the cluster file; None if neither is given.

    Raises:
        BadInput: the file does not contain it, or contradicts the argument.
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
    """Read all files of the training run, in the order in which the run reads them.

    Built-in files are referred to by name, which is valid on every node; others by a path relative to the
    submission folder.

    Raises:
        BadInput: a file cannot be read.
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
        # Cluster files are for 'ampipe plan'; a training run uses only their section 'flags'.
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
    """Refuse settings that the job script sets itself, in files and on the command line of the training run.

    Raises:
        BadInput: there is such a setting, or the command line does not begin with a flag.
    """
    for path, document in files.values():
        for key in _SET_BY_THE_SCRIPT:
            if key in document:
                raise BadInput(
                    f"{path}:{document.lines[key]}:",
                    key,
                    rule="is set by the job script, which resumes from its own checkpoints",
                    remedy="Remove it from the file; --folder sets the folder of the checkpoints, and "
                    "pretrained-checkpoint starts from the checkpoint of another run.",
                )
    names = {f"--{key}" for key in (*_SET_BY_THE_SCRIPT, "save-interval")}
    if flags and not flags[0].startswith("--"):
        # It would come after the names of the files and be parsed as one of them.
        raise BadInput(
            "argument", flags[0], rule="does not belong to a flag", remedy="Write each as --flag value."
        )
    for word in flags:
        if word.partition("=")[0] in names:
            raise BadInput(
                "flag",
                word,
                rule="is set by the job script, which resumes from its own checkpoints",
                remedy="Leave it out after --; 'ampipe sbatch' takes --folder and --save-interval before it.",
            )
