"""Where the bars of a timeline go: a row for each lane of each rank, and a panel for each pass.

The forward and the backward pass of one layer get a panel each, on one scale, because between them a run
does other things for a long time; a whole iteration gets one panel. Each rank's clock begins at its own
first stage of the panel: the clocks of different ranks need not agree.

Arithmetic only, in milliseconds and inches; draws nothing. Called by :mod:`.timeline_picture`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.files.timeline import COMPUTE, DIRECTIONS, StageSpan, Timeline
from megatron_ampipe.tools.timeline_style import PREDICTED_STRIPE, STRIPE

_WIDTH_IN, ROW_IN, _RANK_GAP_IN = 13.0, 0.36, 0.2
# A whole iteration is drawn wider, so that its median span has this width, up to a limit.
_MEDIAN_SPAN_IN, _MAX_WIDTH_IN = 0.06, 90.0


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """One lane of one timeline; ``y_in`` is its middle in inches above the lowest row's foot."""

    timeline: int
    lane: str
    y_in: float
    stripe: str


@dataclass(frozen=True, slots=True)
class TimelinePanel:
    """What one axes shows: spans by timeline, in milliseconds after the first of each."""

    heading: str
    spans: dict[int, list[StageSpan]]
    length_ms: float


def rows_of(timelines: Sequence[Timeline]) -> tuple[list[TimelineRow], float]:
    """Rows from the top: for each rank compute, then its communication lanes. And their height together."""
    rows: list[TimelineRow] = []
    depth_in = 0.0
    for number, timeline in enumerate(timelines):
        stripe = PREDICTED_STRIPE if timeline.is_predicted else STRIPE
        lanes = {span.lane for span in timeline.spans}
        for lane in sorted(lanes, key=lambda lane: (lane != COMPUTE, lane)):
            rows.append(TimelineRow(number, lane, -depth_in - ROW_IN / 2, stripe))
            depth_in += ROW_IN
        depth_in += _RANK_GAP_IN
    height_in = depth_in - _RANK_GAP_IN
    return [replace(row, y_in=row.y_in + height_in) for row in rows], height_in


def panels_of(timelines: Sequence[Timeline], *, split: bool) -> list[TimelinePanel]:
    """Panels from the left: one for each direction that was run, or one for both if not ``split``."""
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
            panels.append(TimelinePanel(heading, spans, max(longest_us, 1e-3) / 1e3))
    return panels


def width_in_of(panels: Sequence[TimelinePanel], *, split: bool) -> float:
    """Width of the whole picture in inches; panels that are not ``split`` may need more."""
    if split:
        return _WIDTH_IN
    lengths_us = [
        span.end_us - span.begin_us for panel in panels for part in panel.spans.values() for span in part
    ]
    median_ms = max(statistics.median(lengths_us) / 1e3, 1e-6)
    length_ms = sum(panel.length_ms for panel in panels)
    return min(_MAX_WIDTH_IN, max(_WIDTH_IN, length_ms / median_ms * _MEDIAN_SPAN_IN))
