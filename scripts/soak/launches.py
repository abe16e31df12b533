"""Starts trainings of the soak test by torchrun, waits for them, and ends them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from soak.judgement import ITERATION, Samples, SoakFailed

MODULE = "megatron_ampipe.pretrain_gpt"
# In every layer, some rank gets no tokens.
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 255 --mock-data"
)
TRAINING = (
    "--micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --log-interval 1 "
    "--eval-iters 1 --overlap-grad-reduce --ddp-bucket-size 1000 "
    "--exit-signal-handler --ampipe-degree 2 --ampipe-partner --ampipe-router soak.router:OneRankRouter"
)
STANDSTILL_S = 900.0
"""A launch that logs nothing for so long hangs. Trainings are small, but the machine can be busy."""
_POLL_S = 0.05
_SAMPLE_S = 0.25


@dataclass(frozen=True, slots=True)
class Shape:
    """How the ranks of a training are laid out."""

    num_ranks: int
    flags: str
    what: str
    can_load: bool = True
    """Whether its checkpoints can be loaded: not those of a sharded optimizer, without Transformer Engine."""


SHAPES = {
    "ep2": Shape(2, "--num-experts 4 --expert-model-parallel-size 2", "two expert-parallel ranks"),
    "ep4": Shape(4, "--num-experts 8 --expert-model-parallel-size 4", "four expert-parallel ranks"),
    "pp2-ep2": Shape(
        4,
        "--num-experts 4 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1 --moe-layer-freq [0,1,1,1]",
        "two pipeline stages of two virtual stages, the first one without experts; two expert-parallel ranks",
    ),
    "ep4-dp8": Shape(
        8,
        "--num-layers 2 --hidden-size 32 --num-experts 8 --expert-model-parallel-size 4 "
        "--global-batch-size 16 --use-distributed-optimizer --overlap-param-gather",
        "two groups of four expert-parallel ranks, which share a sharded optimizer",
        can_load=False,
    ),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What is trained, and where its files are."""

    shape: Shape
    num_iterations: int
    interval: int
    """Iterations between checkpoints, and between evaluations."""
    folder: Path
    random: random.Random

    def checkpoints(self, name: str) -> Path:
        """The folder of the checkpoints of a training."""
        return self.folder / name

    def logs(self, name: str) -> list[Path]:
        """The logs of a training, in the order of its launches."""
        found = self.folder.glob(f"{name}.*.log")
        return sorted(found, key=lambda path: int(path.suffixes[-2].removeprefix(".")))

    def last_saved(self, name: str) -> int:
        """The iteration of the last checkpoint that is complete."""
        return int((self.checkpoints(name) / "latest_checkpointed_iteration.txt").read_text())

    def somewhere(self) -> int:
        """An iteration, far enough from the last one."""
        return self.random.randint(2, 3 * self.num_iterations // 4)


@dataclass(slots=True)
class Training:
    """One launch by torchrun."""

    process: subprocess.Popen[bytes]
    log: Path
    warm_up: int
    """Iterations after which memory and threads are sampled; evaluations and checkpoints have begun."""
    samples: Samples = field(default_factory=Samples)
    _all_ranks: set[int] = field(default_factory=set)

    @property
    def output(self) -> str:
        """What the ranks have printed."""
        return self.log.read_text(errors="replace")

    @property
    def last_iteration(self) -> int:
        """The last iteration in the log; 0 if there is none."""
        numbers = [int(match[1]) for match in ITERATION.finditer(self.output)]
        return numbers[-1] if numbers else 0

    def ranks(self) -> list[int]:
        """The processes of the ranks, in any order."""
        pids: list[int] = []
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            pids = [int(pid) for pid in path.read_text().split()]
        self._all_ranks.update(pids)
        return pids

    def wait_for(self, iteration: int) -> None:
        """Wait until an iteration is in the log; raises :class:`SoakFailed` if it never will be."""
        for _ in self._polls():
            if self.last_iteration >= iteration:
                return
        raise SoakFailed(f"{self.log.name}: ended before iteration {iteration}")

    def finish(self) -> int:
        """Wait for the end; returns the exit code."""
        sampled = time.monotonic()
        is_warm = False
        for _ in self._polls():
            if time.monotonic() < sampled + _SAMPLE_S:
                continue
            sampled = time.monotonic()
            is_warm = is_warm or self.last_iteration > self.warm_up
            if is_warm:
                self._sample()
        return self.process.returncode

    def _polls(self) -> Iterator[None]:
        """A turn every few milliseconds until the launch ends; raises SoakFailed if its log stands still."""
        size, changed = -1, time.monotonic()
        while self.process.poll() is None:
            self.ranks()
            yield
            now = self.log.stat().st_size
            if now != size:
                size, changed = now, time.monotonic()
            if time.monotonic() > changed + STANDSTILL_S:
                raise SoakFailed(f"{self.log.name}: hangs after iteration {self.last_iteration}")
            time.sleep(_POLL_S)

    def _sample(self) -> None:
        """Read the kernel's records of the ranks that it still has."""
        for pid in self.ranks():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                fields = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
                if "VmRSS" in fields:
                    memory_mib = int(fields["VmRSS"]) / 1024
                    self.samples.add(pid, memory_mib=memory_mib, num_threads=int(fields["Threads"]))

    def kill(self) -> None:
        """End the launcher and all ranks, each of which leads a session."""
        for pid in (self.process.pid, *self._all_ranks, *self.ranks()):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def launched(options: Options, name: str, *, load: bool, extra: Sequence[str] = ()) -> Iterator[Training]:
    """Start a training that saves into the folder of its name; it is killed if it still runs at the end."""
    checkpoints = options.checkpoints(name)
    checkpoints.mkdir(exist_ok=True)
    log = options.folder / f"{name}.{len(options.logs(name))}.log"
    log.touch()
    interval = str(options.interval)
    words = [
        # torchrun chooses a port and keeps it. One that is only looked up here could be taken before.
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={options.shape.num_ranks}", "-m", MODULE),
        *shlex.split(MODEL),
        *shlex.split(TRAINING),
        *shlex.split(options.shape.flags),
        *("--train-iters", str(options.num_iterations), "--eval-interval", interval),
        *("--save", str(checkpoints), "--save-interval", interval),
        *("--ampipe-routing-dir", str(routing_folder(log)), "--ampipe-routing-interval", interval),
        *(("--load", str(checkpoints)) if load else ()),
        *extra,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
    with log.open("wb") as output:
        # The ranks write to a pipe, which a limit on the size of files leaves alone.
        copying = subprocess.Popen(["cat"], stdin=process.stdout, stdout=output, start_new_session=True)
    training = Training(process, log, warm_up=2 * options.interval)
    try:
        yield training
    finally:
        training.kill()
        copying.wait()


def routing_folder(log: Path) -> Path:
    """Where the launch with this log records how tokens are routed."""
    return log.with_suffix(".routing")
