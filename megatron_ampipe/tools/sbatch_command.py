"""``ampipe sbatch``: a job script for SLURM from a model, a cluster and a number of nodes.

Declares and checks the arguments, shows the script, and gives it to ``sbatch`` on request. What
the script does is in :mod:`megatron_ampipe.tools.slurm`. Imports neither torch nor Megatron, which login
nodes often lack; a separate process asks Megatron about the flags, where it is installed. Called by
:mod:`megatron_ampipe.cli`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ampipe.errors import BadInput, EnvironmentMissing, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.files.shipped import configs_folder
from megatron_ampipe.launch.config_files import CONFIG_FLAG
from megatron_ampipe.tools.slurm import launch_files, preflight
from megatron_ampipe.tools.slurm.mounts import Needed, needed, values_of_file, values_of_words
from megatron_ampipe.tools.slurm.site import add_options, settle
from megatron_ampipe.tools.slurm.slurm_job import Job, render
from megatron_ampipe.tools.slurm.syntax import check_image, check_mount, mount_targets
from megatron_ampipe.tools.whole_numbers import at_least

SAVE_INTERVAL = 500
"""Iterations between checkpoints, where neither the command nor a file of the run says it."""

_DATA_FLAGS = ("data-path", "train-data-path", "valid-data-path", "test-data-path")
_EPILOG = """\
examples:
  ampipe sbatch --model mixtral-8x7b --cluster a800x8-20gbps --nodes 4 --run my-run.yaml
      show the script for four nodes, then ask whether to submit it
  ampipe sbatch --nodes 1 --gpus-per-node 8 --model my-model.yaml --output job.sbatch -- --bf16 --lr 1e-4
      write it to a file; what follows -- are Megatron's flags, and replace what the files say
  ampipe sbatch --nodes 2 --site site.yaml --model my-model.yaml --run my-run.yaml --submit
      submit it, with what is the same for every job of a cluster in one file (docs/slurm.md)
  ampipe sbatch --nodes 2 --gpus-per-node 8 --model my-model.yaml --container reg.org#me/image --submit
      the same in a container (pyxis); folders that the job names are mounted
  ampipe sbatch --nodes 2 --site site.yaml --model my-model.yaml --folder runs/a --chain 5 --max-restarts 0
      five jobs, each waits for the one before: where jobs may not go back to the queue

The job saves and goes back to the queue before its time is up or after a failure, and goes on from its last
checkpoint. Each job has a folder, runs/JOB-NAME/JOB-NUMBER; to go on with what another job left,
name its folder with --folder. 'none' removes what the site's file says. docs/slurm.md explains all of it.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe sbatch``."""
    parser.description = "Write a SLURM job script that trains with AMPipe, show it, and submit it."
    parser.epilog = _EPILOG
    # Or --mem would also be --m, which a later argument could take away.
    parser.allow_abbrev = False
    interval = f"iterations between checkpoints (default: as the run's file says, else {SAVE_INTERVAL})"
    folder = (
        "checkpoints and logs; all nodes see it (default: runs/JOB-NAME/JOB-NUMBER). Tasks of an array have "
        "folders in it"
    )
    chain = "submit it N times, each to begin when the one before has ended, in one --folder (default: 1)"
    no_check = "do not ask Megatron whether it takes the flags, for one that is not that of the job"
    training = parser.add_argument_group("what to train")
    training.add_argument(
        "--model", metavar="NAME|FILE", help="the model: a YAML file or a name in configs/models"
    )
    training.add_argument(
        "--run", metavar="NAME|FILE", dest="run_file", help="batch, learning rate, data: as for --model"
    )
    training.add_argument(
        "flags", metavar="-- FLAGS", nargs="*", help="flags of Megatron and AMPipe for the training run"
    )
    training.add_argument("--no-check", action="store_true", help=no_check)
    where = parser.add_argument_group("where", "What is the same for every job can stand in --site FILE.")
    where.add_argument("--site", metavar="FILE", type=Path, help="settings of the site, a YAML file")
    where.add_argument(
        "--cluster", metavar="NAME|FILE", help="says how many GPUs a node has; a name in configs/clusters"
    )
    where.add_argument("--nodes", metavar="N", type=at_least(1), required=True, help="number of nodes")
    add_options(where, "gpus-per-node", "gres", "mem", "exclude", "account", "partition", "time")
    add_options(where, "sbatch-option")
    inside = parser.add_argument_group("on each node")
    add_options(inside, "setup", "health-check", "container", "mount")
    job = parser.add_argument_group("checkpoints and restarts")
    job.add_argument("--folder", metavar="DIR", help=folder)
    job.add_argument("--save-interval", metavar="N", type=at_least(1), help=interval)
    add_options(job, "save-before-end", "max-restarts")
    job.add_argument("--chain", metavar="N", type=at_least(1), default=1, help=chain)
    done = parser.add_argument_group("the script")
    done.add_argument("--job-name", metavar="NAME", help="(default: the model's name)")
    done.add_argument("--output", metavar="FILE", type=Path, help="write the script there")
    done.add_argument("--submit", action="store_true", help="submit it without asking")


def run(arguments: argparse.Namespace) -> int:
    """Show the script, write it on request, submit it on request or if the user agrees.

    Raises:
        BadInput: an argument or a file is refused.
        EnvironmentMissing: it is to be submitted, and there is no ``sbatch``.
        RunFailed: ``sbatch`` refused it, or it cannot be written.
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
        for _ in range(job.chain):
            print(_submit(script))
    else:
        print("not submitted", file=sys.stderr)
        if job.chain > 1:
            print(f"note: the chain is this script, submitted {job.chain} times", file=sys.stderr)
    return 0


def make_job(arguments: argparse.Namespace) -> Job:
    """The job that the arguments ask for. Says on standard error what the user should know about it.

    Raises:
        BadInput: an argument or a file is refused.
    """
    arguments.gpus_per_node = launch_files.gpus_per_node(arguments)
    settle(arguments, arguments.site)
    read = launch_files.read_all(arguments)
    if not read and not arguments.flags:
        raise BadInput(
            "--model",
            "(not given)",
            rule="there is nothing to train",
            remedy="Give --model mixtral-8x7b, your YAML file, or Megatron's flags after --.",
        )
    if arguments.gpus_per_node is None:
        raise BadInput(
            "--gpus-per-node",
            "(not given)",
            rule="nothing says how many ranks a node gets",
            remedy="Add --gpus-per-node 8, or a cluster file: --cluster FILE.",
        )
    launch_files.check_nothing_is_set_by_the_script(read, arguments.flags)
    name = arguments.job_name or (Path(arguments.model).stem if arguments.model else "ampipe")
    own = arguments.save_interval
    said = any("save-interval" in document for _, document in read.values())
    needed, notes = _needed(arguments, read)
    named = [text for flag, text in read if flag != CONFIG_FLAG]
    job = Job(
        command=arguments.command_line,
        name=name,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        time=arguments.time,
        folder=arguments.folder,
        training=[*([CONFIG_FLAG, *named] if named else []), *arguments.flags],
        save_interval=own if own is not None or said else SAVE_INTERVAL,
        save_before_end_s=arguments.save_before_end,
        max_restarts=arguments.max_restarts,
        chain=arguments.chain,
        account=arguments.account,
        partition=arguments.partition,
        gres=arguments.gres,
        mem=arguments.mem,
        exclude=arguments.exclude,
        options=arguments.sbatch_option,
        setup=arguments.setup,
        health_check=arguments.health_check,
        container=arguments.container,
        mounts=arguments.mount,
        needed=needed,
    )
    notes += _check_training(arguments, job, [path for path, _ in read.values()])
    for note in notes:
        print(f"note: {note}.", file=sys.stderr)
    return job


def _check_training(arguments: argparse.Namespace, job: Job, paths: Sequence[Path]) -> list[str]:
    """Whether a launch would take the flags; what could not be checked, and why, as sentences."""
    if arguments.no_check:
        return ["the training flags are not checked, as --no-check asks"]
    if sys.stderr.isatty():
        print("asking Megatron whether it takes these flags, about 10 s ...", file=sys.stderr)
    num_ranks = job.nodes * job.gpus_per_node
    found = preflight.check(job.training_words("checkpoints"), num_ranks=num_ranks, files=paths)
    return [] if found is None else [found]


def _needed(arguments: argparse.Namespace, read: launch_files.Files) -> tuple[Needed, list[str]]:
    """What has to be mounted, and what the user should know about paths and the image."""
    values = [pair for _, document in read.values() for pair in values_of_file(document)]
    values += values_of_words(arguments.flags)
    notes = [
        f"--{flag} {value}: there is no {value}.idx here, and the job looks for it there"
        for flag, value in values
        if flag in _DATA_FLAGS and not _is_number(value) and "://" not in value
        if not value.startswith(("/", "../")) or arguments.container is None
        if not (Path(value).exists() or Path(f"{value}.idx").exists())
    ]
    if arguments.container is None:
        return Needed(), notes
    about_image = check_image(arguments.container)
    notes += [] if about_image is None else [about_image]
    for mount in arguments.mount:
        check_mount(mount)
    own = [path for path, _ in read.values() if not path.is_relative_to(configs_folder())]
    found = needed(values, folder=arguments.folder, files=own, targets=mount_targets(arguments.mount))
    return found, [*notes, *found.notes]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _agreed() -> bool:
    """Whether the user wants it submitted. Without a terminal it asks nothing, and says so."""
    reason = None
    if shutil.which("sbatch") is None:
        reason = "there is no sbatch on the PATH. Write the script with --output job.sbatch and submit that"
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        reason = "without a terminal it cannot ask. Add --submit, or --output job.sbatch"
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
