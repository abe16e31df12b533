"""``ampipe draw``: pictures of the timelines that a run recorded.

Chooses what is shown and prints how much was hidden; the drawing itself is
:mod:`megatron_ampipe.tools.timeline_picture`. Called by :mod:`megatron_ampipe.cli`.
"""

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
        type=_layer,
        help="layer to draw, from 1, with the layers that share its schedule; or 'all' (default: each rank's "
        "first MoE layer)",
    )
    parser.add_argument(
        "--predicted",
        metavar="FILE",
        type=Path,
        help="draw this prediction of ampipe plan --trace below every rank, and compare",
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw, and print the share of communication that was hidden; with a prediction, the time of each stage.

    Raises:
        BadInput: no trace, not one of a run, or without the iteration or layer that was asked for; or
            a prediction of something else.
        EnvironmentMissing: matplotlib is absent.
        RunFailed: the pictures cannot be written.
    """
    targets = _targets(arguments.output or _beside(arguments.traces[0]))
    timelines = read_timelines(arguments.traces)
    iteration = _iteration(timelines, wanted=arguments.iteration)
    if arguments.layer == "all":
        shown, num_passes = [_of_iteration(timeline, iteration) for timeline in timelines], 1
    else:
        shown, num_passes = _one_schedule(timelines, iteration=iteration, wanted=arguments.layer)
    title = _title(shown, iteration=iteration, num_passes=num_passes)
    prediction = _prediction(arguments, shown)
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


def _prediction(arguments: argparse.Namespace, shown: Sequence[Timeline]) -> Timeline | None:
    """What is drawn below every rank, if anything, in the directions that they hold."""
    if arguments.predicted is None:
        return None
    if arguments.layer == "all":
        raise BadInput(
            "--layer",
            "all",
            rule="is every layer, and a prediction is of one block",
            remedy="Leave it out, or name one layer: --layer 1.",
        )
    predicted = Timeline.read_chrome(arguments.predicted)
    if (rule := misfit(predicted, shown)) is not None:
        remedy = "Write it with ampipe plan --stack 1 --trace FILE --trace-of DEGREE, from this run's flags."
        raise BadInput("--predicted", arguments.predicted, rule=rule, remedy=remedy)
    return predicted


def _layer(text: str) -> int | str:
    if text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a layer number nor 'all'; write --layer 1"
        ) from None


def _beside(trace: Path) -> Path:
    return (trace if trace.is_dir() else trace.parent) / "timeline"


def _targets(output: Path) -> list[Path]:
    if output.suffix in (".svg", ".png"):
        raise BadInput(
            "--output",
            output,
            rule="has a suffix, and both an SVG and a PNG are written",
            remedy=f"Leave it out: {output.with_suffix('')}.",
        )
    if output.is_dir():
        raise BadInput(
            "--output", output, rule="is a directory", remedy=f"Name the files too: {output / 'timeline'}."
        )
    return outputs.check_prefix(
        output, suffixes=timeline_picture.SUFFIXES, flag="--output", makes_folder=True
    )


def _iteration(timelines: Sequence[Timeline], *, wanted: int | None) -> int:
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


def _of_iteration(timeline: Timeline, iteration: int) -> Timeline:
    return replace(timeline, spans=tuple(span for span in timeline.spans if span.iteration == iteration))


def _one_schedule(
    timelines: Sequence[Timeline], *, iteration: int, wanted: int | None
) -> tuple[list[Timeline], int]:
    """Of each rank that ran the layer, its first forward and first backward pass; and how many it ran.

    With the layers that share its schedule: they compute and communicate in what would be gaps without them.
    """
    shown: list[Timeline] = []
    num_passes = 1
    for whole in timelines:
        timeline = _of_iteration(whole, iteration)
        layer = _first_moe_layer(timeline) if wanted is None else wanted
        parts: defaultdict[str, defaultdict[int, list[StageSpan]]] = defaultdict(lambda: defaultdict(list))
        for span in timeline.spans:
            parts[span.direction][span.layer].append(span)
        passes = {
            direction: {number: split_passes(part) for number, part in of_layers.items()}
            for direction, of_layers in parts.items()
        }
        of_direction = next((found for found in passes.values() if layer in found), {})
        layers = sharing_layers(layer, {number: part[0] for number, part in of_direction.items()})
        chosen = [found[number] for found in passes.values() for number in layers if number in found]
        spans = [span for part in chosen for span in part[0]]
        if spans:
            num_passes = max(num_passes, *map(len, chosen))
            shown.append(replace(timeline, spans=tuple(sorted(spans, key=lambda span: span.begin_us))))
    if not shown:
        layers = sorted({span.layer for timeline in timelines for span in timeline.spans})
        raise BadInput(
            "--layer",
            wanted,
            rule=f"no trace holds it; they hold {', '.join(map(str, layers))}",
            remedy=f"Choose one of them: --layer {layers[0]}.",
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
    found = {layer}
    if layer not in computing:
        return found
    first, last = computing[layer]
    while True:
        sharing = {
            number
            for number, (begin, end) in computing.items()
            if begin < last - _CLOCK_US and end > first + _CLOCK_US
        }
        if sharing <= found:
            return found
        found |= sharing
        first = min(computing[number][0] for number in found)
        last = max(computing[number][1] for number in found)


def _first_moe_layer(timeline: Timeline) -> int:
    """The first layer that dispatches tokens; the first of all where none does."""
    dispatching = [span.layer for span in timeline.spans if span.kind == "dispatch"]
    return min(dispatching or [span.layer for span in timeline.spans])


def _title(shown: Sequence[Timeline], *, iteration: int, num_passes: int) -> str:
    """The labels that all ranks share, then the iteration."""
    counts = Counter(label for timeline in shown for label in timeline.labels.items())
    labels = [f"{key} {value}" for (key, value), count in counts.items() if count == len(shown)]
    several = [f"first of {num_passes} passes"] if num_passes > 1 else []
    return "  \u00b7  ".join([*labels, f"iteration {iteration}", *several])
