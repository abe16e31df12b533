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
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from gpu_check.families import FAMILIES
from megatron_ampipe.errors import DifferenceFound, EnvironmentMissing

REPOSITORY = Path(__file__).resolve().parents[2]
BUDGET_S = 530
"""For everything: under nine minutes, with some seconds for the start and the table."""
DEGREES = "2,4"
LINKS = ("emulated:20GB/s", "emulated:50GB/s")
TRACED_LINK = LINKS[0]
BENCHMARKS = {
    "mixtral": ("mixtral-8k", 8, 45),
    "deepseek": ("deepseek-8k-grouped", 8, 35),
    # Of the paper's sizes a middle and a large one.
    "paper": ("large-16k-b1-c2,xl-32k-b1-c1", 4, 50),
}
"""By grid: cases, ranks, seconds."""
_PROFILE_S, _ATTENTION_S, _PARTNERS_S, _TRAINING_S, _DEVICE_S = 45, 40, 70, 150, 60
_RUN = "packaging", "ruamel.yaml", "numpy", "torch", "megatron.core"
_TEST = (*_RUN, "pytest", "pytest_timeout")
_TRAIN = (*_RUN, "rich", "tqdm", "pydantic")
COMPILER = "a C compiler with Python.h and triton"
"""What Triton needs to compile; all other needs are modules."""
TESTS = {
    # Modules and names of tests, seconds, needs beyond those of all tests.
    "cases": (("test_cuda.py", "test_gradients.py"), "not transformer and not compiled", 110, ()),
    "partners": (("test_partners.py",), "", 110, ()),
    "graphs": (("test_graphs.py",), "not transformer_engine", 60, ()),
    "stress": (("test_stress.py",), "", 110, ()),
    "link": (("test_link.py",), "", 60, ()),
    "attention": (("test_attention.py",), "", 110, ()),
    "transformer engine": (
        ("test_gradients.py", "test_graphs.py"), "transformer_engine", 110, ("transformer_engine.pytorch",),
    ),
    "compiled": (("test_cuda.py",), "compiled", 110, (COMPILER,)),
}  # fmt: skip
"""By step: parts of ``tests/gpu``, all run together."""
_GRACE_S, _POLL_S = 5.0, 0.05
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
    NO_TIME = "no time"
    """There was none left."""
    SKIPPED = "skipped"
    """Something is missing that it needs: no fault, and nothing is shown."""


@dataclass(frozen=True, slots=True)
class Step:
    """One process.

    Attributes:
        kind: How its findings are read: ``tests``, ``training``, ``profile``, ``attention``, ``partners``,
            ``bench``, ``ranks`` or ``queues``.
        name: In the table.
        command: What is run, in the checkout.
        result: The file that it writes.
        limit_s: It is cut after so many seconds.
        needs: Modules that it imports, and :data:`COMPILER`; a GPU is needed by all.
        environment: Variables of its process.
    """

    kind: str
    name: str
    command: tuple[str, ...]
    result: Path
    limit_s: float
    needs: tuple[str, ...] = _RUN
    environment: Mapping[str, str] = field(default_factory=lambda: {"TORCHDYNAMO_DISABLE": "1"})


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


def plan(scratch: Path, output: Path) -> list[list[Step]]:
    """All steps, the most important first; those of a list run together.

    Args:
        scratch: Folder for what the steps write.
        output: Folder that the user keeps.
    """
    python, needs = sys.executable, _TRAIN
    profile, attention, partners = (
        scratch / f"{name}.json" for name in ("profile", "attention-times", "partners")
    )
    together = [_tests(name, scratch) for name in TESTS]
    together += [_training(name, scratch) for name, family in FAMILIES.items() if family.ranks == 1]
    words: tuple[str, ...] = (
        *(python, "-m", "gpu_check.profiled", "--link", TRACED_LINK),
        *("--trace", str(output / "trace.json.gz"), "--json", str(profile)),
    )
    alone = [Step("profile", "profile", words, profile, _PROFILE_S, needs)]
    words = (python, "-m", "gpu_check.attention_times", "--json", str(attention))
    alone.append(Step("attention", "attention times", words, attention, _ATTENTION_S, needs))
    words = (python, "docs/measured/partners.py", str(partners), TRACED_LINK, "mixtral", "mixtral-4k")
    alone.append(Step("partners", f"partners, {TRACED_LINK}", words, partners, _PARTNERS_S, needs))
    for grid, (cases, ranks, limit_s) in BENCHMARKS.items():
        for link in LINKS[:1] if grid == "paper" else LINKS:
            file = scratch / f"{grid}-{link.partition(':')[2].replace('/', '-per-')}.json"
            words = (
                *(python, "-m", "megatron_ampipe.cli", "bench", "--grid", grid, "--cases", cases),
                *("--link", link, "--ranks", str(ranks), "--pretend-peers", "--degrees", DEGREES),
                *("--repeats", "5", "--warmup", "1", "--json", str(file)),
            )
            alone.append(Step("bench", f"bench {grid}, {link}", words, file, limit_s, needs))
    return [together, *([step] for step in alone)]


RANK_STEPS_S = {2: (170, 180, 170), 4: (150, 120, 0)}
"""By number of ranks on one device: seconds for the cases, for trainings, and for the order of kernels."""


def plan_of_ranks(num_ranks: int, scratch: Path) -> list[list[Step]]:
    """The steps of several ranks on one device, one after another, the most important first.

    Args:
        num_ranks: On the device.
        scratch: Folder for what the steps write.
    """
    cases_s, training_s, queues_s = RANK_STEPS_S[num_ranks]
    python = (sys.executable, "-m", "gpu_check.ranks", "--ranks", str(num_ranks))
    lines, queues = scratch / "ranks.jsonl", scratch / "queues.jsonl"
    steps = [Step("ranks", f"{num_ranks} ranks", (*python, "--json", str(lines)), lines, cases_s, _TEST)]
    for name, family in FAMILIES.items():
        if family.ranks == num_ranks:
            steps.append(_training(name, scratch, limit_s=training_s))
    if queues_s:
        words = (*python, "--json", str(queues), "--queues", "6")
        steps.append(Step("queues", "order of kernels", words, queues, queues_s, _TEST))
    return [[step] for step in steps]


def _training(name: str, scratch: Path, *, limit_s: float = _TRAINING_S) -> Step:
    file = scratch / f"training-{name.replace(' ', '-')}.json"
    words = (sys.executable, "-m", "gpu_check.trained", name, "--json", str(file))
    return Step("training", f"training, {name}", words, file, limit_s, (*_TRAIN, *FAMILIES[name].needs))


def _tests(name: str, scratch: Path) -> Step:
    modules, names, limit_s, more = TESTS[name]
    lines = scratch / f"{name.replace(' ', '-')}.jsonl"
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
        *("-p", "gpu_check.case_lines", "--case-lines", str(lines)),
        *(f"tests/gpu/{module}" for module in modules),
        *(("-k", names) if names else ()),
    )
    environment = {"TORCHDYNAMO_DISABLE": "0" if COMPILER in more else "1"}
    return Step("tests", name, command, lines, limit_s, (*_TEST, *more), environment)


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


def run(
    steps: Sequence[Step],
    *,
    environment: Mapping[str, str],
    lacking: Mapping[str, str],
    log: Path,
    deadline: float,
) -> list[Done]:
    """Run steps together, each to its end, or to the end of its time.

    Args:
        steps: What to run.
        environment: Of their processes.
        lacking: What of the needs of all steps is not there, as :func:`missing` found it.
        log: All that they say is appended to this, step by step.
        deadline: Of the whole check, on the clock of ``time.monotonic``.
    """
    done: dict[str, Done] = {}
    running: list[_Running] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for step in steps:
                lacks = [f"{need} ({lacking[need]})" for need in step.needs if need in lacking]
                if deadline - time.monotonic() < _SHORTEST_S:
                    done[step.name] = Done(step.kind, step.name, Outcome.NO_TIME, 0.0, "no time left", None)
                elif lacks:
                    said = f"needs {', '.join(lacks)}"
                    done[step.name] = Done(step.kind, step.name, Outcome.SKIPPED, 0.0, said, None)
                else:
                    own_log = Path(folder) / str(len(running))
                    running.append(_Running(step, environment, log=own_log, deadline=deadline))
            while left := [one for one in running if one.step.name not in done]:
                for one in left:
                    if (ended := one.done()) is not None:
                        done[one.step.name] = ended
                        with log.open("ab") as file:
                            file.write(f"\n== {one.step.name}\n".encode() + one.log.read_bytes())
                time.sleep(_POLL_S)
        finally:
            # Also on Ctrl-C.
            for one in running:
                one.end()
    return [done[step.name] for step in steps]


class _Running:
    """A step whose process runs."""

    def __init__(self, step: Step, environment: Mapping[str, str], *, log: Path, deadline: float) -> None:
        self.step, self.log = step, log
        self._begin = time.monotonic()
        self._limit_s = max(0.0, min(step.limit_s, deadline - self._begin))
        print(f"{step.name} (at most {self._limit_s:.0f} s)", flush=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                step.command,
                cwd=REPOSITORY,
                env={**environment, **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def done(self) -> Done | None:
        """What it was, once it has ended or its time is over; None before."""
        code = self._process.poll()
        seconds = time.monotonic() - self._begin
        if code is None and seconds < self._limit_s:
            return None
        self.end()
        if code is None:
            outcome, said = Outcome.CUT, f"did not end within {self._limit_s:.0f} s"
        elif code == 0:
            outcome, said = Outcome.OK, ""
        else:
            outcome = Outcome.DIFFERENT if code == DifferenceFound.exit_code else Outcome.FAILED
            said = _last_line(self.log) or f"exit code {code}"
        step = self.step
        found = step.result.read_text() if step.result.is_file() else None
        return Done(step.kind, step.name, outcome, round(seconds, 1), said, found)

    def end(self) -> None:
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
