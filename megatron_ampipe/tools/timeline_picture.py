"""Draws timelines with matplotlib: a row for each lane of each rank, a colour for each chunk.

A timeline that was predicted is one more, with another background; the caller chooses its place, for
example below the rank that it is compared with.

Chooses nothing of what it draws. Called by :mod:`megatron_ampipe.tools.draw_command`.

Several layers that share a schedule run at the same time, so a strip along the top of each bar says of which
layer it is.

The forward and the backward pass of one layer get a panel each, on one scale, because between them a run
does other things for a long time; a whole iteration gets one panel. Each rank's clock begins at its own
first stage of the panel: the clocks of different ranks need not agree.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ampipe import outputs
from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.timeline import COMPUTE, DIRECTIONS, PREDICTED, StageSpan, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, for all common kinds of colour vision, without its black and its pale yellow; the
# order keeps neighbouring chunks far apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#7F7F3F")
WHOLE_BLOCK = "#A6A9AD"

_INK, _FAINT_INK, _PAPER = "#22262B", "#6B7280", "#FFFFFF"
_STRIPE, _PREDICTED_STRIPE = "#F3F4F6", "#FBF3DC"
# Within a chunk's colour, what the stage does: the share of white mixed in.
_TINTS = {"attention": 0.0, "dispatch": 0.0, "expert": 0.35, "combine": 0.35, "shared": 0.5, "wgrad": 0.5}
_OTHER_TINT = 0.6

_WIDTH_IN, _ROW_IN, _RANK_GAP_IN = 13.0, 0.36, 0.2
_LEFT_IN, _RIGHT_IN, _TOP_IN, _PANEL_GAP_IN = 1.6, 1.3, 1.12, 0.16
_LABEL_PT, _CHARACTER_SHARE = 7.5, 0.6
SUFFIXES = (".svg", ".png")
"""Of the files that a picture is written to."""
_PNG_DPI = 180
_MAX_PNG_PIXELS = 30_000
_BAR_SHARE, _SEAM_IN = 0.84, 0.012
_BACKWARD_SHARE, _BACKWARD_ALPHA = 0.15, 0.75
# Layers next to each other run at the same time: three shades tell them apart.
_LAYER_SHARE, _LAYER_SHADES = 0.2, ("#22262B", "#9AA0A6", "#FFFFFF")
_LEGEND_COLUMNS, _LEGEND_ROW_IN = 10, 0.2
_NAMED_LAYERS = 4
# A whole iteration is drawn wider, so that its median span has this width, up to a limit.
_MEDIAN_SPAN_IN, _MAX_WIDTH_IN = 0.06, 90.0


@dataclass(frozen=True, slots=True)
class _Row:
    """One lane of one timeline; ``y_in`` is its middle in inches above the lowest row's foot."""

    timeline: int
    lane: str
    y_in: float
    stripe: str


@dataclass(frozen=True, slots=True)
class _Panel:
    """What one axes shows: spans by timeline, in milliseconds after the first of each."""

    heading: str
    spans: dict[int, list[StageSpan]]
    length_ms: float


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
        rows, height_in = _rows(timelines)
        panels = _panels(timelines, split=split)
        layers = _layers(timelines)
        bottom_in = 0.78 + _LEGEND_ROW_IN * _legend_rows(timelines)
        size_in = (_width_in(panels, split=split and len(layers) == 1), height_in + _TOP_IN + bottom_in)
        figure = Figure(figsize=size_in, facecolor=_PAPER)
        _draw_panels(figure, panels, rows, layers=layers, rows_in=height_in, bottom_in=bottom_in)
        _draw_margins(figure, timelines, rows, title=title, bottom_in=bottom_in)
        _draw_legend(figure, timelines)
        for target in targets:
            _write(figure, target)


def layers_of(timeline: Timeline) -> str:
    """``layer 2`` or ``layers 1-4``: what a timeline holds, as text."""
    layers = sorted({span.layer for span in timeline.spans})
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


def chunk_colours(chunks: Sequence[int]) -> dict[int, str]:
    """A colour for each chunk: the palette, or for more chunks than it has, colours evenly from viridis."""
    if len(chunks) <= len(PALETTE):
        return dict(zip(chunks, PALETTE, strict=False))
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return {
        chunk: to_hex(colormaps["viridis"](0.95 * place / (len(chunks) - 1)))
        for place, chunk in enumerate(chunks)
    }


def _layers(timelines: Sequence[Timeline]) -> list[int]:
    return sorted({span.layer for timeline in timelines for span in timeline.spans})


def _rows(timelines: Sequence[Timeline]) -> tuple[list[_Row], float]:
    """Rows from the top: for each rank compute, then its communication lanes. And their height together."""
    rows: list[_Row] = []
    depth_in = 0.0
    for number, timeline in enumerate(timelines):
        stripe = _PREDICTED_STRIPE if timeline.is_predicted else _STRIPE
        lanes = {span.lane for span in timeline.spans}
        for lane in sorted(lanes, key=lambda lane: (lane != COMPUTE, lane)):
            rows.append(_Row(number, lane, -depth_in - _ROW_IN / 2, stripe))
            depth_in += _ROW_IN
        depth_in += _RANK_GAP_IN
    height_in = depth_in - _RANK_GAP_IN
    return [replace(row, y_in=row.y_in + height_in) for row in rows], height_in


def _panels(timelines: Sequence[Timeline], *, split: bool) -> list[_Panel]:
    directions = [(name, (name,)) for name in DIRECTIONS] if split else [("", DIRECTIONS)]
    panels = []
    for heading, wanted in directions:
        spans: dict[int, list[StageSpan]] = {}
        for number, timeline in enumerate(timelines):
            chosen = [span for span in timeline.spans if span.direction in wanted]
            if chosen:
                zero = min(span.begin_us for span in chosen)
                spans[number] = [
                    replace(span, begin_us=span.begin_us - zero, end_us=span.end_us - zero) for span in chosen
                ]
        if spans:
            longest_us = max(span.end_us for chosen in spans.values() for span in chosen)
            # A panel of which every stage took no time at all still needs an axis.
            panels.append(_Panel(heading, spans, max(longest_us, 1e-3) / 1e3))
    return panels


def _width_in(panels: Sequence[_Panel], *, split: bool) -> float:
    if split:
        return _WIDTH_IN
    lengths_us = [
        span.end_us - span.begin_us for panel in panels for part in panel.spans.values() for span in part
    ]
    median_ms = max(statistics.median(lengths_us) / 1e3, 1e-6)
    length_ms = sum(panel.length_ms for panel in panels)
    return min(_MAX_WIDTH_IN, max(_WIDTH_IN, length_ms / median_ms * _MEDIAN_SPAN_IN))


def _draw_panels(
    figure: Figure,
    panels: Sequence[_Panel],
    rows: Sequence[_Row],
    *,
    layers: Sequence[int],
    rows_in: float,
    bottom_in: float,
) -> None:
    width_in, height_in = figure.get_size_inches()
    room_in = width_in - _LEFT_IN - _RIGHT_IN - _PANEL_GAP_IN * (len(panels) - 1)
    in_per_ms = room_in / sum(panel.length_ms for panel in panels)
    colours = chunk_colours(
        _chunks([span for panel in panels for part in panel.spans.values() for span in part])
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


def _dress(axes: Axes, rows: Sequence[_Row], *, panel: _Panel, panel_in: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for row in rows:
        axes.axhspan(row.y_in - _ROW_IN / 2, row.y_in + _ROW_IN / 2, color=row.stripe, linewidth=0, zorder=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_FAINT_INK)
    axes.spines["bottom"].set_position(("outward", 4))
    axes.set_yticks([])
    axes.xaxis.set_major_locator(MaxNLocator(nbins=max(1, int(panel_in / 0.8)), steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(axis="x", colors=_FAINT_INK, labelsize=8, length=3)
    axes.grid(axis="x", color="#DDE0E4", linewidth=0.6, zorder=0.5)
    axes.set_axisbelow(True)
    if panel.heading:
        axes.set_title(
            f"{panel.heading}  {panel.length_ms:.3g} ms", loc="left", fontsize=9, color=_INK, pad=5
        )


def _draw_row(
    axes: Axes, row: _Row, spans: Sequence[StageSpan], *, colours: dict[int, str], in_per_ms: float
) -> None:
    """Bars in one collection for each style, which is fast for tens of thousands of spans; then the names."""
    looks: defaultdict[tuple[str, bool], list[tuple[float, float]]] = defaultdict(list)
    bar_in = _ROW_IN * _BAR_SHARE
    for span in spans:
        begin_ms, length_ms = span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3
        fill = _fill(span, colours)
        # A gap between neighbours: a white edge would cover narrow ones completely.
        shown_ms = length_ms - min(_SEAM_IN / in_per_ms, 0.2 * length_ms)
        looks[fill, _has_foot(span)].append((begin_ms, shown_ms))
        name = _fitting_name(span, room_in=length_ms * in_per_ms)
        if name:
            axes.text(
                begin_ms + length_ms / 2,
                row.y_in,
                name,
                ha="center",
                va="center_baseline",
                fontsize=_LABEL_PT,
                color=_ink_on(fill),
                clip_on=True,
                zorder=4,
            )
    for (fill, has_foot), bars in looks.items():
        axes.broken_barh(bars, (row.y_in - bar_in / 2, bar_in), facecolor=fill, linewidth=0, zorder=2)
        if has_foot:
            foot = (row.y_in - bar_in / 2, bar_in * _BACKWARD_SHARE)
            axes.broken_barh(bars, foot, facecolor=_INK, linewidth=0, alpha=_BACKWARD_ALPHA, zorder=3)


def _draw_layers(axes: Axes, row: _Row, spans: Sequence[StageSpan], layers: Sequence[int]) -> None:
    bar_in = _ROW_IN * _BAR_SHARE
    strip = (row.y_in + bar_in * (0.5 - _LAYER_SHARE), bar_in * _LAYER_SHARE)
    for place, layer in enumerate(layers):
        bars = [
            (span.begin_us / 1e3, (span.end_us - span.begin_us) / 1e3)
            for span in spans
            if span.layer == layer
        ]
        axes.broken_barh(bars, strip, facecolor=_shade(place), linewidth=0, zorder=3)


def _shade(place: int) -> str:
    return _LAYER_SHADES[place % len(_LAYER_SHADES)]


def _draw_margins(
    figure: Figure, timelines: Sequence[Timeline], rows: Sequence[_Row], *, title: str, bottom_in: float
) -> None:
    width_in, height_in = figure.get_size_inches()

    def write(x_in: float, y_in: float, text: str, **how: Any) -> None:
        figure.text(x_in / width_in, y_in / height_in, text, **{"color": _INK, "fontsize": 9, **how})

    write(0.2, height_in - 0.36, title, fontsize=13, fontweight="bold")
    write(0.2, height_in - 0.62, _hidden(timelines), fontsize=10, color=_FAINT_INK)
    under_axis_in = bottom_in - 0.5
    write(_LEFT_IN, under_axis_in, "ms after the first stage of each rank", fontsize=8.5, color=_FAINT_INK)
    key = {"fontsize": 8.5, "ha": "right", "color": _FAINT_INK}
    write(width_in - _RIGHT_IN, under_axis_in, _initials(timelines), **key)
    for row in rows:
        write(_LEFT_IN - 0.12, bottom_in + row.y_in, row.lane, ha="right", va="center", fontsize=8.5)
    for number, timeline in enumerate(timelines):
        own = [row.y_in for row in rows if row.timeline == number]
        middle_in = bottom_in + (own[0] + own[-1]) / 2
        name, below = f"rank {timeline.rank}", layers_of(timeline)
        if timeline.is_predicted:
            name, below = PREDICTED, "one block" if len(_layers([timeline])) == 1 else below
        write(0.2, middle_in + 0.02, name, fontweight="bold", va="bottom")
        write(0.2, middle_in - 0.02, below, color=_FAINT_INK, fontsize=8, va="top")
        if timeline.communication_us:
            right_in = width_in - _RIGHT_IN + 0.15
            write(right_in, middle_in + 0.02, f"{timeline.hidden_share:.0%}", fontweight="bold", va="bottom")
            hidden = f"of {timeline.communication_us / 1e3:.3g} ms hidden"
            write(right_in, middle_in - 0.02, hidden, color=_FAINT_INK, fontsize=7.5, va="top")


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
    chunks = _chunks(spans)
    colours = chunk_colours(chunks)
    handles: list[Any] = [Patch(facecolor=colours[chunk], label=f"chunk {chunk}") for chunk in chunks]
    if any(span.chunk is None for span in spans):
        handles.append(Patch(facecolor=WHOLE_BLOCK, label="whole block"))
    if any(map(_has_foot, spans)):
        handles.append(Line2D([], [], color=_INK, alpha=_BACKWARD_ALPHA, linewidth=2.5, label="backward"))
    layers = _layers(timelines)
    for place in range(min(len(layers), len(_LAYER_SHADES)) if len(layers) > 1 else 0):
        named = ", ".join(map(str, layers[place :: len(_LAYER_SHADES)][:_NAMED_LAYERS]))
        more = ", ..." if len(layers[place :: len(_LAYER_SHADES)]) > _NAMED_LAYERS else ""
        handles.append(
            Patch(facecolor=_shade(place), edgecolor=_FAINT_INK, label=f"strip: layer {named}{more}")
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
    chunks = _chunks([span for timeline in timelines for span in timeline.spans])
    shades = len(_LAYER_SHADES) if len(_layers(timelines)) > 1 else 0
    return math.ceil((len(chunks) + 2 + shades) / _LEGEND_COLUMNS)


def _chunks(spans: Sequence[StageSpan]) -> list[int]:
    return sorted({span.chunk for span in spans if span.chunk is not None})


def _has_foot(span: StageSpan) -> bool:
    """Whether the bar is marked as backward; a forward stage that the backward pass runs again is not."""
    return span.direction == "backward" and not span.runs_again


def _fill(span: StageSpan, colours: dict[int, str]) -> str:
    from matplotlib.colors import to_hex, to_rgb

    if span.chunk is None:
        return WHOLE_BLOCK
    tint = _TINTS.get(span.kind, _OTHER_TINT)
    red, green, blue = (value + (1 - value) * tint for value in to_rgb(colours[span.chunk]))
    return to_hex((red, green, blue))


def _fitting_name(span: StageSpan, *, room_in: float) -> str:
    """The stage's name, its first letter with the chunk, or nothing: the longest that fits into the bar."""
    for name in (span.stage, _initial(span)):
        if len(name) * _LABEL_PT * _CHARACTER_SHARE / 72 + 0.05 <= room_in:
            return name
    return ""


def _initial(span: StageSpan) -> str:
    _, _, number = span.stage.partition(".")
    return f"{_letter(span.kind)}{number}"


def _initials(timelines: Sequence[Timeline]) -> str:
    """What the initials in the bars mean."""
    stages = {span.kind for timeline in timelines for span in timeline.spans}
    return "   ".join(f"{_letter(stage)} {stage}" for stage in sorted(stages))


def _ink_on(fill: str) -> str:
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(fill)
    return _PAPER if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else _INK


def _write(figure: Figure, target: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    kind = target.suffix.removeprefix(".")
    dpi = min(_PNG_DPI, _MAX_PNG_PIXELS / max(figure.get_size_inches()))
    metadata = {"Date": None} if kind == "svg" else None
    with outputs.atomic_file(target) as partial:
        figure.savefig(partial, format=kind, dpi=dpi, metadata=metadata)


def _letter(stage: str) -> str:
    """The initial of a stage, where its name does not fit; counts and combine share one, as others do."""
    return {"counts": "#", "reduce": "Σ", "reduce-experts": "Σ"}.get(stage, stage[:1].upper())
