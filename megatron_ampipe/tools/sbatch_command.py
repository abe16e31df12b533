"""``ampipe sbatch``: a job script for SLURM from a model, a cluster and a number of nodes.

The script is rendered from ``job.sbatch.j2`` next to this file; ``scripts/slurm`` has three examples. Imports
neither torch nor Megatron, which login nodes often lack: ``ampipe config`` checks the training flags in a
separate process. Options of SLURM are checked by ``sbatch``, except for what would break the script.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.errors import BadInput, EnvironmentMissing, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import at_least, load
from megatron_ampipe.files.shipped import configs_folder, find_config
from megatron_ampipe.launch.config_files import CONFIG_FLAG

SAVE_INTERVAL = 500
"""Iterations between checkpoints, where neither the command nor a file of the run says it."""
CHECK_TIMEOUT_S = 180
_NONE = "none"
_SET_BY_THE_SCRIPT = ("save", "load", "ckpt-step", "exit-signal", "exit-signal-handler")
_DATA_FLAGS = ("data-path", "train-data-path", "valid-data-path", "test-data-path")
_OUTPUT_FLAGS = (
    *("tensorboard-dir", "data-cache-path", "wandb-save-dir"),
    *(f"ampipe-{setting.key}" for setting in SETTING.values() if setting.is_folder),
)
"""Flags for folders that the run creates."""
# Mounting these would hide the image's own files.
_OF_THE_IMAGE = frozenset(map(Path, ("/", "/bin", "/etc", "/lib", "/lib64", "/opt", "/sbin", "/usr", "/var")))

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


def _matching(pattern: str, example: str) -> Callable[[str], str]:
    """A type for ``argparse``: text that matches; the error shows an example."""

    def text(given: str) -> str:
        if not re.fullmatch(pattern, given):
            raise argparse.ArgumentTypeError(f"{given!r} is not valid; write for example {example}")
        return given

    return text


def _shell(given: str) -> str:
    """A type for ``argparse``: lines that bash can parse; others would break the whole script."""
    said = ""
    if shutil.which("bash") is not None:
        said = subprocess.run(["bash", "-n"], input=given, capture_output=True, text=True).stderr
    if said or not given.strip() or "END_OF_NODE_SCRIPT" in given:
        raise argparse.ArgumentTypeError(f"{given!r} is not valid shell. {said.strip()}")
    return given


_WORD = r"[\w.,:=+@%/\[\]-]+"
"""Part of an ``#SBATCH`` line: a blank or a quote would end it."""
_OWN_OPTIONS = (
    "account|cpu-bind|exclude|exclusive|gpus-per-node|gres|job-name|mem|no-requeue|nodes|ntasks-per-node|"
    "open-mode|output|partition|requeue|signal|time"
)
SITE_OPTIONS: Mapping[str, dict[str, Any]] = {
    "account": {"metavar": "A", "type": _matching(_WORD, "moe"), "help": "whom to charge"},
    "partition": {"metavar": "P", "type": _matching(_WORD, "gpu"), "help": "where to run"},
    "gpus-per-node": {"metavar": "N", "type": at_least(1), "help": "if no cluster file gives it"},
    "gres": {
        "metavar": "gpu[:TYPE]",
        "type": _matching(r"[a-zA-Z_]\w*(:[\w.-]*[a-zA-Z_][\w.-]*)?", "gpu:a100; N is --gpus-per-node"),
        "help": "ask for GPUs as --gres=gpu[:TYPE]:N in place of --gpus-per-node=N, for an older SLURM",
    },
    "mem": {
        "metavar": "SIZE",
        "type": _matching(_WORD, "900G"),
        "help": "memory of each node; 0 is all of it, none leaves it out (default: 0)",
    },
    "exclude": {
        "metavar": "NODES",
        "type": _matching(_WORD, "node[3,7-9]"),
        "help": "nodes not to run on, for example node[3,7-9]",
    },
    "time": {
        "metavar": "T",
        "type": _matching(_WORD, "24:00:00"),
        "help": "longest duration of the job: [DAYS-]HH:MM:SS (default: 24:00:00)",
    },
    "sbatch-option": {
        "metavar": "=--X=Y",
        "action": "append",
        "type": _matching(
            rf"--(?!(?:{_OWN_OPTIONS})(?:=|$)){_WORD}",
            "--sbatch-option=--qos=high. Options that the script or 'ampipe sbatch' sets are refused",
        ),
        "help": "a further line for #SBATCH, as in --sbatch-option=--qos=high; can be repeated",
    },
    "setup": {
        "metavar": "LINE",
        "action": "append",
        "type": _shell,
        "help": "a line of shell that each node runs first: 'module load cuda', 'source venv/bin/activate'; "
        "can be repeated",
    },
    "health-check": {
        "metavar": "COMMAND",
        "type": _shell,
        "help": "each node runs this before training; where it fails, the job ends and names the node: "
        "'ampipe doctor --quick', 'dcgmi diag -r 1'",
    },
    "container": {
        "metavar": "IMAGE",
        # pyxis takes a name that begins with neither / nor . for an image of a registry.
        "type": _matching(
            r"[/.][^\n'\"]+|(?!.*\.(?:sqsh|squashfs|sif)$)[^\s'\"]+",
            "registry.org#me/image:1 or ./image.sqsh",
        ),
        "help": "run in this image, by pyxis: registry#image:tag, or a file /... or ./...",
    },
    "mount": {
        "metavar": "FROM:TO",
        "action": "append",
        "type": _matching(r"(,?/[^:,\s'\"]*:/[^:,\s'\"]*(:\w+)?)+", "/data:/data:ro"),
        "help": "mount this too; the folder, the files and the data that the job names are mounted anyway; "
        "can be repeated",
    },
    "save-before-end": {
        "metavar": "S",
        "type": at_least(30, at_most=65535),
        "help": "how many seconds before the job's end it is asked to save (default: 300)",
    },
    "max-restarts": {
        "metavar": "N",
        "type": at_least(0),
        "help": "how often the job may go back to the queue (default: 20)",
    },
}
"""Arguments that a site's file may hold too, by name without dashes."""
Files = list[tuple[str, str, Path, Mapping[str, Any]]]
"""Flag, name, path and contents of the YAML files of a run, in the order in which it reads them."""
_DEFAULTS = {"mem": "0", "time": "24:00:00", "save-before-end": 300, "max-restarts": 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe sbatch``."""
    parser.description = "Write a SLURM job script that trains with AMPipe, show it, and submit it."
    parser.epilog = _EPILOG
    # Or --mem would also be --m, which a later argument could take away.
    parser.allow_abbrev = False

    def add(group: argparse._ArgumentGroup, *names: str) -> None:
        for name in names:
            group.add_argument(f"--{name}", **SITE_OPTIONS[name])

    train = parser.add_argument_group("what to train")
    train.add_argument(
        "--model", metavar="NAME|FILE", help="the model: a YAML file or a name in configs/models"
    )
    train.add_argument("--run", metavar="NAME|FILE", dest="run_file", help="batch, learning rate, data")
    train.add_argument(
        "flags", metavar="-- FLAGS", nargs="*", help="flags of Megatron and AMPipe for the training run"
    )
    train.add_argument("--no-check", action="store_true", help="do not check the flags with Megatron")
    where = parser.add_argument_group("where", "What is the same for every job can stand in --site FILE.")
    where.add_argument("--site", metavar="FILE", type=Path, help="settings of the site, a YAML file")
    where.add_argument(
        "--cluster", metavar="NAME|FILE", help="says how many GPUs a node has; a name in configs/clusters"
    )
    where.add_argument("--nodes", metavar="N", type=at_least(1), required=True, help="number of nodes")
    add(where, "gpus-per-node", "gres", "mem", "exclude", "account", "partition", "time", "sbatch-option")
    add(parser.add_argument_group("on each node"), "setup", "health-check", "container", "mount")
    job = parser.add_argument_group("checkpoints and restarts")
    job.add_argument(
        "--folder",
        metavar="DIR",
        type=_matching(r".*\S.*", "runs/first"),
        help="checkpoints and logs; all nodes see it (default: runs/JOB-NAME/JOB-NUMBER). Tasks of an array "
        "have folders in it",
    )
    job.add_argument(
        "--save-interval",
        metavar="N",
        type=at_least(1),
        help=f"iterations between checkpoints (default: as the run's file says, else {SAVE_INTERVAL})",
    )
    add(job, "save-before-end", "max-restarts")
    job.add_argument(
        "--chain",
        metavar="N",
        type=at_least(1),
        default=1,
        help="submit it N times, each to begin when the one before has ended, in one --folder (default: 1)",
    )
    done = parser.add_argument_group("the script")
    done.add_argument(
        "--job-name",
        metavar="NAME",
        type=_matching(r"\w[\w.,:=+@-]*", "moe-1"),
        help="(default: the model's name)",
    )
    done.add_argument("--output", metavar="FILE", type=Path, help="write the script there")
    done.add_argument("--submit", action="store_true", help="submit it without asking")


def run(arguments: argparse.Namespace) -> int:
    """Show the script, write it on request, submit it on request or if the user agrees.

    Raises:
        BadInput: a file is refused.
        EnvironmentMissing: it is to be submitted, and there is no ``sbatch``.
        RunFailed: ``sbatch`` refused it, or it cannot be written.
    """
    if arguments.output is not None:
        outputs.check(arguments.output, flag="--output")
    script = _render(arguments)
    has_slurm = shutil.which("sbatch") is not None
    if arguments.submit and not has_slurm:
        raise EnvironmentMissing(
            "There is no sbatch on the PATH. Submit from a login node of the cluster: write the script with "
            "--output job.sbatch, and there run sbatch job.sbatch."
        )
    print(script, end="")
    if arguments.output is not None:
        outputs.write_text(arguments.output, script, mode=0o755)
        print(f"wrote {arguments.output}", file=sys.stderr)
    agreed = arguments.submit
    if not agreed and arguments.output is None and has_slurm and sys.stdin.isatty() and sys.stdout.isatty():
        print("\nSubmit it? [y/N] ", end="", flush=True)
        agreed = sys.stdin.readline().strip().lower() in ("y", "yes")
    if not agreed:
        times = f" {arguments.chain} times" if arguments.chain > 1 else ""
        print(f"not submitted. Add --submit, or --output job.sbatch and submit that{times}.", file=sys.stderr)
        return 0
    for _ in range(arguments.chain):
        done = subprocess.run(["sbatch"], input=script, capture_output=True, text=True)
        if done.returncode != 0:
            raise RunFailed(f"sbatch refused the script: {done.stderr.strip() or done.returncode}")
        print(done.stdout.strip())
    return 0


def _render(arguments: argparse.Namespace) -> str:
    """Fill in what is not given, check what depends on several arguments, and render the script."""
    site = {} if arguments.site is None else _read_site(arguments.site)
    files = _read_files(arguments)
    for name, option in SITE_OPTIONS.items():
        key = name.replace("-", "_")
        value = getattr(arguments, key)
        if option.get("action") == "append":
            value = [*(site.get(key) or ()), *(value or ())]
        elif value is None:
            value = site.get(key)
        setattr(arguments, key, None if value == _NONE else _DEFAULTS.get(name) if value is None else value)
    _check_combinations(arguments, files)

    configs = [name for flag, name, *_ in files if flag != CONFIG_FLAG]
    training = [*([CONFIG_FLAG, *configs] if configs else []), *arguments.flags]
    if not any("save-interval" in document for *_, document in files):
        arguments.save_interval = arguments.save_interval or SAVE_INTERVAL
    if any(option.startswith("--mem-per-") for option in arguments.sbatch_option):
        # SLURM accepts one memory option.
        arguments.mem = None
    stem = re.sub(r"[^\w.-]", "-", Path(arguments.model).stem) if arguments.model else "ampipe"
    arguments.job_name = arguments.job_name or stem
    mounts, made, notes = _folders(arguments, files)
    if arguments.no_check:
        notes.append("the training flags are not checked, as --no-check asks")
    else:
        notes += _check_training(arguments, training)
    for note in notes:
        print(f"note: {note}.", file=sys.stderr)

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
    # Always quotes, because shellcheck reports an unquoted comma.
    environment.filters["single_quoted"] = lambda text: "'" + text.replace("'", "'\"'\"'") + "'"
    lines: list[str] = []
    for word in training:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    template = environment.get_template("job.sbatch.j2")
    return template.render(job=arguments, training_lines=lines, mounts=mounts, made=made)


def _read_site(path: Path) -> dict[str, Any]:
    """The values of a site's file, checked by the types of the arguments."""
    remedy = "docs/slurm.md has an example of such a file."
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)

    def refuse(message: str) -> None:
        raise BadInput("--site", path, rule=message.removeprefix("argument "), remedy=remedy)

    parser.error = refuse  # type: ignore[assignment, method-assign]
    for name, option in SITE_OPTIONS.items():
        parser.add_argument(f"--{name}", **option)
    words = []
    for key, value in load(path, what="--site", remedy=remedy, scalars_as_text=True).items():
        words += [f"--{key}={one or ''}" for one in (value if isinstance(value, list) else [value])]
    return vars(parser.parse_args(words))


def _read_files(arguments: argparse.Namespace) -> Files:
    """Read the files of the run, and take the number of GPUs per node from that of the cluster.

    Built-in files are referred to by name, which is valid on every node.
    """
    given = [
        ("--model", arguments.model, ["models"]),
        ("--cluster", arguments.cluster, ["clusters"]),
        ("--run", arguments.run_file, ["runs"]),
    ]
    own = [value for flag, value in _values(arguments.flags) if f"--{flag}" == CONFIG_FLAG]
    files: Files = []
    for flag, name, folders in [
        *given,
        *((CONFIG_FLAG, value, ["models", "clusters", "runs"]) for value in own),
    ]:
        if name is None:
            continue
        path = find_config(name, folders=folders, flag=flag, what="configuration")
        remedy = "Look at configs/models, configs/clusters and configs/runs for the format."
        document = load(path, what="configuration", remedy=remedy)
        if flag == "--cluster":
            number = document.get("ranks_per_node")
            if not isinstance(number, int) or arguments.gpus_per_node not in (None, number):
                raise BadInput(
                    str(path),
                    f"ranks_per_node {number}",
                    rule="is no whole number, or differs from --gpus-per-node",
                    remedy="Write the GPUs of a node there, for example ranks_per_node: 8.",
                )
            arguments.gpus_per_node = number
            if "flags" not in document:
                # The rest of such a file is for 'ampipe plan'.
                continue
        files.append((flag, name, path, document))
    return files


def _check_combinations(arguments: argparse.Namespace, files: Files) -> None:
    """Refuse what one argument alone cannot tell."""
    refuse: Callable[[str], None] = arguments.refuse
    if not files and not arguments.flags:
        refuse("nothing to train: give --model mixtral-8x7b, your YAML file, or Megatron's flags after --")
    if arguments.gpus_per_node is None:
        refuse("add --gpus-per-node 8, or a cluster file: --cluster FILE")
    if arguments.mount and arguments.container is None:
        refuse("--mount has no effect without --container IMAGE")
    if arguments.chain > 1 and arguments.folder is None:
        refuse("--chain needs a folder that all its jobs share: add for example --folder runs/long")
    dependent = [word for word in arguments.sbatch_option if word.startswith(("--dependency", "--array"))]
    if arguments.chain > 1 and dependent:
        refuse(f"--chain makes each job wait for the one before, which conflicts with {dependent[0]}")
    limit_s = _seconds(arguments.time)
    if limit_s is not None and arguments.save_before_end >= limit_s:
        refuse(
            f"--save-before-end {arguments.save_before_end} is not less than the {limit_s} s of --time "
            f"{arguments.time}"
        )
    if arguments.flags and not arguments.flags[0].startswith("--"):
        # It would come after the names of the files and be parsed as one of them.
        refuse(f"unexpected argument {arguments.flags[0]!r} after --; write each as --flag value")
    remedy = "--folder sets the folder of the checkpoints, --save-interval how often they are saved."
    rule = "is set by the job script, which resumes from its own checkpoints"
    for _, _, path, document in files:
        for key in _SET_BY_THE_SCRIPT:
            if key in document:
                raise BadInput(str(path), key, rule=rule, remedy=f"Remove it from the file; {remedy}")
    for word in arguments.flags:
        if word.partition("=")[0].removeprefix("--") in (*_SET_BY_THE_SCRIPT, "save-interval"):
            raise BadInput("flag", word, rule=rule, remedy=f"Leave it out after --; {remedy}")


def _seconds(time: str) -> int | None:
    """A duration in SLURM's format in seconds; None for an unlimited one, or one that sbatch will refuse."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, *clock = match.groups()
    parts = [int(part) for part in clock if part is not None]
    # Without days one or two numbers begin with minutes.
    units = (3600, 60, 1) if days is not None or len(parts) == 3 else (60, 1)
    return int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))


def _folders(arguments: argparse.Namespace, files: Files) -> tuple[list[str], list[str], list[str]]:
    """What a container must mount, folders that the script creates, and notes on paths that are absent here.

    The script itself mounts the submission folder. Mounts are in pyxis's format.
    """
    mounted = [Path(part.split(":")[1]) for mount in arguments.mount for part in mount.split(",")]
    folders: dict[str, None] = {}
    made: dict[str, None] = {}
    notes: list[str] = []
    shipped = configs_folder()
    paths = [("file", str(path)) for *_, path, _ in files if not path.is_relative_to(shipped)]
    for document in (document for *_, document in files):
        paths += _values_of_file(document)
    for flag, value in [("folder", arguments.folder or "."), *paths, *_values(arguments.flags)]:
        is_outside = value.startswith(("/", "../"))
        path = Path(os.path.abspath(value))
        if not (is_outside or flag in _DATA_FLAGS) or any(path.is_relative_to(place) for place in mounted):
            continue
        is_made = flag == "folder" or flag in _OUTPUT_FLAGS
        folder = path if is_made or path.is_dir() else path.parent
        is_here = is_made or any(os.path.exists(f"{path}{suffix}") for suffix in ("", ".bin", ".idx"))
        if not is_here and not _is_number(value):
            notes.append(f"--{flag} {value} is not on this machine, and the job looks for it there")
        if is_here and is_outside and arguments.container is not None and folder not in _OF_THE_IMAGE:
            folders[f"{folder}:{folder}"] = None
            if is_made and flag != "folder":
                made[str(folder)] = None
    return [*arguments.mount, *folders], list(made), list(dict.fromkeys(notes))


def _values(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of flag, without dashes, and value for all values of a command line."""
    flag = ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            if equals:
                yield flag, value
        else:
            yield flag, word


def _values_of_file(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of flag and value for all values of a settings file."""
    for key, value in document.items():
        if isinstance(value, Mapping):
            yield from _values_of_file(value, "ampipe-" if key == "ampipe" else prefix)
        else:
            yield from ((prefix + key, str(one)) for one in (value if isinstance(value, list) else [value]))


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[\d.eE+-]+", text) is not None


def _check_training(arguments: argparse.Namespace, training: Sequence[str]) -> list[str]:
    """Run ``ampipe config`` on the training flags; what could not be checked, as sentences.

    Raises:
        SystemExit: a launch would refuse them; the message has been printed.
    """
    if sys.stderr.isatty():
        print("asking Megatron whether it takes these flags, about 10 s ...", file=sys.stderr)
    num_ranks = str(arguments.nodes * arguments.gpus_per_node)
    words = [*training, "--save", "checkpoints", "--load", "checkpoints", "--exit-signal-handler"]
    if arguments.save_interval is not None:
        words += ["--save-interval", str(arguments.save_interval)]
    # Without the rank variables, so that it does not join a job inside which this command runs.
    inherited = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK")}
    command = [sys.executable, "-m", "megatron_ampipe.cli", "config", "--ranks", num_ranks, *words]
    try:
        done = subprocess.run(command, env=inherited, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        reason = f"it took more than {CHECK_TIMEOUT_S} s"
    else:
        if done.returncode == 0:
            return []
        _, _, message = done.stderr.rpartition("\nampipe: ")
        message = message.removeprefix("ampipe: ").strip()
        if done.returncode == BadInput.exit_code:
            print(f"ampipe: {message} To submit it anyway, add --no-check.", file=sys.stderr)
            raise SystemExit(BadInput.exit_code)
        last = (message.splitlines() or ["no output"])[-1]
        reason = f"ended with {done.returncode}: {last}"
    return [
        f"the training flags are not checked here ({reason}). To check them, run in the environment of the "
        f"job: ampipe config --ranks {num_ranks} and the flags of the script"
    ]
