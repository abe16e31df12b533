"""A cluster of loopback nodes built from the stub's commands: runs the job that ``ampipe sbatch`` submits."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.megatron.launcher import environment
from tests.slurm.stub import FOLDER, OF_A_TASK, processes, send

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
    """A cluster for one job at a time.

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
        self.job_id = os.getpid() % 10_000

    @property
    def environment(self) -> dict[str, str]:
        path = [str(self._bin), str(Path(sys.executable).parent), os.environ["PATH"]]
        kept = {name: value for name, value in environment().items() if not name.startswith("SLURM_")}
        return {**kept, "PATH": os.pathsep.join(path), FOLDER: str(self._state)}

    def ampipe_sbatch(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "megatron_ampipe.cli", "sbatch", *words],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    def submit(self, *words: str) -> None:
        """Submit a job; :meth:`start` runs it."""
        self.job_id = _job_id_with_a_free_port(self.job_id + 1)
        (self._state / "job-id").write_text(str(self.job_id))
        done = self.ampipe_sbatch("--submit", *words)
        assert done.returncode == 0, done.stderr
        assert f"Submitted batch job {self.job_id}\n" in done.stdout
        self._attempts = 0

    @property
    def submitted(self) -> bool:
        return (self._state / "script").exists()

    def start(self) -> subprocess.Popen[bytes]:
        """The script of the job, started once more as slurmctld and slurmd do it."""
        given = json.loads((self._state / "directives").read_text())
        identity = {
            "SLURM_JOB_ID": str(self.job_id),
            "SLURM_JOB_NODELIST": f"127.0.0.[1-{given['nodes']}]",
        }
        if given["array"] is not None:
            # One task of the array, which has a separate number.
            identity |= {"SLURM_ARRAY_JOB_ID": str(self.job_id), "SLURM_ARRAY_TASK_ID": given["array"]}
        if self._attempts:
            identity["SLURM_RESTART_COUNT"] = str(self._attempts)
        self._attempts += 1
        (self._state / "requeue").unlink(missing_ok=True)
        (self._state / "state").write_text("RUNNING")
        log = given["output"].replace("%x", given["job_name"]).replace("%j", str(self.job_id))
        with (self.folder / log).open("a" if given["open_mode"] == "append" else "w") as output:
            return subprocess.Popen(
                ["bash", self._state / "script"],
                cwd=self.folder,
                env=self.environment | identity,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ended(self, script: subprocess.Popen[bytes], *, timeout_s: float = 30) -> Ended:
        """What became of an attempt, as soon as its script has ended."""
        try:
            code = script.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"timeout after {timeout_s} s\n{self.everything()}") from None
        left = self.end()
        requeue = json.loads((self._state / "directives").read_text())["requeue"]
        return Ended(code, requeue and (self._state / "requeue").exists(), left)

    def run(self) -> list[Ended]:
        """Run the job until it is not requeued; all its attempts."""
        attempts = [self.ended(self.start())]
        while attempts[-1].requeued:
            attempts.append(self.ended(self.start()))
        return attempts

    def until(self, happened: Callable[[], bool], *, timeout_s: float = 30) -> None:
        """Wait for a condition; fails the test if it takes longer."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline, f"timeout after {timeout_s} s\n{self.everything()}"
            time.sleep(0.01)

    def processes(self, *texts: str) -> list[int]:
        """The processes of this job that run, with each of these texts in their environment."""
        return processes(f"{FOLDER}={self._state}", *texts)

    def cancel(self, script: subprocess.Popen[bytes]) -> None:
        """Like ``scancel``: the job is no longer running, and its steps are terminated."""
        (self._state / "state").write_text("CANCELLED")
        srun = {*self.processes()} - {*self.processes(OF_A_TASK), script.pid}
        send(signal.SIGTERM, list(srun))

    def end(self) -> int:
        """Kill what still runs of the job; returns how many processes that were."""
        left = self.processes()
        send(signal.SIGKILL, left)
        return len(left)

    def said(self) -> str:
        """What the script says, in all attempts."""
        return next(self.folder.glob(f"*-{self.job_id}.out")).read_text()

    def log(self, *, attempt: int, node: int) -> str:
        """Of the job with the name ``job``."""
        folder = self.folder / f"runs/job/{self.job_id}/logs/{self.job_id}.{attempt}"
        path = folder / f"127.0.0.{node}.log"
        return path.read_text() if path.exists() else ""

    def everything(self) -> str:
        logs = [*self.folder.glob("*.out"), *self.folder.glob("runs/**/logs/*/*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in logs)


def _job_id_with_a_free_port(first: int) -> int:
    """A job number for which the port that the job script derives from it is free."""
    for job_id in range(first, first + 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", 20_000 + job_id % 12_000))
            return job_id
    raise AssertionError("no free port")
