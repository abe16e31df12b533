"""Prints a result, of blocks or of trainings, as a table. Chooses and computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.schedule import KEEP, Exchange
from megatron_ampipe.tools.measuring.result import megatrons_again

Record = Mapping[str, Any]
"""A document, a case or a row."""

_BLOCKS = (
    "ms: forward + backward of all layers, median over repeats of the slowest rank. of bound: the least "
    "possible time as a share of this time. MiB: the most that a pass holds at once, beyond weights and "
    "input. wire MB: sent by all ranks, by the kernel's counters. degree 1 is stock again. "
)
_TRAININGS = (
    "ms: an iteration (all layers, optimizer and gradient reduction included) by Megatron's log, median. "
    "loss difference: the largest of all iterations, relative to stock. "
)
_BOTH = (
    "speedup: median of stock / this within a repeat, and the 10th to 90th percentile. control: stock once "
    "more. Its spread: how far the 10th or 90th percentile of stock / control is from 1, as a factor. A "
    "speedup nearer to 1 is marked 'no difference seen'. stock-gloo: stock with gloo's own all-to-all; all "
    "other rows have the host platform's."
)


def show(document: Record, console: Console) -> None:
    """Print one row for each layer of each case; a column without any figure is left out."""
    training = "rounds" in document
    lines: list[tuple[str, Record, str | None]] = []
    for case in document["cases"]:
        fastest = min(case["rows"], key=lambda row: row["ms"], default=None)
        lines.append((case["name"], _stock(case), None))
        for row in (*megatrons_again(case), *case["rows"]):
            lines.append(("", row, "bold" if row is fastest else None))
    columns = {name: [cell(row) for _, row, _ in lines] for name, cell in _COLUMNS.items()}
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    caption = (_TRAININGS if training else _BLOCKS) + _BOTH
    title = "training · " * training + _heading(document)
    table = Table(title=title, caption=caption, caption_justify="left")
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
    if "prediction" in document:
        summary = document["prediction"]
        console.print(
            f"predictions are off by {summary['median_error']:.1%} in the median and "
            f"{summary['worst_error']:.1%} at most; the row with the least predicted time is within 3 % of "
            f"the fastest in {summary['close_choices']} of {summary['cases']} cases (at most "
            f"{summary['worst_loss']:.1%} slower)"
        )


def _heading(document: Record) -> str:
    link = f"link {document['link']}" + " (emulated)" * document["emulated"]
    ranks = f"{document['ranks']} ranks" + ", all but one pretended" * document["pretended"]
    layers = f", {document['layers']} layers" * (document["layers"] > 1)
    return f"grid {document['grid']}{layers} · {link} · {ranks}"


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
    "bound ms": _figure("bound_ms", "{:.2f}"),
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
