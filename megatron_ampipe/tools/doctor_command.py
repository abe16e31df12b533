"""``ampipe doctor``: checks what training needs, whether ranks agree, and whether overlap happens.

Works where torch or Megatron is absent or broken: neither is imported here. Under torchrun, the ranks are
compared that torchrun has started. A broken package may end the process that imports it, so each is imported
in another one: ``python -m megatron_ampipe.tools.doctor_command NAME`` prints what it found as JSON.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from megatron_ampipe import compat
from megatron_ampipe.errors import AMPipeError, EnvironmentMissing, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.launch import connections

TORCH, MEGATRON = "torch", "Megatron"
OK, MISSING, TOO_OLD, BROKEN, UNTESTED = "ok", "missing", "too old", "broken", "untested"
_PROBE_TIMEOUT_S = 120
_CPU_RANKS = 2
_HARMFUL = (
    ("CUDA_LAUNCH_BLOCKING", "every kernel is waited for: nothing overlaps", "unset it; it is for debugging"),
    ("TORCH_NCCL_BLOCKING_WAIT", "the host waits for every collective: nothing overlaps", "unset it"),
    ("NCCL_P2P_DISABLE", "disables a fast path between GPUs", "unset it, unless this machine hangs without"),
    ("NCCL_IB_DISABLE", "disables InfiniBand and RoCE", "unset it where there is such a network"),
    ("NCCL_SHM_DISABLE", "disables a fast path between GPUs", "unset it"),
)
"""Variables that slow training down, with what they do, and the remedy."""
_EPILOG = """\
examples:
  ampipe doctor                      everything, within two minutes; starts a rank per GPU, or two on a CPU
  ampipe doctor --quick              packages and environment alone
  ampipe doctor --json health.json   also as a document; '-' for standard output, and no tables
  torchrun --standalone --nproc-per-node 2 -m megatron_ampipe.cli doctor
      compares the ranks that torchrun has started; on a cluster, start it as training is started

exit codes: 0 all that is required is there; 1 it is not, an installed package is broken, ranks do not agree,
or nothing overlaps on GPUs
"""


@dataclass(frozen=True, slots=True)
class Component:
    """One thing that training uses: what was found, and how a run is without it."""

    name: str
    status: str
    found: str
    needed: str
    without: str
    remedy: str
    required: bool = False

    @property
    def problem(self) -> str | None:
        """A required component that is not ok, or an optional one that is broken, as a sentence."""
        # A launch only warns of what is untested, too.
        if self.status in (OK, UNTESTED) or not (self.required or self.status == BROKEN):
            return None
        return (
            f"{self.name} is {self.status}: found {self.found}, needed {self.needed}. Get it: {self.remedy}."
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe doctor``."""
    parser.description = "Check an environment: packages, variables, ranks, and whether overlap happens."
    parser.epilog = _EPILOG
    parser.add_argument("--quick", action="store_true", help="do not start ranks and measure no overlap")
    parser.add_argument("--json", metavar="FILE|-", help="write what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check everything, and print it; 1 if there is a problem.

    Raises:
        BadInput: the JSON cannot be written where it should be.
        RunFailed: the JSON can no longer be written.
    """
    if arguments.json not in (None, "-"):
        outputs.check(Path(arguments.json), flag="--json")
    started = "RANK" in os.environ
    # Before the packages are looked at, which takes a while: the other ranks are waiting.
    answers = _ask_ranks(None, quick=arguments.quick) if started else None
    if started and int(os.environ["RANK"]) != 0:
        return 0
    components, torch = examine()
    problems = [component.problem for component in components if component.problem is not None]
    ranks: dict[str, Any] = {"ranks": [], "differences": [], "overlap": None}
    not_measured = "as --quick asks" if arguments.quick else "because one rank on a CPU has no peer"
    if "version" not in torch:
        not_measured = "because torch cannot be imported"
    else:
        if answers is None and not arguments.quick:
            answers = _ask_ranks(len(torch["gpus"]) or _CPU_RANKS, quick=False)
        if isinstance(answers, str):
            not_measured = "because the ranks failed"
            problems.append(answers)
        elif answers is not None:
            ranks = answers
    for difference in ranks["differences"]:
        problems.append(f"ranks do not agree on {difference['name']}. Start all of them identically.")
    overlap = ranks["overlap"]
    if overlap is not None and overlap["device"] == "cuda" and overlap["verdict"] == "does not overlap":
        problems.append(
            "communication does not overlap with computation on this machine. Look at the variables above; "
            "with another process on the GPUs, run this again when it has ended."
        )
    document = {
        "format": "ampipe-doctor-1",
        "healthy": not problems,
        "problems": problems,
        "pieces": [asdict(component) for component in components],
        "environment": notes_on_variables(os.environ, has_gpu=bool(torch.get("gpus"))),
        **ranks,
        "overlap_not_measured": None if overlap else not_measured,
    }
    text = json.dumps(document, indent=2) + "\n"
    if arguments.json == "-":
        print(text, end="")
    else:
        if arguments.json is not None:
            outputs.write_text(Path(arguments.json), text)
        show(document)
    return 1 if problems else 0


def _ask_ranks(num_ranks: int | None, *, quick: bool) -> dict[str, Any] | str:
    """What ranks found that this starts, or those of torchrun if None; or why they found nothing."""
    try:
        from megatron_ampipe.tools import doctor_ranks

        if num_ranks is not None:
            return doctor_ranks.start(num_ranks)
        return doctor_ranks.examine(measure_overlap=not quick)
    except RunFailed as error:
        return str(error)
    # A torch that cannot be imported, a missing peer, a network that does not work.
    except (EnvironmentMissing, ImportError, OSError, RuntimeError, ValueError) as error:
        return f"the ranks cannot connect ({type(error).__name__}: {error})"


def examine() -> tuple[list[Component], Mapping[str, Any]]:
    """Look at everything that a training run may need.

    Returns:
        The components, and what the probe found out about torch: ``error`` where it cannot be imported.
    """
    absent = compat.missing_packages()
    optional = [package for package in compat.OPTIONAL_PACKAGES if package not in absent]
    modules = [TORCH, MEGATRON, *(package.module for package in optional)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = dict(zip(modules, pool.map(_probe, modules), strict=True))
    torch = answers[TORCH] or {}
    gpus = torch.get("gpus")
    components = [
        required_package(TORCH, answers[TORCH]),
        Component(
            "CUDA",
            OK if gpus else MISSING,
            f"{torch['cuda']}, NCCL {torch['nccl']}, {len(gpus)} x {gpus[0]}" if gpus else "no GPU",
            "optional",
            "Megatron trains on the CPU, which is for trying things",
            "a GPU, its driver, and a torch that is built for CUDA",
        ),
        required_package("megatron-core", answers[MEGATRON]),
    ]
    for package in compat.OPTIONAL_PACKAGES:
        error = (answers.get(package.module) or {}).get("error")
        status = MISSING if package in absent else BROKEN if error else OK
        version = str(compat.installed_version(package.distribution) or "-")
        found = "not installed" if package in absent else error or version
        without = f"a run uses {package.fallback}"
        components.append(Component(package.name, status, found, "optional", without, package.remedy))
    return components, torch


def required_package(distribution: str, answer: Mapping[str, Any] | None) -> Component:
    """A package without which nothing trains; ``answer`` is the probe's, None where it is not there."""
    needed, found, status = f">= {compat.MINIMUM_VERSIONS[distribution]}", "-", MISSING
    if answer is not None:
        # What was imported need not be what pip installed.
        found = answer.get("version") or str(compat.installed_version(distribution) or "a checkout")
        version = Version(found.partition(" ")[0]) if "error" not in answer else None
        if version is None:
            status, found = BROKEN, f"{found}: {answer['error']}"
        elif version < Version(compat.MINIMUM_VERSIONS[distribution]):
            status = TOO_OLD
        else:
            is_untested = distribution != TORCH and compat.is_untested(version)
            status = UNTESTED if is_untested else OK
    if distribution == TORCH:
        remedy = "pip install torch, as pytorch.org says for the machine's CUDA"
        return Component(TORCH, status, found, needed, "nothing runs", remedy, required=True)
    needed += f"; tested: {', '.join(compat.SUPPORTED_MEGATRON)}"
    remedy = f"pip install 'megatron-core[training]=={compat.SUPPORTED_MEGATRON[-1]}.*'"
    return Component(MEGATRON, status, found, needed, "nothing trains", remedy, required=True)


def notes_on_variables(environ: Mapping[str, str], *, has_gpu: bool) -> list[dict[str, str | None]]:
    """What is to be said about environment variables: ``name``, ``value``, ``means`` and ``remedy``."""
    notes = [row for row in _HARMFUL if environ.get(row[0], "0") not in ("", "0")]
    queues = environ.get(connections.VARIABLE)
    if has_gpu or queues is not None:
        means, remedy = connections.meaning(queues)
        if queues is None:
            remedy = f"nothing to do: pipelined launches set {connections.QUEUES}"
        notes.insert(0, (connections.VARIABLE, means, remedy or "nothing to do"))
    return [
        {"name": name, "value": environ.get(name), "means": means, "remedy": remedy}
        for name, means, remedy in notes
    ]


def show(document: Mapping[str, Any]) -> None:
    """Print what was found, then the problems."""
    print(f"What a training run uses, with Python {platform.python_version()}:")
    for one in document["pieces"]:
        print(f"  {one['status']:8}  {one['name']}: {one['found']} ({one['needed']})")
        if one["status"] != OK:
            print(f"{'':12}without it: {one['without']}. Get it: {one['remedy']}")
    for note in document["environment"]:
        print(f"{note['name']}={note['value'] or ''}: {note['means']}; {note['remedy']}")
    ranks, differences, overlap = document["ranks"], document["differences"], document["overlap"]
    if len(ranks) > 1:
        hosts = len({rank["host"] for rank in ranks})
        agree = "do not agree" if differences else "agree"
        print(f"{len(ranks)} ranks on {hosts} host(s): versions and environment {agree}")
    for difference in differences:
        for value, having in difference["values"].items():
            print(f"  {difference['name']} is {value} on ranks {', '.join(map(str, having))}")
    if overlap is None:
        print(f"overlap: not measured, {document['overlap_not_measured']}")
    else:
        device = "GPU" if overlap["device"] == "cuda" else "CPU"
        print(
            f"overlap on the {device}: {overlap['what']} of {overlap['bytes'] / 2**20:.0f} MiB "
            f"{overlap['communication_ms']:.1f} ms, computation {overlap['computation_ms']:.1f} ms, together "
            f"{overlap['together_ms']:.1f} ms: {overlap['hidden_share']:.0%} hidden, {overlap['verdict']}"
        )
    for problem in document["problems"]:
        print(f"problem: {problem}")
    if not document["problems"]:
        print("all that is required is there")


def _probe(component: str) -> dict[str, Any] | None:
    """Import a component in another process; None where it is not there, ``error`` where that fails."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "megatron_ampipe.tools.doctor_command", component],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"importing it took more than {_PROBE_TIMEOUT_S} s"}
    if done.returncode == 0:
        answer: dict[str, Any] | None = json.loads(done.stdout.splitlines()[-1])
        return answer
    # A negative code is that of a signal, as of SIGABRT.
    return {"error": f"importing it ended with {done.returncode}: {' '.join(done.stderr.splitlines()[-5:])}"}


def _look_at(component: str) -> dict[str, Any] | None:
    """Import a component, and say what only the imported package knows; None where it is not there."""
    if importlib.util.find_spec(component.partition(".")[0].lower()) is None:
        return None
    if component == MEGATRON:
        from megatron_ampipe.launch.flags import import_megatron

        # What a launch does first.
        import_megatron()
        return {"version": compat.describe_megatron()}
    module = importlib.import_module(component)
    if component != TORCH:
        return {}
    gpus = [module.cuda.get_device_name(index) for index in range(module.cuda.device_count())]
    nccl = ".".join(map(str, module.cuda.nccl.version())) if gpus else None
    return {"version": str(module.__version__), "cuda": module.version.cuda, "gpus": gpus, "nccl": nccl}


def main() -> None:
    """Look at the component that the command line names."""
    try:
        answer = _look_at(sys.argv[1])
    # Whatever an import of other people's code may raise, SystemExit included.
    except BaseException as error:
        kind = "" if isinstance(error, AMPipeError) else f"{type(error).__name__}: "
        answer = {"error": f"{kind}{error}"}
    print("\n" + json.dumps(answer), flush=True)
    # Half-imported packages may crash at exit.
    os._exit(0)


if __name__ == "__main__":
    main()
