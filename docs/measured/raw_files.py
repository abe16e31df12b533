"""Raw files of measurements, in the folder ``results``: their text, and where each one comes from."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.tools.measuring.prediction import predict_peaks

MEASURED = Path(__file__).resolve().parent
RESULTS = MEASURED / "results"
DOCS = MEASURED.parent
ROOT = DOCS.parent
MIB = 1 << 20
# What is checked on a GPU is described next to the check (gpu_checks.py), which no package holds.
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
UNKNOWN = "unknown"
"""What a raw file names as its commit where its code was in no repository."""

LINK_START = "measured/results/"
"""What links to raw files begin with, on pages in ``docs``."""

Document = Mapping[str, Any]
Documents = Mapping[str, Document]
"""Raw files by their name, without its ending."""
Rows = list[list[str]]


def link_to(name: str) -> str:
    """A link to a raw file, from a page in ``docs``."""
    return f"[{name}]({LINK_START}{name}.json)"


def read_all() -> dict[str, dict[str, Any]]:
    """Every raw file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a raw file comes from; a field is empty where the file does not say it."""

    command: str
    commits: Sequence[str]
    """Of the code that ran, with ``-dirty`` where it had been modified."""
    machine: str
    torch: str
    date: str


def origin_of(document: Document) -> Origin:
    """What a raw file, or the first of the runs that it holds, says about its origin."""
    runs = [document]
    if "command" not in document:
        values = [*document.values(), *document.get("rows", [])]
        runs += [each for each in values if isinstance(each, Mapping) and "command" in each]
    first = runs[1] if len(runs) > 1 else document
    versions, hardware = first.get("versions", document.get("versions", {})), first.get("hardware", {})
    commits = [each.get("versions", {}).get("commit") or each.get("commit") for each in runs]
    machine = document.get("machine", hardware.get("cpu", ""))
    gpu = hardware.get("gpu") or _gpu_of_check(document)
    if "usable_cores" in hardware:
        machine = f"{machine}, {hardware['usable_cores']} cores"
    return Origin(
        command=without_output(without_paths(shlex.join(command_words(first)))) or document.get("what", ""),
        commits=list(dict.fromkeys(commit for commit in commits if commit not in (None, UNKNOWN))),
        machine=f"{gpu}; {machine}" if gpu else machine,
        torch=versions.get("torch", ""),
        date=str(first.get("begin", ""))[:10],
    )


def _gpu_of_check(document: Document) -> str:
    device = document.get("device")
    return device["gpu"] if isinstance(device, Mapping) else ""


def command_words(document: Document) -> list[str]:
    """The words of the command; none if the file has none."""
    command = document.get("command", [])
    return shlex.split(command) if isinstance(command, str) else list(command)


def without_paths(text: str) -> str:
    """The text without the folders of the machine it ran on."""
    return re.sub(r"/(?:home|root|work|tmp)/(\S+/)*", "", text)


def without_output(command: str) -> str:
    """The command without the name of the file that it writes."""
    return re.sub(r" ?(--json )?[\w./-]+\.json(?= |$)", "", command)


def is_modified(document: Document) -> bool:
    """True if files of the code that ran were modified."""
    return any(commit.endswith("-dirty") for commit in origin_of(document).commits)


def in_history(commit: str) -> bool:
    """True if the commit is one that the present one descends from.

    Raises:
        FileNotFoundError: This is not a repository, or not one with its whole history.
    """
    if not has_history():
        raise FileNotFoundError(f"{ROOT} is not a git repository with its whole history")
    command = ["git", "merge-base", "--is-ancestor", commit.removesuffix("-dirty"), "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 0


def has_history() -> bool:
    """True in a git repository that is no shallow clone."""
    command = ["git", "rev-parse", "--is-shallow-repository"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0 and done.stdout.strip() == "false"


def is_check(document: Document) -> bool:
    """True for a file of ``scripts/gpu_check.sh``."""
    return str(document.get("format", "")).startswith("ampipe-gpu-check-")


def bench_results(document: Document) -> Iterator[Document]:
    """The results of ``ampipe bench`` in a file: itself, or those of the steps of a check."""
    if is_check(document):
        yield from (step["found"] for step in steps_of(document) if step["kind"] == "bench")
    elif "cases" in document:
        yield document


def with_peaks(result: Document) -> Document:
    """A result of ``ampipe bench`` with the peaks that are predicted now, in place of those of its day."""
    predicted = copy.deepcopy(dict(result))
    predict_peaks(predicted)
    return predicted


def steps_of(document: Document) -> list[dict[str, Any]]:
    """The steps of a ``scripts/gpu_check.sh``, with what they found as a document where it is one."""
    steps = []
    for step in document["steps"]:
        found = None
        # Lines are several documents.
        if step["found"] and step["kind"] not in ("tests", "ranks", "queues"):
            found = json.loads(step["found"])
        steps.append({**step, "found": found})
    return steps


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; in the first column, what repeats is left out. The others are aligned to the right."""
    rule = f"|---|{'--:|' * (len(head) - 1)}"
    lines, above = [], ""
    for first, *others in (head, *rows):
        lines.append(f"| {' | '.join(['' if first == above else first, *others])} |")
        above = first
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def without_empty(head: Sequence[str], rows: Rows) -> str:
    """A table without the columns that have no cell."""
    kept = [i for i, _ in enumerate(head) if any(row[i] for row in rows)]
    return markdown([head[i] for i in kept], [[row[i] for i in kept] for row in rows])
