"""Pictures of a result, one file each: the figures of the paper's evaluation, with our figures.

``by-case`` (figure 7), ``by-degree`` (8), ``overhead`` (9: what chunking costs and what overlap gains) and
``bound`` (11: the speedup that the bound allows, and the one reached). Draws what a result holds and
measures nothing. Called by ``ampipe bench --plot``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.schedule import KEEP, Exchange
from megatron_ampipe.tools.benchmark.table import heading

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPER_DEGREE = 4
"""The degree of the paper's figures 7 and 9; where it was not measured, each case shows its fastest."""

# Okabe and Ito, as in the timelines.
_COLOURS = {"ampipe": "#0072B2", "moe-only": "#E69F00", "sequential": "#CC79A7"}
_OTHER_COLOURS = ("#009E73", "#56B4E9", "#D55E00", "#8C6BB1")
_FAINT = "#C9CDD2"
_GROUP_IN, _MINIMUM_WIDTH_IN, _MAXIMUM_WIDTH_IN, _HEIGHT_IN = 0.55, 6.0, 30.0, 4.2
_FILE_TYPES = ("svg", "png")


def check_target(prefix: Path) -> None:
    """Refuse, before anything is measured, pictures that could not be written afterwards.

    Raises:
        BadInput: nothing can be written there.
    """
    suffixes = [f"-{name}.{kind}" for name in _FIGURES for kind in _FILE_TYPES]
    outputs.check_prefix(prefix, suffixes=suffixes, flag="--plot")


def draw(document: Mapping[str, Any], prefix: Path) -> tuple[list[Path], list[str]]:
    """Draw every figure for which there is data.

    Args:
        document: A result.
        prefix: ``PREFIX-by-case.svg`` and so on are written.

    Returns:
        The files, and for each figure that was left out, why.

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
    written, left_out = [], []
    for name, (paint, missing) in _FIGURES.items():
        why = missing(document)
        if why is not None:
            left_out.append(f"{name}: {why}")
            continue
        groups = len(document["cases"]) if name != "by-degree" else 1
        width = min(max(_MINIMUM_WIDTH_IN, 1.5 + _GROUP_IN * groups * 2), _MAXIMUM_WIDTH_IN)
        with matplotlib.rc_context({"svg.hashsalt": "ampipe", "text.parse_math": False}):
            figure = Figure(figsize=(width, _HEIGHT_IN), layout="constrained")
            axes = figure.add_subplot()
            paint(axes, document)
            axes.spines[["top", "right"]].set_visible(False)
            figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
            figure.suptitle(heading(document), fontsize=9)
            for kind in _FILE_TYPES:
                target = prefix.with_name(f"{prefix.name}-{name}.{kind}")
                _write(figure, target)
                written.append(target)
    return written, left_out


def _by_case(axes: Axes, document: Mapping[str, Any]) -> None:
    degree = _shown_degree(document)
    bars = {
        series: [_value(_row(case, series, degree), "speedup") for case in document["cases"]]
        for series in _series(document)
    }
    _bars(axes, document, bars)
    axes.set_ylabel("speedup over stock")
    axes.set_title(f"degree {degree}" if degree else "each at its best degree", fontsize=9)


def _by_degree(axes: Axes, document: Mapping[str, Any]) -> None:
    """Median over cases, and the range of cases."""
    for series in _series(document):
        degrees = _degrees(document, series)
        speedups = [
            [row["speedup"] for case in document["cases"] for row in _plain(case)
             if (_series_of(row), row["degree"]) == (series, degree)]
            for degree in degrees
        ]  # fmt: skip
        colour = _colour(document, series)
        axes.plot(degrees, [statistics.median(s) for s in speedups], "o-", color=colour, label=series)
        if len(document["cases"]) > 1:
            low, high = [min(s) for s in speedups], [max(s) for s in speedups]
            axes.fill_between(degrees, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(1.0, color=_FAINT, zorder=0)
    axes.set_xscale("log", base=2)
    ticks = sorted({degree for series in _series(document) for degree in _degrees(document, series)})
    axes.set_xticks(ticks, [str(degree) for degree in ticks])
    axes.set_xlabel("degree")
    axes.set_ylabel("speedup over stock")
    axes.set_title("median over cases; shaded: from the lowest to the highest", fontsize=9)


def _overhead(axes: Axes, document: Mapping[str, Any]) -> None:
    degree = _shown_degree(document)
    bars = {
        label: [_percent(_row(case, series, degree)) for case in document["cases"]]
        for label, series in (
            ("chunked, nothing overlapped", "sequential"),
            ("chunked and overlapped", "ampipe"),
        )
    }
    colours = [_COLOURS["sequential"], _COLOURS["ampipe"]]
    _bars(axes, document, bars, level=0.0, colours=colours)
    axes.set_ylabel("gain over stock, %")
    axes.set_title(f"degree {degree}" if degree else "each at its best degree", fontsize=9)


def _bound(axes: Axes, document: Mapping[str, Any]) -> None:
    best = [
        min(
            (row for row in _plain(case) if _of_ampipe(row)),
            key=lambda row: row["ms"],
            default=None,
        )
        for case in document["cases"]
    ]
    bars = {
        "allowed by the bound": [
            case["stock_ms"] / row["bound_ms"] if row else 0.0
            for case, row in zip(document["cases"], best, strict=True)
        ],
        "reached": [_value(row, "speedup") for row in best],
    }
    _bars(axes, document, bars, colours=[_FAINT, _COLOURS["ampipe"]])
    axes.set_ylabel("speedup over stock")
    axes.set_title("ampipe at its best degree", fontsize=9)


def _bars(
    axes: Axes,
    document: Mapping[str, Any],
    bars: Mapping[str, Sequence[float]],
    *,
    level: float = 1.0,
    colours: Sequence[str] | None = None,
) -> None:
    """Grouped bars that begin at ``level``; a case without a value has none."""
    names = [case["name"] for case in document["cases"]]
    width = 0.8 / len(bars)
    for place, (label, values) in enumerate(bars.items()):
        at = [index + (place - (len(bars) - 1) / 2) * width for index in range(len(names))]
        heights = [value - level if value else 0.0 for value in values]
        colour = colours[place] if colours else _colour(document, label)
        axes.bar(at, heights, width, bottom=level, color=colour, label=label)
    axes.axhline(level, color="#22262B", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=60 if len(names) > 6 else 0, fontsize=7)
    axes.margins(x=0.02)


def _plain(case: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rows of a named order, equal chunks and one degree, as in the paper; the table shows the others."""
    special = ("shares", "backward_degree", "order")
    return [row for row in case["rows"] if not any(row.get(key) for key in special)]


def _of_ampipe(row: Mapping[str, Any]) -> bool:
    return bool(row["schedule"] == "ampipe" and row["degree"] > 1)


def _series_of(row: Mapping[str, Any]) -> str:
    """What rows of several degrees have in common: schedule, layers that share it, exchange."""
    # Absent from older results.
    stack, exchange = row.get("stack", 1), row.get("exchange", Exchange.ROWS)
    memory = row.get("memory", KEEP)
    words = [str(row["schedule"]), *[f"{stack} layers together"] * (stack > 1), *[memory] * (memory != KEEP)]
    return ", ".join([*words, *[f"exchange {exchange}"] * (exchange != Exchange.ROWS)])


def _series(document: Mapping[str, Any]) -> list[str]:
    """Those measured at more than degree 1, in the order of the result."""
    rows = (row for case in document["cases"] for row in _plain(case) if row["degree"] > 1)
    return list(dict.fromkeys(map(_series_of, rows)))


def _degrees(document: Mapping[str, Any], series: str) -> list[int]:
    rows = (row for case in document["cases"] for row in _plain(case))
    return sorted({row["degree"] for row in rows if _series_of(row) == series})


def _shown_degree(document: Mapping[str, Any]) -> int | None:
    """The paper's degree where every schedule has it."""
    everywhere = all(PAPER_DEGREE in _degrees(document, series) for series in _series(document))
    return PAPER_DEGREE if everywhere else None


def _row(case: Mapping[str, Any], series: str, degree: int | None) -> Mapping[str, Any] | None:
    """The row at a degree; the fastest of the chunked ones for None."""
    rows = [row for row in _plain(case) if _series_of(row) == series and row["degree"] > 1]
    if degree is not None:
        rows = [row for row in rows if row["degree"] == degree]
    return min(rows, key=lambda row: row["ms"], default=None)


def _value(row: Mapping[str, Any] | None, key: str) -> float:
    return 0.0 if row is None else float(row[key])


def _percent(row: Mapping[str, Any] | None) -> float:
    return 0.0 if row is None else 100 * (row["speedup"] - 1)


def _colour(document: Mapping[str, Any], series: str) -> str:
    others = [name for name in _series(document) if name not in _COLOURS]
    return _COLOURS.get(series) or _OTHER_COLOURS[others.index(series) % len(_OTHER_COLOURS)]


def _write(figure: Any, target: Path) -> None:
    with outputs.atomic_file(target) as partial:
        figure.savefig(partial, format=target.suffix[1:], dpi=160)


def _needs_chunks(document: Mapping[str, Any]) -> str | None:
    return None if _series(document) else "no degree above 1 was measured"


def _needs_ampipe(document: Mapping[str, Any]) -> str | None:
    if any(_of_ampipe(row) for case in document["cases"] for row in _plain(case)):
        return None
    return "schedule ampipe was not measured above degree 1"


def _needs_sequential(document: Mapping[str, Any]) -> str | None:
    if {"sequential", "ampipe"} <= set(_series(document)):
        return None
    return "needs --schedules sequential,moe-only,ampipe, block by block"


_FIGURES: dict[
    str, tuple[Callable[[Any, Mapping[str, Any]], None], Callable[[Mapping[str, Any]], str | None]]
] = {
    "by-case": (_by_case, _needs_chunks),
    "by-degree": (_by_degree, _needs_chunks),
    "overhead": (_overhead, _needs_sequential),
    "bound": (_bound, _needs_ampipe),
}
