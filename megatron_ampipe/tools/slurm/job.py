"""One job, and the script that it becomes. Knows neither Megatron nor the command line of ``ampipe``.

The template ``job.sbatch.j2`` beside this module is the one source of every script: those in
``scripts/slurm`` are what it gives for three examples, which a test holds. Called by ``ampipe sbatch``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import jinja2

from megatron_ampipe.errors import BadInput

_TEMPLATE = "job.sbatch.j2"
# What SLURM takes for a time: minutes, minutes:seconds, hours:minutes:seconds, and days before each.
_TIME = re.compile(r"(\d+-)?\d+(:\d+){0,2}")
# One word of an #SBATCH line: no blanks, no quotes, nothing a shell would look at.
_WORD = re.compile(r"[A-Za-z0-9_.,:=+@%/\[\]-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one script is to ask of SLURM and to run.

    Attributes:
        command: The ``ampipe sbatch`` line that made it, for the script's head.
        name: Of the job.
        nodes: How many.
        gpus_per_node: Also the number of ranks on each node.
        time: Longest duration, as SLURM writes it.
        folder: Holds checkpoints and logs; seen by every node.
        training: Flags of the training run, beside those about checkpoints and signals.
        save_interval: Iterations between checkpoints; None where a file of the run says it.
        save_before_end_s: How long before its end the job is asked to save, in seconds.
        max_restarts: After so many the job stays out of the queue.
        account: Whom to charge; None for the cluster's default.
        partition: Where to run; None for the cluster's default.
        options: Further options of sbatch, each as it stands behind ``#SBATCH``.
        container: Image for pyxis; None to run on the nodes themselves.
        mounts: Further mounts of the container, ``from:to``.
    """

    command: str
    name: str
    nodes: int
    gpus_per_node: int
    time: str
    folder: str
    training: Sequence[str]
    save_interval: int | None
    save_before_end_s: int
    max_restarts: int
    account: str | None = None
    partition: str | None = None
    options: Sequence[str] = ()
    container: str | None = None
    mounts: Sequence[str] = ()

    def __post_init__(self) -> None:
        for flag, word in (
            ("--job-name", self.name),
            ("--account", self.account),
            ("--partition", self.partition),
            *(("--sbatch-option", option) for option in self.options),
            *(("--mount", mount) for mount in self.mounts),
        ):
            if word is not None and not _WORD.fullmatch(word):
                raise BadInput(
                    flag,
                    word or "(empty)",
                    rule="holds a blank, a quote or another character that #SBATCH lines cannot carry",
                    remedy="Use letters, digits and _ . , : = + @ % / - alone.",
                )
        if not _TIME.fullmatch(self.time):
            raise BadInput(
                "--time",
                self.time or "(empty)",
                rule="is not a duration that SLURM knows",
                remedy="Write hours:minutes:seconds, for example 24:00:00, or days-hours: 2-00.",
            )
        for option in self.options:
            if not option.startswith("--"):
                raise BadInput(
                    "--sbatch-option",
                    option,
                    rule="does not begin with --",
                    remedy="Write it as sbatch takes it, for example --sbatch-option=--qos=high.",
                )
        if self.mounts and self.container is None:
            raise BadInput(
                "--mount",
                self.mounts[0],
                rule="has no effect without a container",
                remedy="Add --container IMAGE, or leave it out.",
            )

    def training_lines(self) -> list[str]:
        """The training run's words as they stand in the script, a line for what belongs together."""
        saving = '--save "$checkpoints" --load "$checkpoints"'
        if self.save_interval is not None:
            saving += f" --save-interval {self.save_interval}"
        return [*_lines(self.training), saving, "--exit-signal-handler --exit-signal SIGUSR1"]


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
    return environment.get_template(_TEMPLATE).render(job=job)


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
