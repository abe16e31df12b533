"""``ampipe draw``: chooses what of recorded timelines is shown, draws it, prints how much was hidden."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import outputs
from megatron_ampipe.files.timeline import COMPUTE, PREDICTED, StageSpan, Timeline
from megatron_ampipe.tools import timeline_picture
from megatron_ampipe.tools.predicted import compare, misfit, table_of

_CLOCK_US = 1.0
"""By how much times of a device's events may be wrong."""

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
        BadInput: no trace, not one of a run, or without the iteration or layer that was asked for; or
            a prediction of something else.
        RunFailed: the pictures cannot be written.
    """
    first = arguments.traces[0]
    output = arguments.output or (first if first.is_dir() else first.parent) / "timeline"
    if output.suffix in timeline_picture.SUFFIXES or output.is_dir():
        arguments.refuse(
            f"--output {output} is a directory or has a suffix; use for example --output timeline"
        )
    targets = outputs.check_prefix(
        output, suffixes=timeline_picture.SUFFIXES, flag="--output", makes_folder=True
    )
    timelines = read_timelines(arguments.traces)
    iteration = _iteration(timelines, wanted=arguments.iteration)
    timelines = [
        replace(timeline, spans=tuple(span for span in timeline.spans if span.iteration == iteration))
        for timeline in timelines
    ]
    shown, num_passes = timelines, 1
    if arguments.layer != "all":
        shown, num_passes = _one_schedule(timelines, wanted=arguments.layer)
    title = _title(shown, iteration=iteration, num_passes=num_passes)
    prediction = None
    if arguments.predicted is not None:
        if arguments.layer == "all":
            arguments.refuse("--predicted is of one block: leave --layer all out, or use --layer 1")
        prediction = Timeline.read_chrome(arguments.predicted)
        if (rule := misfit(prediction, shown)) is not None:
            remedy = (
                "Write it with ampipe plan --stack 1 --trace FILE --trace-of DEGREE, with this run's flags."
            )
            raise BadInput("--predicted", arguments.predicted, rule=rule, remedy=remedy)
    drawn = shown if prediction is None else [one for rank in shown for one in (rank, prediction)]
    timeline_picture.draw(drawn, targets=targets, title=title, split=arguments.layer != "all")
    for timeline in shown:
        print(
            f"rank {timeline.rank}: {timeline.hidden_share:.0%} of {timeline.communication_us / 1e3:.2f} ms "
            f"communication hidden under computation ({timeline_picture.layers_of(timeline)})"
        )
    if prediction is not None:
        print(
            f"predicted: {prediction.hidden_share:.0%} of {prediction.communication_us / 1e3:.2f} ms "
            f"({prediction.labels[PREDICTED]})"
        )
        Console().print(table_of(compare(prediction, shown)))
    print(f"wrote {' and '.join(str(target) for target in targets)}")
    return 0


def read_timelines(traces: Sequence[Path]) -> list[Timeline]:
    """Read files and directories of files, in the order of their ranks.

    Raises:
        BadInput: a directory without a trace, a file that is not a trace, or two traces of one rank.
    """
    paths: list[Path] = []
    for trace in traces:
        found = sorted(trace.glob("rank*.trace.json")) if trace.is_dir() else [trace]
        if not found:
            raise BadInput(
                "TRACE",
                trace,
                rule="holds no rank*.trace.json",
                remedy="Give the directory that a run got as --ampipe-trace-dir.",
            )
        paths += found
    timelines: dict[int, Timeline] = {}
    for path in dict.fromkeys(paths):
        timeline = Timeline.read_chrome(path)
        if timeline.rank in timelines:
            raise BadInput(
                "TRACE",
                path,
                rule=f"is a second trace of rank {timeline.rank}",
                remedy="Give the traces of one run at a time.",
            )
        timelines[timeline.rank] = timeline
    return [timelines[rank] for rank in sorted(timelines)]


def split_passes(spans: Iterable[StageSpan]) -> list[list[StageSpan]]:
    """Split the spans of one layer and direction into its passes, one for each micro-batch.

    A pass ends where a stage comes again. Spans are taken in the order in which they began.
    """
    passes: list[list[StageSpan]] = []
    seen: set[tuple[str, str]] = set()
    for span in sorted(spans, key=lambda span: span.begin_us):
        if not passes or (span.lane, span.stage) in seen:
            passes.append([])
            seen = set()
        seen.add((span.lane, span.stage))
        passes[-1].append(span)
    return passes


def _iteration(timelines: Sequence[Timeline], *, wanted: int | None) -> int:
    """The wanted iteration, or the last one that all traces hold."""
    recorded = [{span.iteration for span in timeline.spans} for timeline in timelines]
    common = set.intersection(*recorded)
    if wanted is None and common:
        return max(common)
    if wanted in common:
        return wanted
    anywhere = ", ".join(map(str, sorted(set.union(*recorded))))
    raise BadInput(
        "--iteration",
        "(default)" if wanted is None else wanted,
        rule=f"not every trace holds one same iteration that was asked for; they hold {anywhere}",
        remedy="Choose an iteration that all traces hold, or draw fewer traces.",
    )


def _one_schedule(timelines: Sequence[Timeline], *, wanted: int | None) -> tuple[list[Timeline], int]:
    """Of each rank that ran the layer, its first forward and first backward pass; and how many it ran.

    With the layers that share its schedule: they compute and communicate in what would be gaps without them.

    Args:
        timelines: Of one iteration.
        wanted: The layer; None for each rank's first one that dispatches tokens.
    """
    shown: list[Timeline] = []
    num_passes = 1
    for timeline in timelines:
        dispatching = [span.layer for span in timeline.spans if span.kind == "dispatch"]
        layer = wanted or min(dispatching or [span.layer for span in timeline.spans])
        parts: defaultdict[str, defaultdict[int, list[StageSpan]]] = defaultdict(lambda: defaultdict(list))
        for span in timeline.spans:
            parts[span.direction][span.layer].append(span)
        passes = {
            direction: {number: split_passes(spans) for number, spans in by_layer.items()}
            for direction, by_layer in parts.items()
        }
        with_layer = next((by_layer for by_layer in passes.values() if layer in by_layer), {})
        layers = sharing_layers(layer, {number: part[0] for number, part in with_layer.items()})
        chosen = [by_layer[number] for by_layer in passes.values() for number in layers if number in by_layer]
        spans = [span for part in chosen for span in part[0]]
        if spans:
            num_passes = max(num_passes, *map(len, chosen))
            shown.append(replace(timeline, spans=tuple(sorted(spans, key=lambda span: span.begin_us))))
    if not shown:
        numbers = sorted({span.layer for timeline in timelines for span in timeline.spans})
        raise BadInput(
            "--layer",
            wanted,
            rule=f"no trace holds it; they hold {', '.join(map(str, numbers))}",
            remedy=f"Choose one of them: --layer {numbers[0]}.",
        )
    return shown, num_passes


def sharing_layers(layer: int, first_passes: Mapping[int, Sequence[StageSpan]]) -> set[int]:
    """The layers whose computation takes turns with a layer's, itself included.

    Those are the layers that share its schedule: others compute one after another.

    Args:
        layer: The layer.
        first_passes: Of one direction, what each layer ran in its first pass.
    """
    computing = {
        number: (min(span.begin_us for span in spans), max(span.end_us for span in spans))
        for number, part in first_passes.items()
        if (spans := [span for span in part if span.lane == COMPUTE])
    }
    sharing = {layer}
    while layer in computing:
        first = min(computing[number][0] for number in sharing)
        last = max(computing[number][1] for number in sharing)
        more = {
            number
            for number, (begin, end) in computing.items()
            if begin < last - _CLOCK_US and end > first + _CLOCK_US
        }
        if more <= sharing:
            break
        sharing |= more
    return sharing


def _title(shown: Sequence[Timeline], *, iteration: int, num_passes: int) -> str:
    """The labels that all ranks share, then the iteration."""
    counts = Counter(label for timeline in shown for label in timeline.labels.items())
    labels = [f"{key} {value}" for (key, value), count in counts.items() if count == len(shown)]
    several = [f"first of {num_passes} passes"] if num_passes > 1 else []
    return "  \u00b7  ".join([*labels, f"iteration {iteration}", *several])
