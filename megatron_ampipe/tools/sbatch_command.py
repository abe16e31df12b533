"""``ampipe sbatch``: a job script for SLURM from a model, a cluster and a number of nodes.

The script is rendered from ``job.sbatch.j2`` next to this file; ``scripts/slurm`` has three examples. Imports
neither torch nor Megatron, which login nodes often lack: ``ampipe config`` checks the training flags in a
separate process. ``sbatch`` checks options of SLURM; values that would break the script are refused here.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_ampipe.errors import BadInput, EnvironmentMissing, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.files.flag_files import FlagFile, read_flag_file
from megatron_ampipe.files.inputs import adder, at_least, find_config, load, matching, several
from megatron_ampipe.files.outputs import ReportView
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.config_files import CONFIG_FLAG, groups_of
from megatron_ampipe.tools import packages

SAVE_INTERVAL = 500
"""Iterations between checkpoints, if neither the command nor a file of the run gives them."""
_SET_BY_THE_SCRIPT = ("save", "load", "ckpt-step", "exit-signal", "exit-signal-handler", "ampipe-config")

EPILOG = """\
examples:
  ampipe sbatch --model mixtral-8x7b --cluster a800x8-20gbps --nodes 4 --run my-run.yaml
      show the script for four nodes
  ampipe sbatch --nodes 1 --gpus-per-node 8 --model my-model.yaml --output job.sbatch -- --bf16 --lr 1e-4
      write it to a file; what follows -- are Megatron's flags, and replace what the files say
  ampipe sbatch --recipe bf16_1024GPU_TP1PP16EP64.yaml --gpus-per-node 8 -- --ampipe-degree 2
      a recipe of Megatron-LM, or the flags of another job script, on as many nodes as it names GPUs
  ampipe sbatch --nodes 2 --gpus-per-node 8 --model my-model.yaml --container reg.org#me/image --submit
      the same in a container (pyxis)

@FILE reads arguments from a file, such as those that are the same for every job of a cluster.
The job saves and goes back to the queue before its time is up or after a failure, and goes on from its last
checkpoint. Each job has a folder, runs/JOB-NAME/JOB-NUMBER; to go on with what another job left,
name its folder with --folder. docs/slurm.md explains all of it.
"""


_WORD = r"[\w.,:=+@%/\[\]-]+"
"""Part of an ``#SBATCH`` line: a blank or a quote would end it."""
_PLAIN_LINE = r"[^\x00-\x08\x0a-\x1f\x7f]*"
"""Text without line breaks and other control characters but tabs."""
_FOLDER = rf"(?=.*\S)(?!-){_PLAIN_LINE}"
_SET_DIRECTIVES = (
    *("--job-name", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--time"),
    *("--output", "--open-mode", "--signal"),
)
"""Options of SLURM that the script sets, and the job depends on."""
_END_OF_SETUP = "END_OF_NODE_SCRIPT"
"""Ends the text of the script that contains the lines of ``--setup``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe sbatch``."""
    # Otherwise --t would mean --time, until a later version adds another argument with t.
    parser.allow_abbrev = False
    parser.fromfile_prefix_chars = "@"
    parser.convert_arg_line_to_args = partial(shlex.split, comments=True)  # type: ignore[method-assign]
    add = adder(parser)
    _add_training(add)
    _add_resources(add)
    _add_environment(add)
    add("--output", "FILE", "write the script there", type=Path)
    add("--submit", None, "submit it", action="store_true")


def _add_training(add: Callable[..., None]) -> None:
    """What is trained, and where it is saved."""
    add("--model", "NAME|FILE", "the model: a YAML file or a name in configs/models")
    recipe = "in place of a model: a recipe (YAML with ARGS) or a job script; nothing in it is run"
    add("--recipe", "FILE", recipe, type=Path)
    add("--without", "FLAG,FLAG", "with --recipe: flags to leave out", type=several(str), default=[])
    add("--run", "NAME|FILE", "batch, learning rate, data", dest="run_file")
    add("flags", "-- FLAGS", "flags of Megatron and AMPipe for the training run", nargs="*")
    folder = (
        "checkpoints and logs; all nodes see it (default: runs/JOB-NAME/JOB-NUMBER). Tasks of an array have "
        "folders in it"
    )
    add("--folder", "DIR", folder, type=matching(_FOLDER, "runs/first"))
    add("--no-check", None, "do not check the flags with Megatron", action="store_true")


def _add_resources(add: Callable[..., None]) -> None:
    """What is asked of SLURM."""
    word = matching(_WORD, "gpu")
    nodes = "number of nodes (default with --recipe: as many as it needs for its GPUs)"
    add("--nodes", "N", nodes, type=at_least(1))
    add("--cluster", "NAME|FILE", "says how many GPUs a node has; a name in configs/clusters")
    add("--gpus-per-node", "N", "if no cluster file gives it", type=at_least(1))
    add("--account", "A", "whom to charge", type=word)
    add("--partition", "P", "where to run", type=word)
    time = matching(r"(\d+-)?\d+:\d\d:\d\d", "24:00:00")
    add("--time", "T", "longest duration of the job: [DAYS-]HH:MM:SS", type=time, default="24:00:00")
    option = (
        "a further line for #SBATCH, as in --sbatch-option=--qos=high; can be repeated. All memory of a node "
        "is asked for, unless one begins with --mem"
    )
    line = matching(f"--{_WORD}", "--sbatch-option=--qos=high")
    add("--sbatch-option", "=--X=Y", option, type=line, action="append", default=[])
    saving = "how many seconds before the job's end it is asked to save"
    add("--save-before-end", "S", saving, type=at_least(30), default=300)
    add("--max-restarts", "N", "how often the job may go back to the queue", type=at_least(0), default=20)
    name = "(default: the model's name)"
    add("--job-name", "NAME", name, type=matching(r"\w[\w.,:=+@-]*", "moe-1"))


def _add_environment(add: Callable[..., None]) -> None:
    """What each node needs."""
    setup = (
        "a line of shell that each node runs first: 'module load cuda', 'source venv/bin/activate'; can be "
        "repeated"
    )
    add("--setup", "LINE", setup, type=_setup_line, action="append", default=[])
    add("--container", "IMAGE", "run in this image, by pyxis: registry#image:tag, or a file /... or ./...")
    mount = "mount this besides the folders of the submission and of the job; can be repeated"
    path = matching(_WORD, "/data:/data:ro")
    add("--mount", "FROM:TO", mount, type=path, action="append", default=[])


def _setup_line(text: str) -> str:
    """A type for ``argparse``: one line of shell that cannot reach into the lines of the script after it."""
    if re.fullmatch(_PLAIN_LINE, text) is None:
        rule = (
            "is not one line: it has a line break or another control character; give each line as a --setup"
        )
    elif text.endswith("\\"):
        rule = "ends with a backslash, which would join it with the next line of the script; leave that out"
    elif text == _END_OF_SETUP:
        rule = "is the word that ends these lines in the script; leave it out"
    else:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} {rule}")


def run(arguments: argparse.Namespace) -> int:
    """Show the script, and write and submit it on request."""
    packages.require("jinja2")
    if arguments.output is not None:
        outputs.check(arguments.output, flag="--output")
    script = _render(arguments)
    if arguments.submit and shutil.which("sbatch") is None:
        raise EnvironmentMissing(
            "There is no sbatch on the PATH. Submit from a login node of the cluster: write the script with "
            "--output job.sbatch, and there run sbatch job.sbatch."
        )
    print(script, end="")
    if arguments.output is not None:
        outputs.write_text(arguments.output, script, mode=0o755)
        print(f"wrote {arguments.output}", file=sys.stderr)
    if not arguments.submit:
        remedy = "Add --submit, or --output job.sbatch and submit that."
        if arguments.output is not None:
            remedy = f"Run: sbatch {arguments.output}"
        print(f"not submitted. {remedy}", file=sys.stderr)
        return 0
    done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True)
    if done.returncode != 0:
        raise RunFailed(f"sbatch refused the script: {done.stderr.strip() or done.returncode}")
    print(done.stdout.strip())
    return 0


def _render(arguments: argparse.Namespace) -> str:
    """Fill in defaults, check combinations of arguments, and render the script."""
    files = _read_files(arguments)
    recipe = _read_recipe(arguments)
    _check_combinations(arguments, files, recipe)
    # Before files and the user's flags, because the last value of a flag counts.
    of_recipe = [] if recipe is None else recipe.words
    training = [*of_recipe, *([CONFIG_FLAG, *files] if files else []), *arguments.flags]
    if not any("save-interval" in document for document in files.values()):
        training.insert(0, f"--save-interval={SAVE_INTERVAL}")
    # A name such as ".." would be another folder.
    stem = re.sub(r"[^\w.-]", "-", Path(arguments.model or arguments.recipe or "").stem).lstrip(".-")
    arguments.job_name = arguments.job_name or stem or "ampipe"
    if not arguments.no_check:
        _check_training(arguments, training)
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Shell, not HTML; the template quotes values.
        autoescape=False,
        # With Jinja's default, ${#array[@]} would start a comment.
        comment_start_string="<#",
        comment_end_string="#>",
    )
    environment.filters["quote"] = shlex.quote
    template = environment.get_template("job.sbatch.j2")
    return template.render(job=arguments, training_lines=map(shlex.join, groups_of(training)))


def _read_files(arguments: argparse.Namespace) -> dict[str, ReportView]:
    """The paths of the run's files, valid on every node; the cluster file sets GPUs per node."""
    files: dict[str, ReportView] = {}
    named = {"models": arguments.model, "clusters": arguments.cluster, "runs": arguments.run_file}
    for folder, name in named.items():
        if name is None:
            continue
        path = find_config(name, folders=[folder], flag=f"--{folder[:-1]}", what="configuration")
        content = load(path, what="configuration", remedy=f"configs/{folder} has examples.")
        if folder == "clusters":
            number = content.get("ranks_per_node")
            # True is an int.
            is_number = type(number) is int and number > 0
            if not is_number or arguments.gpus_per_node not in (None, number):
                arguments.refuse(f"{path}: ranks_per_node {number} must be --gpus-per-node, a whole number")
            arguments.gpus_per_node = number
        if folder != "clusters" or "flags" in content:
            # The rest of a cluster file is for 'ampipe plan'.
            files[name] = content
    return files


def _read_recipe(arguments: argparse.Namespace) -> FlagFile | None:
    """The recipe, without what the script sets itself; its GPUs and nodes count if nothing else says them."""
    if arguments.recipe is None:
        if arguments.without:
            arguments.refuse("--without leaves out flags of a recipe; add --recipe FILE")
        return None
    recipe = read_flag_file(arguments.recipe)
    if arguments.without:
        recipe = recipe.without(arguments.without, flag="--without")
    own = {f"--{name}" for name in _SET_BY_THE_SCRIPT}
    notes = list(recipe.notes)
    notes += [
        f"{given.place}: {given.flag} is set by the job script" for given in recipe.flags if given.flag in own
    ]
    recipe = replace(recipe, flags=tuple(given for given in recipe.flags if given.flag not in own))
    arguments.gpus_per_node = arguments.gpus_per_node or recipe.gpus_per_node
    per_node = arguments.gpus_per_node
    if arguments.nodes is None and recipe.ranks is not None and per_node is not None:
        if recipe.ranks % per_node:
            arguments.refuse(
                f"{recipe.path} is for {recipe.ranks} GPUs, which {per_node} of a node do not divide"
            )
        arguments.nodes = recipe.ranks // per_node
    exported = connections.without_one_queue(recipe.environment)
    if exported.keys() != recipe.environment.keys():
        notes.append(f"{connections.VARIABLE} of the recipe is left out: {connections.warning('1')}")
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
    # As the ranks will have them, for the check of the flags.
    os.environ.update(exported)
    # The user's lines may replace them.
    arguments.setup = [*lines, *arguments.setup]
    return recipe


def _check_combinations(
    arguments: argparse.Namespace, files: Mapping[str, ReportView], recipe: FlagFile | None
) -> None:
    """Refuse wrong combinations of arguments."""
    refuse: Callable[[str], None] = arguments.refuse
    if recipe is not None and arguments.model is not None:
        refuse(f"--recipe {arguments.recipe} has a model; leave out --model {arguments.model}")
    if arguments.nodes is None and (recipe is None or recipe.ranks is None):
        refuse("add --nodes N, the number of nodes")
    if not files and not arguments.flags and recipe is None:
        refuse("nothing to train: give --model mixtral-8x7b, your YAML file, or Megatron's flags after --")
    if arguments.gpus_per_node is None:
        refuse("add --gpus-per-node 8, or a cluster file: --cluster FILE")
    if arguments.mount and arguments.container is None:
        refuse("--mount has no effect without --container IMAGE")
    if arguments.container is not None and re.search("[:,]", arguments.folder or ""):
        refuse(f"--folder {arguments.folder} cannot be mounted: pyxis splits mounts at : and ,")
    for option in arguments.sbatch_option:
        if (name := option.partition("=")[0]) in _SET_DIRECTIVES:
            refuse(f"--sbatch-option={option}: the job script sets {name}; use the argument of ampipe sbatch")
    if (problem := _problem_of_shell(arguments.setup)) is not None:
        refuse(f"--setup: these lines are not complete commands of bash: {problem}")
    days, hours, minutes, seconds = map(int, re.split("[-:]", f"0-{arguments.time}")[-4:])
    if arguments.save_before_end >= ((days * 24 + hours) * 60 + minutes) * 60 + seconds:
        refuse(f"--save-before-end {arguments.save_before_end} s is not less than --time {arguments.time}")
    given = [f"{name}: {key}" for name, document in files.items() for key in document]
    for name in (*given, *(word.partition("=")[0] for word in arguments.flags)):
        if name.rpartition(" ")[2].removeprefix("--") in _SET_BY_THE_SCRIPT:
            refuse(f"{name} is set by the job script: use --folder, --model and --run")


def _problem_of_shell(lines: Sequence[str]) -> str | None:
    """What bash says of lines that are not complete, such as a quote that is not closed; None if nothing."""
    bash = shutil.which("bash")
    if bash is None or not lines:
        return None
    done = subprocess.run([bash, "-n"], input="\n".join(lines) + "\n", capture_output=True, text=True)
    # A here-document that does not end is a warning.
    said = done.stderr.strip().splitlines()
    return said[0].removeprefix(f"{bash}: ") if said else None


def _check_training(arguments: argparse.Namespace, training: Sequence[str]) -> None:
    """Run ``ampipe config`` on the training flags; if it cannot run, print a note."""
    num_ranks, per_node = arguments.nodes * arguments.gpus_per_node, arguments.gpus_per_node
    ranks = ["--ranks", str(num_ranks), "--ranks-per-node", str(per_node)]
    words = [*training, "--save", "checkpoints", "--load", "checkpoints", "--exit-signal-handler"]
    # Without the rank variables, so that it does not join a job inside which this command runs.
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK")}
    command = [sys.executable, "-m", "megatron_ampipe.cli", "config", *ranks, *words]
    done = subprocess.run(command, env=inherited, capture_output=True, text=True)
    if done.returncode == BadInput.exit_code:
        # Libraries may have said something before.
        answer = re.split(r"^(?=ampipe: )", done.stderr.strip(), flags=re.M)[-1]
        print(f"{answer} To submit it anyway, add --no-check.", file=sys.stderr)
        raise SystemExit(BadInput.exit_code)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
        print(f"note: 'ampipe config' cannot check the training flags here: {last}", file=sys.stderr)
