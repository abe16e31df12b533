"""Shows a result: the table in the terminal, and pictures, one file each. Chooses and computes nothing.

The pictures are figures of the paper's evaluation: the speedups ``by-case`` (figure 7) and ``by-degree`` (8).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.schedule import KEEP, Exchange
from megatron_ampipe.tools.measuring.bench_job import STOCK_GLOO
from megatron_ampipe.tools.measuring.result import megatrons_again, possible_speedup

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Record = Mapping[str, Any]
"""A document, a case or a row."""

_BLOCKS = (
    "ms: forward + backward of {layers}, median over repeats of the slowest rank. speedup: median of "
    "stock / this within a repeat, and the 10th to 90th percentile; for stock, what no order of these "
    "stages can exceed. of bound: the least possible time as a share of this time. busy: cores that the "
    "slowest rank kept busy. MiB: the most that a pass holds at once, beyond weights and input."
)
_TRAININGS = (
    "ms: an iteration (all layers, optimizer and gradient reduction included) by Megatron's log, median. "
    "speedup: median of stock / this at the same iteration of the same round, and the 10th to 90th "
    "percentile. loss difference: the largest of all iterations, relative to stock."
)
_CONTROL = (
    " control: stock once more. Its spread: how far the 10th or 90th percentile of stock / control is from "
    "1, as a factor. A speedup nearer to 1 is marked 'no difference seen'."
)
_GLOO = (
    " stock-gloo: stock with gloo's own all-to-all; all other rows have the host platform's, stock included."
)
_STACKS = " stack: how many layers share a schedule; 1 is block by block."
_MEMORIES = " memory: what the experts keep for their backward pass."
_WIRE = (
    " wire MB: sent by all ranks, by the kernel's counters, and how much more that is than rows and "
    "probabilities by the routing."
)
_DEGREE_1 = " degree 1 is stock again."

# Okabe and Ito, as in the timelines.
_COLOURS = {"ampipe": "#0072B2", "moe-only": "#E69F00", "sequential": "#CC79A7"}
_OTHER_COLOURS = ("#009E73", "#56B4E9", "#D55E00", "#8C6BB1")
_FAINT = "#C9CDD2"
_GROUP_IN, _WIDTHS_IN, _HEIGHT_IN = 1.1, (6.0, 30.0), 4.2
_FILE_TYPES = ("svg", "png")


def heading(document: Record) -> str:
    """What was measured, in one line; says so when the link was emulated, and when cases are missing."""
    link = f"link {document['link']}" + " (emulated)" * document["emulated"]
    ranks = f"{document['ranks']} ranks" + ", all but one pretended" * document["pretended"]
    layers = f", {document['layers']} layers" if document["layers"] > 1 else ""
    missing = ", ".join(document["missing_cases"])
    unfinished = f" · unfinished, without {missing}" if missing else ""
    return f"grid {document['grid']}{layers} · {link} · {ranks}{unfinished}"


def show(document: Record, console: Console) -> None:
    """Print one row for each layer of each case, of blocks or of trainings."""
    cases, training = document["cases"], "rounds" in document
    rows = [row for case in cases for row in case["rows"]]
    again = [row for case in cases for row in megatrons_again(case)]
    columns = _training_columns() if training else _block_columns(document)
    ways: dict[str, Callable[[Record], str]] = {}
    if document["layers"] > 1:
        ways["stack"] = lambda row: str(row["stack"])
    if any(row["memory"] != KEEP for row in rows):
        ways["memory"] = lambda row: row["memory"]
    if any(row["exchange"] != Exchange.ROWS for row in rows):
        ways["exchange"] = lambda row: row["exchange"]
    if any(row.get("wire") for row in rows):
        ways["wire"] = lambda row: row["wire"] or "none"
    ways["degree"] = lambda row: row["cut"]
    caption = (
        (_TRAININGS if training else _BLOCKS.format(layers=_layers(document)))
        + _STACKS * ("stack" in ways)
        + _CONTROL * bool(again)
        + _GLOO * any(row["schedule"] == STOCK_GLOO for row in again)
        + _MEMORIES * ("memory" in ways)
        + _WIRE * ("wire MB" in columns)
        + _DEGREE_1 * any(map(_is_stock_again, rows))
    )
    title = ("training · " if training else "") + heading(document)
    table = Table(title=title, caption=caption, caption_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("layer")
    for name in (*ways, *columns):
        # In a narrow terminal a figure goes on in the next line rather than losing its end.
        table.add_column(name.strip(), justify="right", overflow="fold")
    blank = [""] * len(ways)
    for case in cases:
        fastest = min((row["ms"] for row in case["rows"]), default=None)
        cells = [column(_stock(case)) for column in columns.values()]
        table.add_row(case["name"], "stock", *blank, *cells)
        for row in megatrons_again(case):
            table.add_row("", row["schedule"], *blank, *[column(row) for column in columns.values()])
        for row in case["rows"]:
            cells = [way(row) for way in ways.values()] + [column(row) for column in columns.values()]
            table.add_row("", row["schedule"], *cells, style="bold" if row["ms"] == fastest else None)
        table.add_section()
    console.print(table)
    if "prediction" in document:
        summary = document["prediction"]
        console.print(
            f"predictions are off by {summary['median_error']:.1%} in the median and "
            f"{summary['worst_error']:.1%} at most; the row with the least predicted time is within 3 % of "
            f"the fastest in {summary['close_choices']} of {summary['cases']} cases (at most "
            f"{summary['worst_loss']:.1%} slower)"
        )


def _layers(document: Record) -> str:
    return f"{document['layers']} layers" if document["layers"] > 1 else "one block"


def _is_stock_again(row: Record) -> bool:
    """Whether it is a schedule in one chunk, which is Megatron's own layer."""
    own = row["degree"] == 1 and row["exchange"] == Exchange.ROWS
    return own and "loss_difference" not in row and row.get("stages_us_by_rank") is None


def _stock(case: Record) -> dict[str, Any]:
    """The figures of stock, as a row without speedup."""
    if "stock" in case:
        return dict(case["stock"])
    figures = {key.removeprefix("stock_"): value for key, value in case.items() if key.startswith("stock_")}
    possible = possible_speedup(case["stock_ms"], case["rows"])
    return figures | {"possible": possible}


Columns = dict[str, Callable[[Record], str]]
"""By heading, what makes a cell of a row; empty where the row has no such figure."""


def _figure(key: str, form: str, factor: float = 1) -> Callable[[Record], str]:
    return lambda row: "" if row.get(key) is None else form.format(row[key] * factor)


def _speedup(row: Record) -> str:
    """The speedup, with what the control says of it."""
    if "speedup" not in row:
        return "" if row.get("possible") is None else f"at most {row['possible']:.2f}"
    said = f" (spread {row['spread']:.1%})" if "spread" in row else ""
    return f"{row['speedup']:.3f}" + (said if row.get("difference_seen", True) else " no difference seen")


def _range(low: str, high: str, form: str) -> Callable[[Record], str]:
    return lambda row: f"{row[low]:{form}}-{row[high]:{form}}" if low in row else ""


def _wire_mb(row: Record) -> str:
    """Megabytes that all ranks put on the wire, and by how much that exceeds what the routing asks for."""
    sent, expected = row["wire_bytes"], row["expected_wire_bytes"]
    return f"{sent / 1e6:.2f} ({sent / expected - 1:+.1%})"


def _block_columns(document: Record) -> Columns:
    cases = document["cases"]
    columns = {
        "ms": _figure("ms", "{:.2f}"),
        "speedup": _speedup,
        "10-90 %": _range("speedup_p10", "speedup_p90", ".3f"),
        "bound ms": _figure("bound_ms", "{:.2f}"),
        "of bound": _figure("bound_share", "{:.1%}"),
        # Not measured on a GPU.
        "busy": _figure("busy_cores", "{:.2f}"),
        "MiB": _figure("peak_bytes", "{:.1f}", 2**-20),
        "predicted MiB": _figure("predicted_peak_bytes", "{:.1f}", 2**-20),
    }
    if not all(case.get("stock_busy_cores") for case in cases):
        del columns["busy"]
    if all(case["stock_wire_bytes"] for case in cases):
        columns["wire MB"] = _wire_mb
    if any(row["wire"] for case in cases for row in case["rows"]):
        columns["difference"] = _figure("difference_from_stock", "{:.1e}")
    if "prediction" in document:
        columns |= {"predicted": _figure("predicted_ms", "{:.2f}"), "off by": _figure("error", "{:+.1%}")}
    return columns


def _training_columns() -> Columns:
    return {
        "ms": _figure("ms", "{:.1f}"),
        "10-90 %": _range("ms_p10", "ms_p90", ".1f"),
        "iterations/s": _figure("iterations_per_s", "{:.3f}"),
        "speedup": _speedup,
        "10-90 % ": _range("speedup_p10", "speedup_p90", ".3f"),
        "loss difference": _figure("loss_difference", "{:.1e}"),
    }


def check_target(prefix: Path) -> None:
    """Refuse, before anything is measured, pictures that could not be written afterwards.

    Raises:
        BadInput: nothing can be written there.
    """
    suffixes = [f"-{name}.{kind}" for name in _PICTURES for kind in _FILE_TYPES]
    outputs.check_prefix(prefix, suffixes=suffixes, flag="--plot")


def draw(document: Record, prefix: Path) -> list[Path]:
    """Draw every picture: ``PREFIX-by-case.svg`` and so on.

    Returns:
        The files; none where no degree above 1 was measured.

    Raises:
        EnvironmentMissing: matplotlib is absent.
        RunFailed: a file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentMissing(
            f"ampipe bench --plot needs matplotlib ({error}). Install it: pip install matplotlib"
        ) from error
    written: list[Path] = []
    if not _series(document):
        return written
    for name, paint in _PICTURES.items():
        groups = len(document["cases"]) if name != "by-degree" else 1
        width = min(max(_WIDTHS_IN[0], 1.5 + _GROUP_IN * groups), _WIDTHS_IN[1])
        with matplotlib.rc_context({"svg.hashsalt": "ampipe", "text.parse_math": False}):
            figure = Figure(figsize=(width, _HEIGHT_IN), layout="constrained")
            axes = figure.add_subplot()
            paint(axes, document)
            axes.spines[["top", "right"]].set_visible(False)
            figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
            figure.suptitle(heading(document), fontsize=9)
            for kind in _FILE_TYPES:
                target = prefix.with_name(f"{prefix.name}-{name}.{kind}")
                with outputs.atomic_file(target) as partial:
                    figure.savefig(partial, format=kind, dpi=160)
                written.append(target)
    return written


def _by_case(axes: Axes, document: Record) -> None:
    """Bars that begin at 1, each series of a case at its best degree; none where it was not measured."""
    series, names = _series(document), [case["name"] for case in document["cases"]]
    width = 0.8 / len(series)
    for place, name in enumerate(series):
        rows = [_fastest(case, name) for case in document["cases"]]
        at = [index + (place - (len(series) - 1) / 2) * width for index in range(len(names))]
        heights = [row["speedup"] - 1 if row else 0.0 for row in rows]
        axes.bar(at, heights, width, bottom=1.0, color=_colour(document, name), label=name)
    axes.axhline(1.0, color="#22262B", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=60 if len(names) > 6 else 0, fontsize=7)
    axes.margins(x=0.02)
    axes.set_ylabel("speedup over stock")
    axes.set_title("each at its best degree", fontsize=9)


def _by_degree(axes: Axes, document: Record) -> None:
    """Median over cases, and the range of cases."""
    for series in _series(document):
        speedups: dict[int, list[float]] = {}
        for row in _rows(document["cases"], series):
            speedups.setdefault(row["degree"], []).append(row["speedup"])
        degrees, colour = sorted(speedups), _colour(document, series)
        medians = [statistics.median(speedups[degree]) for degree in degrees]
        axes.plot(degrees, medians, "o-", color=colour, label=series)
        if len(document["cases"]) > 1:
            low, high = ([of(speedups[degree]) for degree in degrees] for of in (min, max))
            axes.fill_between(degrees, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(1.0, color=_FAINT, zorder=0)
    axes.set_xscale("log", base=2)
    ticks = sorted(
        {row["degree"] for series in _series(document) for row in _rows(document["cases"], series)}
    )
    axes.set_xticks(ticks, [str(degree) for degree in ticks])
    axes.set_xlabel("degree")
    axes.set_ylabel("speedup over stock")
    axes.set_title("median over cases; shaded: from the lowest to the highest", fontsize=9)


def _rows(cases: Iterable[Record], series: str | None = None) -> list[Record]:
    """The rows of a named order, equal chunks and one degree, as in the paper; of one series if given."""
    special = ("shares", "backward_degree", "order")
    rows = [row for case in cases for row in case["rows"] if not any(row.get(key) for key in special)]
    return [row for row in rows if series is None or _series_of(row) == series]


def _series_of(row: Record) -> str:
    """What rows of several degrees have in common: schedule, layers that share it, memory, exchange."""
    words = [row["schedule"]]
    words += [f"{row['stack']} layers together"] * (row["stack"] > 1) + [row["memory"]] * (
        row["memory"] != KEEP
    )
    return ", ".join([*words, *[f"exchange {row['exchange']}"] * (row["exchange"] != Exchange.ROWS)])


def _series(document: Record) -> list[str]:
    """Those measured at more than degree 1, in the order of the result."""
    return list(dict.fromkeys(_series_of(row) for row in _rows(document["cases"]) if row["degree"] > 1))


def _fastest(case: Record, series: str) -> Record | None:
    """Of the chunked rows."""
    rows = [row for row in _rows([case], series) if row["degree"] > 1]
    return min(rows, key=lambda row: row["ms"], default=None)


def _colour(document: Record, series: str) -> str:
    others = [name for name in _series(document) if name not in _COLOURS]
    return _COLOURS.get(series) or _OTHER_COLOURS[others.index(series) % len(_OTHER_COLOURS)]


_PICTURES: dict[str, Callable[[Any, Record], None]] = {"by-case": _by_case, "by-degree": _by_degree}
