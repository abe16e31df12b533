"""Starts the processes of a measurement, connects them, reads their answers, and ends them whatever happens.

Every rank is a process in a separate session, so that Ctrl-C reaches only the command, which then kills them;
the kernel kills them if the command dies itself (:mod:`.rank_worker`). Imports no torch. Called by
``ampipe bench``, ``ampipe profile`` and ``benchmark.training``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_ampipe.errors import AMPipeError, DifferenceFound, EnvironmentMissing, RunFailed
from megatron_ampipe.tools.measuring import network
from megatron_ampipe.tools.measuring.link import LinkKind, parse_link
from megatron_ampipe.tools.measuring.rank_job import BlockJob, RankJob

_PREFIX = "ampipe-bench-"
_SOURCES = str(Path(__file__).resolve().parents[3])
_LOG_LINES = 15
# When a rank is lost, its peers fail a moment later; the first cause is reported.
_GRACE_S = 0.3
_POLL_S = 1.0
_KINDS: dict[int, type[AMPipeError]] = {1: EnvironmentMissing, 4: DifferenceFound}


@dataclass(slots=True)
class RankReports:
    """What the ranks reported.

    Attributes:
        cases: By case, the report of each rank.
        hardware: What the first rank knows about its device.
    """

    cases: list[list[dict[str, Any]]]
    hardware: dict[str, str] = field(default_factory=dict)


def measure(
    job: BlockJob,
    *,
    timeout_s: float,
    on_event: Callable[[str], None],
    on_case: Callable[[int, RankReports], None] = lambda *_: None,
) -> RankReports:
    """Run a job to its end.

    Args:
        job: What to do; its ``rendezvous`` is filled in here.
        timeout_s: The run fails after so long without an answer.
        on_event: Told the name of each event of rank 0.
        on_case: Told the index of each case that all ranks have finished, and what they reported so far.

    Raises:
        RunFailed: a rank was lost or failed, or none answered in time.
        DifferenceFound: the layers do not compute the same.
        EnvironmentMissing: the network cannot be made.
    """
    num_ranks = job.num_processes
    reports = RankReports([[{}] * num_ranks for _ in job.cases])
    with started(job, timeout_s=timeout_s) as ranks:
        for rank, found in ranks.events(timeout_s=timeout_s):
            event = found.pop("event")
            if event == "case":
                index = found.pop("index")
                reports.cases[index][rank] = found
                if all(reports.cases[index]):
                    on_case(index, reports)
            elif event == "ready" and rank == 0:
                reports.hardware = found["hardware"]
            if rank == 0:
                on_event(event)
    return reports


@contextlib.contextmanager
def started(job: RankJob, *, timeout_s: float, log: Path | None = None) -> Iterator[Ranks]:
    """The ranks of a job, connected and started; their processes have ended when this ends for any reason.

    Args:
        job: What they do; its ``rendezvous`` is filled in here.
        timeout_s: The run fails after so long without an answer.
        log: File that receives what all ranks print; None for temporary files, one for each rank.

    Raises:
        RunFailed: a rank was lost or failed, or none answered in time.
        EnvironmentMissing: the network cannot be made.
    """
    _remove_stale_folders()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-")))
        stack.enter_context(signals_as_interrupts())
        ranks = stack.enter_context(Ranks(replace(job, rendezvous=str(folder / "rendezvous")), folder, log))
        ranks.wait_for("placed", timeout_s=timeout_s)
        link = parse_link(job.link)
        if link.kind is LinkKind.NETWORK:
            assert link.rate_bit_per_s is not None
            stack.enter_context(
                network.joined(ranks.pids, rate_bit_per_s=link.rate_bit_per_s, nodes=link.nodes)
            )
        ranks.tell("go")
        yield ranks


class Ranks:
    """The processes of a job. Made by :func:`started`."""

    def __init__(self, job: RankJob, folder: Path, log: Path | None = None) -> None:
        self._job, self._folder, self._log = job, folder, log
        self._processes: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._unfinished: dict[int, bytes] = {}
        self._failures: dict[int, tuple[int, str]] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def __enter__(self) -> Ranks:
        try:
            for rank in range(self._job.num_processes):
                self._start(rank)
            self.tell(self._job.to_json())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                # A rank that ended without reading its job leaves it in the pipe.
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()
        self._selector.close()

    def tell(self, line: str) -> None:
        """One line to every rank. A rank that has ended is found when answers are read."""
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line.encode() + b"\n")
                process.stdin.flush()

    def wait_for(self, event: str, *, timeout_s: float) -> None:
        """Until every rank has reported the event."""
        missing = set(range(len(self._processes)))
        for rank, found in self._heard(timeout_s=timeout_s):
            if found["event"] == event:
                missing.discard(rank)
            if not missing:
                return

    def events(self, *, timeout_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """The answers, each with its rank, until every rank is done."""
        missing = set(range(len(self._processes)))
        for rank, found in self._heard(timeout_s=timeout_s):
            if found["event"] == "done":
                missing.discard(rank)
            yield rank, found
            if not missing:
                return

    def _start(self, rank: int) -> None:
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._job.num_ranks),
            "LOCAL_WORLD_SIZE": str(self._job.num_ranks),
            "AMPIPE_BENCH_PARENT": str(os.getpid()),
            # Temporary files of libraries are removed with the folder.
            "TMPDIR": str(self._folder),
            "PYTHONPATH": os.pathsep.join(filter(None, [_SOURCES, os.environ.get("PYTHONPATH")])),
        }
        if self._job.device == "cpu":
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # Appended to, so that ranks that share a file do not overwrite each other.
        with self._log_of(rank).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", self._job.worker],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._processes.append(process)
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._selector.register(process.stdout, selectors.EVENT_READ, rank)
        self._unfinished[rank] = b""

    def _heard(self, *, timeout_s: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Answers as they arrive. Raises when a rank fails or is lost, or none answers."""
        last_sign = time.monotonic()
        failing_since: float | None = None
        while True:
            # Wakes up rarely, for an answer or the end of a rank: on two cores it competes with the ranks.
            for key, _ in self._selector.select(timeout=_POLL_S if failing_since is None else _GRACE_S):
                for found in self._read(key.data, key.fileobj):
                    last_sign = time.monotonic()
                    if found["event"] == "failed":
                        self._failures.setdefault(key.data, (found["code"], found["message"]))
                    else:
                        yield key.data, found
            lost = [p.returncode for p in self._processes if p.poll() not in (None, 0)]
            if lost or self._failures:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > _GRACE_S:
                    raise self._failure()
            elif time.monotonic() - last_sign > timeout_s:
                raise RunFailed(
                    f"no rank answered for {timeout_s:g} s; all were ended. "
                    f"Use a longer --timeout.{self._log_tail(0)}"
                )

    def _read(self, rank: int, pipe: Any) -> list[dict[str, Any]]:
        data = os.read(pipe.fileno(), 1 << 20)
        if not data:
            self._selector.unregister(pipe)
            # Without a pipe left to wait for, select would return at once.
            time.sleep(0.02)
        *lines, self._unfinished[rank] = (self._unfinished[rank] + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _failure(self) -> AMPipeError:
        """The first cause: a rank that was killed counts before ranks that lost a peer."""
        codes = {rank: process.returncode for rank, process in enumerate(self._processes)}
        killed = [rank for rank, code in codes.items() if code is not None and code < 0]
        if killed:
            name = signal.Signals(-codes[killed[0]]).name
            return RunFailed(f"rank {killed[0]} was killed by {name}; the others were ended")
        known = [(rank, *found) for rank, found in self._failures.items() if found[0] in _KINDS]
        if known:
            rank, code, message = known[0]
            return _KINDS[code](message)
        rank = min(self._failures or {r: c for r, c in codes.items() if c})
        message = self._failures.get(rank, (0, f"ended with exit code {codes[rank]}"))[1]
        return RunFailed(f"rank {rank} failed: {message}{self._log_tail(rank)}")

    def _log_of(self, rank: int) -> Path:
        return self._log or self._folder / f"rank{rank}.log"

    def _log_tail(self, rank: int) -> str:
        lines = self._log_of(rank).read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "".join(f"\n  {line}" for line in ["", f"last lines of rank {rank}:", *lines] if lines)


@contextlib.contextmanager
def signals_as_interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that everything is cleaned up."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    earlier = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _remove_stale_folders() -> None:
    """Logs of runs that were killed outright: their name carries the process id."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        found = re.match(rf"{_PREFIX}(\d+)-", folder.name)
        if found and not Path(f"/proc/{found[1]}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)
