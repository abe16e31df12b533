"""What a bar of a timeline looks like: the colour of its chunk, the marks of its pass and layer, its name.

Also the colours of the page and of its rows. Says nothing about places: those are in :mod:`.timeline_layout`,
which takes the colours of rows from here. Called by :mod:`.timeline_picture`.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ampipe.files.timeline import StageSpan, Timeline

# Okabe and Ito's palette, for all common kinds of colour vision, without its black and its pale yellow; the
# order keeps neighbouring chunks far apart.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6BB1", "#7F7F3F")
WHOLE_BLOCK = "#A6A9AD"
INK, FAINT_INK, PAPER = "#22262B", "#6B7280", "#FFFFFF"
STRIPE, PREDICTED_STRIPE = "#F3F4F6", "#FBF3DC"
LABEL_PT, _CHARACTER_SHARE = 7.5, 0.6
# Within a chunk's colour, what the stage does: the share of white mixed in.
_TINTS = {"attention": 0.0, "dispatch": 0.0, "expert": 0.35, "combine": 0.35, "shared": 0.5, "wgrad": 0.5}
_OTHER_TINT = 0.6
# Layers next to each other run at the same time: three shades tell them apart.
LAYER_SHADES = ("#22262B", "#9AA0A6", "#FFFFFF")


def chunks_of(spans: Sequence[StageSpan]) -> list[int]:
    """The chunks that these spans are of, in order."""
    return sorted({span.chunk for span in spans if span.chunk is not None})


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


def fill_of(span: StageSpan, colours: dict[int, str]) -> str:
    """The colour of a bar: its chunk's, lighter for some kinds of stages."""
    from matplotlib.colors import to_hex, to_rgb

    if span.chunk is None:
        return WHOLE_BLOCK
    tint = _TINTS.get(span.kind, _OTHER_TINT)
    red, green, blue = (value + (1 - value) * tint for value in to_rgb(colours[span.chunk]))
    return to_hex((red, green, blue))


def ink_on(fill: str) -> str:
    """The colour of text on a bar, dark or light."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(fill)
    return PAPER if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else INK


def shows_backward(span: StageSpan) -> bool:
    """Whether the bar is marked as backward; a forward stage that the backward pass runs again is not."""
    return span.direction == "backward" and not span.runs_again


def shade_of(place: int) -> str:
    """The shade of a layer's strip; ``place`` counts the layers of the picture from 0."""
    return LAYER_SHADES[place % len(LAYER_SHADES)]


def fitting_name(span: StageSpan, *, room_in: float) -> str:
    """The stage's name, its first letter with the chunk, or nothing: the longest that fits into the bar."""
    for name in (span.stage, _initial(span)):
        if len(name) * LABEL_PT * _CHARACTER_SHARE / 72 + 0.05 <= room_in:
            return name
    return ""


def initials_of(timelines: Sequence[Timeline]) -> str:
    """What the initials in the bars mean."""
    stages = {span.kind for timeline in timelines for span in timeline.spans}
    return "   ".join(f"{_letter(stage)} {stage}" for stage in sorted(stages))


def _initial(span: StageSpan) -> str:
    _, _, number = span.stage.partition(".")
    return f"{_letter(span.kind)}{number}"


def _letter(stage: str) -> str:
    """The initial of a stage, where its name does not fit; counts and combine share one, as others do."""
    return {"counts": "#", "reduce": "Σ", "reduce-experts": "Σ"}.get(stage, stage[:1].upper())
