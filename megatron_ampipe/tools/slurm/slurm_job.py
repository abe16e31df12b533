"""A SLURM job and its script. Depends neither on Megatron nor on the command line of ``ampipe``.

All scripts are rendered from the template ``job.sbatch.j2`` next to this module. Those in ``scripts/slurm``
are three examples; a test checks that they are up to date. Called by ``ampipe sbatch``.
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
    """What a script requests from SLURM, and what it runs.

    Attributes:
        command: The ``ampipe sbatch`` command that made it, for the script's header.
        name: Name of the job.
        nodes: Number of nodes.
        gpus_per_node: Number of GPUs, and of ranks, per node.
        time: Time limit, in SLURM's format.
        folder: Folder for checkpoints and logs, shared by all nodes. None for a separate one for each job.
        training: Flags of the training run, without those for checkpoints and signals.
        save_interval: Iterations between checkpoints; None if a file of the run sets it.
        save_before_end_s: How long before its time limit the job is signalled to save, in seconds.
        max_restarts: Number of restarts after which the job is not requeued.
        chain: Number of jobs of this script that run one after another.
        account: Account to charge; None for the cluster's default.
        partition: Partition; None for the cluster's default.
        gres: Name of the GPU resource; None for ``--gpus-per-node``.
        mem: Memory of each node; None to leave the option out.
        exclude: Nodes not to use.
        options: Further sbatch options, each as written after ``#SBATCH``.
        setup: Shell lines that each node runs first.
        health_check: A command that must succeed on each node before training.
        container: Image for pyxis; None to run without a container.
        mounts: Mounts that the user requests, ``from:to``.
        needed: Folders that the job uses, mounted as well.
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
                rule="is not a folder name",
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
                rule="needs a folder that all its jobs share; by default each job has a separate one",
                remedy=f"Add for example --folder runs/{self.name}-1.",
            )
        if any(option.startswith(("--dependency", "--array")) for option in self.options):
            raise BadInput(
                "--chain",
                self.chain,
                rule="makes each job wait for the one before, which conflicts with --dependency and --array",
                remedy="Leave out --chain or that --sbatch-option.",
            )

    @property
    def memory(self) -> str | None:
        """The value of ``--mem``; None with ``--mem-per-*``, because SLURM accepts only one memory option."""
        return None if any(option.startswith("--mem-per-") for option in self.options) else self.mem

    @property
    def resource(self) -> str:
        """The option that requests the GPUs of a node."""
        if self.gres is not None:
            return f"--gres={self.gres}:{self.gpus_per_node}"
        return f"--gpus-per-node={self.gpus_per_node}"

    @property
    def all_mounts(self) -> str:
        """All mounts except the submission folder, in pyxis's format."""
        own = [f"{folder}:{folder}" for folder in self.needed.folders]
        return "".join(f",{mount}" for mount in (*self.mounts, *own))

    def training_words(self, checkpoints: str) -> list[str]:
        """The command line of the training run.

        Args:
            checkpoints: The checkpoint folder.
        """
        return [*self.training, "--save", checkpoints, "--load", checkpoints, *self._saving()]

    def training_lines(self) -> list[str]:
        """The same as written in the script, one line per flag."""
        *interval, handler, signal, name = self._saving()
        saving = '--save "$checkpoints" --load "$checkpoints"'
        return [*_lines(self.training), " ".join([saving, *interval]), f"{handler} {signal} {name}"]

    def _saving(self) -> list[str]:
        interval = [] if self.save_interval is None else ["--save-interval", str(self.save_interval)]
        return [*interval, "--exit-signal-handler", "--exit-signal", "SIGUSR1"]


def render(job: Job) -> str:
    """Render the script for ``sbatch``."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("megatron_ampipe.tools.slurm", package_path=""),
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
    return environment.get_template(_TEMPLATE).render(job=job)


def _check_option(option: str) -> None:
    name = option.removeprefix("--").partition("=")[0]
    if not option.startswith("--"):
        raise BadInput(
            "--sbatch-option",
            option,
            rule="does not begin with --",
            remedy="Write it as for sbatch, for example --sbatch-option=--qos=high.",
        )
    if name in _HAS_AN_ARGUMENT:
        raise BadInput(
            "--sbatch-option", option, rule="has a separate argument", remedy=f"Use --{name} instead."
        )
    if name in _SET_BY_THE_SCRIPT:
        raise BadInput(
            "--sbatch-option",
            option,
            rule="is set by the job script, which depends on it",
            remedy="Leave it out, or write the script with --output and change it there.",
        )


def _check_end(flag: str, line: str) -> None:
    """Refuse the line that would end the here-document of the script."""
    if _END_OF_NODE_SCRIPT in line.split("\n"):
        raise BadInput(flag, line, rule="is the delimiter of the node's script", remedy="Leave it out.")


def _lines(words: Sequence[str]) -> list[str]:
    """Quoted lines, each with one flag and its values."""
    lines: list[str] = []
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return lines
