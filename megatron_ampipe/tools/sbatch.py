"""``ampipe sbatch``: a job script for SLURM from a model, a cluster and a number of nodes.

Declares and checks the arguments, shows the script, and hands it to ``sbatch`` where that is asked for. What
the script does stands in :mod:`megatron_ampipe.tools.slurm`. Imports neither torch nor Megatron, which login
nodes often lack: the flags themselves are checked when the job starts. Called by :mod:`megatron_ampipe.cli`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ampipe import outputs
from megatron_ampipe.errors import BadInput, EnvironmentMissing, RunFailed
from megatron_ampipe.shipped import find_config
from megatron_ampipe.tools.slurm.job import Job, render
from megatron_ampipe.tools.whole_numbers import at_least
from megatron_ampipe.yaml_lines import LinedMapping, load

SAVE_INTERVAL = 500
"""Iterations between checkpoints, where neither the command nor a file of the run says it."""

_SET_BY_THE_SCRIPT = ("save", "load", "ckpt-step", "exit-signal", "exit-signal-handler")
_EPILOG = """\
examples:
  ampipe sbatch --model mixtral-8x7b --cluster a800x8-20gbps --nodes 4 --run my-run.yaml
      show the script for four nodes, then ask whether to submit it
  ampipe sbatch --nodes 1 --gpus-per-node 8 --model my-model.yaml --output job.sbatch -- --bf16 --lr 1e-4
      write it to a file; what stands behind -- are Megatron's flags, and go before what the files say
  ampipe sbatch --nodes 2 --gpus-per-node 8 --model my-model.yaml --container registry/image --submit
      the same in a container (pyxis), submitted

The job saves and goes back to the queue before its time is up or after a failure, and goes on from its last
checkpoint. docs/slurm.md explains how.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe sbatch``."""
    parser.description = "Write a SLURM job script that trains with AMPipe, show it, and submit it."
    parser.epilog = _EPILOG
    add = parser.add_argument
    chosen = " (default: %(default)s)"
    interval = f"iterations between checkpoints (default: as the run's file says, else {SAVE_INTERVAL})"
    before_end = "how many seconds before the job's end it is asked to save" + chosen
    restarts = "how often the job may go back to the queue" + chosen
    option = "a further line for #SBATCH, as in --sbatch-option=--qos=high; can be repeated"
    add("--model", metavar="NAME|FILE", help="the model: a YAML file or a name in configs/models")
    add("--cluster", metavar="NAME|FILE", help="says how many GPUs a node has; a name in configs/clusters")
    add("--run", metavar="NAME|FILE", dest="run_file", help="batch, learning rate, data: as for --model")
    add("--nodes", metavar="N", type=at_least(1), required=True, help="number of nodes")
    add("--gpus-per-node", metavar="N", type=at_least(1), help="where no cluster file says it")
    add("--folder", metavar="DIR", help="checkpoints and logs; all nodes see it (default: runs/JOB-NAME)")
    add("--time", metavar="T", default="24:00:00", help="longest duration of the job" + chosen)
    add("--job-name", metavar="NAME", help="(default: the model's name)")
    add("--account", metavar="A", help="whom to charge")
    add("--partition", metavar="P", help="where to run")
    add("--save-interval", metavar="N", type=at_least(1), help=interval)
    add("--save-before-end", metavar="S", type=at_least(30), default=300, help=before_end)
    add("--max-restarts", metavar="N", type=at_least(0), default=20, help=restarts)
    add("--container", metavar="IMAGE", help="run in this image, by pyxis")
    add("--mount", metavar="FROM:TO", action="append", default=[], help="mount this too; can be repeated")
    add("--sbatch-option", metavar="=--X=Y", action="append", default=[], help=option)
    add("--output", metavar="FILE", type=Path, help="write the script there")
    add("--submit", action="store_true", help="submit it without asking")
    add("flags", metavar="-- FLAGS", nargs="*", help="flags of Megatron and AMPipe for the training run")


def run(arguments: argparse.Namespace) -> int:
    """Show the script, write it where that was asked for, submit it where that was asked for or is agreed to.

    Raises:
        BadInput: an argument or a file is refused.
        EnvironmentMissing: it is to be submitted, and there is no ``sbatch``.
        RunFailed: ``sbatch`` refused it.
    """
    if arguments.output is not None:
        outputs.check(arguments.output, flag="--output")
    job = make_job(arguments)
    script = render(job)
    if arguments.submit and shutil.which("sbatch") is None:
        raise EnvironmentMissing(
            "There is no sbatch on the PATH. Submit from a login node of the cluster: write the script with "
            "--output job.sbatch, and there run sbatch job.sbatch."
        )
    print(script, end="")
    if arguments.output is not None:
        outputs.write_text(arguments.output, script, mode=0o755)
        print(f"wrote {arguments.output}", file=sys.stderr)
    if arguments.submit or (arguments.output is None and _agreed()):
        print(_submit(script))
    else:
        print("not submitted", file=sys.stderr)
    return 0


def make_job(arguments: argparse.Namespace) -> Job:
    """The job that the arguments ask for.

    Raises:
        BadInput: an argument or a file is refused.
    """
    files = _files(arguments)
    if not files and not arguments.flags:
        raise BadInput(
            "--model",
            "(not given)",
            rule="there is nothing to train",
            remedy="Give --model mixtral-8x7b, a YAML file of your own, or Megatron's flags behind --.",
        )
    for path, document in files.values():
        _check(path, document)
    _check_flags(arguments.flags)
    name = arguments.job_name or (Path(arguments.model).stem if arguments.model else "ampipe")
    own = arguments.save_interval
    said = any("save-interval" in document for _, document in files.values())
    return Job(
        command=arguments.command_line,
        name=name,
        nodes=arguments.nodes,
        gpus_per_node=_gpus_per_node(arguments),
        time=arguments.time,
        folder=arguments.folder or f"runs/{name}",
        training=[*(["--ampipe-config", *files] if files else []), *arguments.flags],
        save_interval=own if own is not None or said else SAVE_INTERVAL,
        save_before_end_s=arguments.save_before_end,
        max_restarts=arguments.max_restarts,
        account=arguments.account,
        partition=arguments.partition,
        options=arguments.sbatch_option,
        container=arguments.container,
        mounts=arguments.mount,
    )


def _gpus_per_node(arguments: argparse.Namespace) -> int:
    own: int | None = arguments.gpus_per_node
    if arguments.cluster is None:
        if own is None:
            raise BadInput(
                "--gpus-per-node",
                "(not given)",
                rule="nothing says how many ranks a node gets",
                remedy="Add --gpus-per-node 8, or a cluster file: --cluster FILE.",
            )
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


def _files(arguments: argparse.Namespace) -> dict[str, tuple[Path, LinedMapping]]:
    """What the launch is to read, in its order: by the name in the job script, the file and what it says.

    Files of ours keep their name, which every node knows; others are named from where the job is submitted.
    """
    found: dict[str, tuple[Path, LinedMapping]] = {}
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
            found[str(text)] = (path, document)
    return found


def _read(flag: str, text: str, what: str) -> tuple[Path, LinedMapping]:
    path = find_config(text, folders=[f"{what}s"], flag=flag, what=what)
    return path, load(path, what=what, remedy=f"Look at configs/{what}s for the form.")


def _check(path: Path, document: LinedMapping) -> None:
    for key in _SET_BY_THE_SCRIPT:
        if key in document:
            raise BadInput(
                f"{path}:{document.lines[key]}:",
                key,
                rule="is set by the job script, which goes on from its own checkpoints",
                remedy="Take it out of the file; --folder says where checkpoints go, and "
                "pretrained-checkpoint begins from another run's.",
            )


def _check_flags(flags: Sequence[str]) -> None:
    names = {f"--{key}" for key in (*_SET_BY_THE_SCRIPT, "save-interval")}
    for word in flags:
        if word.partition("=")[0] in names:
            raise BadInput(
                "flag",
                word,
                rule="is set by the job script, which goes on from its own checkpoints",
                remedy="Leave it out behind --; 'ampipe sbatch' has --folder and --save-interval before it.",
            )


def _agreed() -> bool:
    """Whether the user wants it submitted; nobody is asked where nobody can answer, and is told so."""
    reason = None
    if shutil.which("sbatch") is None:
        reason = "there is no sbatch on the PATH. Write the script with --output job.sbatch and submit that"
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        reason = "without a terminal nobody can be asked. Add --submit, or --output job.sbatch"
    if reason is not None:
        print(f"{reason}.", file=sys.stderr)
        return False
    print("\nSubmit it? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _submit(script: str) -> str:
    done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True)
    if done.returncode != 0:
        raise RunFailed(f"sbatch refused the script: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()
