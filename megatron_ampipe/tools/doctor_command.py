"""``ampipe doctor``: checks what training needs, whether ranks agree, and whether overlap happens.

Puts the parts of :mod:`megatron_ampipe.tools.checkup` together. Works where torch or Megatron is absent or
broken: neither is imported here. Called by :mod:`megatron_ampipe.cli`, also under torchrun, where the ranks
are compared that torchrun has started.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import EnvironmentMissing, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.tools.checkup import compare_ranks, components, environment, report
from megatron_ampipe.tools.checkup.overlap_figures import PARTLY

_CPU_RANKS = 2
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe doctor``."""
    parser.description = "Check an environment: packages, variables, ranks, and whether overlap happens."
    parser.epilog = _EPILOG
    parser.add_argument("--quick", action="store_true", help="do not start ranks and measure no overlap")
    parser.add_argument("--json", metavar="FILE|-", help="write what was found as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check everything, and print it.

    Returns:
        0 if there is no problem, else 1.

    Raises:
        BadInput: the JSON cannot be written where it should be.
        RunFailed: the JSON can no longer be written.
    """
    if arguments.json not in (None, "-"):
        outputs.check(Path(arguments.json), flag="--json")
    started = "RANK" in os.environ
    # Before the packages are looked at, which takes a while: the other ranks are waiting.
    met = _meet(quick=arguments.quick) if started else None
    if started and int(os.environ["RANK"]) != 0:
        return 0
    found = components.examine()
    findings = report.DoctorFindings(
        components=found.table, notes=environment.notes(has_gpu=bool(found.gpus))
    )
    findings.problems += [_problem(component) for component in found.table if component.is_problem]
    if "version" not in found.torch:
        findings.not_measured = "because torch cannot be imported"
    elif arguments.quick and not started:
        findings.not_measured = "as --quick asks"
    else:
        _judge(findings, met or _start(found), quick=arguments.quick)
    _write(findings.document(), arguments.json)
    if arguments.json != "-":
        from rich.console import Console

        # A table in a file or a pipe may be wider than this terminal.
        report.show(findings, Console(width=None if sys.stdout.isatty() else 140))
    return findings.exit_code


def _meet(*, quick: bool) -> dict[str, Any] | str:
    """Take part as one of the ranks that torchrun has started: what was found, or why nothing was."""
    try:
        from megatron_ampipe.tools.checkup.rank import examine

        return examine(measure_overlap=not quick)
    # A torch that cannot be imported, a missing peer, a network that does not work.
    except (EnvironmentMissing, ImportError, OSError, RuntimeError, ValueError) as error:
        return f"the ranks that torchrun has started cannot connect ({type(error).__name__}: {error})"


def _start(found: components.Components) -> dict[str, Any] | str:
    """Start ranks on this machine: what they found, or why they found nothing."""
    try:
        return compare_ranks.start(len(found.gpus) or _CPU_RANKS, on_gpu=bool(found.gpus))
    except RunFailed as error:
        return str(error)


def _judge(findings: report.DoctorFindings, answers: dict[str, Any] | str, *, quick: bool) -> None:
    """Fill in what only ranks can tell."""
    if isinstance(answers, str):
        findings.not_measured = "because the ranks failed"
        findings.problems.append(answers)
        return
    findings.ranks, findings.overlap = answers["ranks"], answers["overlap"]
    findings.differences = compare_ranks.differences(findings.ranks)
    for difference in findings.differences:
        findings.problems.append(f"ranks do not agree on {difference.name}. Start all of them identically.")
    if findings.overlap is None:
        findings.not_measured = "as --quick asks" if quick else "because one rank on a CPU has no peer"
    elif findings.overlap["device"] == "cuda" and findings.overlap["hidden_share"] < PARTLY:
        findings.problems.append(
            "communication does not overlap with computation on this machine. Look at the variables above; "
            "with another process on the GPUs, run this again when it has ended."
        )


def _problem(component: components.Component) -> str:
    return (
        f"{component.name} is {component.status}: found {component.found}, needed {component.needed}. "
        f"Get it: {component.remedy}."
    )


def _write(document: dict[str, Any], target: str | None) -> None:
    text = json.dumps(document, indent=2) + "\n"
    if target == "-":
        print(text, end="")
    elif target is not None:
        outputs.write_text(Path(target), text)
