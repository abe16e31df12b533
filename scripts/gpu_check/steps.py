"""What the check runs, one process after another, and for how long each may run. Called by :mod:`.__main__`.

A step that would not end in time is cut: its processes are killed, and the table says so. So the check ends
in time, whatever hangs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import DifferenceFound, EnvironmentMissing

REPOSITORY = Path(__file__).resolve().parents[2]
BUDGET_S = 530
"""For everything: under nine minutes, with some seconds for the start and the table."""
DEGREES = "1,2,4,8"
LINKS = ("emulated:20GB/s", "emulated:50GB/s")
TRACED_LINK = LINKS[0]
BENCHMARKS = {
    # Of the paper's sizes a small, a middle and a large one.
    "paper": ("base-16k-b1-c1,large-16k-b1-c2,xl-32k-b1-c1", 4, 60),
    "mixtral": ("mixtral-8k", 8, 40),
    "deepseek": ("deepseek-8k,deepseek-8k-grouped", 8, 40),
}
"""By grid: cases, ranks, seconds."""
_PARITY_S, _PROFILE_S, _DEVICE_S = 180, 70, 60
_GRACE_S = 5.0
# Less than this is not worth starting anything.
_SHORTEST_S = 5.0


class Outcome(StrEnum):
    """The result of a step, or of one line of its findings."""

    OK = "ok"
    DIFFERENT = "DIFFERENT"
    """It computes something else than Megatron, or what was to be shown is not so."""
    FAILED = "FAILED"
    CUT = "cut"
    """It took longer than it may, and was ended."""
    SKIPPED = "skipped"
    """There was no time left."""


@dataclass(frozen=True, slots=True)
class Step:
    """One process.

    Attributes:
        kind: How its findings are read: ``parity``, ``profile`` or ``bench``.
        name: In the table.
        command: What is run, in the checkout.
        result: The file that it writes.
        limit_s: It is cut after so many seconds.
    """

    kind: str
    name: str
    command: tuple[str, ...]
    result: Path
    limit_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """The result of a step.

    Attributes:
        kind: Of the step.
        name: Of the step.
        outcome: By its exit code and its time; what it found is for :mod:`.findings`.
        seconds: How long it ran.
        said: Its last line, if it failed.
        found: What it wrote, as text; None if nothing.
    """

    kind: str
    name: str
    outcome: Outcome
    seconds: float
    said: str
    found: str | None

    def as_json(self) -> dict[str, Any]:
        """For ``summary.json``."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Device:
    """The GPU that is checked.

    Attributes:
        gpu: Its name.
        torch: Version of torch.
        cuda: Version of CUDA that torch was built for.
        python: Version of Python.
    """

    gpu: str
    torch: str
    cuda: str
    python: str

    def as_json(self) -> dict[str, str]:
        """For ``summary.json``."""
        return asdict(self)

    @classmethod
    def ask(cls, environment: Mapping[str, str]) -> Device:
        """Ask torch, in a separate process.

        Raises:
            EnvironmentMissing: there is no torch, or it finds no CUDA device.
        """
        code = (
            "import json, platform, torch\n"
            "gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else ''\n"
            "print(json.dumps([gpu, torch.__version__, str(torch.version.cuda), platform.python_version()]))"
        )
        try:
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_DEVICE_S,
            )
        except subprocess.TimeoutExpired as error:
            raise EnvironmentMissing(f"torch did not start within {_DEVICE_S} s") from error
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise EnvironmentMissing(f"torch cannot be imported by {sys.executable} ({said})")
        device = cls(*json.loads(done.stdout.splitlines()[-1]))
        if not device.gpu:
            raise EnvironmentMissing(
                f"torch {device.torch} finds no CUDA device, and this check is for one. Run scripts/test.sh, "
                "which needs none"
            )
        return device


def plan(scratch: Path, output: Path) -> list[Step]:
    """All steps, the most important first.

    Args:
        scratch: Folder for what the steps write.
        output: Folder that the user keeps.
    """
    python = sys.executable
    junit, profile = scratch / "parity.xml", scratch / "profile.json"
    steps = [
        Step(
            kind="parity",
            name="parity",
            command=(
                python,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "tests/gpu",
                f"--junitxml={junit}",
            ),
            result=junit,
            limit_s=_PARITY_S,
        ),
        Step(
            kind="profile",
            name="profile",
            command=(
                *(python, "-m", "gpu_check.profiled", "--link", TRACED_LINK),
                *("--trace", str(output / "trace.json.gz"), "--json", str(profile)),
            ),
            result=profile,
            limit_s=_PROFILE_S,
        ),
    ]
    for link in LINKS:
        for grid, (cases, ranks, limit_s) in BENCHMARKS.items():
            file = scratch / f"{grid}-{link.partition(':')[2].replace('/', '-per-')}.json"
            command = (
                *(python, "-m", "megatron_ampipe.cli", "bench", "--grid", grid, "--cases", cases),
                *("--link", link, "--ranks", str(ranks), "--pretend-peers", "--degrees", DEGREES),
                *("--repeats", "5", "--warmup", "1", "--json", str(file)),
            )
            steps.append(Step("bench", f"bench {grid}, {link}", command, file, limit_s))
    return steps


def run(step: Step, *, environment: Mapping[str, str], log: Path, deadline: float) -> Done:
    """Run one step to its end, or to the end of its time.

    Args:
        step: What to run.
        environment: Of its process.
        log: All that it says is appended to this.
        deadline: Of the whole check, on the clock of ``time.monotonic``.
    """
    begin = time.monotonic()
    limit_s = min(step.limit_s, deadline - begin)
    if limit_s < _SHORTEST_S:
        return Done(step.kind, step.name, Outcome.SKIPPED, 0.0, "no time left", None)
    print(f"{step.name} (at most {limit_s:.0f} s)", flush=True)
    with log.open("ab") as file:
        file.write(f"\n== {step.name}\n".encode())
        file.flush()
        start = file.tell()
        code = _wait(step.command, environment=environment, log=file, limit_s=limit_s)
    seconds = round(time.monotonic() - begin, 1)
    if code is None:
        outcome, said = Outcome.CUT, f"did not end within {limit_s:.0f} s"
    elif code == 0:
        outcome, said = Outcome.OK, ""
    else:
        outcome = Outcome.DIFFERENT if code == DifferenceFound.exit_code else Outcome.FAILED
        said = _last_line(log, start) or f"exit code {code}"
    found = step.result.read_text() if step.result.is_file() else None
    return Done(step.kind, step.name, outcome, seconds, said, found)


def _wait(command: Sequence[str], *, environment: Mapping[str, str], log: Any, limit_s: float) -> int | None:
    """The exit code; None if the time was over and everything of it was ended."""
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also on Ctrl-C. First kindly: ampipe bench then ends its ranks.
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _last_line(log: Path, start: int) -> str:
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
