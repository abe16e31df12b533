"""A predicted timeline compared with recorded ones: whether they fit together, and how long each stage took.

``ampipe plan --trace`` writes the prediction, ``ampipe draw --predicted`` reads it. Draws nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from megatron_ampipe.files.timeline import DIRECTIONS, Timeline

_LABELS = ("degree", "backward degree", "shares", "schedule", "layers that share a schedule")


@dataclass(frozen=True, slots=True)
class ComparedTime:
    """One kind of stage in one direction, or the whole pass.

    Attributes:
        direction: ``forward`` or ``backward``.
        what: Kind of stage, or ``first to last`` for the pass from its first stage's begin to its last one's
            end, which is less than the sum where lanes overlap.
        predicted_ms: Of all chunks together.
        measured_ms: Likewise, the mean over the ranks that ran it.
    """

    direction: str
    what: str
    predicted_ms: float
    measured_ms: float


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


def compare(predicted: Timeline, measured: Sequence[Timeline]) -> list[ComparedTime]:
    """Every kind of stage in both directions, in the order in which the prediction begins them.

    Args:
        predicted: One block.
        measured: For which :func:`misfit` is None. A direction that no rank holds is left out.
    """
    rows = []
    for direction in DIRECTIONS:
        ran = [one for one in measured if any(span.direction == direction for span in one.spans)]
        if not ran:
            continue
        for kind in dict.fromkeys(span.kind for span in predicted.spans if span.direction == direction):
            mean_ms = statistics.fmean(_kind_ms(one, direction, kind) for one in ran)
            rows.append(ComparedTime(direction, kind, _kind_ms(predicted, direction, kind), mean_ms))
        mean_ms = statistics.fmean(one.length_us(direction) / 1e3 for one in ran)
        rows.append(ComparedTime(direction, "first to last", predicted.length_us(direction) / 1e3, mean_ms))
    return rows


def _kind_ms(timeline: Timeline, direction: str, kind: str) -> float:
    spans = (span for span in timeline.spans if (span.direction, span.kind) == (direction, kind))
    return sum(span.end_us - span.begin_us for span in spans) / 1e3


def table_of(rows: Sequence[ComparedTime]) -> Table:
    """A table to print: each row, and the whole pass in the last line."""
    table = Table(title="one block, one micro-batch, mean over the ranks drawn")
    for name in ("direction", "stages", "predicted ms", "measured ms", "measured/predicted"):
        table.add_column(name, justify="left" if name in ("direction", "stages") else "right", no_wrap=True)
    totals = [row for row in rows if row.what == "first to last"]
    predicted_ms, measured_ms = (
        sum(row.predicted_ms for row in totals),
        sum(row.measured_ms for row in totals),
    )
    both = ComparedTime("both", "first to last", predicted_ms, measured_ms)
    for row in [*rows, both]:
        is_total = row in totals or row is both
        ratio = f"{row.measured_ms / row.predicted_ms:.2f}" if row.predicted_ms else ""
        numbers = f"{row.predicted_ms:.3f}", f"{row.measured_ms:.3f}", ratio
        table.add_row(
            row.direction, row.what, *numbers, style="bold" if is_total else None, end_section=is_total
        )
    return table
