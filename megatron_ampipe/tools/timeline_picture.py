"""Draws timelines with matplotlib: a row for each lane of each rank, a colour for each chunk.

A timeline that was predicted is one more, with another background; the caller chooses its place, for
example below the rank that it is compared with.

Chooses nothing of what it draws. Called by ``ampipe draw`` and ``ampipe plan``.

Several layers that share a schedule run at the same time, so a strip along the top of each bar says of which
layer it is.

:mod:`.timeline_layout` says where each bar goes, and :mod:`.timeline_style` what it looks like.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.files.timeline import PREDICTED, StageSpan, Timeline
from megatron_ampipe.tools.timeline_layout import (
    ROW_IN,
    TimelinePanel,
    TimelineRow,
    panels_of,
    rows_of,
    width_in_of,
)
from megatron_ampipe.tools.timeline_style import (
    FAINT_INK,
    INK,
    LABEL_PT,
    LAYER_SHADES,
    PAPER,
    WHOLE_BLOCK,
    chunk_colours,
    chunks_of,
    fill_of,
    fitting_name,
    initials_of,
    ink_on,
    shade_of,
    shows_backward,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEFT_IN, _RIGHT_IN, _TOP_IN, _PANEL_GAP_IN = 1.75, 1.3, 1.12, 0.16
SUFFIXES = (".svg", ".png")
"""Of the files that a picture is written to."""
_PNG_DPI = 180
_MAX_PNG_PIXELS = 30_000
_BAR_SHARE, _SEAM_IN = 0.84, 0.012
_BACKWARD_SHARE, _BACKWARD_ALPHA = 0.15, 0.75
_LAYER_SHARE = 0.2
_LEGEND_COLUMNS, _LEGEND_ROW_IN = 10, 0.2
_NAMED_LAYERS = 4


def draw(timelines: Sequence[Timeline], *, targets: Sequence[Path], title: str, split: bool) -> None:
    """Draw one picture and write it under every target; the suffix gives the format.

    Args:
        timelines: What is to be shown, from the top, one for each rank; none may be empty.
        targets: Files to write. Each appears under its name only when it is whole.
        title: First line of the picture.
        split: Whether forward and backward get a panel each.

    Raises:
        EnvironmentMissing: matplotlib is absent.
        RunFailed: a file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise EnvironmentMissing(
            f"ampipe draw needs matplotlib ({error}). Install it: pip install matplotlib"
        ) from error
    # Labels come from files: a dollar sign in one is no formula. The salt makes the SVG reproducible.
    settings: dict[Any, Any] = {
        "text.parse_math": False,
        "svg.hashsalt": "ampipe",
        "font.family": "DejaVu Sans",
    }
    with matplotlib.rc_context(settings):
        rows, height_in = rows_of(timelines)
        panels = panels_of(timelines, split=split)
        layers = _layers(timelines)
        bottom_in = 0.78 + _LEGEND_ROW_IN * _legend_rows(timelines)
        size_in = (width_in_of(panels, split=split and len(layers) == 1), height_in + _TOP_IN + bottom_in)
        figure = Figure(figsize=size_in, facecolor=PAPER)
        _draw_panels(figure, panels, rows, layers=layers, rows_in=height_in, bottom_in=bottom_in)
        _draw_margins(figure, timelines, rows, title=title, bottom_in=bottom_in)
        _draw_legend(figure, timelines)
        for target in targets:
            _write(figure, target)


def layers_of(timeline: Timeline) -> str:
    """``layer 2`` or ``layers 1-4``: what a timeline holds, as text."""
    layers = sorted({span.layer for span in timeline.spans})
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def _layers(timelines: Sequence[Timeline]) -> list[int]:
    return sorted({span.layer for timeline in timelines for span in timeline.spans})


def _draw_panels(
    figure: Figure,
    panels: Sequence[TimelinePanel],
    rows: Sequence[TimelineRow],
    *,
    layers: Sequence[int],
    rows_in: float,
    bottom_in: float,
) -> None:
    width_in, height_in = figure.get_size_inches()
    room_in = width_in - _LEFT_IN - _RIGHT_IN - _PANEL_GAP_IN * (len(panels) - 1)
    in_per_ms = room_in / sum(panel.length_ms for panel in panels)
    colours = chunk_colours(
        chunks_of([span for panel in panels for part in panel.spans.values() for span in part])
    )
    left_in = _LEFT_IN
    for panel in panels:
        panel_in = panel.length_ms * in_per_ms
        axes = figure.add_axes(
            (left_in / width_in, bottom_in / height_in, panel_in / width_in, rows_in / height_in)
        )
        left_in += panel_in + _PANEL_GAP_IN
        axes.set_xlim(0, panel.length_ms)
        axes.set_ylim(0, rows_in)
        _dress(axes, rows, panel=panel, panel_in=panel_in)
        for row in rows:
            spans = [span for span in panel.spans.get(row.timeline, []) if span.lane == row.lane]
            _draw_row(axes, row, spans, colours=colours, in_per_ms=in_per_ms)
            if len(layers) > 1:
                _draw_layers(axes, row, spans, layers)


def _dress(axes: Axes, rows: Sequence[TimelineRow], *, panel: TimelinePanel, panel_in: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for row in rows:
        axes.axhspan(row.y_in - ROW_IN / 2, row.y_in + ROW_IN / 2, color=row.stripe, linewidth=0, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT_INK)
    axes.spines["bottom"].set_position(("outward", 4))
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=max(1, int(panel_in / 0.8)), steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(axis="x", colors=FAINT_INK, labelsize=8, length=3)
    axes.grid(axis="x", color="#DDE0E4", linewidth=0.6, zorder=0.5)
    axes.set_axisbelow(True)
    if panel.heading:
        axes.set_title(f"{panel.heading}  {panel.length_ms:.3g} ms", loc="left", fontsize=9, color=INK, pad=5)


def _draw_row(
    axes: Axes, row: TimelineRow, spans: Sequence[StageSpan], *, colours: dict[int, str], in_per_ms: float
) -> None:
    """Bars in one collection for each style, which is fast for tens of thousands of spans; then the names."""
    looks: defaultdict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    bar_in = ROW_IN * _BAR_SHARE
    for span in spans:
        begin_ms, length_ms = span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3
        fill = fill_of(span, colours)
        # A gap between neighbours: a white edge would cover narrow ones completely.
        shown_ms = length_ms - min(_SEAM_IN / in_per_ms, 0.2 * length_ms)
        looks[fill, shows_backward(span)].append((begin_ms, shown_ms))
        name = fitting_name(span, room_in=length_ms * in_per_ms)
        if name:
            axes.text(
                begin_ms + length_ms / 2,
                row.y_in,
                name,
                ha="center",
                va="center_baseline",
                fontsize=LABEL_PT,
                color=ink_on(fill),
                clip_on=True,
                zorder=4,
            )
    for (fill, has_foot), bars in looks.items():
        axes.broken_barh(bars, (row.y_in - bar_in / 2, bar_in), facecolor=fill, linewidth=0, zorder=2)
        if has_foot:
            foot = (row.y_in - bar_in / 2, bar_in * _BACKWARD_SHARE)
            axes.broken_barh(bars, foot, facecolor=INK, linewidth=0, alpha=_BACKWARD_ALPHA, zorder=3)


def _draw_layers(axes: Axes, row: TimelineRow, spans: Sequence[StageSpan], layers: Sequence[int]) -> None:
    bar_in = ROW_IN * _BAR_SHARE
    strip = (row.y_in + bar_in * (0.5 - _LAYER_SHARE), bar_in * _LAYER_SHARE)
    for place, layer in enumerate(layers):
        bars = [
            (span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3)
            for span in spans
            if span.layer == layer
        ]
        axes.broken_barh(bars, strip, facecolor=shade_of(place), linewidth=0, zorder=3)


def _draw_margins(
    figure: Figure,
    timelines: Sequence[Timeline],
    rows: Sequence[TimelineRow],
    *,
    title: str,
    bottom_in: float,
) -> None:
    width_in, height_in = figure.get_size_inches()

    def write(x_in: float, y_in: float, text: str, **how: Any) -> None:
        figure.text(x_in / width_in, y_in / height_in, text, **{"color": INK, "fontsize": 9, **how})

    write(0.2, height_in - 0.36, title, fontsize=13, fontweight="bold")
    write(0.2, height_in - 0.62, _hidden(timelines), fontsize=10, color=FAINT_INK)
    under_axis_in = bottom_in - 0.5
    write(_LEFT_IN, under_axis_in, "ms after the first stage of each rank", fontsize=8.5, color=FAINT_INK)
    key = {"fontsize": 8.5, "ha": "right", "color": FAINT_INK}
    write(width_in - _RIGHT_IN, under_axis_in, initials_of(timelines), **key)
    for row in rows:
        write(_LEFT_IN - 0.12, bottom_in + row.y_in, row.lane, ha="right", va="center", fontsize=8.5)
    for number, timeline in enumerate(timelines):
        own = [row.y_in for row in rows if row.timeline == number]
        middle_in = bottom_in + (own[0] + own[-1]) / 2
        name, below = f"rank {timeline.rank}", layers_of(timeline)
        if timeline.is_predicted:
            name, below = PREDICTED, "one block" if len(_layers([timeline])) == 1 else below
        write(0.2, middle_in + 0.02, name, fontweight="bold", va="bottom")
        write(0.2, middle_in - 0.02, below, color=FAINT_INK, fontsize=8, va="top")
        if timeline.communication_us:
            right_in = width_in - _RIGHT_IN + 0.15
            write(right_in, middle_in + 0.02, f"{timeline.hidden_share:.0%}", fontweight="bold", va="bottom")
            hidden = f"of {timeline.communication_us / 1e3:.3g} ms hidden"
            write(right_in, middle_in - 0.02, hidden, color=FAINT_INK, fontsize=7.5, va="top")


def _hidden(timelines: Sequence[Timeline]) -> str:
    """Second line of the picture; the share of a prediction comes after that of the recorded ranks."""
    recorded = [timeline for timeline in timelines if not timeline.is_predicted]
    total_us = sum(timeline.communication_us for timeline in recorded or timelines)
    hidden_us = sum(timeline.hidden_us for timeline in recorded or timelines)
    if not total_us:
        return "no communication"
    text = f"{hidden_us / total_us:.0%} of communication hidden under computation"
    predicted = next((timeline for timeline in timelines if timeline.is_predicted), None)
    if recorded and predicted is not None:
        text += f", {predicted.hidden_share:.0%} predicted"
    return text


def _draw_legend(figure: Figure, timelines: Sequence[Timeline]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    spans = [span for timeline in timelines for span in timeline.spans]
    chunks = chunks_of(spans)
    colours = chunk_colours(chunks)
    handles: list[Any] = [Patch(facecolor=colours[chunk], label=f"chunk {chunk}") for chunk in chunks]
    if any(span.chunk is None for span in spans):
        handles.append(Patch(facecolor=WHOLE_BLOCK, label="whole block"))
    if any(map(shows_backward, spans)):
        handles.append(Line2D([], [], color=INK, alpha=_BACKWARD_ALPHA, linewidth=2.5, label="backward"))
    layers = _layers(timelines)
    for place in range(min(len(layers), len(LAYER_SHADES)) if len(layers) > 1 else 0):
        named = ", ".join(map(str, layers[place :: len(LAYER_SHADES)][:_NAMED_LAYERS]))
        more = ", ..." if len(layers[place :: len(LAYER_SHADES)]) > _NAMED_LAYERS else ""
        handles.append(
            Patch(facecolor=shade_of(place), edgecolor=FAINT_INK, label=f"strip: layer {named}{more}")
        )
    figure.legend(
        handles=handles,
        loc="lower center",
        ncol=math.ceil(len(handles) / math.ceil(len(handles) / _LEGEND_COLUMNS)),
        frameon=False,
        fontsize=8.5,
        handlelength=1.3,
        handleheight=1.0,
        columnspacing=1.6,
        borderaxespad=0.3,
    )


def _legend_rows(timelines: Sequence[Timeline]) -> int:
    # More than the chunks: the whole block, backward, and shades of layers.
    chunks = chunks_of([span for timeline in timelines for span in timeline.spans])
    shades = len(LAYER_SHADES) if len(_layers(timelines)) > 1 else 0
    return math.ceil((len(chunks) + 2 + shades) / _LEGEND_COLUMNS)


def _write(figure: Figure, target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    kind = target.suffix.removeprefix(".")
    dpi = min(_PNG_DPI, _MAX_PNG_PIXELS / max(figure.get_size_inches()))
    metadata = {"Date": None} if kind == "svg" else None
    with outputs.atomic_file(target) as partial:
        figure.savefig(partial, format=kind, dpi=dpi, metadata=metadata)
