"""``ampipe doctor``: checks what training needs, whether ranks agree, and whether overlap happens.

Works where torch or Megatron is absent or broken: neither is imported here. Under torchrun, the ranks are
compared that torchrun has started.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron_ampipe.errors import EnvironmentMissing, RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.tools import checkup
from megatron_ampipe.tools.checkup import Component, Note, Status

FORMAT = "ampipe-doctor-1"
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
    answers = _ask_ranks(None, quick=arguments.quick) if started else None
    if started and int(os.environ["RANK"]) != 0:
        return 0
    components, torch = checkup.examine()
    has_gpu = bool(torch.get("gpus"))
    notes = checkup.notes_on_variables(os.environ, has_gpu=has_gpu)
    problems = [component.problem for component in components if component.problem is not None]
    ranks, overlap, differences = [], None, []
    if "version" not in torch:
        not_measured = "because torch cannot be imported"
    elif arguments.quick and not started:
        not_measured = "as --quick asks"
    else:
        if answers is None:
            answers = _ask_ranks(len(torch["gpus"]) or _CPU_RANKS, quick=False)
        not_measured = "as --quick asks" if arguments.quick else "because one rank on a CPU has no peer"
        if isinstance(answers, str):
            not_measured = "because the ranks failed"
            problems.append(answers)
        else:
            ranks, overlap, differences = answers["ranks"], answers["overlap"], answers["differences"]
    for difference in differences:
        problems.append(f"ranks do not agree on {difference['name']}. Start all of them identically.")
    if overlap is not None and overlap["device"] == "cuda" and overlap["verdict"] == "does not overlap":
        problems.append(
            "communication does not overlap with computation on this machine. Look at the variables above; "
            "with another process on the GPUs, run this again when it has ended."
        )
    document = {
        "format": FORMAT,
        "healthy": not problems,
        "problems": problems,
        "pieces": [asdict(component) for component in components],
        "environment": [asdict(note) for note in notes],
        "ranks": ranks,
        "differences": differences,
        "overlap": overlap,
        "overlap_not_measured": None if overlap else not_measured,
    }
    text = json.dumps(document, indent=2) + "\n"
    if arguments.json == "-":
        print(text, end="")
        return 1 if problems else 0
    if arguments.json is not None:
        outputs.write_text(Path(arguments.json), text)
    # A table in a file or a pipe may be wider than this terminal.
    show(Console(width=None if sys.stdout.isatty() else 140), components, notes, document)
    return 1 if problems else 0


def _ask_ranks(num_ranks: int | None, *, quick: bool) -> dict[str, Any] | str:
    """What ranks found that this starts, or those of torchrun if None; or why they found nothing."""
    try:
        from megatron_ampipe.tools import doctor_ranks

        found = (
            doctor_ranks.start(num_ranks) if num_ranks else doctor_ranks.examine(measure_overlap=not quick)
        )
        return found | {"differences": doctor_ranks.differences(found["ranks"])}
    except RunFailed as error:
        return str(error)
    # A torch that cannot be imported, a missing peer, a network that does not work.
    except (EnvironmentMissing, ImportError, OSError, RuntimeError, ValueError) as error:
        return f"the ranks cannot connect ({type(error).__name__}: {error})"


def show(
    console: Console, components: Sequence[Component], notes: Sequence[Note], document: dict[str, Any]
) -> None:
    """Print the tables, then the problems."""

    def line(text: str, style: str = "") -> None:
        console.print(escape(text), style=style, soft_wrap=True)

    _table(
        console,
        "What a training run uses",
        ("", "found", "needed", "", "lost without it", "how to get it"),
        [
            (
                *(component.name, component.found, component.needed, str(component.status)),
                *(("", "") if component.status is Status.OK else (component.lost, component.remedy)),
            )
            for component in components
        ],
        styles=[
            None if one.status is Status.OK else ("red" if one.problem else "yellow") for one in components
        ],
    )
    for component in components:
        if component.lacks:
            is_tested = component.status is Status.OK
            known = "AMPipe is tested without them" if is_tested else "what needs them fails"
            line(f"not in this {component.name}: {', '.join(component.lacks)}; {known}")
    if notes:
        rows = [(note.name, note.value or "(not set)", note.means, note.remedy) for note in notes]
        _table(console, "Environment", ("variable", "value", "what it does", "what to do"), rows)
    ranks, differences, overlap = document["ranks"], document["differences"], document["overlap"]
    if len(ranks) > 1:
        hosts = len({rank["host"] for rank in ranks})
        agree = "do not agree" if differences else "agree"
        line(f"{len(ranks)} ranks on {hosts} host(s): versions and environment {agree}")
    if differences:
        rows = [
            (difference["name"], value, " ".join(map(str, having)))
            for difference in differences
            for value, having in difference["values"].items()
        ]
        _table(console, "Different between ranks", ("", "value", "ranks"), rows)
    if overlap is None:
        line(f"overlap: not measured, {document['overlap_not_measured']}")
    else:
        device = "GPU" if overlap["device"] == "cuda" else "CPU"
        line(
            f"overlap on the {device}: {overlap['what']} of {overlap['bytes'] / 2**20:.0f} MiB "
            f"{overlap['communication_ms']:.1f} ms, computation {overlap['computation_ms']:.1f} ms, together "
            f"{overlap['together_ms']:.1f} ms: {overlap['hidden_share']:.0%} hidden, {overlap['verdict']}"
        )
    for problem in document["problems"]:
        line(f"problem: {problem}", style="red")
    if not document["problems"]:
        line("all that is required is there", style="green")


def _table(
    console: Console,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    styles: Sequence[str | None] | None = None,
) -> None:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row, style in zip(rows, styles or [None] * len(rows), strict=True):
        table.add_row(*map(escape, row), style=style)
    console.print(table)
