"""Draws the answer of ``ampipe plan``: how the speedup depends on what the cluster file says.

A panel for the host's time per stage and one for the rate of the links: a flat line is an answer that does
not depend on the figure, a steep one asks for a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ampipe.plan.sensitivity import Line
from megatron_ampipe.tools import pictures
from megatron_ampipe.tools.pictures import FAINT, GRID, INK, PALETTE, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PANEL_IN = (5.4, 3.7)


def draw(lines: Sequence[Line], *, target: Path, title: str, plan: str) -> None:
    """Draw a panel for each line, and write the picture in the format of the target's suffix.

    Args:
        lines: At least one.
        target: The file, which appears only when it is complete.
        title: The model and the cluster.
        plan: The plan whose speedup is drawn, in words.

    Raises:
        RunFailed: the file cannot be written.
    """
    with pictures.style():
        pictures.write(_figure(lines, title=title, plan=plan), target)


def _figure(lines: Sequence[Line], *, title: str, plan: str) -> Figure:
    from matplotlib.figure import Figure

    size = (_PANEL_IN[0] * len(lines), _PANEL_IN[1] + 0.5)
    figure = Figure(figsize=size, layout="constrained", facecolor=PAPER)
    grid = figure.subplots(1, len(lines), squeeze=False, sharey=True)
    for axes, line in zip(grid[0], lines, strict=True):
        _draw_line(axes, line)
    grid[0][0].set_ylabel("predicted speed over Megatron's layers", fontsize=9.5)
    figure.suptitle(f"{title}\n{plan}", x=0.01, ha="left", fontsize=11)
    return figure


def _draw_line(axes: Axes, line: Line) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axes.plot(line.values, line.speedups, color=PALETTE[0], linewidth=2.0, marker="o", markersize=3.5)
    axes.set_xscale("log", base=2)
    axes.axhline(1.0, color=INK, linewidth=1.0)
    # On the side of the line where the curve does not begin.
    is_faster = line.speedups[0] >= 1
    away_pt = -3 if is_faster else 3
    megatron = axes.annotate(
        "Megatron", (0.005, 1.0), (0, away_pt), xycoords=("axes fraction", "data"), textcoords="offset points"
    )
    megatron.set(fontsize=8.5, color=FAINT, va="top" if is_faster else "bottom")
    axes.axvline(line.given, color=PALETTE[1], linewidth=1.4, linestyle="--", zorder=1)
    given = f"cluster file: {line.given:.3g}, {line.basis}"
    label = axes.annotate(given, (line.given, 1.01), xycoords=("data", "axes fraction"))
    label.set(fontsize=8.5, color=FAINT, ha="center", va="bottom")
    axes.set_xticks(line.values[::2])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}x"))
    axes.set_xlabel(line.name, fontsize=9.5)
    low, high = min(1.0, *line.speedups), max(1.0, *line.speedups)
    margin = max(0.02, 0.06 * (high - low))
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, low - margin), max(top, high + margin))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.tick_params(length=0, labelsize=9, labelleft=True)
