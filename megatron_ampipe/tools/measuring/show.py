"""Prints a result, of blocks or of trainings, as a table. Chooses and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.schedule import KEEP, Exchange

Record = Mapping[str, Any]
"""A document, a case or a row."""

_CAPTION = (
    "ms: median of a forward and a backward pass of all layers, or of a training's iteration; degree 1 is "
    "stock again. speedup: median of stock / this within a repeat, and its 10th to 90th percentile; no "
    "difference is seen where it is nearer to 1 than the spread of the control, which is stock once more. "
    "of bound: the least possible time as a share of this. MiB: the peak beyond weights and input. wire MB: "
    "sent by all ranks. More: docs/measured.md"
)


def show(document: Record, console: Console) -> None:
    """Print one row for each layer of each case; a column without any figure is left out."""
    lines: list[tuple[str, Record, str | None]] = []
    for case in document["cases"]:
        fastest = min(case["rows"], key=lambda row: row["ms"], default=None)
        lines.append((case["name"], _stock(case), None))
        for row in (*([case["control"]] if "control" in case else []), *case["rows"]):
            lines.append(("", row, "bold" if row is fastest else None))
    columns = {name: [cell(row) for _, row, _ in lines] for name, cell in _COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    table = Table(title=_heading(document), caption=_CAPTION, caption_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("layer")
    for name in columns:
        # In a narrow terminal a figure goes on in the next line rather than losing its end.
        table.add_column(name, justify="right", overflow="fold")
    for (name, row, style), *cells in zip(lines, *columns.values(), strict=True):
        if name:
            table.add_section()
        table.add_row(name, row["schedule"], *cells, style=style)
    console.print(table)


def _heading(document: Record) -> str:
    link = f"link {document['link']}" + " (emulated)" * document["emulated"]
    ranks = f"{document['ranks']} ranks" + ", all but one pretended" * document["pretended"]
    layers = f", {document['layers']} layers" * (document["layers"] > 1)
    return "training · " * ("rounds" in document) + f"grid {document['grid']}{layers} · {link} · {ranks}"


def _stock(case: Record) -> dict[str, Any]:
    """The figures of stock, as a row without speedup."""
    figures = {key.removeprefix("stock_"): value for key, value in case.items() if key.startswith("stock_")}
    return {"schedule": "stock", **figures, **case.get("stock", {})}


def _figure(key: str, form: str, factor: float = 1) -> Callable[[Record], str]:
    return lambda row: "" if row.get(key) is None else form.format(row[key] * factor)


def _choice(key: str, usual: object) -> Callable[[Record], str]:
    """Empty where it is as usual."""
    return lambda row: "" if row.get(key, usual) == usual else str(row[key])


def _speedup(row: Record) -> str:
    """The speedup, with what the control says of it."""
    if "speedup" not in row:
        return ""
    said = f" (spread {row['spread']:.1%})" if "spread" in row else ""
    return f"{row['speedup']:.3f}" + (said if row.get("difference_seen", True) else " no difference seen")


_COLUMNS: dict[str, Callable[[Record], str]] = {
    "stack": _choice("stack", 1),
    "memory": _choice("memory", KEEP),
    "exchange": _choice("exchange", Exchange.ROWS),
    "wire": _choice("wire", None),
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
    "difference": lambda row: f"{row['difference_from_stock']:.1e}" if row.get("wire") else "",
    "loss difference": _figure("loss_difference", "{:.1e}"),
    "predicted": _figure("predicted_ms", "{:.2f}"),
    "off by": _figure("error", "{:+.1%}"),
}
"""By heading, what makes a cell of a row; empty where the row has no such figure."""
