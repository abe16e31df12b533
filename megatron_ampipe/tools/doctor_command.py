"""``ampipe doctor``: checks what training needs, whether ranks agree, and whether overlap happens.

Works if torch or Megatron is missing or broken: neither is imported here. A broken package may end the
process that imports it, so each is imported in a separate process. Under torchrun, it compares the ranks that
torchrun has started.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatron_ampipe import compat
from megatron_ampipe.errors import EnvironmentMissing, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.files.outputs import Report, ReportView
from megatron_ampipe.launch import connections

_PROBE_TIMEOUT_S = 120
_CPU_RANKS = 2
# The first steps of a launch, and facts that only the imported package knows.
_TORCH = """
import torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else None
more = f" {gpus[0]}, NCCL {nccl}" if gpus else ": Megatron trains on the CPU, which is for trying things"
print(f"{torch.__version__}, CUDA {torch.version.cuda}, {len(gpus)} GPUs{more}")
"""
_MEGATRON = """
from megatron_ampipe import compat
from megatron_ampipe.launch.flags import import_megatron
import_megatron()
print(compat.describe_megatron())
"""
_KERNEL = """
from megatron_ampipe.tools.doctor_command import describe_kernel
print(describe_kernel({kernel!r}))
"""
_ENGINE = """
import transformer_engine.pytorch
from megatron_ampipe.tools.doctor_command import describe_engine
print(describe_engine())
"""
_OTHER_APEX = (
    "Another package named apex is installed. Megatron takes it for NVIDIA's, and its local layers with "
    "LayerNorm fail: pip uninstall apex"
)
_HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for: nothing overlaps",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for every collective: nothing overlaps",
    "NCCL_P2P_DISABLE": "disables a fast path between GPUs",
    "NCCL_SHM_DISABLE": "disables a fast path between GPUs",
    "NCCL_IB_DISABLE": "disables InfiniBand and RoCE",
}
EPILOG = """\
examples:
  ampipe doctor             everything, within two minutes; starts a rank per GPU, or two on a CPU
  ampipe doctor --quick     packages and environment alone
  torchrun --standalone --nproc-per-node 2 -m megatron_ampipe.cli doctor
      compares the ranks that torchrun has started; on a cluster, start it as training is started

exit codes: 0 all that is required is there; 1 it is not, an installed package is broken, ranks do not agree,
or nothing overlaps on GPUs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe doctor``."""
    parser.add_argument("--quick", action="store_true", help="do not start ranks and measure no overlap")
    parser.add_argument("--json", metavar="FILE", help="also write what was found as JSON; - for stdout")


def run(arguments: argparse.Namespace) -> int:
    """Check everything, and print it; 1 if there is a problem."""
    to_stdout = arguments.json == "-"
    if arguments.json is not None and not to_stdout:
        outputs.check(Path(arguments.json), flag="--json")
    # The document has the standard output for itself.
    with contextlib.redirect_stdout(sys.stderr if to_stdout else sys.stdout):
        report = check(quick=arguments.quick)
    if report is None:
        return 0
    text = json.dumps(report, indent=1) + "\n"
    if to_stdout:
        print(text, end="")
    elif arguments.json is not None:
        outputs.write_text(Path(arguments.json), text)
    return 1 if report["problems"] else 0


def check(*, quick: bool) -> Report | None:
    """Print the report, and return it; None on ranks other than the first."""
    started = "RANK" in os.environ
    # Before the check of packages, which takes a while: the other ranks are waiting.
    answers = _ask_ranks(None, measures=not quick) if started else None
    if started and int(os.environ["RANK"]) != 0:
        return None
    print(f"What a training run uses, with Python {platform.python_version()}:")
    packages, problems, num_gpus = examine()
    notes = notes_on_variables(os.environ, has_gpu=bool(num_gpus))
    print(*notes, sep="\n", end="\n" if notes else "")
    if num_gpus is not None and not started and not quick:
        answers = _ask_ranks(num_gpus or _CPU_RANKS, measures=True)
    problems += [answers] if isinstance(answers, str) else show(answers) if answers else []
    verdict = [f"problem: {problem}" for problem in problems] or ["all that is required is there"]
    print(*verdict, sep="\n")
    return {"packages": packages, "notes": notes, "ranks": answers, "problems": problems}


def _ask_ranks(num_ranks: int | None, *, measures: bool) -> Report | str:
    """The report of ``num_ranks`` started ranks, or of torchrun's ranks if None; or why it failed."""
    try:
        from megatron_ampipe.tools import doctor_ranks

        return doctor_ranks.join(measures=measures) if num_ranks is None else doctor_ranks.start(num_ranks)
    except RunFailed as error:
        return str(error)
    # A torch that cannot be imported, a missing peer, a network that does not work.
    except (EnvironmentMissing, ImportError, KeyError, OSError, RuntimeError, ValueError) as error:
        return f"the ranks cannot connect ({type(error).__name__}: {error})"


def examine() -> tuple[dict[str, str], list[str], int | None]:
    """Print everything that a training run may need.

    Returns:
        The line about each package, the problems, and the number of GPUs (None without torch).
    """
    absent = [package for package in compat.OPTIONAL_PACKAGES if not package.is_installed]
    present = [package for package in compat.OPTIONAL_PACKAGES if package.is_installed]
    programs = {"torch": _TORCH, "Megatron": _MEGATRON, **{p.name: _program(p) for p in present}}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = dict(zip(programs, pool.map(_probe, programs.values()), strict=True))
    for name, (works, said) in answers.items():
        print(f"  {'ok' if works else 'broken':8}  {name}: {said}")
    for package in absent:
        print(f"  {'missing':8}  {package.name}. Without it, a run uses {package.fallback}.")
        print(f"{'':12}To get it: {package.remedy}")
        if package.name == "apex" and importlib.util.find_spec("apex") is not None:
            print(f"{'':12}{_OTHER_APEX}")
    problems = [f"{name} cannot be used: {said}" for name, (works, said) in answers.items() if not works]
    gpus = re.search(r"(\d+) GPUs", answers["torch"][1]) if answers["torch"][0] else None
    packages = {name: said for name, (_, said) in answers.items()}
    return packages | {each.name: "missing" for each in absent}, problems, int(gpus[1]) if gpus else None


def _program(package: compat.OptionalPackage) -> str:
    """A program that imports a package, and may print what it is."""
    if package.module == "transformer_engine.pytorch":
        return _ENGINE
    return f"import {package.module}" if package.kernel is None else _KERNEL.format(kernel=package.kernel)


def describe_kernel(kernel: str) -> str:
    """The installed version of the package that has an attention kernel, and whether the kernel is used here.

    Raises:
        EnvironmentMissing: the package cannot be imported.
    """
    import torch

    from megatron_ampipe.attention.kernels import device_objection

    (package,) = (each for each in compat.FLASH_ATTENTION if each.kernel == kernel)
    problem = compat.flash_attention_problem(kernel)
    if problem is not None and compat.CANNOT_BE_IMPORTED in problem:
        raise EnvironmentMissing(problem)
    if problem is None and not torch.cuda.is_available():
        problem = "there is no CUDA device"
    if problem is None:
        problem = device_objection(kernel, compat.current_gpu())
    version = compat.found_version(package.name) or "of an unknown version"
    return (
        f"{version}, usable as attention kernel {kernel}"
        if problem is None
        else f"{version}, not used: {problem}"
    )


def describe_engine() -> str:
    """The installed version of Transformer Engine, and in which precisions it takes rows as fixed rows do."""
    import torch

    version = str(compat.found_version("transformer-engine") or "of an unknown version")
    if not torch.cuda.is_available():
        return f"{version}; --ampipe-rows fixed: there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    problems = {recipe: compat.grouped_linear_problem(recipe, capability) for recipe in compat.DEVICE_ROWS}
    usable = [recipe or "bf16" for recipe, problem in problems.items() if problem is None]
    if usable:
        return f"{version}; --ampipe-rows fixed in {', '.join(usable)}"
    return f"{version}; no --ampipe-rows fixed: {problems[None]}"


def _probe(program: str) -> tuple[bool, str]:
    """Run a program in another process: whether it succeeded, and the last line that it printed."""
    # Half-imported packages may crash at exit.
    command = [sys.executable, "-c", f"{program}\nimport os, sys; sys.stdout.flush(); os._exit(0)"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROBE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return False, f"importing it took more than {_PROBE_TIMEOUT_S} s"
    if done.returncode == 0:
        return True, (done.stdout.splitlines() or ["works"])[-1]
    # A negative code is the number of a signal, such as SIGABRT.
    last = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("megatron_ampipe.errors.")
    return False, last if done.returncode == 1 else f"importing it ended with {done.returncode}: {last}"


def notes_on_variables(environ: Mapping[str, str], *, has_gpu: bool) -> list[str]:
    """Notes on environment variables that decide whether work overlaps."""
    notes, queues, order = [], environ.get(connections.VARIABLE), environ.get(connections.ORDER)
    if queues is not None:
        warning = connections.warning(queues)
        notes = [f"{connections.VARIABLE}={queues}: {warning or 'streams work independently'}"]
    elif has_gpu:
        notes = [f"{connections.VARIABLE} is not set: pipelined launches set {connections.QUEUES}"]
    if order not in (None, "1"):
        warning = connections.order_warning(order, connections.ORDER_SINCE)
        notes.append(f"{connections.ORDER}={order}: {warning}")
    records = environ.get(connections.RECORDS)
    if records is not None and (problem := connections.records_warning(records, compat.torch_release())):
        notes.append(f"{connections.RECORDS}={records}: {problem}")
    given = {name: environ.get(name, "0") for name in _HARMFUL}
    harmful = {name: value for name, value in given.items() if value not in ("", "0")}
    return notes + [f"{name}={value}: {_HARMFUL[name]}; unset it" for name, value in harmful.items()]


def show(report: ReportView) -> list[str]:
    """Print the ranks' report; returns the problems."""
    problems = []
    for name, values in report["differences"].items():
        listed = "; ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
        problems.append(f"ranks do not agree on {name}: {listed}. Start all of them identically.")
    agree = "do not agree" if problems else "agree"
    print(f"{report['num_ranks']} ranks: versions and environment {agree}")
    if (overlap := report["overlap"]) is None:
        return problems
    share = overlap["hidden_share"]
    verdict = "overlaps" if share >= 0.5 else "overlaps in part" if share >= 0.2 else "does not overlap"
    transfer = "all-to-all" if report["num_ranks"] > 1 else "a kernel that waits"
    print(
        f"overlap on {overlap['device']}: {transfer} {overlap['communication_ms']:.1f} ms, computation "
        f"{overlap['computation_ms']:.1f} ms, together {overlap['together_ms']:.1f} ms: {share:.0%} hidden, "
        f"{verdict}"
    )
    if overlap["device"] == "cuda" and share < 0.2:
        problems.append(
            "communication does not overlap with computation on this machine. Look at the variables above; "
            "with another process on the GPUs, run this again when it has ended."
        )
    return problems
