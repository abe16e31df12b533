"""One job, and the script that it becomes. Knows neither Megatron nor the command line of ``ampipe``.

The template ``job.sbatch.j2`` beside this module is the one source of every script: those in
``scripts/slurm`` are what it gives for three examples, which a test holds. Called by ``ampipe sbatch``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

import jinja2

from megatron_ampipe.errors import BadInput
from megatron_ampipe.tools.slurm import syntax
from megatron_ampipe.tools.slurm.mounts import Needed

_TEMPLATE = "job.sbatch.j2"
_END_OF_NODE_SCRIPT = "END_OF_NODE_SCRIPT"
_SET_BY_THE_SCRIPT = (
    "ntasks-per-node",
    "output",
    "open-mode",
    "signal",
    "requeue",
    "no-requeue",
    "exclusive",
)
_HAS_AN_ARGUMENT = (
    *("job-name", "account", "partition", "nodes", "gpus-per-node", "gres", "mem", "exclude", "time"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one script is to ask of SLURM and to run.

    Attributes:
        command: The ``ampipe sbatch`` line that made it, for the script's head.
        name: Of the job.
        nodes: How many.
        gpus_per_node: Also the number of ranks on each node.
        time: Longest duration, as SLURM writes it.
        folder: Holds checkpoints and logs; seen by every node. None for one of the job's own.
        training: Flags of the training run, beside those about checkpoints and signals.
        save_interval: Iterations between checkpoints; None where a file of the run says it.
        save_before_end_s: How long before its end the job is asked to save, in seconds.
        max_restarts: After so many the job stays out of the queue.
        chain: How many jobs of this script are to follow each other.
        account: Whom to charge; None for the cluster's default.
        partition: Where to run; None for the cluster's default.
        gres: By which name GPUs are asked for; None for ``--gpus-per-node``.
        mem: Of each node; None to ask for none.
        exclude: Nodes not to run on.
        options: Further options of sbatch, each as it stands behind ``#SBATCH``.
        setup: Lines of shell that each node runs first.
        health_check: A command that each node has to pass before training.
        container: Image for pyxis; None to run on the nodes themselves.
        mounts: Mounts of the container that the user asks for, ``from:to``.
        needed: Folders that the job names, mounted as well.
    """

    command: str
    name: str
    nodes: int
    gpus_per_node: int
    time: str
    folder: str | None
    training: Sequence[str]
    save_interval: int | None
    save_before_end_s: int
    max_restarts: int
    chain: int = 1
    account: str | None = None
    partition: str | None = None
    gres: str | None = None
    mem: str | None = None
    exclude: str | None = None
    options: Sequence[str] = ()
    setup: Sequence[str] = ()
    health_check: str | None = None
    container: str | None = None
    mounts: Sequence[str] = ()
    needed: Needed = field(default_factory=Needed)

    def __post_init__(self) -> None:
        syntax.check_name("--job-name", self.name)
        for flag, word in (
            ("--account", self.account),
            ("--partition", self.partition),
            ("--exclude", self.exclude),
            *(("--sbatch-option", option) for option in self.options),
        ):
            if word is not None:
                syntax.check_word(flag, word)
        if self.mem is not None:
            syntax.check_size("--mem", self.mem)
        if self.gres is not None:
            syntax.check_gres("--gres", self.gres)
        syntax.check_save_before_end(self.save_before_end_s, self.time)
        for option in self.options:
            _check_option(option)
        for flag, lines in (("--setup", self.setup), ("--health-check", [self.health_check])):
            for line in lines:
                if line is not None:
                    syntax.check_shell(flag, line)
                    _check_end(flag, line)
        if self.folder is not None and (not self.folder.strip() or "\n" in self.folder):
            raise BadInput(
                "--folder",
                self.folder.strip() or "(empty)",
                rule="is not the name of a folder",
                remedy="Write for example --folder runs/first, or leave it out.",
            )
        self._check_container()
        self._check_chain()

    def _check_container(self) -> None:
        if self.container is not None:
            syntax.check_image(self.container)
            for mount in self.mounts:
                syntax.check_mount(mount)
        elif self.mounts:
            raise BadInput(
                "--mount",
                self.mounts[0],
                rule="has no effect without a container",
                remedy="Add --container IMAGE, or leave it out.",
            )

    def _check_chain(self) -> None:
        if self.chain == 1:
            return
        if self.folder is None:
            raise BadInput(
                "--chain",
                self.chain,
                rule="needs a folder that all its jobs share, and by default each has its own",
                remedy=f"Add for example --folder runs/{self.name}-1.",
            )
        if any(option.startswith(("--dependency", "--array")) for option in self.options):
            raise BadInput(
                "--chain",
                self.chain,
                rule="makes one job wait for the other, which --dependency and --array do otherwise",
                remedy="Leave --chain or that --sbatch-option out.",
            )

    @property
    def memory(self) -> str | None:
        """What stands behind ``--mem=``; SLURM takes only one way to ask for memory."""
        return None if any(option.startswith("--mem-per-") for option in self.options) else self.mem

    @property
    def resource(self) -> str:
        """The option that asks for the GPUs of a node."""
        if self.gres is not None:
            return f"--gres={self.gres}:{self.gpus_per_node}"
        return f"--gpus-per-node={self.gpus_per_node}"

    @property
    def all_mounts(self) -> str:
        """Behind the folder of the submission, in the form of pyxis."""
        own = [f"{folder}:{folder}" for folder in self.needed.folders]
        return "".join(f",{mount}" for mount in (*self.mounts, *own))

    def training_words(self, checkpoints: str) -> list[str]:
        """The command line of the training run.

        Args:
            checkpoints: The folder of its checkpoints.
        """
        return [*self.training, "--save", checkpoints, "--load", checkpoints, *self._saving()]

    def training_lines(self) -> list[str]:
        """The same as it stands in the script, a line for what belongs together."""
        *interval, handler, signal, name = self._saving()
        saving = '--save "$checkpoints" --load "$checkpoints"'
        return [*_lines(self.training), " ".join([saving, *interval]), f"{handler} {signal} {name}"]

    def _saving(self) -> list[str]:
        interval = [] if self.save_interval is None else ["--save-interval", str(self.save_interval)]
        return [*interval, "--exit-signal-handler", "--exit-signal", "SIGUSR1"]


def render(job: Job) -> str:
    """The script, to be handed to ``sbatch``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_ampipe.tools.slurm", package_path=""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Shell, not HTML; values are quoted where they stand.
        autoescape=False,
        # Jinja's own would take ${#array[@]} for the begin of a comment.
        comment_start_string="<#",
        comment_end_string="#>",
    )
    environment.filters["quote"] = shlex.quote
    # Also where no sign needs it: shellcheck takes a bare comma for a mistake.
    environment.filters["single_quoted"] = lambda text: "'" + text.replace("'", "'\"'\"'") + "'"
    return environment.get_template(_TEMPLATE).render(job=job)


def _check_option(option: str) -> None:
    name = option.removeprefix("--").partition("=")[0]
    if not option.startswith("--"):
        raise BadInput(
            "--sbatch-option",
            option,
            rule="does not begin with --",
            remedy="Write it as sbatch takes it, for example --sbatch-option=--qos=high.",
        )
    if name in _HAS_AN_ARGUMENT:
        raise BadInput(
            "--sbatch-option", option, rule="has an argument of its own", remedy=f"Use --{name} instead."
        )
    if name in _SET_BY_THE_SCRIPT:
        raise BadInput(
            "--sbatch-option",
            option,
            rule="is set by the job script, which depends on it",
            remedy="Leave it out, or write the script with --output and change it there.",
        )


def _check_end(flag: str, line: str) -> None:
    """Refuse the one line that would end the part of the script in which it stands."""
    if _END_OF_NODE_SCRIPT in line.split("\n"):
        raise BadInput(flag, line, rule="is the word that ends the node's script", remedy="Leave it out.")


def _lines(words: Sequence[str]) -> list[str]:
    """A flag and its values on one line each."""
    lines: list[str] = []
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return lines
