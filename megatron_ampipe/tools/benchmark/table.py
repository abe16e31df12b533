"""Shows a result as a table in the terminal. Chooses and computes nothing. Called by ``ampipe bench``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.schedule import KEEP, Exchange
from megatron_ampipe.tools.benchmark.argument_values import UNCHANGED
from megatron_ampipe.tools.benchmark.result import possible_speedup

_CAPTION = (
    "ms: forward + backward of {passed}, median over repeats of the slowest rank. speedup: median of "
    "stock / this within a repeat, and the 10th to 90th percentile; for stock, what no order of these "
    "stages can exceed. of bound: the least possible time as a share of this time. busy: cores that the "
    "slowest rank kept busy. MiB: the most that a pass holds at once, beyond weights and input."
)
_OF_WIRE = (
    " wire MB: sent by all ranks, by the kernel's counters, and how much more that is than rows and "
    "probabilities by the routing."
)
OF_CONTROL = (
    " control: stock once more. Its spread: how far the 10th or 90th percentile of stock / control is from "
    "1, as a factor. A speedup nearer to 1 is marked 'no difference seen'."
)
OF_GLOO = (
    " stock-gloo: stock with gloo's own all-to-all; all other rows have the host platform's, stock included."
)
_OF_DEGREE_1 = " degree 1 is stock again."
_OF_MEMORIES = " memory: what the experts keep for their backward pass."
OF_STACKS = " stack: how many layers share a schedule; 1 is block by block."


def heading(document: Mapping[str, Any]) -> str:
    """What was measured, in one line; says so when the link was emulated."""
    link = f"link {document['link']}" + (" (emulated)" if document["emulated"] else "")
    ranks = f"{document['ranks']} ranks" + (", all but one pretended" if document.get("pretended") else "")
    # Absent from older results.
    num_layers = document.get("layers", 1)
    layers = f", {num_layers} layers" if num_layers > 1 else ""
    return f"grid {document['grid']}{layers} · {link} · {ranks}{unfinished(document)}"


def unfinished(document: Mapping[str, Any]) -> str:
    """What a heading says of cases that were not measured, because the run ended early."""
    # Absent from older results.
    missing = document.get("missing_cases")
    return f" · unfinished, without {', '.join(missing)}" if missing else ""


def show(document: Mapping[str, Any], console: Console) -> None:
    """Print one row for each layer of each case."""
    again = any(
        row["degree"] == 1 and row.get("exchange", "rows") == "rows" and row.get("stages_us_by_rank") is None
        for case in document["cases"]
        for row in case["rows"]
    )
    num_layers = document.get("layers", 1)
    stacked = num_layers > 1
    passed = f"{num_layers} layers" if stacked else "one block"
    # Absent from older results.
    rows = [row for case in document["cases"] for row in case["rows"]]
    several = any(row.get("memory", KEEP) != KEEP for row in rows)
    exchanged = any(row.get("exchange", Exchange.ROWS) != Exchange.ROWS for row in rows)
    encoded = any(row.get("wire") for row in rows)
    controlled = any(case.get("control") for case in document["cases"])
    on_gloo = any(case.get("gloo_all_to_all") for case in document["cases"])
    wired = all(case.get("stock_wire_bytes") for case in document["cases"])
    caption = _CAPTION.format(passed=passed) + OF_STACKS * stacked
    caption += (
        OF_CONTROL * controlled
        + OF_GLOO * on_gloo
        + _OF_MEMORIES * several
        + _OF_WIRE * wired
        + _OF_DEGREE_1 * again
    )
    table = Table(title=heading(document), caption=caption, caption_justify="left")
    table.add_column("case", overflow="fold")
    table.add_column("layer")
    predicted = "prediction" in document
    columns = [
        *["stack"] * stacked,
        *["memory"] * several,
        *["exchange"] * exchanged,
        *["wire"] * encoded,
        "degree",
        "ms",
        "speedup",
        "10-90 %",
        "bound ms",
        "of bound",
    ]
    # Not measured on a GPU, and absent from older results.
    counted = all(case.get("stock_busy_cores") for case in document["cases"])
    metered = all(case.get("stock_peak_bytes") for case in document["cases"])
    columns += ["busy"] * counted + ["MiB"] * metered
    foreseen = metered and all("stock_predicted_peak_bytes" in case for case in document["cases"])
    columns += ["predicted MiB"] * foreseen + ["wire MB"] * wired + ["difference"] * encoded
    for column in columns + ["predicted", "off by"] * predicted:
        # In a narrow terminal a figure goes on in the next line rather than losing its end.
        table.add_column(column, justify="right", overflow="fold")
    for case in document["cases"]:
        fastest = min((row["ms"] for row in case["rows"]), default=None)
        measured = [f"{case['stock_busy_cores']:.2f}"] if counted else []
        measured += [_mib(case["stock_peak_bytes"])] if metered else []
        measured += [_mib(case["stock_predicted_peak_bytes"])] if foreseen else []
        measured += [_mb(case, "stock_")] if wired else []
        measured += [""] * encoded
        possible = possible_speedup(case["stock_ms"], case["rows"])
        limit = "" if possible is None else f"at most {possible:.2f}"
        blank = [""] * (1 + stacked + several + exchanged + encoded)
        table.add_row(case["name"], "stock", *blank, f"{case['stock_ms']:.2f}", limit, *[""] * 3, *measured)
        for row in megatrons_again(case):
            cells = [f"{row['busy_cores']:.2f}"] if counted else []
            cells += [_mib(row["peak_bytes"])] if metered else []
            cells += [""] * foreseen + ([_mb(row)] if wired else [])
            cells += [f"{row['difference_from_stock']:.1e}"] if encoded else []
            table.add_row(
                "", row["schedule"], *blank, f"{row['ms']:.2f}", *speedup_cells(row), "", "", *cells
            )
        for row in case["rows"]:
            bound_ms, share = row["bound_ms"], row["bound_share"]
            table.add_row(
                "",
                row["schedule"],
                *([str(row["stack"])] if stacked else []),
                *([row.get("memory", KEEP)] if several else []),
                *([row.get("exchange", Exchange.ROWS)] if exchanged else []),
                *([row.get("wire") or UNCHANGED] if encoded else []),
                # An older result has degrees alone.
                row.get("cut", str(row["degree"])),
                f"{row['ms']:.2f}",
                *speedup_cells(row),
                "" if bound_ms is None else f"{bound_ms:.2f}",
                "" if share is None else f"{share:.1%}",
                *([f"{row['busy_cores']:.2f}"] if counted else []),
                *([_mib(row["peak_bytes"])] if metered else []),
                *([_mib(row["predicted_peak_bytes"])] if foreseen else []),
                *([_mb(row)] if wired else []),
                *([f"{row['difference_from_stock']:.1e}"] if encoded else []),
                *([f"{row['predicted_ms']:.2f}", f"{row['error']:+.1%}"] if predicted else []),
                style="bold" if row["ms"] == fastest else None,
            )
        table.add_section()
    console.print(table)
    if predicted:
        found = document["prediction"]
        console.print(
            f"predictions are off by {found['median_error']:.1%} in the median and "
            f"{found['worst_error']:.1%} at most; the row with the least predicted time is within 3 % of the "
            f"fastest in {found['close_choices']} of {found['cases']} cases (at most "
            f"{found['worst_loss']:.1%} slower)"
        )


def megatrons_again(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The control, and Megatron's layers with gloo's all-to-all, if there are; older results have neither."""
    return [case[key] for key in ("control", "gloo_all_to_all") if case.get(key) is not None]


def speedup_cells(row: Mapping[str, Any]) -> tuple[str, str]:
    """The speedup, with what the control says of it, and its 10th to 90th percentile."""
    said = f" (spread {row['spread']:.1%})" if "spread" in row else ""
    # Absent from older results.
    if not row.get("difference_seen", True):
        said = " no difference seen"
    return f"{row['speedup']:.3f}{said}", f"{row['speedup_p10']:.3f}-{row['speedup_p90']:.3f}"


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f}"


def _mb(row: Mapping[str, Any], prefix: str = "") -> str:
    """Megabytes that all ranks put on the wire, and by how much that exceeds what the routing asks for."""
    wire, expected = row[f"{prefix}wire_bytes"], row[f"{prefix}expected_wire_bytes"]
    return f"{wire / 1e6:.2f} ({wire / expected - 1:+.1%})"
