"""A predicted timeline compared with recorded ones: whether they fit together, and how long each stage took.

``ampipe plan --trace`` writes the prediction, ``ampipe draw --predicted`` reads it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from rich.table import Table

from megatron_ampipe.files.timeline import DIRECTIONS, Timeline

_LABELS = ("degree", "backward degree", "shares", "schedule", "layers that share a schedule")
_PASS = "first to last"


def misfit(predicted: Timeline, measured: Sequence[Timeline]) -> str | None:
    """Why a timeline is no prediction of what ran, as a clause; None if it is one.

    Args:
        predicted: What ``--predicted`` named.
        measured: One pass in each direction of one layer, of each rank.
    """
    if not predicted.is_predicted:
        return "was recorded by a run, not predicted"
    if any(timeline.is_predicted for timeline in measured):
        return "is compared with traces of a run, and one that is drawn is a prediction"
    num_layers = len({span.layer for span in predicted.spans})
    if num_layers > 1:
        return f"is of {num_layers} layers that share a schedule, and only one layer can be compared"
    for timeline in measured:
        expected, ran = (_description(one) for one in (predicted, timeline))
        if expected != ran:
            return f"predicts {expected}, and rank {timeline.rank} ran {ran}"
        for direction in {span.direction for span in timeline.spans}:
            # Each with its lane: a collective on the compute lane does not overlap.
            on_paper, recorded = (
                {(span.lane, span.stage) for span in one.spans if span.direction == direction}
                for one in (predicted, timeline)
            )
            if on_paper != recorded:
                stages = ", ".join(sorted(stage for _, stage in on_paper ^ recorded)[:4])
                return f"has other stages {direction} than rank {timeline.rank} recorded: {stages}"
    return None


def _description(timeline: Timeline) -> str:
    labels = timeline.labels
    return ", ".join(f"{name} {labels[name]}" for name in _LABELS if name in labels) or "an unknown degree"


def compare(predicted: Timeline, measured: Sequence[Timeline]) -> dict[tuple[str, str], tuple[float, float]]:
    """Predicted and measured milliseconds, the mean over ranks, of each direction and kind of stage.

    Kinds are in the order in which the prediction begins them. ``first to last`` is the pass from its first
    stage's begin to its last one's end. A direction that no rank holds is left out.

    Args:
        predicted: One block.
        measured: For which :func:`misfit` is None.
    """
    rows = {}
    for direction in DIRECTIONS:
        ran = [one for one in measured if any(span.direction == direction for span in one.spans)]
        kinds = dict.fromkeys(span.kind for span in predicted.spans if span.direction == direction)
        for kind in (*kinds, _PASS) if ran else ():
            on_paper, *found = (_time_ms(one, direction, kind) for one in (predicted, *ran))
            rows[direction, kind] = on_paper, statistics.fmean(found)
    return rows


def _time_ms(timeline: Timeline, direction: str, kind: str) -> float:
    if kind == _PASS:
        return timeline.length_us(direction) / 1e3
    spans = (span for span in timeline.spans if (span.direction, span.kind) == (direction, kind))
    return sum(span.end_us - span.begin_us for span in spans) / 1e3


def table_of(rows: dict[tuple[str, str], tuple[float, float]]) -> Table:
    """The result of :func:`compare`, and the whole pass in the last line."""
    table = Table(title="one block, one micro-batch, mean over the ranks drawn")
    for name in ("direction", "stages", "predicted ms", "measured ms", "measured/predicted"):
        table.add_column(name, justify="left" if name in ("direction", "stages") else "right", no_wrap=True)
    passes = [times for (_, kind), times in rows.items() if kind == _PASS]
    both = (sum(predicted for predicted, _ in passes), sum(measured for _, measured in passes))
    for (direction, kind), (predicted, measured) in {**rows, ("both", _PASS): both}.items():
        ratio = f"{measured / predicted:.2f}" if predicted else ""
        cells = direction, kind, f"{predicted:.3f}", f"{measured:.3f}", ratio
        table.add_row(*cells, style="bold" if kind == _PASS else None, end_section=kind == _PASS)
    return table
