"""Writes ``docs/papers.md``: what five papers report, what AMPipe does in the same cases, and what differs.

What papers report is typed in ``papers.yaml``, each figure with its place; AMPipe's figures come from raw
files. A part whose raw file is missing says "unmeasured", and which command measures it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import papers_tables as tables
from raw_files import MEASURED, Documents, link_to, markdown
from ruamel.yaml import YAML

PAGE = "papers.md"

PAPERS = MEASURED / "papers.yaml"

HEAD = """# Papers

Written by `{command}`: figures of the papers that AMPipe builds on, next to its own.

- *Reported*: copied from the paper, with the place.
- *Predicted*: simulated by the planner (`docs/measured/papers_predicted.py`) with a
  [cluster file](planner.md#form-of-the-files) of the machine that the paper names. Most figures of these
  files are from data sheets, so a prediction says which way is faster rather than by how much.
- *Measured*: [how](measured.md). The raw files' machines and commits are in [results](results.md). *Noise*:
  how far Megatron's layers, measured twice, differ; *no difference seen*: a speedup that is closer to 1.

Cells of several cases: mean (least to greatest). None of the papers' machines was at hand, and AMPipe has not
run on several GPUs. One GPU with an [emulated link](gpu.md#one-gpu-instead-of-several) shows less than they
do.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A table of AMPipe's results, or the command that measures it.

    ``files`` is a pattern of the names of its raw files, one of which ``command`` writes.
    """

    title: str
    files: str
    table: tables.Table
    command: str = ""


PREDICTED = tables.PREDICTED
GPU_LINK = "--link emulated:20GB/s"
EMULATED_PEERS = f"{GPU_LINK} --emulate-peers"
FSMOE_SAMPLE = (
    *("b1-h8-l512-m1024-x2-f1.2-simple", "b1-h16-l2048-m2048-x4-all-mixtral"),
    *("b2-h16-l1024-m2048-x3-f2.4-simple", "b4-h32-l2048-m4096-x4-all-mixtral"),
)

PARTS: Mapping[str, tuple[Part, ...]] = {
    "AMPipe": (
        Part("Figure 7, predicted for 4 A10G (`ampipe-g5`)", PREDICTED, tables.figure_7_predicted),
        Part(
            "Figure 7, on one GPU",
            r"gpu-check-h200|paper-figure-7-(?!cpu).*",
            tables.figure_7_measured,
            f"ampipe bench --grid paper {EMULATED_PEERS} --ranks 4 --degrees 2,4 --repeats 3 --warmup 1 "
            "--json docs/measured/results/paper-figure-7-h200.json",
        ),
        Part(
            "Figure 7, an eighth of the size, on CPUs",
            r"paper-figure-7-cpu.*",
            tables.figure_7_measured,
            "ampipe bench --grid cpu-paper --link emulated:50MB/s --degrees 2,4,8 --repeats 5 --warmup 1 "
            "--json docs/measured/results/paper-figure-7-cpu.json",
        ),
        Part("Table 2, reported and predicted for 8 A800 over 20 GB/s", PREDICTED, tables.table_2_predicted),
        Part(
            "Table 2, on one GPU",
            r"paper-table-2-.*",
            tables.table_2_measured,
            f"ampipe bench --grid paper-layers {EMULATED_PEERS} --ranks 8 --layers 12 --stack 1,all "
            "--schedules ampipe --degrees 2,4 --repeats 3 --warmup 1 "
            "--json docs/measured/results/paper-table-2-h200.json",
        ),
    ),
    "MPipeMoE": (
        Part("Memory of eight layers, predicted", PREDICTED, tables.memory_predicted),
        Part(
            "Memory of eight layers, measured on CPUs",
            r"memory-(bf16|fp32|peaks-.*|offload-.*|copies-none-.*)",
            tables.memory_on_cpus,
        ),
        Part(
            "Memory and time of eight layers, on one GPU",
            r"paper-mpipemoe-.*",
            tables.memory_measured,
            f"ampipe bench --grid mpipemoe {EMULATED_PEERS} --ranks 8 --layers 8 --stack all "
            "--schedules ampipe --degrees 4 --memory keep,S1,S2,S3,S4 --repeats 3 --warmup 1 "
            "--json docs/measured/results/paper-mpipemoe-h200.json",
        ),
        Part(
            "Time of a few layers by strategy, predicted (`mpipemoe-a100`)", PREDICTED, tables.strategy_times
        ),
    ),
    "FSMoE": (
        Part("1458 layers, predicted from the paper's fitted figures", PREDICTED, tables.fsmoe_predicted),
        Part(
            "Two degrees, on one GPU",
            r"paper-fsmoe-.*",
            tables.fsmoe_measured,
            f"ampipe bench --grid fsmoe --cases {','.join(FSMOE_SAMPLE)} {EMULATED_PEERS} --ranks 8 "
            "--schedules ampipe --degrees 2,4,2:4,4:2 --repeats 5 --warmup 1 "
            "--json docs/measured/results/paper-fsmoe-h200.json",
        ),
    ),
    "Lancet": (
        Part("Exposed communication, predicted, 12 layers", PREDICTED, tables.exposed_predicted),
        Part(
            "Exposed communication, measured, one layer",
            r"gpu-check-h200|cpu-small-(100mbit|200mbit-again)",
            tables.exposed_measured,
        ),
        Part(
            "Exposed communication of twelve layers, on one GPU",
            r"paper-lancet-.*",
            tables.exposed_measured,
            f"ampipe bench --grid paper-layers --cases medium-24k {EMULATED_PEERS} --ranks 8 --layers 12 "
            "--stack all --schedules moe-only,ampipe,lancet,joined --degrees 1,2 --repeats 3 --warmup 1 "
            "--json docs/measured/results/paper-lancet-h200.json",
        ),
    ),
    "Luffy": (
        Part("Condensation, trained", r"condense|condense_speed_small", tables.condensed),
        Part("Migration, counted on recorded trainings", r"migration", tables.migrated),
    ),
}
"""The tables of each paper of ``papers.yaml``."""


def page(documents: Documents, command: str) -> str:
    """The text of the page."""
    texts = [HEAD.format(command=command)]
    papers = load_papers()
    assert papers.keys() == PARTS.keys(), papers.keys() ^ PARTS.keys()
    for title, paper in papers.items():
        reported = [[figure["what"], figure["where"]] for figure in paper["reported"]]
        texts.append(f"\n## {title}\n\n{paper['source']}\n\n")
        texts.append(markdown(["the paper reports", "where"], reported))
        texts += (f"\n### {part.title}\n\n{text_of(part, documents)}" for part in PARTS[title])
        texts.append(f"\n### What differs from {title}\n\n")
        texts += (f"- {line}\n" for line in paper["differs"])
    return "".join(texts)


def load_papers() -> Mapping[str, Any]:
    """What the papers report, and what differs."""
    papers: Mapping[str, Any] = YAML(typ="safe").load(PAPERS)
    return papers


def text_of(part: Part, documents: Documents) -> str:
    """The table with its raw files, and the command if its file is missing."""
    chosen = {name: document for name, document in documents.items() if re.fullmatch(part.files, name)}
    texts = []
    if chosen:
        links = ", ".join(link_to(name) for name in chosen)
        texts.append(f"{part.table(chosen)}\nRaw files: {links}.\n")
    if part.command and output_of(part.command) not in chosen:
        what = "The rest is unmeasured" if chosen else "Unmeasured"
        texts.append(f"{what}. To measure it:\n\n```sh\n{part.command}\n```\n")
    return "\n".join(texts)


def output_of(command: str) -> str:
    """The name of the raw file that a command writes."""
    (name,) = re.findall(r"--json docs/measured/results/([\w.-]+)\.json", command)
    return str(name)


def used_by(name: str) -> dict[str, str]:
    """The page and a link to its first section that uses a raw file; empty if none does."""
    for title, parts in PARTS.items():
        if any(re.fullmatch(part.files, name) for part in parts):
            return {f"docs/{PAGE}": f"[papers]({PAGE}#{title.lower()})"}
    return {}
