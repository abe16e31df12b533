"""Draws timelines with matplotlib: a row for each lane of each rank, a colour for each chunk.

The forward and the backward pass each have a panel, on one scale, because a run does other things for a long
time between them. A forward pass that runs together with a backward pass is hatched in the backward panel.
Each rank's time starts at its first stage in the panel: the clocks of different ranks need not agree. Layers
that share a schedule run at the same time, so a strip along the top of each bar shows its layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ampipe.files.timeline import COMPUTE, DIRECTIONS, PREDICTED, StageSpan, Timeline
from megatron_ampipe.tools import pictures
from megatron_ampipe.tools.pictures import FAINT, GRID, INK, PALETTE, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

SUFFIXES = (".svg", ".png")
"""Suffixes of the files that a picture is written to."""
_WIDTH_IN, _MARGINS_IN, _ROW_IN = 13.0, 2.6, 0.36
"""Width of the picture, space left and right of the bars, height of a lane."""
_BAR, _SEAM_IN, _STRIP = 0.84, 0.012, 0.17
"""Height of a bar in its row, the gap to its neighbour, and its part for the layer."""
_LABEL_PT = 7.5
_MOST_LAYERS = 4
"""Of more layers that share a schedule, the begin of a pass is drawn, until it has left so many."""
_TITLE_IN = 2.2
"""The least width of a panel whose title says the micro-batch."""
_WHOLE_BLOCK = "#A6A9AD"
_STRIPE, _PREDICTED_STRIPE = "#F3F4F6", "#FBF3DC"
# The share of white that is mixed into a chunk's colour, by kind of stage.
_TINTS = {"attention": 0.0, "dispatch": 0.0, "expert": 0.35, "combine": 0.35, "shared": 0.5, "wgrad": 0.5}
_OTHER_TINT = 0.6
_HATCH = "////"
_Colour = tuple[float, float, float] | str
# Layers next to each other run at the same time: three shades tell them apart.
_SHADES = (INK, "#9AA0A6", PAPER)


NAME = "name"
"""The label of a timeline that is named otherwise than by its rank."""


def draw(
    timelines: Sequence[Timeline],
    *,
    targets: Sequence[Path],
    title: str,
    next_microbatch: int | None = None,
) -> None:
    """Draw one picture and write it under every target; the suffix gives the format.

    Args:
        timelines: A timeline for each rank, from the top; none may be empty. A predicted one has another
            background.
        targets: Files to write. Each appears only when it is complete.
        title: Title of the picture.
        next_microbatch: The number, in its iteration, of the micro-batch whose forward pass runs together
            with a backward pass, which is that of micro-batch 1; None if it differs between ranks.

    Raises:
        RunFailed: a file cannot be written.
    """
    with pictures.style():
        figure = _figure(timelines, title=title, next_microbatch=next_microbatch)
        for target in targets:
            pictures.write(figure, target)


def layers_of(timeline: Timeline) -> str:
    """The layers of a timeline as text: ``layer 2`` or ``layers 1-4``."""
    layers = sorted({span.layer for span in timeline.spans})
    return f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"


@dataclass(frozen=True, slots=True)
class _Panel:
    """One direction of all ranks.

    Attributes:
        direction: ``forward`` or ``backward``.
        parts: The spans of each rank, from the begin of its first one on.
        length_ms: The length of the axis: of the whole pass, or of its first layers.
        whole_ms: The length of the whole pass.
    """

    direction: str
    parts: tuple[list[StageSpan], ...]
    length_ms: float
    whole_ms: float

    @property
    def spans(self) -> list[StageSpan]:
        return [span for part in self.parts for span in part]


def _figure(timelines: Sequence[Timeline], *, title: str, next_microbatch: int | None) -> Figure:
    from matplotlib.figure import Figure

    panels = _panels(timelines)
    lengths_ms = [panel.length_ms for panel in panels]
    spans = [span for panel in panels for span in panel.spans]
    layers = sorted({span.layer for span in spans})
    lanes = [_lanes_of(timeline) for timeline in timelines]
    letters = letters_of({span.kind for span in spans})
    heights = [len(lanes_of_rank) for lanes_of_rank in lanes]
    height_in = _ROW_IN * sum(heights) + 0.25 * len(timelines) + 1.6
    in_per_ms = (_WIDTH_IN - _MARGINS_IN) / sum(lengths_ms)
    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained", facecolor=PAPER)
    grid = figure.subplots(
        len(timelines),
        len(panels),
        sharex="col",
        squeeze=False,
        width_ratios=lengths_ms,
        height_ratios=heights,
    )
    for column, panel in enumerate(panels):
        for row, timeline in enumerate(timelines):
            axes = grid[row][column]
            style = _BarStyle(in_per_ms, layers, letters)
            _draw_bars(axes, panel.parts[row], lanes[row], style)
            _draw_rows(axes, len(lanes[row]), is_predicted=timeline.is_predicted)
            axes.set_yticks(range(len(lanes[row])), lanes[row] if column == 0 else [])
            if column == 0:
                axes.set_ylabel(_name_of(timeline), rotation=0, ha="right", va="center", fontsize=8.5)
        _draw_time_axis(grid[0][column], panel, in_per_ms=in_per_ms)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    # In the widest panel: in another panel a long label would move the panels apart.
    widest = grid[-1][lengths_ms.index(max(lengths_ms))]
    widest.set_xlabel("ms after the first stage of each rank", loc="left", fontsize=8, color=FAINT)
    _add_legend(figure, spans, layers, letters, next_microbatch)
    return figure


def _panels(timelines: Sequence[Timeline]) -> list[_Panel]:
    """A panel for each direction that has stages."""
    panels = []
    for direction in DIRECTIONS:
        parts = tuple(_from_zero(timeline, direction) for timeline in timelines)
        if any(parts):
            # A panel needs an axis even if all its stages took no time.
            whole_ms = max(1e-6, *(span.end_us / 1e3 for part in parts for span in part))
            length_ms = max(1e-6, *(_end_of_first_layers_ms(part, direction) for part in parts))
            seen = tuple([span for span in part if span.begin_us / 1e3 < length_ms] for part in parts)
            panels.append(_Panel(direction, seen, length_ms=length_ms, whole_ms=whole_ms))
    return panels


def _end_of_first_layers_ms(spans: Sequence[StageSpan], direction: str) -> float:
    """When the pass has left the first layers that are drawn: the bars of more would be too thin."""
    own = [span for span in spans if span.direction == direction]
    layers = sorted({span.layer for span in own}, reverse=direction == DIRECTIONS[1])
    drawn = layers[:_MOST_LAYERS]
    counted = spans if len(layers) <= _MOST_LAYERS else [span for span in own if span.layer in drawn]
    return max((span.end_us / 1e3 for span in counted), default=0.0)


def _lanes_of(timeline: Timeline) -> list[str]:
    """The lanes from the top."""
    return sorted({span.lane for span in timeline.spans}, key=lambda lane: (lane != COMPUTE, lane))


def _draw_rows(axes: Axes, num_lanes: int, *, is_predicted: bool) -> None:
    """Draw what is under the bars."""
    stripe = _PREDICTED_STRIPE if is_predicted else _STRIPE
    for row in range(num_lanes):
        axes.axhspan(row - 0.48, row + 0.48, color=stripe, linewidth=0, zorder=0)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    axes.grid(axis="x", color=GRID, linewidth=0.6, zorder=0.5)


def _draw_time_axis(axes: Axes, panel: _Panel, *, in_per_ms: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(0, panel.length_ms)
    most_ticks = max(1, int(panel.length_ms * in_per_ms / 0.8))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=most_ticks, steps=[1, 2, 2.5, 5, 10]))
    length_in = panel.length_ms * in_per_ms
    microbatch = " of micro-batch 1" if length_in > _TITLE_IN else ""
    begin = "" if panel.length_ms == panel.whole_ms else f"the first {panel.length_ms:.3g} of "
    title = f"{panel.direction}{microbatch}  {begin}{panel.whole_ms:.3g} ms"
    axes.set_title(title, loc="left", fontsize=9)


def _add_legend(
    figure: Figure,
    spans: Sequence[StageSpan],
    layers: Sequence[int],
    letters: Mapping[str, str],
    next_microbatch: int | None,
) -> None:
    """The colours, and above them the letters of narrow bars."""
    handles = _legend(spans, layers, next_microbatch)
    legend = figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(10, len(handles)),
        frameon=False,
        fontsize=8.5,
        title="   ".join(f"{letter} {kind}" for kind, letter in letters.items()),
        title_fontsize=8,
    )
    legend.get_title().set_color(FAINT)


def _from_zero(timeline: Timeline, direction: str) -> list[StageSpan]:
    """The spans of a direction, from the begin of the first one on."""
    spans = [span for span in timeline.spans if span.program == direction]
    zero = min((span.begin_us for span in spans), default=0.0)
    return [replace(span, begin_us=span.begin_us - zero, end_us=span.end_us - zero) for span in spans]


@dataclass(frozen=True, slots=True)
class _BarStyle:
    """The scale of the bars, all layers of the picture, and the letter of each kind of stage."""

    in_per_ms: float
    layers: Sequence[int]
    letters: Mapping[str, str]


def _draw_bars(axes: Axes, spans: Sequence[StageSpan], lanes: Sequence[str], style: _BarStyle) -> None:
    """Draw bars, one collection for each style (fast for tens of thousands of spans), and then the names."""
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    bars: defaultdict[tuple[float, float, tuple[float, ...] | str, bool], list[tuple[float, float]]] = (
        defaultdict(list)
    )
    for span in spans:
        row, begin_ms = lanes.index(span.lane), span.begin_us / 1e3
        length_ms = (span.end_us - span.begin_us) / 1e3
        red, green, blue = fill = _fill(span)
        # A gap between neighbours: a white edge would cover narrow ones completely.
        bar = (begin_ms, length_ms - min(_SEAM_IN / style.in_per_ms, 0.2 * length_ms))
        bars[row - _BAR / 2, _BAR, fill, span.of_next_microbatch].append(bar)
        if len(style.layers) > 1:
            shade = _SHADES[style.layers.index(span.layer) % len(_SHADES)]
            bars[row - _BAR / 2, _STRIP, shade, False].append(bar)
        named = _name_that_fits(span, style.letters[span.kind], length_ms * style.in_per_ms)
        if named is not None:
            name, rotation = named
            is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
            label = axes.text(begin_ms + length_ms / 2, row, name, color=PAPER if is_dark else INK)
            vertical = "center" if rotation else "center_baseline"
            label.set(ha="center", va=vertical, fontsize=_LABEL_PT, clip_on=True, zorder=4, rotation=rotation)
            if span.of_next_microbatch:
                # The hatching would run through the letters.
                label.set_bbox({"facecolor": fill, "edgecolor": "none", "pad": 0.6})
    for (top, height, colour, hatched), pieces in bars.items():
        is_strip = height < _BAR
        drawn = axes.broken_barh(
            pieces, (top, height), facecolor=colour, linewidth=0, zorder=3 if is_strip else 2
        )
        if hatched:
            drawn.set(hatch=_HATCH, edgecolor=PAPER)


def _name_of(timeline: Timeline) -> str:
    """The label on the left of a timeline's rows."""
    name = timeline.labels.get(NAME, f"rank {timeline.rank}")
    if timeline.is_predicted:
        name = f"{timeline.labels[NAME]}, {PREDICTED}" if NAME in timeline.labels else PREDICTED
    lines = [name, layers_of(timeline)]
    if timeline.communication_us:
        lines += [f"{timeline.hidden_share:.0%} hidden", f"of {timeline.communication_us / 1e3:.3g} ms"]
    return "\n".join(lines)


def _legend(spans: Sequence[StageSpan], layers: Sequence[int], next_microbatch: int | None) -> list[Patch]:
    from matplotlib.patches import Patch

    chunks = sorted({span.chunk for span in spans if span.chunk is not None})
    handles = [Patch(facecolor=_colour(chunk), label=f"chunk {chunk}") for chunk in chunks]
    if any(span.chunk is None for span in spans):
        handles.append(Patch(facecolor=_WHOLE_BLOCK, label="whole block"))
    if any(span.of_next_microbatch for span in spans):
        label = "next micro-batch" + (f": {next_microbatch}" if next_microbatch is not None else "")
        handles.append(Patch(facecolor=FAINT, edgecolor=PAPER, hatch=_HATCH, label=label))
    for place, shade in enumerate(_SHADES[: len(layers)] if len(layers) > 1 else ()):
        first, *others = layers[place :: len(_SHADES)]
        label = f"strip: layer {first}" + f" and {len(others)} more" * bool(others)
        handles.append(Patch(facecolor=shade, edgecolor=FAINT, label=label))
    return handles


def _fill(span: StageSpan) -> tuple[float, float, float]:
    """The colour of a bar: its chunk's, lighter for some kinds of stages."""
    from matplotlib.colors import to_rgb

    if span.chunk is None:
        return to_rgb(_WHOLE_BLOCK)
    tint = _TINTS.get(span.kind, _OTHER_TINT)
    red, green, blue = (value + (1 - value) * tint for value in to_rgb(_colour(span.chunk)))
    return red, green, blue


def _colour(chunk: int) -> str:
    return PALETTE[chunk % len(PALETTE)]


def _name_that_fits(span: StageSpan, letter: str, width_in: float) -> tuple[str, int] | None:
    """The longest name that fits a bar, and its rotation in degrees; None if none does.

    The name of the stage, or its letter with the chunk, if need be upright.
    """
    short = letter + span.stage.partition(".")[2]
    letter_in, margin_in = _LABEL_PT * 0.6 / 72, 0.05
    for name in (span.stage, short):
        if len(name) * letter_in + margin_in <= width_in:
            return name, 0
    fits_upright = len(short) * letter_in <= _ROW_IN * _BAR and width_in >= _LABEL_PT / 72
    return (short, 90) if fits_upright else None


_SIGNS = {"counts": "#", "reduce": "Σ", "reduce-experts": "Σe"}


def letters_of(kinds: Iterable[str]) -> dict[str, str]:
    """A letter or a few for each kind of stage, for narrow bars: the shortest that no other kind has."""
    letters = {}
    names = sorted(kinds)
    for kind in names:
        lengths = range(1, len(kind))
        others = [other for other in names if other != kind and other not in _SIGNS]
        length = next((n for n in lengths if not any(other[:n] == kind[:n] for other in others)), len(kind))
        letters[kind] = _SIGNS.get(kind, kind[:length].capitalize())
    return letters
