"""Runs the steps of the check, one process after another or together, and how each ended. See :mod:`.plan`.

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
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpu_check.plan import COMPILER, REPOSITORY, Step
from megatron_ampipe.errors import DifferenceFound, EnvironmentMissing

_DEVICE_S = 60
_GRACE_S, _POLL_S = 5.0, 0.05
_KEPT_EVERY_S = 5.0
"""How often what a running step has written is kept."""
_SHORTEST_S = 5.0
"""Less than this is not worth starting anything."""
_LEAST_SHARE = 0.5
"""Of its limit that must be left when a step starts: most need about half, and one that is interrupted runs
again in the next call."""


class Outcome(StrEnum):
    """The result of a step, or of one line of its findings."""

    OK = "ok"
    DIFFERENT = "DIFFERENT"
    """It computes something else than Megatron, or what was to be shown is not so."""
    FAILED = "FAILED"
    CUT = "cut"
    """It took longer than it may, and was ended."""
    INTERRUPTED = "interrupted"
    """The time of the check was over, or somebody ended it, while this ran: the next call runs it again."""
    NO_TIME = "no time"
    """There was none left."""
    SKIPPED = "skipped"
    """Something is missing that it needs: no fault, and nothing is shown."""

    @property
    def is_final(self) -> bool:
        """Whether the step would end so again."""
        return self not in (Outcome.INTERRUPTED, Outcome.NO_TIME, Outcome.SKIPPED)


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
        begin: When it started, in UTC; empty if it did not.
        commit: Of the code that ran.
    """

    kind: str
    name: str
    outcome: Outcome
    seconds: float
    said: str
    found: str | None
    begin: str = ""
    commit: str = ""


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


_ASK = """
import importlib, importlib.util, json, os, shutil, sys, sysconfig
for need in json.loads(sys.argv[1]):
    why = ""
    try:
        if need == sys.argv[2]:
            importlib.import_module("triton")
            header = os.path.join(sysconfig.get_path("include"), "Python.h")
            if not os.path.isfile(header):
                why = "no Python.h"
            elif not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
                why = "no compiler"
        elif need.startswith("megatron"):
            why = "" if importlib.util.find_spec(need) else "not installed"
        else:
            importlib.import_module(need)
    except ModuleNotFoundError as error:
        why = "not installed" if error.name == need.partition(".")[0] else str(error)
    except Exception as error:
        why = str(error).strip().partition("\\n")[0] or type(error).__name__
    print("need", json.dumps([need, why]), flush=True)
"""


def missing(needs: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """What is not there, with the reason. Asked in a separate process, which an import may end."""
    found = dict.fromkeys(needs, "does not load")
    command = [sys.executable, "-c", _ASK, json.dumps(list(needs)), COMPILER]
    with tempfile.TemporaryFile("w+") as said, contextlib.suppress(subprocess.TimeoutExpired):
        try:
            subprocess.run(
                command,
                env=environment,
                stdout=said,
                stderr=subprocess.DEVNULL,
                timeout=_DEVICE_S,
                check=False,
            )
        finally:
            said.seek(0)
            answers = [line.partition(" ")[2] for line in said if line.startswith("need ")]
            found |= dict(map(json.loads, answers))
    return {need: why for need, why in found.items() if why}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What all steps have in common.

    Attributes:
        environment: Of their processes.
        lacking: What of the needs of all steps is not there, as :func:`missing` found it.
        log: All that they say is appended to this, step by step.
        deadline: Of the whole check, on the clock of ``time.monotonic``.
        commit: Of the code that runs.
    """

    environment: Mapping[str, str]
    lacking: Mapping[str, str]
    log: Path
    deadline: float
    commit: str = ""


def run(steps: Sequence[Step], around: Surroundings, keep: Callable[[Done], None]) -> None:
    """Run steps together, each to its end, or to the end of its time.

    Args:
        steps: What to run.
        around: What they have in common.
        keep: Gets every step when it has ended; and each that runs now and then, as if it were interrupted
            now, so that whatever ends this process, what was found is known.
    """
    running: list[_Running] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for step in steps:
                why_not = _why_not(step, around)
                if why_not is not None:
                    keep(why_not)
                else:
                    running.append(_Running(step, around, log=Path(folder) / str(len(running))))
            while any(one.ended is None for one in running):
                for one in running:
                    one.look(keep)
                time.sleep(_POLL_S)
        finally:
            # Also on Ctrl-C.
            for one in running:
                one.interrupt(keep)


def _why_not(step: Step, around: Surroundings) -> Done | None:
    """The outcome of a step that is not started."""
    left_s = around.deadline - time.monotonic()
    lacks = [f"{need} ({around.lacking[need]})" for need in step.needs if need in around.lacking]
    if lacks:
        said, outcome = f"needs {', '.join(lacks)}", Outcome.SKIPPED
    elif left_s < max(_SHORTEST_S, _LEAST_SHARE * step.limit_s):
        said, outcome = f"{max(left_s, 0):.0f} s left, of {step.limit_s:.0f}", Outcome.NO_TIME
    else:
        return None
    return Done(step.kind, step.name, outcome, 0.0, said, None)


class _Running:
    """A step whose process runs.

    Attributes:
        ended: What it was, once it has ended.
    """

    def __init__(self, step: Step, around: Surroundings, *, log: Path) -> None:
        self.step = step
        self.ended: Done | None = None
        self._around, self._log = around, log
        self._begin = self._kept = time.monotonic()
        self._began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        left_s = around.deadline - self._begin
        self._limit_s, self._is_short = min(step.limit_s, left_s), left_s < step.limit_s
        print(f"{step.name} (at most {self._limit_s:.0f} s)", flush=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                step.command,
                cwd=REPOSITORY,
                env={**around.environment, **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def look(self, keep: Callable[[Done], None]) -> None:
        """End it if its time is over; keep what is new of it."""
        if self.ended is not None:
            return
        code, now = self._process.poll(), time.monotonic()
        if code is None and now - self._begin < self._limit_s:
            if now - self._kept > _KEPT_EVERY_S:
                self._kept = now
                keep(self._done(Outcome.INTERRUPTED, "the check ended while it ran"))
            return
        self._stop()
        if code is None and self._is_short:
            said = f"the check's time was over after {self._limit_s:.0f} of {self.step.limit_s:.0f} s"
            self._finish(Outcome.INTERRUPTED, said, keep)
        elif code is None:
            self._finish(Outcome.CUT, f"did not end within {self._limit_s:.0f} s", keep)
        elif code == 0:
            self._finish(Outcome.OK, "", keep)
        else:
            outcome = Outcome.DIFFERENT if code == DifferenceFound.exit_code else Outcome.FAILED
            self._finish(outcome, _last_line(self._log) or f"exit code {code}", keep)

    def interrupt(self, keep: Callable[[Done], None]) -> None:
        """End it if it still runs."""
        if self.ended is None:
            self._stop()
            self._finish(Outcome.INTERRUPTED, "ended by a signal", keep)

    def _finish(self, outcome: Outcome, said: str, keep: Callable[[Done], None]) -> None:
        self.ended = self._done(outcome, said)
        with self._around.log.open("ab") as file:
            file.write(f"\n== {self.step.name}\n".encode() + self._log.read_bytes())
        keep(self.ended)

    def _done(self, outcome: Outcome, said: str) -> Done:
        found = self.step.result.read_text() if self.step.result.is_file() else None
        seconds = round(time.monotonic() - self._begin, 1)
        commit = self._around.commit
        return Done(self.step.kind, self.step.name, outcome, seconds, said, found, self._began, commit)

    def _stop(self) -> None:
        """End all of it that still runs; first kindly: ``ampipe bench`` then ends its ranks."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _last_line(log: Path) -> str:
    lines = log.read_bytes().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
