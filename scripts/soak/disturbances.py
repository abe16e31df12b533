"""What can happen to a training of hours, each as one training that has to reach its last iteration."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from soak.judgement import Samples, SoakFailed, count_lines
from soak.launches import Options, Training, launched

MEGATRON_EXITS = r"exiting program after receiving"
"""Megatron's line after a signal; it names SIGTERM whatever the signal was."""
AMPIPE_ENDS = r"^error: (?!rank \d+ failed: it has lost a peer)"
"""AMPipe's line with the cause. Ranks that have lost a peer say so, and that the cause is elsewhere."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """One kind of disturbance.

    Attributes:
        run: Trains to the last iteration, and returns the samples of the last launch.
        intervals_lost: How many intervals of checkpoints may be trained again.
        what: For the tables.
        loads: Whether a launch goes on from a checkpoint.
    """

    run: Callable[[Options, str], Samples]
    intervals_lost: int
    what: str
    loads: bool = True


def undisturbed(options: Options, name: str) -> Samples:
    """One launch from the first to the last iteration."""
    with launched(options, name, load=False) as training:
        _expect_success(training)
        return training.samples


def slow_rank(options: Options, name: str) -> Samples:
    """A rank stands still for up to 0.3 s, again and again, as one on a busy or faulty node does."""
    with launched(options, name, load=False) as training:
        training.wait_for(1)
        with _pauses(options, training.ranks()[0]):
            _expect_success(training)
        return training.samples


@contextlib.contextmanager
def _pauses(options: Options, pid: int) -> Iterator[None]:
    """Stop a process for a moment, again and again, until the context ends."""
    ended = threading.Event()

    def pause() -> None:
        while not ended.wait(options.random.uniform(0.05, 1.0)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(options.random.uniform(0.02, 0.3))
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=pause, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def sigterm(options: Options, name: str) -> Samples:
    """All ranks get SIGTERM, Megatron's own choice."""
    _end_by_signal(options, name, signal.SIGTERM)
    return _continued(options, name)


def sigusr2(options: Options, name: str) -> Samples:
    """All ranks get the signal of ``--exit-signal``."""
    _end_by_signal(options, name, signal.SIGUSR2, "--exit-signal", "SIGUSR2")
    return _continued(options, name)


def _end_by_signal(options: Options, name: str, number: signal.Signals, *flags: str) -> None:
    with launched(options, name, load=False, extra=flags) as training:
        training.wait_for(max(options.somewhere(), options.interval + 1))
        for pid in training.ranks():
            os.kill(pid, number)
        _expect_success(training)
        count_lines(training.output, MEGATRON_EXITS)
        if training.last_iteration == options.num_iterations:
            raise SoakFailed(f"{training.log.name}: {number.name} has not ended it")


def killed_rank(options: Options, name: str) -> Samples:
    """A rank disappears without a word; the launcher must end the others."""
    with launched(options, name, load=False) as training:
        training.wait_for(max(options.somewhere(), options.interval + 1))
        os.kill(options.random.choice(training.ranks()), signal.SIGKILL)
        _expect_failure(training, "a killed rank went unnoticed")
        count_lines(training.output, r"^ *traceback *: Signal 9 \(SIGKILL\) received by PID")
    return _continued(options, name)


def full_disk(options: Options, name: str) -> Samples:
    """From some iteration on, no file can be written; what was saved before must load."""
    with launched(options, name, load=False) as training:
        training.wait_for(max(options.somewhere(), options.interval + 1))
        for pid in training.ranks():
            # As on a full disk, a file cannot grow any more.
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        _expect_failure(training, "a full disk went unnoticed")
        count_lines(training.output, AMPIPE_ENDS, most=options.shape.num_ranks)
    return _continued(options, name)


def cut_checkpoint(options: Options, name: str) -> Samples:
    """The launcher and all ranks are killed, and the newest checkpoint is cut in the middle."""
    with launched(options, name, load=False) as training:
        training.wait_for(max(options.somewhere(), 2 * options.interval + 1))
    return _continued_without_newest(options, name)


def cut_at_sigterm(options: Options, name: str) -> Samples:
    """The checkpoint that is saved at SIGTERM is cut in the middle, as by a node that goes down too early."""
    _end_by_signal(options, name, signal.SIGTERM)
    return _continued_without_newest(options, name)


DISTURBANCES = {
    "slow-rank": Disturbance(
        slow_rank, 0, "a rank stands still for up to 0.3 s, again and again", loads=False
    ),
    "sigterm": Disturbance(sigterm, 0, "SIGTERM to all ranks"),
    "sigusr2": Disturbance(sigusr2, 0, "SIGUSR2 to all ranks, with `--exit-signal SIGUSR2`"),
    "killed-rank": Disturbance(killed_rank, 1, "SIGKILL to one rank"),
    "full-disk": Disturbance(full_disk, 1, "no file can grow any more at a save"),
    "cut-checkpoint": Disturbance(
        cut_checkpoint, 2, "SIGKILL to all, and the newest checkpoint cut in the middle"
    ),
    "cut-at-sigterm": Disturbance(
        cut_at_sigterm, 1, "SIGTERM to all ranks, and the checkpoint saved then cut in the middle"
    ),
}


def _continued(options: Options, name: str, *flags: str) -> Samples:
    """Go on from the last checkpoint to the last iteration."""
    with launched(options, name, load=True, extra=flags) as training:
        _expect_success(training)
        return training.samples


def _continued_without_newest(options: Options, name: str) -> Samples:
    """Cut the newest checkpoint, which must not load, and go on from the one before."""
    newest = options.last_saved(name)
    folder = options.checkpoints(name) / f"iter_{newest:07d}"
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    with launched(options, name, load=True) as training:
        _expect_failure(training, "a checkpoint that was cut in the middle loaded")
        count_lines(training.output, AMPIPE_ENDS)
    before = (newest - 1) // options.interval * options.interval
    return _continued(options, name, "--ckpt-step", str(before))


def _expect_success(training: Training) -> None:
    if (code := training.finish()) != 0:
        raise SoakFailed(f"{training.log.name}: ended with {code}")


def _expect_failure(training: Training, otherwise: str) -> None:
    if training.finish() == 0:
        raise SoakFailed(f"{training.log.name}: {otherwise}")
