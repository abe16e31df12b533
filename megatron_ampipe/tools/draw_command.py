"""``ampipe draw``: chooses what of recorded timelines is shown, draws it, prints how much was hidden."""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ampipe.files import outputs
from megatron_ampipe.files.timeline import COMPUTE, DIRECTIONS, PREDICTED, StageSpan, Timeline
from megatron_ampipe.tools import timeline_picture

_CLOCK_US = 1.0
"""By how much times of a device's events may be wrong."""
_LABELS = ("degree", "backward degree", "shares", "schedule", "layers that share a schedule")
_PASS = "first to last"
_EPILOG = """\
examples:
  ampipe draw traces/ --output timeline
      timeline.svg and timeline.png: of every rank, the first MoE layer in the last recorded iteration, with
      the layers that share its schedule
  ampipe draw traces/rank0.trace.json --output whole --layer all
      one rank, every layer that it ran
  ampipe draw traces/ --predicted predicted.json --output timeline
      under every rank what ampipe plan --trace predicted.json predicted, and a table of both

A run writes its traces with --ampipe-trace-dir traces/. Perfetto (ui.perfetto.dev) opens them as well.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe draw``."""
    parser.description = "Draw what each rank computed and communicated, and when, as SVG and PNG."
    parser.epilog = _EPILOG
    parser.add_argument(
        "traces",
        metavar="TRACE",
        type=Path,
        nargs="+",
        help="a rank's trace, or a directory of them (rank*.trace.json)",
    )
    parser.add_argument(
        "--output",
        metavar="NAME",
        type=Path,
        help="write NAME.svg and NAME.png (default: timeline, in the directory of the traces)",
    )
    parser.add_argument(
        "--iteration",
        metavar="N",
        type=int,
        help="training iteration to draw (default: the last that all ranks recorded)",
    )
    parser.add_argument(
        "--layer",
        metavar="N",
        type=_layer_or_all,
        help="layer to draw, from 1, with the layers that share its schedule; or 'all' (default: each rank's "
        "first MoE layer)",
    )
    parser.add_argument(
        "--predicted",
        metavar="FILE",
        type=Path,
        help="draw this prediction of ampipe plan --trace below every rank, and compare",
    )


def _layer_or_all(text: str) -> int | str:
    return text if text == "all" else int(text)


def run(arguments: argparse.Namespace) -> int:
    """Draw, and print the share of communication that was hidden; with a prediction, the time of each stage.

    Raises:
        BadInput: a trace cannot be read.
        RunFailed: the pictures cannot be written.
    """
    first, refuse = arguments.traces[0], arguments.refuse
    output = arguments.output or (first if first.is_dir() else first.parent) / "timeline"
    if output.suffix in timeline_picture.SUFFIXES or output.is_dir():
        refuse(f"--output {output} is a directory or has a suffix; use for example --output timeline")
    targets = outputs.check_prefix(output, suffixes=timeline_picture.SUFFIXES, flag="--output")
    timelines = _read(arguments.traces, refuse)
    recorded = [{span.iteration for span in timeline.spans} for timeline in timelines]
    common = set.intersection(*recorded)
    iteration = arguments.iteration or max(common, default=None)
    if iteration not in common:
        numbers = ", ".join(map(str, sorted(set.union(*recorded))))
        refuse(f"--iteration {iteration}: choose one that all traces hold; they hold {numbers}")
    shown = [
        replace(timeline, spans=tuple(span for span in timeline.spans if span.iteration == iteration))
        for timeline in timelines
    ]
    counts = Counter(label for timeline in shown for label in timeline.labels.items())
    title = [f"{key} {value}" for (key, value), count in counts.items() if count == len(shown)]
    title.append(f"iteration {iteration}")
    if arguments.layer != "all":
        numbers = sorted({span.layer for timeline in shown for span in timeline.spans})
        if arguments.layer not in (None, *numbers):
            refuse(f"--layer {arguments.layer} is in no trace; they hold {', '.join(map(str, numbers))}")
        num_passes = max(Counter(_stage_of(span) for span in shown[0].spans).values())
        title += [f"first of {num_passes} passes"] if num_passes > 1 else []
        shown = [
            replace(timeline, spans=tuple(spans))
            for timeline in shown
            if (spans := first_pass(timeline.spans, arguments.layer))
        ]
    drawn = shown
    if arguments.predicted is not None:
        if arguments.layer == "all":
            refuse("--predicted is of one block: leave --layer all out, or use --layer 1")
        prediction = Timeline.read_chrome(arguments.predicted)
        if (rule := misfit(prediction, shown)) is not None:
            refuse(
                f"--predicted {arguments.predicted} {rule}. Write it with ampipe plan --stack 1 --trace FILE "
                "--trace-of DEGREE, with this run's flags"
            )
        drawn = [one for rank in shown for one in (rank, prediction)]
    timeline_picture.draw(
        drawn, targets=targets, title="  \u00b7  ".join(title), split=arguments.layer != "all"
    )
    for timeline in shown:
        print(
            f"rank {timeline.rank}: {timeline.hidden_share:.0%} of {timeline.communication_us / 1e3:.2f} ms "
            f"communication hidden under computation ({timeline_picture.layers_of(timeline)})"
        )
    if arguments.predicted is not None:
        print(
            f"predicted: {prediction.hidden_share:.0%} of {prediction.communication_us / 1e3:.2f} ms "
            f"({prediction.labels[PREDICTED]})"
        )
        Console().print(table_of(compare(prediction, shown)))
    print(f"wrote {' and '.join(str(target) for target in targets)}")
    return 0


def _read(traces: Sequence[Path], refuse: Callable[[str], None]) -> list[Timeline]:
    """Files and directories of files, in the order of their ranks."""
    timelines: dict[int, Timeline] = {}
    for trace in traces:
        paths = sorted(trace.glob("rank*.trace.json")) if trace.is_dir() else [trace]
        if not paths:
            refuse(f"{trace} holds no rank*.trace.json; give the directory of --ampipe-trace-dir")
        for path in paths:
            timeline = Timeline.read_chrome(path)
            if timeline.rank in timelines:
                refuse(f"{path} is a second trace of rank {timeline.rank}; give the traces of one run")
            timelines[timeline.rank] = timeline
    return [timelines[rank] for rank in sorted(timelines)]


def _stage_of(span: StageSpan) -> tuple[str, int, str, str]:
    """What runs once in each micro-batch."""
    return span.direction, span.layer, span.lane, span.stage


def first_pass(spans: Sequence[StageSpan], wanted: int | None) -> list[StageSpan]:
    """What a layer ran for its first micro-batch in both directions; empty if it ran nothing.

    With the layers that share its schedule: they compute and communicate in what would be gaps without them.

    Args:
        spans: Of one iteration of a rank.
        wanted: The layer; None for the first one that dispatches tokens.
    """
    dispatching = [span.layer for span in spans if span.kind == "dispatch"]
    layer = wanted or min(dispatching or [span.layer for span in spans])
    firsts: dict[tuple[str, int, str, str], StageSpan] = {}
    for span in sorted(spans, key=lambda span: span.begin_us):
        firsts.setdefault(_stage_of(span), span)
    by_direction = [
        [span for span in firsts.values() if span.direction == direction] for direction in DIRECTIONS
    ]
    with_layer = next((part for part in by_direction if any(span.layer == layer for span in part)), [])
    layers = sharing_layers(layer, with_layer) if with_layer else set()
    return [span for span in firsts.values() if span.layer in layers]


def sharing_layers(layer: int, spans: Iterable[StageSpan]) -> set[int]:
    """The layers whose computation takes turns with a layer's, itself included.

    Those are the layers that share its schedule: others compute one after another.

    Args:
        layer: The layer.
        spans: Of one direction, what each layer ran in its first pass.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in spans:
        if span.lane == COMPUTE:
            begins[span.layer] = min(span.begin_us, begins.get(span.layer, span.begin_us))
            ends[span.layer] = max(span.end_us, ends.get(span.layer, span.end_us))
    sharing = {layer}
    while layer in begins:
        first = min(begins[number] for number in sharing) + _CLOCK_US
        last = max(ends[number] for number in sharing) - _CLOCK_US
        more = {number for number in begins if begins[number] < last and ends[number] > first}
        if more <= sharing:
            break
        sharing |= more
    return sharing


# A prediction, compared with what ran.


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
