"""Which packages are there, in which version, and whether they can be imported. Imports none of them itself.

A package counts as broken when it is installed and cannot be imported; a separate process tries it
(:mod:`.probe`). Called by ``ampipe doctor``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.launch import datasets
from megatron_ampipe.launch.failures import HELPERS_REMEDY
from megatron_ampipe.tools.checkup.probe import MEGATRON, TORCH

_SOURCES = str(Path(__file__).resolve().parents[3])
_PROBE_TIMEOUT_S = 120
_LOG_LINES = 5


class Status(StrEnum):
    """The state of a component."""

    OK = "ok"
    MISSING = "missing"
    TOO_OLD = "too old"
    BROKEN = "broken"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One line of the doctor's first table.

    Attributes:
        name: Of the component.
        status: See :class:`Status`.
        found: The version, or what is shown in place of one.
        needed: Which version is needed, and for what.
        required: Whether training is impossible without it.
        lost: What is not available while it is not ``ok``.
        remedy: How to get it.
        lacks: Names that AMPipe imports and that are not in it, each with the file that needs it.
    """

    name: str
    status: Status
    found: str
    needed: str
    required: bool
    lost: str
    remedy: str
    lacks: tuple[str, ...] = ()

    @property
    def is_problem(self) -> bool:
        """Whether this is a problem: a required component is not ok, or an optional one is broken."""
        # A launch only warns of what is untested, too.
        if self.status in (Status.OK, Status.UNTESTED):
            return False
        return self.required or self.status is Status.BROKEN


@dataclass(frozen=True, slots=True)
class Components:
    """All components, and what the probe found out about torch.

    Attributes:
        table: In the order of the table.
        torch: The probe's answer, ``error`` in it where torch cannot be imported.
    """

    table: tuple[Component, ...]
    torch: Mapping[str, Any]

    @property
    def gpus(self) -> list[str]:
        """Names of the GPUs that torch sees."""
        return list(self.torch.get("gpus", []))


def examine() -> Components:
    """Look at everything that a training run may need."""
    optional = [component for component in compat.OPTIONAL_PACKAGES if compat.has_optional_package(component)]
    modules = [TORCH, MEGATRON, *(component.module for component in optional)]
    answers = probe([name for name in modules if importlib.util.find_spec(_root_of(name)) is not None])
    torch = answers.get(TORCH, {"error": None})
    table = (
        _python(),
        _torch(answers.get(TORCH)),
        _cuda(torch),
        _nccl(torch),
        _megatron(answers.get(MEGATRON)),
        _dataset_helper(),
        *(_optional(component, answers) for component in compat.OPTIONAL_PACKAGES),
    )
    return Components(table, torch)


def probe(names: list[str]) -> dict[str, dict[str, Any]]:
    """Import each of these, in order, in another process; if that dies, go on with the next in a new one."""
    answers: dict[str, dict[str, Any]] = {}
    while names:
        command = [sys.executable, "-m", "megatron_ampipe.tools.checkup.probe", *names]
        path = os.pathsep.join(filter(None, [_SOURCES, os.environ.get("PYTHONPATH")]))
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"PYTHONPATH": path},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=_PROBE_TIMEOUT_S,
            )
            lines, errors, end = done.stdout, done.stderr, _how_it_ended(done.returncode)
        except subprocess.TimeoutExpired as error:
            lines, errors = (_text(stream) for stream in (error.stdout, error.stderr))
            end = f"does not end: importing it took more than {_PROBE_TIMEOUT_S} s"
        begun = names[0]
        for line in lines.splitlines():
            found = json.loads(line)
            begun = found.get("begin", begun)
            if "component" in found:
                answers[found.pop("component")] = found
        if begun not in answers:
            tail = " ".join(errors.splitlines()[-_LOG_LINES:])
            answers[begun] = {"error": " ".join(filter(None, [end, tail]))}
        names = [name for name in names if name not in answers]
    return answers


def _python() -> Component:
    found = platform.python_version()
    is_ok = sys.version_info[:2] >= tuple(map(int, compat.MINIMUM_PYTHON.split(".")))
    return Component(
        name="Python",
        status=Status.OK if is_ok else Status.TOO_OLD,
        found=found,
        needed=f">= {compat.MINIMUM_PYTHON}",
        required=True,
        lost="everything",
        remedy="make the environment with a newer Python",
    )


def _torch(answer: Mapping[str, Any] | None) -> Component:
    minimum = compat.MINIMUM_VERSIONS["torch"]
    status, found, _ = _state("torch", answer)
    return Component(
        name=TORCH,
        status=status,
        found=found,
        needed=f">= {minimum}",
        required=True,
        lost="everything",
        remedy="pip install torch, as pytorch.org says for the machine's CUDA",
    )


def _megatron(answer: Mapping[str, Any] | None) -> Component:
    """The Megatron that a launch from here imports, a checkout's where that comes first."""
    minimum, newest = compat.MINIMUM_VERSIONS["megatron-core"], compat.SUPPORTED_MEGATRON[-1]
    status, found, version = _state("megatron-core", answer)
    lost = "training; schedules and pictures can still be made"
    remedy = f"pip install 'megatron-core[training]>={minimum}'"
    if status is Status.OK and version is not None and compat.is_untested(version):
        status = Status.UNTESTED
        lost = "certainty: AMPipe's tests have not run with it"
        remedy = f"pip install 'megatron-core[training]=={newest}.*'"
    return Component(
        name=MEGATRON,
        status=status,
        found=found,
        needed=f">= {minimum}; tested: {', '.join(compat.SUPPORTED_MEGATRON)}",
        required=True,
        lost=lost,
        remedy=remedy,
        lacks=tuple((answer or {}).get("lacks", ())),
    )


def _dataset_helper() -> Component:
    """What Megatron's datasets are indexed with: in a wheel, or built, or to be built when a run starts."""
    is_needed = datasets.must_be_compiled()
    missing = datasets.missing_tools()
    found = "can be compiled" if not missing else "; ".join(missing)
    if not is_needed and importlib.util.find_spec("megatron") is not None:
        found = "built" if not missing else f"built; for another checkout: {found}"
    return Component(
        name="dataset helper",
        status=Status.MISSING if missing else Status.OK,
        found=found,
        needed="a checkout of Megatron-LM compiles it at start; a wheel has it",
        required=is_needed,
        lost="the launcher and the patch, with a checkout that was never compiled",
        remedy=HELPERS_REMEDY,
    )


def _state(distribution: str, answer: Mapping[str, Any] | None) -> tuple[Status, str, Version | None]:
    """Status of a required package, its version and where it lies in words, and its version.

    Args:
        distribution: As pip calls it.
        answer: The probe's; None where the package is not there.
    """
    version = compat.installed_version(distribution)
    if answer is None:
        return Status.MISSING, "-", version
    if "version" in answer:
        # What was imported need not be what pip installed.
        version = Version(answer["version"].partition(" ")[0])
    found = answer.get("version") or (str(version) if version is not None else "a checkout")
    if answer.get("error") is not None:
        return Status.BROKEN, f"{found}: {answer['error']}", version
    if version is not None and version < Version(compat.MINIMUM_VERSIONS[distribution]):
        return Status.TOO_OLD, found, version
    return Status.OK, found, version


def _optional(component: compat.OptionalPackage, answers: Mapping[str, Mapping[str, Any]]) -> Component:
    version = compat.installed_version(component.distribution)
    found = str(version) if version is not None else "-"
    answer = answers.get(component.module)
    if not compat.has_optional_package(component):
        status = Status.MISSING if version is None or component.minimum is None else Status.TOO_OLD
    elif answer is None or answer.get("error") is not None:
        status = Status.BROKEN
        found = f"{found}: {answer['error'] if answer else 'cannot be found'}"
    else:
        status = Status.OK
    return Component(
        name=component.name,
        status=status,
        found=found,
        needed=f"optional, >= {component.minimum}" if component.minimum else "optional",
        required=False,
        lost=component.lost,
        remedy=component.remedy,
    )


def _cuda(torch: Mapping[str, Any]) -> Component:
    gpus = torch.get("gpus") or []
    found = f"{torch['cuda']}, {len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    if not gpus and torch.get("cuda"):
        found = f"{torch['cuda']}, no GPU"
    return Component(
        name="CUDA",
        status=Status.OK if gpus else Status.MISSING,
        found=found,
        needed="optional",
        required=False,
        lost="speed: without a GPU Megatron trains on the CPU, which is for trying things",
        remedy="a GPU, its driver, and a torch that is built for CUDA",
    )


def _nccl(torch: Mapping[str, Any]) -> Component:
    needed_here = bool(torch.get("gpus"))
    version = torch.get("nccl")
    return Component(
        name="NCCL",
        status=Status.OK if version else Status.MISSING,
        found=version or "-",
        needed="for GPUs",
        required=needed_here,
        lost="communication between GPUs; CPUs use gloo",
        remedy="a torch that is built for CUDA brings it",
    )


def _root_of(module: str) -> str:
    return {TORCH: "torch", MEGATRON: "megatron"}.get(module, module.partition(".")[0])


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"importing it ended the process by {signal.Signals(-code).name}"
    return f"importing it ended the process with code {code}"


def _text(stream: bytes | str | None) -> str:
    return stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""
