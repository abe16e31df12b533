"""The timeline that ``ampipe plan`` predicts, as a trace and as a picture.

What is predicted is a :class:`~megatron_ampipe.schedule.Pipeline`: the choice of the plan, or one that the
user names, as a run with the same flags has it. Called by :mod:`megatron_ampipe.tools.plan_command`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.timeline import PREDICTED, Timeline
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import SCHEDULE_NAMES, Pipeline

_MOST_CHUNKS = 64
"""As for ``--degrees``; a schedule of thousands of chunks would take minutes to build."""


def parse_pipeline(text: str) -> Pipeline:
    """What ``--trace-of`` takes: ``4``, ``4:2`` (2 backward), ``4,moe-only`` (another order).

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    degrees, comma, schedule = text.partition(",")
    forward, colon, backward = degrees.partition(":")
    known = not comma or schedule in SCHEDULE_NAMES
    if not known or not _is_number(forward) or (colon and not _is_number(backward)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no degree such as 4, 4:2 or 4,moe-only (orders: {', '.join(SCHEDULE_NAMES)})"
        )
    try:
        pipeline = Pipeline.of(
            int(forward),
            backward_degree=int(backward) if colon else None,
            schedule=schedule or SCHEDULE_NAMES[0],
        )
    except BadInput:
        pipeline = None
    if pipeline is None or pipeline.num_chunks > _MOST_CHUNKS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: degrees are 1 to {_MOST_CHUNKS}, and one of the two divides the other, as in 4:2"
        )
    return pipeline


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) <= len(str(_MOST_CHUNKS)) + 1


def predicted_timeline(predictor: Predictor, pipeline: Pipeline, *, source: str) -> Timeline:
    """One block, or all layers of a predictor, forward and then backward.

    Args:
        predictor: Of the workload on the cluster, with the layers that share the schedule.
        pipeline: What runs.
        source: Names the model and the cluster.

    Raises:
        BadInput: the sequence has fewer rows than the pipeline has chunks.
    """
    rows = predictor.workload.rows
    if pipeline.num_chunks > rows:
        raise BadInput(
            "--trace-of",
            pipeline.num_chunks,
            rule=f"is more chunks than the {rows} rows that a rank holds",
            remedy=f"Use --trace-of {rows} or less.",
        )
    lengths = tuple(sum(span.length for span in chunk.hidden) for chunk in pipeline.chunks(rows))
    schedule = pipeline.schedule_of(predictor.layers)
    return predictor.timeline(schedule, lengths, labels={PREDICTED: source, **pipeline.labels})


def draw(timeline: Timeline, name: Path) -> None:
    """Write NAME.svg and NAME.png.

    Raises:
        EnvironmentMissing: matplotlib is absent.
        RunFailed: a file cannot be written.
    """
    # Imported here, so that matplotlib is needed only for a picture.
    from megatron_ampipe.tools import timeline_picture

    targets = [name.with_name(name.name + suffix) for suffix in timeline_picture.SUFFIXES]
    degree, backward = timeline.labels["degree"], timeline.labels.get("backward degree")
    title = f"predicted, degree {degree}" + (f" forward, {backward} backward" if backward else "")
    timeline_picture.draw([timeline], targets=targets, title=title, split=True)
