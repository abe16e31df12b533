"""What one run compared, in one form for all kinds of raw files, and tables of it.

A speedup is the ratio of Megatron's time and AMPipe's within a repeat: the median, and how far the repeats
are apart (10th and 90th percentile where the raw file has them, otherwise the least and the greatest).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raw_files import Document, is_check, steps_of, without_empty
from step_kinds import CONTROL, KINDS, MEGATRON

CHUNKS = "{} chunks"
MOE_ONLY = "moe-only, {} chunks"
PARTNERS = "partners"
GRAPHS = "{} chunks, graphs"
WHOLE = "{} chunks, whole graphs"
MOE_ONLY_WHOLE = "moe-only, {} chunks, whole graphs"
MEGATRON_GRAPHS = "Megatron's graphs"
_SEARCHED = "partners, searched"
OF_SCRIPT = {
    **{kind.name: kind.title for kind in KINDS if kind.name not in (MEGATRON, CONTROL, _SEARCHED)},
    # Of earlier versions.
    "partners, degree 2": "partners in 2 chunks",
    "partners, degree 4": "partners in 4 chunks",
    "partners": "partners, listed",
    _SEARCHED: _SEARCHED,
}
"""What ``docs/measured/partners.py`` calls the kinds of a step, and what the tables call them."""
OF_MEGATRON = {kind.name for kind in KINDS if kind.of_megatron}


@dataclass(frozen=True, slots=True)
class Speedup:
    """Megatron's time over AMPipe's."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        text = f"{self.median:.2f}"
        if f"{self.low:.2f}" != f"{self.high:.2f}":
            text += f" ({self.low:.2f}-{self.high:.2f})"
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One case of one run."""

    case: str
    link: str
    topk: int
    layers: int
    micro_batches: int
    is_training: bool
    on_cpu: bool
    emulated: bool
    stock_ms: float
    """Of a pass, and in a training of a part of an iteration: of one micro-batch."""
    noise: float | None
    """How far Megatron's layers measured twice differ; None without a control."""
    speedups: Mapping[str, Speedup]
    bound_shares: Mapping[str, float] = field(default_factory=dict)


def comparisons_of(document: Document) -> Iterator[Comparison]:
    """Every case of a raw file; nothing for files that compare something else."""
    if is_check(document):
        for step in steps_of(document):
            if step["kind"] in ("bench", "partners"):
                yield from comparisons_of(step["found"])
    elif "cases" in document:
        for case in document["cases"]:
            yield _of_case(document, case)
    elif "seconds" in document:
        yield _of_partners(document)


def _of_case(document: Document, case: Mapping[str, Any]) -> Comparison:
    """From a file of ``ampipe bench``: chunks of equal size, with all layers in one schedule."""
    deepest = max(row.get("stack", 1) for row in case["rows"])
    rows = {
        _name_of_row(row): row
        for row in case["rows"]
        if row.get("stack", 1) == deepest and row.get("memory", "keep") == "keep"
    }
    control = case.get("control")
    micro_batches = document.get("micro_batches", 1)
    stock_ms = case["stock"]["ms"] if "stock" in case else case["stock_ms"]
    return Comparison(
        case=case["name"],
        link=document["link"],
        topk=case["block"]["topk"],
        layers=document.get("layers", 1),
        micro_batches=micro_batches,
        is_training=document["format"] == "ampipe-training-1",
        on_cpu=document["device"] == "cpu",
        emulated=document["emulated"],
        stock_ms=stock_ms / micro_batches,
        noise=control["spread"] if control else None,
        speedups={name: _of_row(row) for name, row in rows.items()},
        bound_shares={name: row["bound_share"] for name, row in rows.items() if row.get("bound_share")},
    )


def _of_row(row: Mapping[str, Any]) -> Speedup:
    return Speedup(row["speedup"], row["speedup_p10"], row["speedup_p90"])


def _name_of_row(row: Mapping[str, Any]) -> str:
    if row.get("partner") is not None:
        return PARTNERS
    if row["schedule"] == "stock-graphs":
        return MEGATRON_GRAPHS
    is_fixed, has_graphs = row.get("rows", "exact") == "fixed", row.get("graphs", False)
    how = ", whole graphs" if is_fixed and has_graphs else ", graphs" if has_graphs else ""
    how = how or (", fixed rows" if is_fixed else "")
    schedule = "" if row["schedule"] == "ampipe" else f"{row['schedule']}, "
    return f"{schedule}{row['degree']} chunks{how}"


def _of_partners(document: Document) -> Comparison:
    """From a file of ``docs/measured/partners.py``: steps of several micro-batches."""
    seconds, case = document["seconds"], document["case"]
    stock = seconds["megatron"]
    shares = {}
    # As in a file of ``ampipe bench``: of the control, whichever is larger.
    control = _within(stock, seconds[CONTROL])
    if document.get("bound_seconds"):
        shares = {
            name: document["bound_seconds"] / statistics.median(seconds[key])
            for key, name in OF_SCRIPT.items()
            # Says how near AMPipe's values come, not how near Megatron's do.
            if key in seconds and key not in OF_MEGATRON
        }
    on_cpu = case["dtype"] == "fp32"
    return Comparison(
        case=case["name"],
        link=link_of_partners(document),
        topk=case["topk"],
        layers=case["layers"],
        micro_batches=case["microbatches"],
        is_training=False,
        on_cpu=on_cpu,
        emulated=not on_cpu or "/s" in link_of_partners(document),
        stock_ms=1e3 * statistics.median(stock) / case["microbatches"],
        noise=max(control.high, 1 / control.low) - 1,
        speedups={name: _within(stock, seconds[key]) for key, name in OF_SCRIPT.items() if key in seconds},
        bound_shares=shares,
    )


def link_of_partners(document: Document) -> str:
    """The link of a run of ``docs/measured/partners.py``: its second argument."""
    words = document["command"]
    return str(words[words.index("docs/measured/partners.py") + 2])


def _within(stock: Sequence[float], other: Sequence[float]) -> Speedup:
    """From the times of all rounds."""
    ratios = [before / after for before, after in zip(stock, other, strict=True)]
    return Speedup(statistics.median(ratios), min(ratios), max(ratios))


def merged(runs: Sequence[Comparison], kind: str) -> Speedup | None:
    """The median of several runs, and the range of all their repeats; None if none of them has the kind."""
    found = [run.speedups[kind] for run in runs if kind in run.speedups]
    if not found:
        return None
    return Speedup(
        statistics.median(each.median for each in found),
        min(each.low for each in found),
        max(each.high for each in found),
    )


def kinds_table(runs: Iterable[tuple[str, Comparison]]) -> str:
    """A row for each run: Megatron's time, the noise, and the speedup of every kind; with their bounds."""
    listed = list(runs)
    present = {kind for _, run in listed for kind in run.speedups}
    kinds = [kind for kind in dict.fromkeys(ALL_KINDS) if kind in present]
    rows = []
    for label, run in listed:
        shares = run.bound_shares.values()
        rows.append(
            [
                label,
                run.link,
                f"{run.stock_ms:.0f}",
                "" if run.noise is None else f"{run.noise:.1%}",
                *(str(run.speedups.get(kind, "")) for kind in kinds),
                f"{max(shares):.0%}" if shares else "",
            ]
        )
    return without_empty(["file", "link", "Megatron, a micro-batch", "noise", *kinds, "of the bound"], rows)


ALL_KINDS = (
    *(CHUNKS.format(degree) for degree in (2, 4, 8)),
    *(kind.format(degree) for kind in (GRAPHS, WHOLE) for degree in (2, 4)),
    *OF_SCRIPT.values(),
)
"""Kinds of a step in the order of a table's columns."""
