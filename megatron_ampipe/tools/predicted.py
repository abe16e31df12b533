"""A predicted timeline compared with recorded ones: whether they fit together, and how long each stage took.

``ampipe plan --trace`` writes the prediction, ``ampipe draw --predicted`` reads it. Draws nothing. Called by
:mod:`megatron_ampipe.tools.draw_command`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.timeline import DIRECTIONS, Timeline

_REMEDY = "Give a file that ampipe plan --trace wrote."
_SHOWN_STAGES = 4
_NAMED = ("backward degree", "shares", "schedule", "layers that share a schedule")


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


def read_predicted(path: Path) -> Timeline:
    """Read a prediction.

    Raises:
        BadInput: the file is absent, or holds no prediction.
    """
    try:
        timeline = Timeline.read_chrome(path)
    except BadInput as error:
        raise BadInput("--predicted", path, rule=error.rule, remedy=_REMEDY) from error
    if not timeline.is_predicted:
        raise BadInput("--predicted", path, rule="was recorded by a run, not predicted", remedy=_REMEDY)
    return timeline


def require_fit(predicted: Timeline, path: Path, measured: Sequence[Timeline]) -> None:
    """Refuse a prediction of something else than what ran.

    Args:
        predicted: One block.
        path: Its file, for the error.
        measured: One pass in each direction of one layer, of each rank.

    Raises:
        BadInput: another degree, order or cut, or a block of other stages.
    """
    layers = {span.layer for span in predicted.spans}
    if len(layers) > 1:
        raise BadInput(
            "--predicted",
            path,
            rule=f"is of {len(layers)} layers that share a schedule, and only one layer can be compared",
            remedy="Predict one block, with ampipe plan --stack 1, and record a run with --ampipe-stack 1.",
        )
    for timeline in measured:
        if timeline.is_predicted:
            raise BadInput(
                "TRACE",
                f"of rank {timeline.rank}",
                rule="is a prediction, and --predicted needs recorded traces to compare it with",
                remedy="Give the directory that a run got as --ampipe-trace-dir.",
            )
        labels = ("degree", *_NAMED)
        differing = [name for name in labels if predicted.labels.get(name) != timeline.labels.get(name)]
        if differing:
            raise BadInput(
                "--predicted",
                path,
                rule=f"predicts {_described(predicted)}, and rank {timeline.rank} ran {_described(timeline)}",
                remedy=_remedy(timeline),
            )
        for direction in {span.direction for span in timeline.spans}:
            _require_same_stages(predicted, path, timeline, direction)


def compare(predicted: Timeline, measured: Sequence[Timeline]) -> list[ComparedTime]:
    """Every kind of stage in both directions, in the order in which the prediction begins them.

    Args:
        predicted: One block.
        measured: What :func:`require_fit` has passed. A direction that no rank holds is left out.
    """
    rows = []
    for direction in DIRECTIONS:
        ran = [one for one in measured if any(span.direction == direction for span in one.spans)]
        if not ran:
            continue
        kinds = dict.fromkeys(_kind(span.stage) for span in predicted.spans if span.direction == direction)
        for kind in kinds:
            mean_ms = statistics.fmean(_kind_ms(one, direction, kind) for one in ran)
            rows.append(ComparedTime(direction, kind, _kind_ms(predicted, direction, kind), mean_ms))
        mean_ms = statistics.fmean(one.length_us(direction) / 1e3 for one in ran)
        rows.append(ComparedTime(direction, "first to last", predicted.length_us(direction) / 1e3, mean_ms))
    return rows


def table_of(rows: Sequence[ComparedTime]) -> Table:
    """A table to print: each row, and the whole pass in the last line."""
    table = Table(title="one block, one micro-batch, mean over the ranks drawn")
    for name in ("direction", "stages", "predicted ms", "measured ms", "measured/predicted"):
        table.add_column(name, justify="left" if name in ("direction", "stages") else "right", no_wrap=True)
    totals = [row for row in rows if row.what == "first to last"]
    both = ComparedTime(
        "both",
        "first to last",
        sum(row.predicted_ms for row in totals),
        sum(row.measured_ms for row in totals),
    )
    for row in [*rows, both]:
        is_total = row in totals or row is both
        table.add_row(
            row.direction,
            row.what,
            f"{row.predicted_ms:.3f}",
            f"{row.measured_ms:.3f}",
            f"{row.measured_ms / row.predicted_ms:.2f}" if row.predicted_ms else "",
            style="bold" if is_total else None,
            end_section=is_total,
        )
    return table


def _require_same_stages(predicted: Timeline, path: Path, timeline: Timeline, direction: str) -> None:
    on_paper, ran = _stages(predicted, direction), _stages(timeline, direction)
    if on_paper == ran:
        return
    differences = []
    for verb, more, fewer in (("predicted alone", on_paper, ran), ("recorded alone", ran, on_paper)):
        names = sorted(stage for _, stage in more - fewer)
        if names:
            shown = ", ".join(names[:_SHOWN_STAGES]) + (", ..." if len(names) > _SHOWN_STAGES else "")
            differences.append(f"{verb}: {shown}")
    raise BadInput(
        "--predicted",
        path,
        rule=f"has other stages {direction} than rank {timeline.rank} recorded ({'; '.join(differences)})",
        remedy="Predict it with ampipe plan from a model file with this run's flags, and draw an MoE layer.",
    )


def _remedy(timeline: Timeline) -> str:
    """How to predict what ran, as far as flags of ``ampipe plan`` can say it."""
    labels = timeline.labels
    if "shares" in labels or labels.get("schedule") == "searched" or "degree" not in labels:
        return "Use ampipe plan --output plan.yaml --trace FILE, and run with --ampipe-plan plan.yaml."
    backward = f":{labels['backward degree']}" if "backward degree" in labels else ""
    return f"Use ampipe plan --trace FILE --trace-of {labels['degree']}{backward},{labels.get('schedule')}."


def _described(timeline: Timeline) -> str:
    labels = timeline.labels
    words = [f"degree {labels.get('degree', 'unknown')}"]
    words += [f"{name} {labels[name]}" for name in _NAMED if name in labels]
    return ", ".join(words)


def _stages(timeline: Timeline, direction: str) -> set[tuple[str, str]]:
    """Each with its lane: a collective on the compute lane does not overlap."""
    return {(span.lane, span.stage) for span in timeline.spans if span.direction == direction}


def _kind(stage: str) -> str:
    return stage.partition(".")[0]


def _kind_ms(timeline: Timeline, direction: str, kind: str) -> float:
    return (
        sum(
            span.end_us - span.begin_us
            for span in timeline.spans
            if span.direction == direction and _kind(span.stage) == kind
        )
        / 1e3
    )
