"""Trains for minutes or hours with disturbances, and compares the losses with those of an undisturbed run.

Each round is a training by Megatron's own loop on processes of this machine, with partners, overlapped
reductions, evaluations and checkpoints, and one kind of disturbance (:data:`DISTURBANCES`). A training that a
disturbance ends goes on from its last checkpoint. Every logged loss and gradient norm must have the digits of
the undisturbed run, and memory and threads of the ranks must not grow. ``scripts/soak.sh`` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import resource
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MODULE = "megatron_ampipe.pretrain_gpt"
FORMAT = "ampipe-soak-1"
# In every layer, some rank gets no tokens.
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type none "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 255 --mock-data"
)
TRAINING = (
    "--micro-batch-size 1 --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 1 "
    "--overlap-grad-reduce --ddp-bucket-size 1000 "
    "--exit-signal-handler --ampipe-degree 2 --ampipe-partner --ampipe-router soak.router:OneRankRouter"
)
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|.*")
_VALUE = re.compile(r"\| (lm loss|grad norm): (\S+)")
_SAVED = "successfully saved checkpoint from iteration"
_GROWTH = 1.05
"""Most by which a rank's memory may grow from the second to the last quarter of a training."""
_FEWEST_SAMPLES = 60
"""Of fewer samples no growth is told."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is trained, and for how long."""

    ranks: int
    iterations: int
    interval: int
    folder: Path
    random: random.Random


@dataclass(slots=True)
class Samples:
    """Memory and threads of the ranks of one training, a sample each second."""

    memory_mib: dict[int, list[float]] = field(default_factory=dict)
    threads: dict[int, list[int]] = field(default_factory=dict)

    def add(self, pid: int) -> None:
        """Read the kernel's record of a process, if it still has one."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            if "VmRSS" in fields:
                self.memory_mib.setdefault(pid, []).append(int(fields["VmRSS"].split()[0]) / 1024)
                self.threads.setdefault(pid, []).append(int(fields["Threads"]))

    def growth(self) -> float:
        """The largest growth of a rank's memory, from the second to the last quarter of its samples."""
        return max((late / early for early, late in map(_quarters, self.memory_mib.values())), default=1.0)

    def new_threads(self) -> int:
        """The largest number of threads that a rank has gained, from the second to the last quarter."""
        gained = (late - early for early, late in map(_quarters, self.threads.values()))
        return int(max(gained, default=0))


def _quarters(samples: Sequence[float]) -> tuple[float, float]:
    """The medians of the second and the last quarter; equal if there are too few samples."""
    if len(samples) < _FEWEST_SAMPLES:
        return 1.0, 1.0
    quarter = len(samples) // 4
    return statistics.median(samples[quarter : 2 * quarter]), statistics.median(samples[-quarter:])


@dataclass(slots=True)
class Training:
    """One launch by torchrun."""

    process: subprocess.Popen[bytes]
    log: Path
    warm_up: int
    """Iterations after which memory and threads are sampled; evaluations and checkpoints have begun."""
    samples: Samples = field(default_factory=Samples)

    @property
    def output(self) -> str:
        """What the ranks have printed."""
        return self.log.read_text(errors="replace")

    @property
    def last_iteration(self) -> int:
        """The last iteration in the log; 0 if there is none."""
        numbers = [int(match[1]) for match in _ITERATION.finditer(self.output)]
        return numbers[-1] if numbers else 0

    def ranks(self) -> list[int]:
        """The processes of the ranks, in any order."""
        with contextlib.suppress(OSError):
            path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
            return [int(pid) for pid in path.read_text().split()]
        return []

    def wait_for(self, iteration: int, timeout_s: float = 600.0) -> None:
        """Wait until an iteration is in the log; raises :class:`SoakFailed` if it never will be."""
        end = time.monotonic() + timeout_s
        while self.last_iteration < iteration:
            if self.process.poll() is not None:
                raise SoakFailed(f"ended before iteration {iteration}, see {self.log}")
            if time.monotonic() > end:
                raise SoakFailed(f"no iteration {iteration} within {timeout_s:.0f} s: a hang, see {self.log}")
            time.sleep(0.2)

    def finish(self) -> int:
        """Wait for the end; returns the exit code. The log may not stand still for ten minutes."""
        seen, changed = -1, time.monotonic()
        while self.process.poll() is None:
            if len(_ITERATION.findall(self.output)) > self.warm_up:
                for pid in self.ranks():
                    self.samples.add(pid)
            if (size := self.log.stat().st_size) != seen:
                seen, changed = size, time.monotonic()
            if time.monotonic() > changed + 600:
                raise SoakFailed(f"hangs after iteration {self.last_iteration}, see {self.log}")
            time.sleep(1.0)
        return self.process.returncode


class SoakFailed(Exception):
    """Something was not as in the undisturbed run."""


@contextlib.contextmanager
def launched(options: Options, name: str, *, load: bool, extra: Sequence[str] = ()) -> Iterator[Training]:
    """Start a training that saves into the folder of its name; it is killed if it still runs at the end."""
    checkpoints = options.folder / name
    checkpoints.mkdir(exist_ok=True)
    attempt = len(list(options.folder.glob(f"{name}-*.log")))
    log = options.folder / f"{name}-{attempt}.log"
    words = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={options.ranks}"),
        *("--master-addr=localhost", f"--master-port={_free_port()}", "-m", MODULE),
        *shlex.split(MODEL),
        *shlex.split(TRAINING),
        *("--expert-model-parallel-size", str(options.ranks), "--global-batch-size", str(4 * options.ranks)),
        *("--train-iters", str(options.iterations), "--eval-interval", str(options.interval)),
        *("--save", str(checkpoints), "--save-interval", str(options.interval)),
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
        copying = subprocess.Popen(["cat"], stdin=process.stdout, stdout=output)
    try:
        yield Training(process, log, warm_up=2 * options.interval)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        copying.wait()


def _free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("localhost", 0))
        port: int = tried.getsockname()[1]
        return port


def logged(output: str) -> dict[int, dict[str, str]]:
    """Losses and gradient norms of a log as they are printed, by iteration."""
    return {int(line[1]): dict(_VALUE.findall(line[0])) for line in _ITERATION.finditer(output)}


def undisturbed(options: Options, name: str) -> Samples:
    """One training from the first to the last iteration."""
    with launched(options, name, load=False) as training:
        _expect_end(training)
        return training.samples


def slow_rank(options: Options, name: str) -> Samples:
    """A rank stands still for up to 0.3 s, again and again, as one on a busy or faulty node does."""
    with launched(options, name, load=False) as training:
        training.wait_for(1)
        stopped = threading.Event()

        def pause() -> None:
            while not stopped.wait(options.random.uniform(0.05, 1.0)):
                for pid in training.ranks()[:1]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGSTOP)
                        time.sleep(options.random.uniform(0.02, 0.3))
                        os.kill(pid, signal.SIGCONT)

        thread = threading.Thread(target=pause, daemon=True)
        thread.start()
        try:
            _expect_end(training)
        finally:
            stopped.set()
            thread.join()
        return training.samples


def _ended_by_signal(number: signal.Signals) -> Callable[[Options, str], Samples]:
    def disturb(options: Options, name: str) -> Samples:
        own = () if number == signal.SIGTERM else ("--exit-signal", number.name)
        with launched(options, name, load=False, extra=own) as training:
            last = _somewhere(options)
            training.wait_for(last)
            for pid in training.ranks():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            training.finish()
            saved = _last_saved(options, name)
            if saved < last:
                raise SoakFailed(
                    f"{number.name} after iteration {last}: only {saved} is saved, {training.log}"
                )
        return _continued(options, name)

    return disturb


def killed(options: Options, name: str) -> Samples:
    """A rank disappears without a word; the launcher must end the others."""
    with launched(options, name, load=False) as training:
        training.wait_for(max(_somewhere(options), options.interval + 1))
        os.kill(options.random.choice(training.ranks()), signal.SIGKILL)
        if training.finish() == 0:
            raise SoakFailed(f"a killed rank went unnoticed, see {training.log}")
    return _continued(options, name)


def full_disk(options: Options, name: str) -> Samples:
    """From some iteration on, no file can be written; what was saved before must load."""
    with launched(options, name, load=False) as training:
        training.wait_for(options.interval + 1)
        for pid in training.ranks():
            # As on a full disk, a file cannot grow any more.
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        if training.finish() == 0:
            raise SoakFailed(f"a full disk went unnoticed, see {training.log}")
        _expect_one_line(training)
    return _continued(options, name)


def cut_checkpoint(options: Options, name: str) -> Samples:
    """The newest checkpoint is cut in the middle; the one before must load."""
    with launched(options, name, load=False) as training:
        training.wait_for(2 * options.interval + 1)
    newest = _last_saved(options, name)
    files = [path for path in (options.folder / name / f"iter_{newest:07d}").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with launched(options, name, load=True) as training:
        if training.finish() == 0:
            raise SoakFailed(f"a checkpoint that was cut in the middle loaded, see {training.log}")
        _expect_one_line(training)
    return _continued(options, name, "--ckpt-step", str(newest - options.interval))


DISTURBANCES: dict[str, Callable[[Options, str], Samples]] = {
    "slow-rank": slow_rank,
    "sigterm": _ended_by_signal(signal.SIGTERM),
    "sigusr2": _ended_by_signal(signal.SIGUSR2),
    "killed-rank": killed,
    "full-disk": full_disk,
    "cut-checkpoint": cut_checkpoint,
}


def _somewhere(options: Options) -> int:
    return options.random.randint(2, options.iterations - 2)


def _last_saved(options: Options, name: str) -> int:
    return int((options.folder / name / "latest_checkpointed_iteration.txt").read_text())


def _continued(options: Options, name: str, *extra: str) -> Samples:
    """Go on from the last checkpoint to the last iteration."""
    with launched(options, name, load=True, extra=extra) as training:
        _expect_end(training)
        return training.samples


def _expect_end(training: Training) -> None:
    if (code := training.finish()) != 0:
        raise SoakFailed(f"ended with {code}, see {training.log}")


def _expect_one_line(training: Training) -> None:
    """A rank that failed must say so in one line, which the launcher's summary may follow."""
    if not re.search(r"^error: ", training.output, re.MULTILINE):
        raise SoakFailed(f"no line says why it ended, see {training.log}")


def _compare(options: Options, name: str, expected: dict[int, dict[str, str]]) -> int:
    """Compare all logs of a round with the undisturbed run; returns how many iterations were compared."""
    count = 0
    last = 0
    for log in sorted(options.folder.glob(f"{name}-*.log")):
        iterations = logged(log.read_text(errors="replace"))
        for place, (iteration, values) in enumerate(iterations.items()):
            compared = dict(expected[iteration])
            if place == 1:
                # The second line of a launch has the mean loss of its first two iterations.
                compared["lm loss"] = values["lm loss"]
            if values != compared:
                raise SoakFailed(f"iteration {iteration} has {values}, undisturbed {compared}, see {log}")
        count += len(iterations)
        last = max(last, *iterations) if iterations else last
    if last != options.iterations:
        raise SoakFailed(f"{name} ended with iteration {last} of {options.iterations}")
    return count


def _round(options: Options, kind: str, name: str, expected: dict[int, dict[str, str]]) -> dict[str, object]:
    begin = time.monotonic()
    samples = DISTURBANCES[kind](options, name)
    report: dict[str, object] = {
        "kind": kind,
        "iterations": _compare(options, name, expected),
        "seconds": round(time.monotonic() - begin, 1),
        "memory_growth": round(samples.growth(), 4),
        "new_threads": samples.new_threads(),
    }
    if samples.growth() > _GROWTH or samples.new_threads() > 0:
        raise SoakFailed(f"{name}: memory or threads grow: {report}")
    for log in options.folder.glob(f"{name}-*.log"):
        log.unlink()
    return report


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="begin no round after this time (default: %(default)s)")
    add("--iterations", type=int, default=500, help="of each training (default: %(default)s)")
    add("--interval", type=int, help="of checkpoints and evaluations (default: a tenth of the iterations)")
    add("--ranks", type=int, default=2, help="processes (default: %(default)s)")
    add("--only", choices=DISTURBANCES, action="append", help="this kind of disturbance; may be repeated")
    add("--seed", type=int, default=1, help="of when a disturbance happens (default: %(default)s)")
    add("--json", type=Path, help="write what was seen, after every round")
    add("--keep", type=Path, help="keep logs and checkpoints in this folder, which must not exist yet")
    arguments = parser.parse_args(words)
    if arguments.interval is None:
        arguments.interval = max(2, arguments.iterations // 10)
    if arguments.iterations < 3 * arguments.interval:
        parser.error(
            f"--iterations {arguments.iterations}: give at least 3 times --interval {arguments.interval}"
        )
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Run rounds until the time is over; returns 0 if all of them were as the undisturbed run."""
    arguments = _arguments(words)
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = arguments.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ampipe-soak-")))
        else:
            folder.mkdir(parents=True)
        options = Options(
            arguments.ranks, arguments.iterations, arguments.interval, folder, random.Random(arguments.seed)
        )
        document: dict[str, object] = {
            "format": FORMAT,
            "command": shlex.join(["scripts/soak.sh", *(sys.argv[1:] if words is None else words)]),
            "flags": f"{MODEL} {TRAINING}",
        }
        rounds: list[dict[str, object]] = []
        document["rounds"] = rounds
        try:
            print(f"soak: {options.iterations} iterations without a disturbance ...", flush=True)
            samples = undisturbed(options, "undisturbed")
            expected = logged((folder / "undisturbed-0.log").read_text(errors="replace"))
            document["undisturbed"] = {
                "iterations": len(expected),
                "memory_growth": round(samples.growth(), 4),
                "new_threads": samples.new_threads(),
            }
            for number, kind in enumerate(itertools.cycle(arguments.only or DISTURBANCES)):
                minutes = (time.monotonic() - begin) / 60
                if number > 0 and minutes > arguments.minutes:
                    break
                print(f"soak: {minutes:.1f} min, round {number + 1}: {kind} ...", flush=True)
                rounds.append(_round(options, kind, f"{kind}-{number}", expected))
                print(f"soak: {rounds[-1]}", flush=True)
                _write(arguments.json, document)
        except SoakFailed as error:
            document["failed"] = str(error)
            _write(arguments.json, document)
            if arguments.keep is None:
                kept = Path(tempfile.mkdtemp(prefix="ampipe-soak-failed-"))
                for log in folder.glob("*.log"):
                    (kept / log.name).write_bytes(log.read_bytes())
                print(f"soak: the logs are in {kept}", file=sys.stderr)
            print(f"soak: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("soak: interrupted", file=sys.stderr)
            return 130
    print(f"soak: {len(rounds)} rounds, all as the undisturbed run", flush=True)
    return 0


def _write(path: Path | None, document: dict[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
