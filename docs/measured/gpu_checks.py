"""Tables of ``scripts/gpu_check.sh``: its plan, and what ranks that share a GPU have shown."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raw_files import Documents, link_to, markdown

from gpu_check import plan, ranks
from gpu_check.plan import RUN

_USUAL = {*RUN, "pytest", "pytest_timeout", "rich", "tqdm", "pydantic"}
"""Modules that nearly every step needs, and that --pack brings."""
_NAMES = {"transformer_engine.pytorch": "Transformer Engine"}
_NOT_RUN = "Not run on a GPU yet.\n"


def plan_table(_: Documents) -> str:
    """The steps in their order: which call runs them if each takes its whole limit, and what they tell."""
    rows = []
    for line in plan.calls(plan.plan(Path("."), Path("."))):
        call = "later" if line.call is None else f"{line.call}"
        for place, step in enumerate(line.steps):
            needs = [_NAMES.get(need, need) for need in step.needs if need not in _USUAL]
            until = f"{line.until_s / 60:.1f}" if place == 0 else ""
            rows.append([call, until, step.name, f"{step.limit_s:.0f}", ", ".join(needs), step.shows])
    head = "| call | until, min | step | at most, s | needs | shows |\n|---|--:|---|--:|---|---|\n"
    return head + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _steps(documents: Documents, kind: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The lines of every step of a kind, with a link to its file."""
    for name, document in documents.items():
        for step in document["steps"]:
            if step["kind"] == kind and step["found"]:
                whole = [line for line in step["found"].splitlines() if line.endswith("}")]
                yield link_to(name), [json.loads(line) for line in whole]


def ranks_table(documents: Documents) -> str:
    """What ranks that share a GPU compute, compared with Megatron's layers, by kind of case."""
    rows = []
    for file, lines in _steps(documents, "ranks"):
        head, found = lines[0], ranks.outcomes(lines)
        over = "gloo" if head["nccl"] is None else f"NCCL {'.'.join(map(str, head['nccl']))}"
        for shows in dict.fromkeys(head["cases"].values()):
            names = [name for name, each in head["cases"].items() if each == shows]
            outcomes = [{how for how, _ in found.get(name, {}).values()} for name in names]
            equal = sum(each == {"equal"} for each in outcomes)
            others = sorted({how for each in outcomes for how in each} - {"equal"})
            cells = [f"{equal} of {len(names)}", ", ".join(others)]
            rows.append([file, f"{head['ranks']}", over, shows, *cells])
    if not rows:
        return _NOT_RUN
    return markdown(["file", "ranks", "over", "shows", "cases equal", "others"], rows)


def queues_table(documents: Documents) -> str:
    """Which environments let ranks that share a GPU hang."""
    rows = []
    for file, lines in _steps(documents, "queues"):
        for line in lines:
            bad = [name for name, how in line["found"].items() if set(how) & set(ranks.BAD)]
            ended = f"{len(line['found']) - len(bad)} of {len(line['found'])}"
            rows.append([file, *line["environment"].values(), ended, ", ".join(bad)])
    if not rows:
        return _NOT_RUN
    head = ["file", "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_LAUNCH_ORDER_IMPLICIT", "cases end", "others"]
    return markdown(head, rows)
