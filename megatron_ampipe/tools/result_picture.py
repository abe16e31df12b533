"""Draws results of ``ampipe bench``: the speedup of every row over Megatron's layers, with its spread.

A case with several degrees has a panel with a line for each variant. Otherwise a result has a panel of bars,
grouped by case. The spread of the control, Megatron's layer measured a second time, is a grey band around 1;
rows that differ less than that are pale or hollow.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ampipe.files.outputs import ReportView
from megatron_ampipe.tools import pictures
from megatron_ampipe.tools.measuring.result import variant_text, where_text
from megatron_ampipe.tools.pictures import FAINT, GRID, INK, PALETTE, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

_COLUMNS = 3
_PANEL_IN = (4.6, 3.9)
_WRAP = 54
"""Characters in a line above a panel."""
_GROUP, _WIDEST = 0.8, 0.22
"""The width of the bars of a case, and at most of one bar, of the distance between two cases."""
_BAND = "#C9CDD2"
_MARKERS = "osD^vPX*"
_PALE = 0.35
_SIMILAR = 2.5
"""Panels have one axis of speedups if their fastest rows differ by less than this factor."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: a case over degrees, or all cases of a result.

    Attributes:
        document: The result.
        cases: The cases of the panel; one if ``over_degrees``.
        over_degrees: Whether the horizontal axis shows degrees.
    """

    document: ReportView
    cases: Sequence[ReportView]
    over_degrees: bool

    @property
    def highest(self) -> float:
        """The highest speedup."""
        highest: float = max(row["speedup"] for case in self.cases for row in case["rows"])
        return highest


def draw(documents: Sequence[ReportView], *, target: Path) -> None:
    """Draw one picture of results, and write it in the format of the target's suffix.

    Args:
        documents: Results; see :mod:`.measuring.result`.
        target: The file, which appears only when it is complete.

    Raises:
        RunFailed: the file cannot be written.
    """
    with pictures.style():
        pictures.write(_figure([panel for each in documents for panel in panels_of(each)]), target)


def panels_of(document: ReportView) -> list[Panel]:
    """The panels of a result."""
    cases = [case for case in document["cases"] if case["rows"]]
    if any(len(cuts_of(rows)) > 1 for case in cases for rows in by_variant(case["rows"]).values()):
        return [Panel(document, [case], over_degrees=True) for case in cases]
    return [Panel(document, cases, over_degrees=False)] if cases else []


def by_variant(rows: Sequence[ReportView]) -> dict[str, list[ReportView]]:
    """The rows of each variant, which differ in their degrees."""
    found: dict[str, list[ReportView]] = {}
    for row in rows:
        found.setdefault(variant_text(row), []).append(row)
    return found


def cuts_of(rows: Sequence[ReportView]) -> list[str]:
    """The degrees of rows as text, in ascending order."""
    return [_text_of(*degrees) for degrees in sorted({_degrees_of(row) for row in rows})]


def _degrees_of(row: ReportView) -> tuple[int, int]:
    return row["degree"], row.get("backward_degree") or row["degree"]


def _text_of(forward: int, backward: int) -> str:
    """``4``, or ``4:2`` for a backward pass of degree 2, as after ``--degrees``."""
    return str(forward) if forward == backward else f"{forward}:{backward}"


def _figure(panels: Sequence[Panel]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Four are a square.
    columns = 2 if len(panels) == 4 else min(_COLUMNS, len(panels))
    num_rows = math.ceil(len(panels) / columns)
    width_in = max(7.0, _PANEL_IN[0] * columns)
    figure = Figure(figsize=(width_in, _PANEL_IN[1] * num_rows + 1.5), layout="constrained", facecolor=PAPER)
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(w_pad=0.12, h_pad=0.12)
    highest = [panel.highest for panel in panels]
    grid = figure.subplots(
        num_rows, columns, squeeze=False, sharey=max(highest) < _SIMILAR * min(highest)
    ).flatten()
    variants = dict.fromkeys(
        variant for panel in panels for case in panel.cases for variant in by_variant(case["rows"])
    )
    numbers = {variant: number for number, variant in enumerate(variants)}
    for axes, panel in zip(grid, panels, strict=False):
        _prepare(axes, panel)
        if panel.over_degrees:
            _draw_lines(axes, panel.cases[0], numbers)
        else:
            _draw_bars(axes, panel, numbers)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle("Speedup over Megatron's layers", x=0.01, ha="left", fontsize=14, fontweight="bold")
    legend = figure.legend(
        handles=_legend(panels, numbers),
        loc="outside lower left",
        ncols=max(1, int(width_in / 2.6)),
        frameon=False,
        fontsize=9.5,
        title=_explanation(panels),
        title_fontsize=8.5,
        alignment="left",
    )
    legend.get_title().set_color(FAINT)
    return figure


def _prepare(axes: Axes, panel: Panel) -> None:
    """Titles, grid and the line of equal speed."""
    lines = [line for part in where_text(panel.document) for line in textwrap.wrap(part, _WRAP)]
    names = panel.cases[0]["name"] if panel.over_degrees else f"grid {panel.document['grid']}"
    axes.set_title(names, loc="left", fontsize=12, fontweight="bold", pad=8 + 12.5 * len(lines))
    axes.annotate(
        "\n".join(lines),
        (0, 1),
        xytext=(0, 6),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        va="bottom",
    )
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.axhline(1.0, color=INK, linewidth=1.0, zorder=2.4)
    axes.tick_params(length=0, labelsize=9.5)
    axes.yaxis.set_tick_params(labelleft=True)
    axes.yaxis.set_major_formatter("{x:g}x")


def _draw_lines(axes: Axes, case: ReportView, numbers: Mapping[str, int]) -> None:
    """A line for each variant, over degrees."""
    cuts = cuts_of(case["rows"])
    series = by_variant(case["rows"])
    _draw_control(axes, case, -0.4, len(cuts) - 0.6)
    best = max(case["rows"], key=lambda row: row["speedup"])
    for place, (variant, rows) in enumerate(series.items()):
        colour, marker = _look(numbers[variant])
        # Side by side, so that no whisker covers another.
        shift = 0.09 * (place - (len(series) - 1) / 2)
        ordered = sorted(rows, key=_degrees_of)
        at = [cuts.index(_text_of(*_degrees_of(row))) + shift for row in ordered]
        axes.errorbar(
            at,
            [row["speedup"] for row in ordered],
            yerr=_whiskers(ordered),
            color=colour,
            linewidth=1.8,
            elinewidth=1.1,
            capsize=2.5,
            zorder=3,
        )
        for position, row in zip(at, ordered, strict=True):
            face = colour if row.get("difference_seen", True) else PAPER
            axes.plot(
                [position],
                [row["speedup"]],
                marker,
                color=colour,
                markerfacecolor=face,
                markersize=6,
                zorder=4,
            )
            if row is best:
                _say(axes, position, row)
    axes.set_xticks(range(len(cuts)), cuts, color=INK)
    axes.set_xlim(-0.4, len(cuts) - 0.6)
    axes.margins(y=0.12)
    both = " (4:2: forward 4, backward 2)" if any(":" in cut for cut in cuts) else ""
    axes.set_xlabel(f"degree: chunks of the sequence{both}", fontsize=9.5)


def _draw_bars(axes: Axes, panel: Panel, numbers: Mapping[str, int]) -> None:
    """A bar for each variant, grouped by case."""
    most = max(len(case["rows"]) for case in panel.cases)
    width = min(_WIDEST, _GROUP / most)
    for group, case in enumerate(panel.cases):
        _draw_control(axes, case, group - 0.46, group + 0.46)
        for place, row in enumerate(case["rows"]):
            at = group + width * (place - (len(case["rows"]) - 1) / 2)
            colour, _ = _look(numbers[variant_text(row)])
            alpha = 1.0 if row.get("difference_seen", True) else _PALE
            axes.bar(at, row["speedup"], 0.9 * width, color=colour, alpha=alpha, zorder=2)
            axes.errorbar(
                at, row["speedup"], yerr=_whiskers([row]), color=INK, elinewidth=1.1, capsize=2.5, zorder=3
            )
            _say(axes, at, row)
    axes.set_xticks(range(len(panel.cases)), [case["name"] for case in panel.cases], color=INK)
    axes.set_xlim(-0.5, len(panel.cases) - 0.5)
    axes.margins(y=0.1)
    degrees = cuts_of([row for case in panel.cases for row in case["rows"]])
    axes.set_xlabel(f"case, at degree {' or '.join(degrees)}", fontsize=9.5)


def _draw_control(axes: Axes, case: ReportView, left: float, right: float) -> None:
    if "control" in case:
        spread = 1 + case["control"]["spread"]
        axes.fill_between([left, right], 1 / spread, spread, color=_BAND, alpha=0.6, linewidth=0, zorder=2.3)


def _say(axes: Axes, at: float, row: ReportView) -> None:
    """The speedup in digits, above its whisker."""
    axes.annotate(
        f"{row['speedup']:.2f}",
        (at, row["speedup_p90"]),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=8.5,
        zorder=5,
    )


def _whiskers(rows: Sequence[ReportView]) -> list[list[float]]:
    """Distances from the median down to the 10th and up to the 90th percentile."""
    down = [max(0.0, row["speedup"] - row["speedup_p10"]) for row in rows]
    up = [max(0.0, row["speedup_p90"] - row["speedup"]) for row in rows]
    return [down, up]


def _look(number: int) -> tuple[str, str]:
    """Colour and marker of a variant."""
    return PALETTE[number % len(PALETTE)], _MARKERS[number % len(_MARKERS)]


def _legend(panels: Sequence[Panel], numbers: Mapping[str, int]) -> list[Line2D | Patch]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    has_lines = any(panel.over_degrees for panel in panels)
    handles: list[Line2D | Patch] = []
    for variant, number in numbers.items():
        colour, marker = _look(number)
        if has_lines:
            handles.append(Line2D([], [], color=colour, marker=marker, linewidth=1.8, label=variant))
        else:
            handles.append(Patch(color=colour, label=variant))
    if any("control" in case for panel in panels for case in panel.cases):
        handles.append(Patch(color=_BAND, alpha=0.6, label="spread of the control"))
    return handles


def _explanation(panels: Sequence[Panel]) -> str:
    cases = [case for panel in panels for case in panel.cases]
    lines = ["Median of stock / variant within a repeat; whiskers: 10th to 90th percentile."]
    if any(not row.get("difference_seen", True) for case in cases for row in case["rows"]):
        lines.append("Hollow or pale: nearer to 1 than the spread of the control, so no difference seen.")
    if any("control" not in case for case in cases):
        lines.append(
            "A result without a control is of an older version, whose Megatron may have had a slower"
        )
        lines.append("all-to-all on a CPU: compare variants, not with 1.")
    return "\n".join(lines)
