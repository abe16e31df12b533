"""A cluster of loopback nodes built from the stub's commands: submits jobs and reports their results."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.megatron.launcher import Run, environment, parse

STUB = Path(__file__).with_name("stub.py")
COMMANDS = ("sbatch", "srun", "scontrol")


@dataclass(frozen=True, slots=True)
class Ended:
    """One attempt of a job that has ended."""

    code: int
    requeued: bool
    left: int
    """Number of processes that were still running when the job script had ended."""


class Cluster:
    """A cluster for one job.

    Args:
        folder: The submission folder; empty.
        fake_python: A bash script that replaces ``python`` inside the job; None for the real one.
    """

    def __init__(self, folder: Path, *, fake_python: str | None = None) -> None:
        self.folder = folder
        self._state = folder / "slurm-state"
        self._bin = folder / "bin"
        for path in (self._state, self._bin):
            path.mkdir(parents=True)
        # The stub's own Python, independent of the job's python.
        commands = {name: f'exec {sys.executable} {STUB} {name} "$@"' for name in COMMANDS}
        for name, line in (commands | ({"python": fake_python} if fake_python else {})).items():
            (self._bin / name).write_text(f"#!/usr/bin/env bash\n{line}\n")
            (self._bin / name).chmod(0o755)
        self.job_id = _job_id_with_a_free_port()
        (self._state / "job-id").write_text(str(self.job_id))

    @property
    def environment(self) -> dict[str, str]:
        path = [str(self._bin), str(Path(sys.executable).parent), os.environ["PATH"]]
        kept = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
        return {**kept, "PATH": os.pathsep.join(path), "SLURM_STUB_DIR": str(self._state)}

    def ampipe_sbatch(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "megatron_ampipe.cli", "sbatch", *words],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    def submit(self, *words: str) -> None:
        done = self.ampipe_sbatch("--submit", *words)
        assert done.returncode == 0, done.stderr
        assert f"Submitted batch job {self.job_id}\n" in done.stdout

    def next_job(self) -> None:
        self.job_id = _job_id_with_a_free_port(self.job_id + 1)
        (self._state / "job-id").write_text(str(self.job_id))
        for name in ("events", "state", "script"):
            (self._state / name).unlink()

    def until(self, happened: Callable[[], object], *, timeout_s: float = 30) -> None:
        """Wait until a condition holds; after a timeout, end the job and fail the test."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            if time.monotonic() > deadline:
                self.end()
                raise AssertionError(f"timeout after {timeout_s} s\n{self.everything()}")
            time.sleep(0.01)

    def wait(self, *, timeout_s: float = 30) -> str:
        """Wait until the job has ended and is not requeued; returns its last state."""
        self.until(lambda: self.state in ("COMPLETED", "FAILED", "CANCELLED"), timeout_s=timeout_s)
        return self.state

    def cancel(self) -> None:
        """Like ``scancel``: the job is no longer running, and its steps are terminated."""
        (self._state / "state").write_text("CANCELLED")
        for pid in self.processes("srun"):
            os.kill(pid, signal.SIGTERM)

    def end(self) -> None:
        for pid in self.processes(""):
            # One that ends meanwhile is gone.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def processes(self, words: str) -> list[int]:
        """The processes of this job whose command line contains ``words``, such as a rank's module."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"SLURM_STUB_DIR={self._state}".encode() in (entry / "environ").read_bytes()
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if mine and words in line:
                found.append(int(entry.name))
        return sorted(found)

    @property
    def state(self) -> str:
        return _text(self._state / "state") or "PENDING"

    @property
    def attempts(self) -> list[Ended]:
        pattern = r"^ended \d+ code (-?\d+) requeued (True|False) left (\d+)$"
        return [
            Ended(int(code), requeued == "True", int(left))
            for code, requeued, left in re.findall(pattern, self.events, re.M)
        ]

    @property
    def script_pid(self) -> int:
        """Process id of the job script of the running attempt, to which SLURM sends USR1."""
        return int(re.findall(r"^attempt \d+ pid (\d+)$", self.events, re.M)[-1])

    @property
    def events(self) -> str:
        return _text(self._state / "events")

    def said(self, name: str) -> str:
        return _text(self.folder / f"{name}-{self.job_id}.out")

    def run_dir(self, name: str) -> Path:
        return self.folder / "runs" / name / str(self.job_id)

    def log(self, name: str, *, attempt: int, node: int) -> str:
        return _text(self.run_dir(name) / f"logs/{self.job_id}.{attempt}/127.0.0.{node}.log")

    def losses(self, name: str, *, attempt: int, node: int) -> Run:
        return parse(0, self.log(name, attempt=attempt, node=node))

    def everything(self) -> str:
        logs = [*self.folder.glob("*.out"), *self.folder.glob("runs/**/logs/*/*.log"), self._state / "events"]
        return "\n".join(f"== {path.name}\n{_text(path)[-3000:]}" for path in logs)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _job_id_with_a_free_port(first: int | None = None) -> int:
    """A job number for which the port that the job script derives from it is free."""
    first = os.getpid() % 10_000 if first is None else first
    for job_id in range(first, first + 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", 20_000 + job_id % 12_000))
            except OSError:
                continue
            return job_id
    raise AssertionError("no free port")
