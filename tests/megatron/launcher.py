"""Runs GPT pretraining of a tiny model in real processes, and parses Megatron's log. Used by tests."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.forked import REPOSITORY, run_ranks
from tests.rendezvous import meeting_place

MODULE = "megatron_ampipe.pretrain_gpt"
SEVERAL = "tests.megatron.runs_worker"
BEGINS = "=== run "
"""A rank prints this before the name of each of several runs."""

TINY_GPT = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --eval-iters 0 --eval-interval 100 "
    "--tokenizer-type NullTokenizer --vocab-size 255 --log-interval 1"
)
TINY_MOE = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --disable-bias-linear"
)
MOCK_DATA = ["--mock-data"]

_FIELD = re.compile(r"\|\s*([a-z0-9_ ]+?):\s*([0-9.]+(?:E[+-]\d+)?)\s*(?=\|)")
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|")
_VALIDATION = re.compile(r"validation loss at iteration (\d+) \| lm loss value: (\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The result of one launch."""

    exit_code: int
    """Exit code of torchrun; without torchrun, of the first rank that failed."""
    output: str
    """Standard output and error of all ranks."""
    iterations: list[int] = field(default_factory=list)
    losses: dict[str, list[float]] = field(default_factory=dict)
    """All that Megatron logs for every iteration, by name."""
    grad_norm: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)

    @property
    def lm_loss(self) -> list[float]:
        """The loss of the language model."""
        return self.losses.get("lm loss", [])

    @property
    def load_balancing_loss(self) -> list[float]:
        """The loss of the type aux_loss."""
        return self.losses.get("load_balancing_loss", [])

    @property
    def table(self) -> str:
        """The output in one line, so that wrapped cells of the start-up table can be matched."""
        return unfolded(self.output)

    @property
    def error(self) -> str:
        """The error line of a refused launch."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, f"expected one error line, found {lines}\n{self.output[-4000:]}"
        return lines[0]


def unfolded(output: str) -> str:
    """``output`` in one line, without the borders of tables."""
    return re.sub(r"[│\s]+", " ", output)


def environment() -> dict[str, str]:
    """The environment of a test's processes: one thread each, and no rank variables of an outer launch."""
    outer = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def torchrun_command(*arguments: str, num_ranks: int = 2) -> list[str]:
    """A torchrun command on a free port."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}",
        *arguments,
    ]  # fmt: skip


def execute(command: list[str], *, timeout_s: float = 240) -> Run:
    """Run ``command`` to its end and parse its log."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )
    return parse(done.returncode, done.stdout)


def launch(*arguments: str, num_ranks: int = 2, timeout_s: float = 240) -> Run:
    """Launch GPT pretraining under torchrun, as a user does; the arguments are its complete command line."""
    command = torchrun_command("-m", MODULE, *arguments, num_ranks=num_ranks)
    return execute(command, timeout_s=timeout_s)


def pretrain(*arguments: str, num_ranks: int = 2, timeout_s: float = 240) -> Run:
    """The same without torchrun, from a process that has Megatron imported; the output is ordered by rank."""
    code, logs = _run_forked(MODULE, arguments, num_ranks=num_ranks, timeout_s=timeout_s)
    return parse(code, "".join(logs))


def pretrain_several(
    runs: Mapping[str, Sequence[str]], *, num_ranks: int, timeout_s: float, module: str = SEVERAL
) -> dict[str, Run]:
    """Runs of :func:`pretrain` on the same ranks, one after another, up to the first that fails.

    Args:
        runs: The command line of each, by name.
        num_ranks: Number of ranks of every run.
        timeout_s: Timeout of all runs together.
        module: What each rank runs.

    Returns:
        The runs that were started, by name; the last one has the exit code of the ranks.
    """
    arguments = [json.dumps([[name, list(words)] for name, words in runs.items()])]
    code, logs = _run_forked(module, arguments, num_ranks=num_ranks, timeout_s=timeout_s)
    outputs: dict[str, str] = {}
    for log in logs:
        for part in log.split(BEGINS)[1:]:
            name, _, output = part.partition("\n")
            outputs[name] = outputs.get(name, "") + output
    last = list(outputs)[-1]
    return {name: parse(code if name == last else 0, output) for name, output in outputs.items()}


def _run_forked(
    module: str, arguments: Sequence[str], *, num_ranks: int, timeout_s: float
) -> tuple[int, list[str]]:
    """The exit code of the first rank that failed, and what each rank printed."""
    address = meeting_place()
    environments = [
        environment()
        | address
        | {name: str(num_ranks) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        | {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
        for rank in range(num_ranks)
    ]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"rank{rank}.log" for rank in range(num_ranks)]
        codes = run_ranks(module, arguments, environments=environments, logs=paths, timeout_s=timeout_s)
        logs = [path.read_text() for path in paths]
    assert None not in codes, f"not done in {timeout_s} s\n{''.join(logs)[-6000:]}"
    return next(filter(None, codes), 0), logs


def train(*arguments: str, num_ranks: int = 2, timeout_s: float = 240) -> Run:
    """Train the tiny GPT-MoE model on mock data; fails the test if the training fails."""
    run = pretrain(*TINY_GPT, *TINY_MOE, *MOCK_DATA, *arguments, num_ranks=num_ranks, timeout_s=timeout_s)
    assert run.exit_code == 0, run.output[-6000:]
    return run


def parse(exit_code: int, output: str) -> Run:
    """Read the logged values of every iteration.

    Ranks share one output stream, so the output of another rank may come before or after the values.
    """
    iterations: list[int] = []
    values: dict[str, list[float]] = {"grad norm": []}
    for line in output.splitlines():
        if found := _ITERATION.search(line):
            iterations.append(int(found[1]))
            for name, value in _FIELD.findall(line[found.end() - 1 :]):
                if name == "grad norm" or name.endswith(" loss") or name.endswith("_loss"):
                    values.setdefault(name, []).append(float(value))
    return Run(
        exit_code=exit_code,
        output=output,
        iterations=iterations,
        grad_norm=values.pop("grad norm"),
        losses=values,
        validation_loss=[float(value) for _, value in _VALIDATION.findall(output)],
    )
