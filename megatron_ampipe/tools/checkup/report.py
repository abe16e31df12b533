"""What the doctor found, as tables and as a document. Called by ``ampipe doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.tools.checkup.compare_ranks import RankDifference
from megatron_ampipe.tools.checkup.components import Component, Status
from megatron_ampipe.tools.checkup.environment import Note

FORMAT = "ampipe-doctor-1"
_COLOURS = {
    Status.OK: "green",
    Status.MISSING: "yellow",
    Status.UNTESTED: "yellow",
    Status.TOO_OLD: "red",
    Status.BROKEN: "red",
}


@dataclass(slots=True, kw_only=True)
class DoctorFindings:
    """Everything that was found.

    Attributes:
        components: Packages and what they bring.
        notes: About the environment.
        ranks: What each rank runs with; empty where none was asked.
        differences: Between ranks.
        overlap: See :func:`.overlap.measure`; None where it was not measured.
        not_measured: Why not, then.
        problems: What makes the exit code 1, a sentence each.
    """

    components: Sequence[Component]
    notes: Sequence[Note]
    ranks: list[dict[str, Any]] = field(default_factory=list)
    differences: list[RankDifference] = field(default_factory=list)
    overlap: dict[str, Any] | None = None
    not_measured: str | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if there is no problem, else 1."""
        return 1 if self.problems else 0

    def document(self) -> dict[str, Any]:
        """What ``--json`` holds."""
        return {
            "format": FORMAT,
            "healthy": not self.problems,
            "problems": self.problems,
            "pieces": [asdict(component) for component in self.components],
            "environment": [asdict(note) for note in self.notes],
            "ranks": self.ranks,
            "differences": [asdict(difference) for difference in self.differences],
            "overlap": self.overlap,
            "overlap_not_measured": self.not_measured,
        }


def show(findings: DoctorFindings, console: Console) -> None:
    """Print the tables, then the problems."""
    console.print(_components(findings.components))
    for component in findings.components:
        if component.lacks:
            known = (
                "AMPipe is tested without them" if component.status is Status.OK else "what needs them fails"
            )
            names = ", ".join(component.lacks)
            console.print(f"not in this {component.name}: {names}; {known}", markup=False, soft_wrap=True)
    if findings.notes:
        console.print(_notes(findings.notes))
    if len(findings.ranks) > 1:
        hosts = len({rank["host"] for rank in findings.ranks})
        agree = "agree" if not findings.differences else "do not agree"
        console.print(f"{len(findings.ranks)} ranks on {hosts} host(s): versions and environment {agree}")
    if findings.differences:
        console.print(_differences(findings.differences))
    _show_overlap(findings, console)
    for problem in findings.problems:
        console.print(f"problem: {problem}", style="red", markup=False, soft_wrap=True)
    if not findings.problems:
        console.print("all that is required is there", style="green")


def _components(components: Sequence[Component]) -> Table:
    table = Table(title="What a training run uses", title_justify="left")
    for column in ("", "found", "needed", "", "lost without it", "how to get it"):
        table.add_column(column, overflow="fold")
    for component in components:
        is_ok = component.status is Status.OK
        status = f"[{_COLOURS[component.status]}]{component.status}[/]"
        lost, remedy = ("", "") if is_ok else (component.lost, component.remedy)
        table.add_row(component.name, _plain(component.found), component.needed, status, lost, _plain(remedy))
    return table


def _notes(notes: Sequence[Note]) -> Table:
    table = Table(title="Environment", title_justify="left")
    for column in ("variable", "value", "what it does", "what to do"):
        table.add_column(column, overflow="fold")
    for note in notes:
        table.add_row(note.name, _plain(note.value or "(not set)"), note.means, note.remedy)
    return table


def _differences(differences: Sequence[RankDifference]) -> Table:
    table = Table("", "value", "ranks", title="Different between ranks", title_justify="left")
    for difference in differences:
        for index, (value, ranks) in enumerate(difference.values.items()):
            name = difference.name if index == 0 else ""
            table.add_row(name, _plain(value), " ".join(map(str, ranks)))
    return table


def _show_overlap(findings: DoctorFindings, console: Console) -> None:
    found = findings.overlap
    if found is None:
        console.print(f"overlap: not measured, {findings.not_measured}", soft_wrap=True)
        return
    device = "GPU" if found["device"] == "cuda" else "CPU"
    communication, computation, together = (
        f"{found[name]:.1f} ms" for name in ("communication_ms", "computation_ms", "together_ms")
    )
    console.print(
        f"overlap on the {device}: {found['what']} of {found['bytes'] / 2**20:.0f} MiB {communication}, "
        f"computation {computation}, together {together}: {found['hidden_share']:.0%} hidden, "
        f"{found['verdict']}",
        soft_wrap=True,
    )


def _plain(text: str) -> str:
    """Text that rich takes as it is: what stands in brackets is no style."""
    return text.replace("[", "\\[")
