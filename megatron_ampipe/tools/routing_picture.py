"""Draws a recorded routing: how many tokens each expert gets, over iterations and layers.

A heat map has a row for each expert, layer by layer, and a column for each recorded iteration; its colour is
the number of tokens over the mean of the layer's experts. Above it, lines of the busiest expert and the
busiest rank: means over layers, with the range over layers.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_ampipe.plan.recorded_routing import LayerRouting, RecordedRouting, busiest
from megatron_ampipe.tools import pictures
from megatron_ampipe.tools.pictures import FAINT, GRID, INK, PALETTE, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_IN, _LINES_IN, _BAR_IN, _OTHERS_IN = 10.0, 2.3, 0.16, 2.4
_EXPERT_IN, _LAYER_IN, _MOST_IN = 0.11, (0.42, 1.2), 24.0
"""Height of an expert's row, limits of a layer's height, and the usual limit of the heat map's."""
_LEAST_EXPERT_IN = 1 / pictures.PNG_DPI
"""No expert gets less than one pixel, whatever the height."""
_MOST_TICKS = 12
_COLOURS = "RdBu_r"
"""Blue below the mean, white at it, red above; told apart with all common kinds of colour vision."""
_SHARE_IN_RANGE = 99.5
"""Percentile of the loads with the darkest colour, so that one extreme expert does not make others pale."""


def draw(routing: RecordedRouting, *, ranks: int, target: Path) -> None:
    """Draw one picture, and write it in the format of the target's suffix.

    Args:
        routing: What a training has recorded.
        ranks: Number of ranks between which the experts are divided in order.
        target: The file, which appears only when it is complete.

    Raises:
        RunFailed: the file cannot be written.
    """
    with pictures.style():
        pictures.write(_figure(routing, ranks=ranks), target)


def loads_of(routing: RecordedRouting) -> np.ndarray:
    """Tokens of each expert over the mean of the layer's experts, ``[layers, experts, iterations]``."""
    columns = []
    for record in routing.records:
        rows = np.array([layer.per_expert() for layer in record.layers], dtype=float)
        # A layer that sent nothing is even.
        means = np.maximum(rows.mean(axis=1, keepdims=True), 1e-12)
        columns.append(np.where(rows.any(axis=1, keepdims=True), rows / means, 1.0))
    return np.stack(columns, axis=2)


def _figure(routing: RecordedRouting, *, ranks: int) -> Figure:
    from matplotlib.figure import Figure

    loads = loads_of(routing)
    num_layers, num_experts, num_iterations = loads.shape
    least_in, most_in = _LAYER_IN
    layer_in = min(most_in, max(least_in, _EXPERT_IN * num_experts))
    usual_in = min(_MOST_IN, layer_in * num_layers)
    map_in = max(usual_in, _LEAST_EXPERT_IN * num_experts * num_layers)
    size_in = (_WIDTH_IN, _LINES_IN + _BAR_IN + map_in + _OTHERS_IN)
    figure = Figure(figsize=size_in, layout="constrained", facecolor=PAPER)
    grid = figure.add_gridspec(3, 1, height_ratios=(_LINES_IN, _BAR_IN, map_in))
    lines = figure.add_subplot(grid[0])
    heat = figure.add_subplot(grid[2], sharex=lines)
    _draw_lines(lines, routing, ranks)
    _draw_heat(heat, figure.add_subplot(grid[1]), loads, routing)
    iterations = [str(record.iteration) for record in routing.records]
    step = -(-num_iterations // _MOST_TICKS)
    heat.set_xticks(range(0, num_iterations, step), iterations[::step])
    heat.set_xlabel("iteration of the training (recorded ones)", fontsize=10)
    lines.set_title(
        f"{num_experts} experts in each of {num_layers} MoE layers on {ranks} ranks, {num_iterations} "
        "recorded iterations",
        loc="left",
        fontsize=10,
        pad=26,
    )
    figure.suptitle("How tokens are routed to experts", x=0.01, ha="left", fontsize=14, fontweight="bold")
    return figure


def _draw_lines(axes: Axes, routing: RecordedRouting, ranks: int) -> None:
    """The imbalance of experts and of ranks, over iterations."""

    def of_expert(layer: LayerRouting) -> float:
        return busiest(layer.per_expert())

    def of_rank(layer: LayerRouting) -> float:
        return busiest(layer.per_place(ranks))

    last = routing.records[-1]
    many = len(last.layers) > 1
    lines = [("busiest expert", of_expert, PALETTE[5])]
    if ranks > 1:
        lines.append((f"busiest of {ranks} ranks", of_rank, PALETTE[0]))
    at = range(len(routing.records))
    for name, imbalance, colour in lines:
        by_layer = [[imbalance(layer) for layer in record.layers] for record in routing.records]
        label = f"{name}, mean and range over {len(last.layers)} layers" if many else name
        means = [statistics.fmean(values) for values in by_layer]
        axes.plot(at, means, color=colour, linewidth=1.8, marker="o", markersize=3, label=label)
        if many:
            low, high = [min(values) for values in by_layer], [max(values) for values in by_layer]
            axes.fill_between(at, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.axhline(1.0, color=INK, linewidth=1.0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.tick_params(length=0, labelsize=9.5, labelbottom=False)
    axes.yaxis.set_major_formatter("{x:g}x")
    axes.set_ylabel("load over the mean", fontsize=10)
    axes.legend(
        frameon=False, fontsize=9.5, loc="lower left", bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0.3
    )


def _draw_heat(axes: Axes, bar_axes: Axes, loads: np.ndarray, routing: RecordedRouting) -> None:
    """The heat map with its colour bar; layers are separated by lines."""
    from matplotlib.colors import TwoSlopeNorm

    num_layers, num_experts, num_columns = loads.shape
    most = max(1.5, float(np.percentile(loads, _SHARE_IN_RANGE)))
    image = axes.imshow(
        loads.reshape(num_layers * num_experts, num_columns),
        aspect="auto",
        interpolation="nearest",
        cmap=_COLOURS,
        norm=TwoSlopeNorm(vmin=0.0, vcenter=1.0, vmax=most),
    )
    for layer in range(1, num_layers):
        axes.axhline(layer * num_experts - 0.5, color=INK, linewidth=0.9)
    middles = [layer * num_experts + (num_experts - 1) / 2 for layer in range(num_layers)]
    names = [f"layer {layer.layer}" for layer in routing.records[-1].layers]
    axes.set_yticks(middles, names)
    axes.tick_params(length=0, labelsize=9.5)
    axes.spines[:].set_color(GRID)
    axes.set_ylabel(f"experts 0 to {num_experts - 1} of each layer, from the top", fontsize=10)
    beyond = "max" if loads.max() > most else "neither"
    figure = axes.get_figure()
    assert figure is not None
    bar = figure.colorbar(image, cax=bar_axes, orientation="horizontal", extend=beyond, extendfrac=0.02)
    bar_axes.set_title("tokens of an expert over the mean of its layer", loc="left", fontsize=10)
    bar_axes.xaxis.set_major_formatter("{x:g}x")
    bar_axes.tick_params(length=0, labelsize=9, labelcolor=FAINT)
    bar.outline.set_visible(False)
