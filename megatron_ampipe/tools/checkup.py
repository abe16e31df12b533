"""What ``ampipe doctor`` looks at on one machine: packages, devices, environment variables.

A package counts as broken when it is installed and cannot be imported. Each is imported in a separate
process, because a broken one may end it: ``python -m megatron_ampipe.tools.checkup NAME`` prints what
it found as JSON. Imports neither torch nor Megatron itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.errors import AMPipeError
from megatron_ampipe.launch import connections, datasets
from megatron_ampipe.launch.failures import HELPERS_REMEDY

TORCH, MEGATRON = "torch", "Megatron"
_PROBE_TIMEOUT_S = 120

COMPARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "NVTE_", "UCX_", "AMPIPE_")
COMPARED_NAMES = (
    connections.VARIABLE,
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "NCCL_TOPO_FILE", "UCX_NET_DEVICES")
"""They name a node's hardware."""
_HARMFUL = (
    ("CUDA_LAUNCH_BLOCKING", "every kernel is waited for: nothing overlaps", "unset it; it is for debugging"),
    ("TORCH_NCCL_BLOCKING_WAIT", "the host waits for every collective: nothing overlaps", "unset it"),
    ("NCCL_P2P_DISABLE", "disables a fast path between GPUs", "unset it, unless this machine hangs without"),
    ("NCCL_IB_DISABLE", "disables InfiniBand and RoCE", "unset it where there is such a network"),
    ("NCCL_SHM_DISABLE", "disables a fast path between GPUs", "unset it"),
)


class Status(StrEnum):
    """The state of a component."""

    OK = "ok"
    MISSING = "missing"
    TOO_OLD = "too old"
    BROKEN = "broken"
    UNTESTED = "untested"


@dataclass(frozen=True, slots=True)
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
    def problem(self) -> str | None:
        """A required component that is not ok, or an optional one that is broken, as a sentence."""
        # A launch only warns of what is untested, too.
        if self.status in (Status.OK, Status.UNTESTED) or not (self.required or self.status is Status.BROKEN):
            return None
        return (
            f"{self.name} is {self.status}: found {self.found}, needed {self.needed}. Get it: {self.remedy}."
        )


@dataclass(frozen=True, slots=True)
class Note:
    """What a user should know about an environment variable; ``value`` is None where it is not set."""

    name: str
    value: str | None
    means: str
    remedy: str


def examine() -> tuple[list[Component], Mapping[str, Any]]:
    """Look at everything that a training run may need.

    Returns:
        The components, and what the probe found out about torch: ``error`` where it cannot be imported.
    """
    packages = compat.OPTIONAL_PACKAGES
    modules = [TORCH, MEGATRON, *(one.module for one in packages if compat.has_optional_package(one))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = dict(zip(modules, pool.map(probe, modules), strict=True))
    torch: Mapping[str, Any] = answers[TORCH] or {"error": None}
    gpus = torch.get("gpus")
    python_is_ok = sys.version_info[:2] >= tuple(map(int, compat.MINIMUM_PYTHON.split(".")))
    components = [
        Component(
            "Python",
            Status.OK if python_is_ok else Status.TOO_OLD,
            platform.python_version(),
            f">= {compat.MINIMUM_PYTHON}",
            True,
            "everything",
            "make the environment with a newer Python",
        ),
        Component(
            TORCH,
            *_state("torch", answers[TORCH]),
            f">= {compat.MINIMUM_VERSIONS['torch']}",
            True,
            "everything",
            "pip install torch, as pytorch.org says for the machine's CUDA",
        ),
        Component(
            "CUDA",
            Status.OK if gpus else Status.MISSING,
            f"{torch['cuda']}, NCCL {torch['nccl']}, {len(gpus)} x {gpus[0]}" if gpus else "no GPU",
            "optional",
            False,
            "speed: without a GPU Megatron trains on the CPU, which is for trying things",
            "a GPU, its driver, and a torch that is built for CUDA",
        ),
        megatron_component(answers[MEGATRON]),
        dataset_helper(),
    ]
    return [*components, *(_optional(package, answers) for package in packages)], torch


def megatron_component(answer: Mapping[str, Any] | None) -> Component:
    """The Megatron that a launch from here imports, a checkout's where that comes first."""
    minimum, newest = compat.MINIMUM_VERSIONS["megatron-core"], compat.SUPPORTED_MEGATRON[-1]
    status, found = _state("megatron-core", answer)
    lost = "training; schedules and pictures can still be made"
    remedy = f"pip install 'megatron-core[training]>={minimum}'"
    if status is Status.OK and compat.is_untested(Version(found.partition(" ")[0])):
        status = Status.UNTESTED
        lost = "certainty: AMPipe's tests have not run with it"
        remedy = f"pip install 'megatron-core[training]=={newest}.*'"
    needed = f">= {minimum}; tested: {', '.join(compat.SUPPORTED_MEGATRON)}"
    return Component(
        MEGATRON, status, found, needed, True, lost, remedy, tuple((answer or {}).get("lacks", ()))
    )


def dataset_helper() -> Component:
    """What Megatron's datasets are indexed with: in a wheel, or built, or to be built when a run starts."""
    missing = datasets.missing_tools()
    return Component(
        "dataset helper",
        Status.MISSING if missing else Status.OK,
        "; ".join(missing) or "built, or can be compiled",
        "a checkout of Megatron-LM compiles it at start; a wheel has it",
        datasets.must_be_compiled(),
        "the launcher and the patch, with a checkout that was never compiled",
        HELPERS_REMEDY,
    )


def _state(distribution: str, answer: Mapping[str, Any] | None) -> tuple[Status, str]:
    """Status of a required package, and its version and where it lies in words.

    Args:
        distribution: As pip calls it.
        answer: The probe's; None where the package is not there.
    """
    if answer is None:
        return Status.MISSING, "-"
    # What was imported need not be what pip installed.
    found = answer.get("version") or str(compat.installed_version(distribution) or "a checkout")
    if answer.get("error") is not None:
        return Status.BROKEN, f"{found}: {answer['error']}"
    is_old = Version(found.partition(" ")[0]) < Version(compat.MINIMUM_VERSIONS[distribution])
    return Status.TOO_OLD if is_old else Status.OK, found


def _optional(package: compat.OptionalPackage, answers: Mapping[str, Mapping[str, Any] | None]) -> Component:
    version = compat.installed_version(package.distribution)
    found, status = str(version or "-"), Status.OK
    if not compat.has_optional_package(package):
        status = Status.MISSING if version is None or package.minimum is None else Status.TOO_OLD
    elif (error := (answers[package.module] or {"error": "cannot be found"}).get("error")) is not None:
        found, status = f"{found}: {error}", Status.BROKEN
    needed = f"optional, >= {package.minimum}" if package.minimum else "optional"
    return Component(package.name, status, found, needed, False, package.lost, package.remedy)


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be equal on every rank."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in COMPARED_NAMES or name.startswith(COMPARED_PREFIXES)) and name not in MAY_DIFFER
    }


def notes_on_variables(environ: Mapping[str, str], *, has_gpu: bool) -> list[Note]:
    """What is to be said about the variables that are set."""
    notes = []
    queues = environ.get(connections.VARIABLE)
    if has_gpu or queues is not None:
        means, remedy = connections.meaning(queues)
        if queues is None:
            remedy = f"nothing to do: pipelined launches set {connections.QUEUES}"
        notes.append(Note(connections.VARIABLE, queues, means, remedy or "nothing to do"))
    for name, means, remedy in _HARMFUL:
        if (value := environ.get(name, "0")) not in ("", "0"):
            notes.append(Note(name, value, means, remedy))
    return notes


def probe(component: str) -> dict[str, Any] | None:
    """Import a component in another process; None where it is not there, ``error`` where that fails."""
    root = {MEGATRON: "megatron"}.get(component, component.partition(".")[0])
    if importlib.util.find_spec(root) is None:
        return None
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_ampipe.tools.checkup", component],
            env=environment_for_modules(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing it took more than {_PROBE_TIMEOUT_S} s"}
    if done.returncode == 0:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    # A negative code is that of a signal, as of SIGABRT.
    return {"error": f"importing it ended with {done.returncode}: {' '.join(done.stderr.splitlines()[-5:])}"}


def environment_for_modules() -> dict[str, str]:
    """The environment of a process that imports this package from where this one did."""
    source = str(compat.__file__).removesuffix("/megatron_ampipe/compat.py")
    return os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}


def nccl_version() -> str | None:
    """The version of NCCL that torch brings, None where it has none."""
    import torch

    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def look_at(component: str) -> dict[str, Any]:
    """Import a component, and say what only the imported package knows."""
    if component == MEGATRON:
        from megatron_ampipe.launch.flags import import_megatron

        # What a launch does first.
        import_megatron()
        return {"version": compat.describe_megatron(), "lacks": compat.missing_internals()}
    module = importlib.import_module(component)
    if component != TORCH:
        return {}
    gpus = [module.cuda.get_device_name(index) for index in range(module.cuda.device_count())]
    version = str(module.__version__)
    return {"version": version, "cuda": module.version.cuda, "gpus": gpus, "nccl": nccl_version()}


def main() -> None:
    """Look at the component that the command line names."""
    try:
        answer = look_at(sys.argv[1])
    # Whatever an import of other people's code may raise, SystemExit included.
    except BaseException as error:
        answer = {
            "error": str(error) if isinstance(error, AMPipeError) else f"{type(error).__name__}: {error}"
        }
    print("\n" + json.dumps(answer), flush=True)
    # Half-imported packages may crash at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
