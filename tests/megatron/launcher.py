"""Runs GPT pretraining of a tiny model in real processes, and parses Megatron's log. Used by tests."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.forked import REPOSITORY, completed, run_ranks, variables_of

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

# Below the ports that the kernel gives to connections on its own (from 32,768), so that none of them takes
# a port between the choice and rank 0's store; the job scripts of tests/slurm use those from 20,000.
_PORTS = range(10_000, 20_000)
_held = []

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
    def logged(self) -> tuple[list[int], dict[str, list[float]], list[float]]:
        """All values of all iterations, of which there are some."""
        assert self.iterations, self.output[-4000:]
        return self.iterations, self.losses, self.grad_norm

    @property
    def lm_loss(self) -> list[float]:
        """The loss of the language model."""
        return self.losses.get("lm loss", [])

    def says(self, text: str) -> bool:
        """Whether a text is in the output, also in a wrapped cell of the start-up table."""
        return squeezed(text) in squeezed(self.output)


def squeezed(output: str) -> str:
    """``output`` without white space and borders of tables."""
    return re.sub(r"[│\s]+", "", output)


def environment() -> dict[str, str]:
    """The environment of a test's processes: one thread each, and no rank variables of an outer launch."""
    outer = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def meeting_place() -> dict[str, str]:
    """The variables that ``env://`` reads, with a free port that no other test on this machine chooses."""
    folder = Path(tempfile.gettempdir()) / "ampipe-test-ports"
    folder.mkdir(exist_ok=True)
    first = os.getpid() * 7 % len(_PORTS)
    for port in itertools.chain(_PORTS[first:], _PORTS[:first]):
        lock = (folder / str(port)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as tried:
                tried.bind(("localhost", port))
        except OSError:
            lock.close()
            continue
        _held.append(lock)  # for as long as this process lives: the ranks bind the port later
        return {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    raise RuntimeError(f"no free port from {_PORTS.start} to {_PORTS.stop - 1}")


def torchrun_command(*arguments: str, num_ranks: int = 2) -> list[str]:
    """A torchrun command on a free port."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}",
        *arguments,
    ]  # fmt: skip


def execute(command: list[str], *, env: Mapping[str, str] | None = None, timeout_s: float = 240) -> Run:
    """Run ``command`` to its end and parse its log; ``env`` is added to the environment."""
    done = completed(*command, env=environment() | dict(env or {}), code=None, timeout_s=timeout_s)
    return parse(done.returncode, done.stdout + done.stderr)


def pretrain(*arguments: str, num_ranks: int = 2, timeout_s: float = 240) -> Run:
    """GPT pretraining without torchrun, from a process that has Megatron imported; output is in rank order.

    The arguments are its complete command line.
    """
    code, logs = _run_forked(MODULE, arguments, num_ranks=num_ranks, timeout_s=timeout_s)
    return parse(code, "".join(logs))


def runs_of(
    lines: Mapping[str, Sequence[str]], *, num_ranks: int = 2, stand_ins: str = "", timeout_s: float = 800
) -> dict[str, Run]:
    """Runs of :func:`pretrain` on the same ranks, one after another; all must succeed.

    Args:
        lines: The command line of each, by name.
        num_ranks: Number of ranks of every run.
        stand_ins: A name of :mod:`.stand_ins`; empty for none.
        timeout_s: Timeout of all runs together.
    """
    arguments = [json.dumps([[name, list(words)] for name, words in lines.items()]), stand_ins]
    code, logs = _run_forked(SEVERAL, arguments, num_ranks=num_ranks, timeout_s=timeout_s)
    outputs: dict[str, str] = {}
    for log in logs:
        for part in log.split(BEGINS)[1:]:
            name, _, output = part.partition("\n")
            outputs[name] = outputs.get(name, "") + output
    # They end with the first that fails.
    last = list(outputs)[-1]
    assert code == 0, f"{last}:\n{outputs[last][-6000:]}"
    assert outputs.keys() == lines.keys()
    return {name: parse(0, output) for name, output in outputs.items()}


def _run_forked(
    module: str, arguments: Sequence[str], *, num_ranks: int, timeout_s: float
) -> tuple[int, list[str]]:
    """The exit code of the first rank that failed, and what each rank printed."""
    env = environment() | meeting_place()
    codes, logs = run_ranks(module, arguments, num_ranks=num_ranks, env=env, timeout_s=timeout_s)
    assert None not in codes, f"not done in {timeout_s} s\n{''.join(logs)[-6000:]}"
    return next(filter(None, codes), 0), logs


@contextlib.contextmanager
def started(*arguments: str, logs: Sequence[Path], until: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A rank of the tiny GPT-MoE for each log, on mock data, as soon as the last one has said this.

    They have no launcher; what still runs in the end is killed.
    """
    common, ranks = environment() | meeting_place(), []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-m", MODULE, *TINY_GPT, *TINY_MOE, *MOCK_DATA, *arguments],
                        cwd=REPOSITORY,
                        env=common | variables_of(rank, len(logs)),
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        # A shell that runs tests in the background ignores SIGINT, and children inherit that.
                        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                    )
                )
        while until not in logs[-1].read_text():
            assert {rank.poll() for rank in ranks} == {None}, "".join(log.read_text()[-4000:] for log in logs)
            time.sleep(0.05)
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.wait()


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


LAST_DIGIT_OF_GRAD_NORM = 1.001e-3
"""Pipelined layers add in another order than stock layers, so it may differ by one."""


def digits(values: Sequence[float]) -> list[object]:
    """What is equal to logged losses in seven digits, but for one unit of the last."""
    # Logged is 1.234567E+00.
    return [
        pytest.approx(value, rel=0, abs=1.001e-6 * 10 ** math.floor(math.log10(value)) if value else 0)
        for value in values
    ]


def assert_same_digits(stock: Run, *others: Run, iterations: int | None = None) -> None:
    """Check that runs log what the stock run logs, but for one unit of the last digit.

    Args:
        stock: The reference.
        others: What is compared with it.
        iterations: How many iterations the stock run has, if it is a whole training, which must learn.
    """
    if iterations is not None:
        assert stock.iterations == list(range(1, iterations + 1))
        assert stock.lm_loss[-1] < stock.lm_loss[0], "a run that learns nothing proves little"
    for ours in others:
        assert ours.iterations == stock.iterations
        assert ours.losses == {name: digits(values) for name, values in stock.losses.items()}
        assert ours.grad_norm == pytest.approx(stock.grad_norm, abs=LAST_DIGIT_OF_GRAD_NORM)


def assert_resumed(resumed: Run, unbroken: Run, *, first: int) -> None:
    """Check that a run that goes on from a checkpoint logs what the unbroken run logs.

    Args:
        resumed: Its first iteration is number ``first``.
        unbroken: From iteration 1.
        first: Counted from 1.
    """
    assert resumed.iterations == list(range(first, unbroken.iterations[-1] + 1))
    # Of the second iteration after a resume, Megatron prints the mean of the first two losses.
    assert resumed.lm_loss[:1] == digits(unbroken.lm_loss[first - 1 : first])
    assert resumed.grad_norm == pytest.approx(unbroken.grad_norm[first - 1 :], abs=LAST_DIGIT_OF_GRAD_NORM)
