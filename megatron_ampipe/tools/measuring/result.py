"""The document of ``ampipe bench --json`` and its table: medians, ratios with their spread, bounds. No torch.

The time of a pass is the maximum over ranks. The speedup is the median of the ratios stock / variant taken
within each repeat, where the machine was in the same state for both. The noise of the machine is the spread
of the control, which is Megatron's layer measured a second time, in turns with all others.
"""

from __future__ import annotations

import csv
import io
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_ampipe.files import inputs, outputs
from megatron_ampipe.files.outputs import Report, ReportView
from megatron_ampipe.plan.simulate import direction_bound
from megatron_ampipe.schedule import KEEP, Exchange, Stage, stage_from_text, to_text
from megatron_ampipe.tools.measuring.bench_job import CONTROL, EXACT, BenchJob, Variant
from megatron_ampipe.tools.measuring.reports import CaseReport, VariantReport

FORMAT, TRAINING_FORMAT = "ampipe-bench-1", "ampipe-training-1"
_PER_NODE = re.compile(r"ranks-per-node=(\d+)")
"""Where older results have the ranks of a node: in the text of the link."""


def write(document: ReportView, path: Path) -> None:
    """Write the document; the file appears only when it is complete."""
    outputs.write_text(path, json.dumps(document) + "\n")


def read(path: Path) -> Report:
    """Read a document of :func:`write`, and add the fields that older ones lack; BadInput if it is none."""

    def parse(text: str) -> Report:
        document: Report = json.loads(text)
        if document["format"] not in (FORMAT, TRAINING_FORMAT):
            raise ValueError("another format")
        in_link = _PER_NODE.search(document["link"])
        older = {"layers": 1, "pretended": False, "ranks_per_node": int(in_link[1]) if in_link else None}
        return older | document

    rule, remedy = "is not a result of ampipe bench", "Give a file that ampipe bench --json wrote."
    return inputs.parse_file(path, parse, what="--from", rule=rule, remedy=remedy)


def speedup(stock: Sequence[float], samples: Sequence[float]) -> dict[str, float]:
    """The ratios stock / variant within each repeat: ``speedup``, their median, and two percentiles."""
    ratios = [before / after for before, after in zip(stock, samples, strict=True)]
    p10, median, p90 = (round(float(value), 4) for value in np.percentile(ratios, (10, 50, 90)))
    return {"speedup": median, "speedup_p10": p10, "speedup_p90": p90}


def with_control(rows: Sequence[Report]) -> Report:
    """The rows of all variants but stock as a case holds them.

    Returns:
        ``control``, with its ``spread``: the distance from 1 of the 10th or the 90th percentile of
        stock / control, whichever is larger (0.03 for 3 %). ``rows``, all others, with ``difference_seen``:
        whether the speedup is further from 1 than the spread.
    """
    control, *others = rows
    assert control["schedule"] == CONTROL
    spread = round(max(control["speedup_p90"], 1 / control["speedup_p10"]) - 1, 4)
    return {
        "control": control | {"spread": spread},
        "rows": [
            row | {"difference_seen": max(row["speedup"], 1 / row["speedup"]) - 1 > spread} for row in others
        ],
    }


def case_result(job: BenchJob, index: int, reports: Sequence[CaseReport]) -> Report:
    """One entry of ``cases`` in the document, from the ranks' reports."""
    case, variants = job.cases[index], job.variants[index]
    by_variant = list(zip(*(report["variants"] for report in reports), strict=True))
    stock, *figures = map(_figures, by_variant)
    rows = [
        {
            **described(variant, job),
            **each,
            **speedup(stock["samples_ms"], each["samples_ms"]),
            "difference_from_stock": ranks[0]["difference"],
            **_stages(variant, ranks, ms=each["ms"]),
        }
        for variant, each, ranks in zip(variants[1:], figures, by_variant[1:], strict=True)
    ]
    return {
        "name": case.name,
        "link": job.link.text,
        "emulated": job.link.emulated,
        "layers": job.layers,
        **{f"stock_{key}": value for key, value in stock.items()},
        "kernel": reports[0]["kernel"],
        "fused_gradients": reports[0]["fused_gradients"],
        "block": asdict(case),
        **with_control(rows),
    }


def described(variant: Variant, job: BenchJob) -> Report:
    """The fields of a row that describe its variant."""
    pipeline = variant.pipeline
    backward = None if pipeline.backward_degree == pipeline.degree else pipeline.backward_degree
    return {
        "schedule": variant.schedule,
        "degree": pipeline.degree,
        "backward_degree": backward,
        "cut": str(pipeline.degree) + (f":{backward}" if backward else ""),
        "layers": job.layers,
        "stack": pipeline.stack,
        "memory": pipeline.memory,
        "exchange": pipeline.exchange,
        "wire": variant.wire,
        "partner": None if pipeline.partner is None else pipeline.partner.order,
        "rows": variant.rows,
        "graphs": variant.graphs,
        # A custom one: a name says nothing to a reader who lacks the function.
        **({} if pipeline.order is None else {"order": to_text(pipeline.order)}),
    }


def _figures(ranks: Sequence[VariantReport]) -> Report:
    """The figures of a variant, stock included; times are those of the slowest rank."""
    by_rank = [[round(1e3 * seconds, 4) for seconds in rank["wall_s"]] for rank in ranks]
    samples = [max(repeat) for repeat in zip(*by_rank, strict=True)]
    backward_s = map(max, zip(*(rank["backward_s"] for rank in ranks), strict=True))
    # By the kernel's counters.
    repeats: list[list[dict[str, int]]] = []
    for sent_by_rank in zip(*(rank["wire_bytes"] for rank in ranks), strict=True):
        counted = [sent for sent in sent_by_rank if sent]
        if len(counted) == len(ranks):
            repeats.append(counted)
    sums = [sum(sum(sent.values()) for sent in repeat) for repeat in repeats]
    classes = repeats[0][0] if repeats else {}
    by_class = {
        name: round(statistics.median(sum(sent[name] for sent in repeat) for repeat in repeats))
        for name in classes
    }
    return {
        "ms": round(statistics.median(samples), 4),
        "backward_ms": round(1e3 * statistics.median(backward_s), 4),
        "samples_ms": samples,
        "samples_ms_by_rank": by_rank,
        "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        "graph_bytes": max(rank["graph_bytes"] for rank in ranks),
        "wire_bytes": round(statistics.median(sums)) if sums else None,
        **({"wire_bytes_by_class": by_class} if len(by_class) > 1 else {}),
    }


def _stages(variant: Variant, ranks: Sequence[VariantReport], *, ms: float) -> Report:
    """The stages of a row, and the bound of its time, of the slowest rank; None where nothing overlaps."""
    needs = ranks[0]["needs"]
    stages: list[dict[str, dict[str, list[float]]]] | None = None
    bound_ms: float | None = None
    if variant.pipelined:
        assert needs is not None
        stages = [rank["stages"] for rank in ranks if rank["stages"] is not None]
        assert len(stages) == len(ranks)
        bounds = [_bound_us(by_direction, needs, stack=variant.pipeline.stack) for by_direction in stages]
        bound_ms = round(max(bounds) / 1e3, 4)
    return {
        "bound_ms": bound_ms,
        "bound_share": bound_ms and round(bound_ms / ms, 4),
        "stage_needs": needs,
        "stages_us_by_rank": stages,
    }


def _bound_us(
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    needs: Mapping[str, Mapping[str, Sequence[str]]],
    *,
    stack: int,
) -> float:
    """The bound of a pass on one rank, from medians; ``stack`` layers share a schedule."""
    total = 0.0
    for direction, stages in samples.items():
        graphs: dict[int, dict[Stage, tuple[Stage, ...]]] = {}
        for name, earlier in needs[direction].items():
            stage = stage_from_text(name)
            graphs.setdefault(stage.layer // stack, {})[stage] = tuple(map(stage_from_text, earlier))
        times = {stage_from_text(name): statistics.median(passes) for name, passes in stages.items()}
        for graph in graphs.values():
            total += direction_bound({stage: times[stage] for stage in graph}, graph)
    return total


_OF_DOCUMENT = ("grid", "link", "emulated", "pretended", "ranks", "ranks_per_node", "device")
_OF_ROW = (
    *("schedule", "degree", "backward_degree", "stack", "memory", "exchange", "wire", "partner"),
    *("rows", "graphs"),
    *("ms", "iterations_per_s", "speedup", "speedup_p10", "speedup_p90", "spread", "difference_seen"),
    *(
        "bound_ms",
        "bound_share",
        "peak_bytes",
        "graph_bytes",
        "predicted_peak_bytes",
        "wire_bytes",
        "wire_bytes_inter",
    ),
    *("difference_from_stock", "loss_difference", "predicted_ms", "error"),
)
_COLUMNS_OF_CSV = (*_OF_DOCUMENT, "hardware", "commit", "layers", "case", *_OF_ROW)


def csv_text(documents: Sequence[ReportView]) -> str:
    """The rows of results, stock and control included, as CSV with a line of names.

    Names are those of the documents; a cell is empty where a row has no such figure. ``wire_bytes_inter`` is
    the part of ``wire_bytes`` that leaves a node, ``hardware`` the GPU or the processor.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS_OF_CSV, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for document in documents:
        run = {name: document.get(name) for name in _OF_DOCUMENT}
        run["hardware"] = document["hardware"].get("gpu") or document["hardware"]["cpu"]
        run["commit"] = document["versions"].get("commit")
        for case in document["cases"]:
            run |= {"layers": case.get("layers", document["layers"]), "case": case["name"]}
            for row in rows_of(case):
                between = (row.get("wire_bytes_by_class") or {}).get("inter")
                writer.writerow(run | dict(row) | {"wire_bytes_inter": between})
    return text.getvalue()


def rows_of(case: ReportView) -> list[ReportView]:
    """The rows of a case as the table has them: stock, its control if there is one, and the variants."""
    control = [case["control"]] if "control" in case else []
    return [_stock(case), *control, *case["rows"]]


_CAPTION = (
    "ms: median of a forward and a backward pass of all layers, or of a training's iteration; degree 1 is "
    "stock again. speedup: median of stock / this within a repeat, and its 10th to 90th percentile; no "
    "difference is seen where it is nearer to 1 than the spread of the control, which is stock once more. "
    "of bound: the least possible time as a share of this. MiB: the peak beyond weights and input. wire MB: "
    "sent by all ranks; between nodes: the part of it that leaves a node. More: docs/measured.md"
)


def show(document: ReportView, console: Console) -> None:
    """Print one row for each layer of each case; a column without any figure is left out."""
    lines: list[tuple[str, ReportView, str | None]] = []
    for case in document["cases"]:
        fastest = min(case["rows"], key=lambda row: row["ms"], default=None)
        for place, row in enumerate(rows_of(case)):
            name = case["name"] if place == 0 else ""
            lines.append((name, row, "bold" if row is fastest else None))
    columns = {name: [cell(row) for _, row, _ in lines] for name, cell in _COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(title=_heading(document), caption=_CAPTION, caption_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("layer")
    for name in columns:
        # In a narrow terminal a figure is wrapped, not cut.
        table.add_column(name, justify="right", overflow="fold")
    for (name, row, style), *cells in zip(lines, *columns.values(), strict=True):
        if name:
            table.add_section()
        table.add_row(name, row["schedule"], *cells, style=style)
    console.print(table)


def _heading(document: ReportView) -> str:
    link = f"link {document['link']}" + " (emulated)" * document["emulated"]
    layers = f", {document['layers']} layers" * (document["layers"] > 1)
    training = "training · " * (document["format"] == TRAINING_FORMAT)
    return f"{training}grid {document['grid']}{layers} · {link} · {_ranks(document)}"


def _ranks(document: ReportView) -> str:
    ranks = f"{document['ranks']} ranks"
    if document["pretended"]:
        ranks += ", all but one emulated"
    if document.get("ranks_per_node") is not None:
        ranks += f", {document['ranks_per_node']} per node"
    return ranks


def where_text(document: ReportView) -> tuple[str, str]:
    """Link, ranks and layers of a result, and its device."""
    hardware = document["hardware"]
    link = re.sub(f",{_PER_NODE.pattern}", "", document["link"])
    parts = [f"link {link}", _ranks(document)]
    if document["layers"] > 1:
        parts.append(f"{document['layers']} layers")
    if document["format"] == TRAINING_FORMAT:
        parts.append("whole training")
    device = hardware.get("gpu") or f"CPU, {hardware['cpu']}, {hardware['usable_cores']} cores"
    return " · ".join(parts), str(device)


def variant_text(row: ReportView) -> str:
    """The variant of a row without its degrees: schedule, and what differs from the usual choices."""
    parts = [str(row["schedule"])]
    for name, usual in (("stack", 1), ("memory", KEEP), ("exchange", Exchange.ROWS)):
        if row.get(name, usual) != usual:
            parts.append(f"{name} {row[name]}")
    parts += [f"{name} {row[name]}" for name in ("wire", "partner") if row.get(name) is not None]
    if row.get("rows", EXACT) != EXACT:
        parts.append(f"rows {row['rows']}")
    if row.get("graphs"):
        parts.append("CUDA graphs")
    return ", ".join(parts)


def _stock(case: ReportView) -> Report:
    """The figures of stock, as a row without speedup."""
    figures = {key.removeprefix("stock_"): value for key, value in case.items() if key.startswith("stock_")}
    return {"schedule": "stock", **figures, **case.get("stock", {})}


def _figure(key: str, form: str, factor: float = 1) -> Callable[[ReportView], str]:
    return lambda row: "" if row.get(key) is None else form.format(row[key] * factor)


def _choice(key: str, usual: object) -> Callable[[ReportView], str]:
    """Empty for the usual value."""
    return lambda row: "" if row.get(key, usual) == usual else str(row[key])


def _between_nodes(row: ReportView) -> str:
    """The part of the bytes that leaves a node, where that is known."""
    by_class = row.get("wire_bytes_by_class") or {}
    return f"{by_class['inter'] * 1e-6:.2f}" if "intra" in by_class else ""


def _speedup(row: ReportView) -> str:
    """The speedup, marked if the control shows that it is noise."""
    if "speedup" not in row:
        return ""
    said = f" (spread {row['spread']:.1%})" if "spread" in row else ""
    return f"{row['speedup']:.3f}" + (said if row.get("difference_seen", True) else " no difference seen")


_COLUMNS: dict[str, Callable[[ReportView], str]] = {
    "stack": _choice("stack", 1),
    "memory": _choice("memory", KEEP),
    "exchange": _choice("exchange", Exchange.ROWS),
    "wire": _choice("wire", None),
    "partner": _choice("partner", None),
    "rows": _choice("rows", EXACT),
    "graphs": lambda row: "yes" if row.get("graphs") else "",
    "degree": lambda row: "" if "spread" in row else row.get("cut", ""),
    "ms": _figure("ms", "{:.2f}"),
    "iterations/s": _figure("iterations_per_s", "{:.3f}"),
    "speedup": _speedup,
    "10-90 %": lambda row: (
        f"{row['speedup_p10']:.3f}-{row['speedup_p90']:.3f}" if "speedup_p10" in row else ""
    ),
    "of bound": _figure("bound_share", "{:.1%}"),
    "MiB": _figure("peak_bytes", "{:.1f}", 2**-20),
    "predicted MiB": _figure("predicted_peak_bytes", "{:.1f}", 2**-20),
    "wire MB": _figure("wire_bytes", "{:.2f}", 1e-6),
    "between nodes": _between_nodes,
    "difference": lambda row: f"{row['difference_from_stock']:.1e}" if row.get("wire") else "",
    "loss difference": _figure("loss_difference", "{:.1e}"),
    "predicted": _figure("predicted_ms", "{:.2f}"),
    "off by": _figure("error", "{:+.1%}"),
}
"""By heading, the function that makes a cell of a row; the cell is empty if the row has no such figure."""
