"""``ampipe draw``: selects a part of recorded timelines, draws it, and prints how much was hidden."""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import adder, at_least
from megatron_ampipe.files.timeline import (
    COMPUTE,
    DIRECTIONS,
    PREDICTED,
    Communication,
    StageSpan,
    Timeline,
    summary_of,
)
from megatron_ampipe.tools import packages, timeline_picture

_CLOCK_US = 1.0
"""Largest error of the times of a device's events."""
EPILOG = """\
examples:
  ampipe draw traces/ --output timeline
      timeline.svg and timeline.png: of every rank, the first MoE layer in a typical iteration, with
      the layers that share its schedule
  ampipe draw traces/rank0.trace.json --output other --layer 7
      another layer of one rank
  ampipe draw traces/ --predicted predicted.json --output timeline
      under every rank what ampipe plan --trace predicted.json predicted, and a table of both

  ampipe draw ampipe.json --above megatron.json --output both
      two predictions of ampipe plan --trace, Megatron's layers (--trace-of 1) above AMPipe's

A run writes its traces with --ampipe-trace-dir traces/. Perfetto (ui.perfetto.dev) opens them as well.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe draw``."""
    add = adder(parser)
    add("traces", "TRACE", "a rank's trace, or a directory of them (rank*.trace.json)", type=Path, nargs="+")
    output = "write NAME.svg and NAME.png (default: timeline, in the directory of the traces)"
    add("--output", "NAME", output, type=Path)
    iteration = "to draw (default: one of median length of those that all ranks recorded)"
    add("--iteration", "N", iteration, type=at_least(0))
    layer = "to draw, from 1, with the layers that share its schedule (default: each rank's first MoE layer)"
    add("--layer", "N", layer, type=at_least(1))
    predicted = "draw this prediction of ampipe plan --trace below every rank, and compare"
    add("--predicted", "FILE", predicted, type=Path)
    above = (
        "draw the same layers of this trace above, on one scale, and compare: of a run, or of ampipe plan "
        "--trace-of 1, which is Megatron's"
    )
    add("--above", "FILE", above, type=Path)


def run(arguments: argparse.Namespace) -> int:
    """Draw, and print the share of communication that was hidden; with a prediction, the time of each stage.

    Raises:
        BadInput: a trace cannot be read.
        RunFailed: the pictures cannot be written.
    """
    first, refuse = arguments.traces[0], arguments.refuse
    output = arguments.output or (first if first.is_dir() else first.parent) / "timeline"
    packages.require("matplotlib")
    targets = outputs.check_prefix(output, suffixes=timeline_picture.SUFFIXES, flag="--output")
    timelines = _read(arguments.traces, refuse)
    recorded = [{span.iteration for span in timeline.spans} for timeline in timelines]
    iteration = arguments.iteration
    if iteration is None:
        iteration = usual_iteration(timelines, set.intersection(*recorded))
    shown = [
        replace(timeline, spans=tuple(spans))
        for timeline in timelines
        if (spans := first_pass(timeline.spans, iteration, arguments.layer))
    ]
    if not shown:
        layers = sorted({span.layer for timeline in timelines for span in timeline.spans})
        refuse(f"choose --iteration and --layer: traces hold {sorted(set.union(*recorded))} and {layers}")
    counts = Counter(label for timeline in shown for label in timeline.labels.items())
    title = [f"{key} {value}" for (key, value), count in counts.items() if count == len(shown)]
    title.append(f"iteration {iteration}")
    drawn = shown
    if arguments.predicted is not None:
        prediction = Timeline.read_chrome(arguments.predicted)
        if (rule := misfit(prediction, shown)) is not None:
            refuse(f"--predicted {arguments.predicted} {rule}. {_how_to_predict(shown[0])}")
        drawn = [timeline for rank in shown for timeline in (rank, with_layers_of(prediction, rank.spans))]
    if arguments.above is not None:
        above = _same_layers(Timeline.read_chrome(arguments.above), shown[0], arguments)
        drawn = [above, *drawn]
    found = {number_of_next(timeline, one) for timeline, one in _pairs(timelines, shown)}
    numbers = {number for number in found if number is not None}
    timeline_picture.draw(
        drawn,
        targets=targets,
        title="  \u00b7  ".join(title),
        next_microbatch=min(numbers) if len(numbers) == 1 else None,
    )
    for timeline in timelines:
        print(f"rank {timeline.rank}, {_measured(timeline)}")
    for timeline in shown:
        print(
            f"rank {timeline.rank}: {timeline.hidden_share:.0%} of {timeline.communication_us / 1e3:.2f} ms "
            f"communication hidden under computation ({timeline_picture.layers_of(timeline)})"
        )
    if arguments.above is not None:
        for timeline in shown:
            print(f"rank {timeline.rank}: {_compared(timeline, above)}")
    if arguments.predicted is not None:
        print(
            f"predicted: {prediction.hidden_share:.0%} of {prediction.communication_us / 1e3:.2f} ms "
            f"({prediction.labels[PREDICTED]})"
        )
        Console().print(compare(prediction, shown))
    print(f"wrote {' and '.join(str(target) for target in targets)}")
    return 0


def _same_layers(other: Timeline, shown: Timeline, arguments: argparse.Namespace) -> Timeline:
    """The first micro-batch of a trace in the layers that are drawn, named for the picture."""
    iteration = usual_iteration([other], {span.iteration for span in other.spans})
    numbers = _layers(shown.spans)
    found: dict[StageSpan, None] = {}
    for layer in numbers if not other.is_predicted else _layers(other.spans):
        found |= dict.fromkeys(first_pass(other.spans, iteration, layer))
    spans = sorted(found, key=lambda span: span.begin_us)
    if not other.is_predicted:
        spans = [span for span in spans if span.layer in numbers]
    held = _layers(spans)
    if len(held) != len(numbers):
        arguments.refuse(
            f"--above {arguments.above} holds {len(held)} of the {len(numbers)} layers that are drawn; write "
            f"it with ampipe plan --stack {shown.labels.get('stack', '1')} --trace FILE --trace-of 1"
        )
    name = "Megatron" if _is_stock(other) else "above"
    selected = replace(other, spans=tuple(spans), labels={**other.labels, timeline_picture.NAME: name})
    return with_layers_of(selected, shown.spans)


def _is_stock(timeline: Timeline) -> bool:
    """Whether nothing overlaps by its labels, as in Megatron's layers."""
    labels = timeline.labels
    overlapping = {"backward degree", "partner"} & labels.keys()
    schedule = labels.get("schedule")
    whole = labels.get("degree") == "1" and schedule in ("ampipe", "moe-only", "sequential")
    return not overlapping and (whole or schedule == "sequential")


def _compared(timeline: Timeline, above: Timeline) -> str:
    """The lengths of both, first to last stage of every pass."""
    ours, theirs = _passes_ms(timeline), _passes_ms(above)
    name = above.labels[timeline_picture.NAME]
    return f"{ours:.2f} ms, {name} {theirs:.2f} ms, {theirs / ours:.2f} times as fast (one micro-batch)"


def _passes_ms(timeline: Timeline) -> float:
    total_us = 0.0
    for program in {span.program for span in timeline.spans}:
        spans = [span for span in timeline.spans if span.program == program]
        total_us += max(span.end_us for span in spans) - min(span.begin_us for span in spans)
    return total_us / 1e3


def _pairs(timelines: Sequence[Timeline], shown: Sequence[Timeline]) -> Iterator[tuple[Timeline, Timeline]]:
    """Each timeline that is drawn, after the whole one that it is a part of."""
    whole = {timeline.rank: timeline for timeline in timelines}
    for one in shown:
        yield whole[one.rank], one


def number_of_next(timeline: Timeline, shown: Timeline) -> int | None:
    """The number, from 1, of the micro-batch whose forward pass runs together with the backward pass shown.

    Counts the forward passes of the same layer that began earlier in the iteration. None without such a pass.
    """
    first = next((span for span in shown.spans if span.of_next_microbatch), None)
    if first is None:
        return None
    earlier = [
        span
        for span in timeline.spans
        if (span.iteration, span.layer, span.kind) == (first.iteration, first.layer, first.kind)
        and span.direction == first.direction
        and span.stage.startswith(first.kind)
        and span.chunk in (None, 0)
        and span.begin_us < first.begin_us
    ]
    # Of a prediction, there is no earlier pass: it begins with a backward pass of micro-batch 1.
    return max(len(earlier), 1) + 1


def _measured(timeline: Timeline) -> str:
    """What a run logs with ``--ampipe-measure``: of the recorded iterations, all layers and micro-batches."""
    iterations = sorted({span.iteration for span in timeline.spans})
    of_each = [
        replace(timeline, spans=tuple(span for span in timeline.spans if span.iteration == iteration))
        for iteration in iterations
    ]
    summary = summary_of([Communication.of(one) for one in of_each])
    if timeline.is_predicted:
        return f"predicted | {summary}"
    return f"iterations {iterations[0]} to {iterations[-1]}, medians | {summary}"


def usual_iteration(timelines: Sequence[Timeline], iterations: Iterable[int]) -> int | None:
    """The iteration whose length is the median; so no outlier is drawn. None if there is none."""

    def length_us(iteration: int) -> float:
        spans = [[span for span in timeline.spans if span.iteration == iteration] for timeline in timelines]
        return max(max(span.end_us for span in rank) - rank[0].begin_us for rank in spans)

    ordered = sorted(sorted(iterations), key=length_us)
    return ordered[len(ordered) // 2] if ordered else None


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


def first_pass(spans: Sequence[StageSpan], iteration: int | None, wanted: int | None) -> list[StageSpan]:
    """The spans of a layer for its first micro-batch in both directions; empty if there are none.

    Includes the layers that share its schedule, which compute and communicate in its gaps.

    Args:
        spans: Spans of a rank, by start time.
        iteration: Iteration of the training.
        wanted: The layer; None for the first one that dispatches tokens.
    """
    firsts: dict[tuple[object, ...], StageSpan] = {}
    # By program and layer, the last end of a stage that runs again later: spans that begin after it belong to
    # a later pass, which may have more chunks, such as the last backward pass, without a partner.
    ends_us: dict[tuple[str, int], float] = {}
    for span in spans:
        if span.iteration == iteration:
            stage, program = (
                (span.lane, span.stage, span.direction, span.of_next_microbatch),
                (span.program, span.layer),
            )
            first = firsts.setdefault((*program, *stage), span)
            if first is not span:
                ends_us[program] = max(ends_us.get(program, 0.0), first.end_us)
    drawn = [
        span
        for span in firsts.values()
        if span.of_next_microbatch or span.begin_us < ends_us.get((span.program, span.layer), math.inf)
    ]
    dispatching = [span.layer for span in drawn if span.kind == "dispatch"]
    layer = wanted or min(dispatching or [span.layer for span in drawn], default=0)
    program_of_layer = next((span.program for span in drawn if span.layer == layer), None)
    layers = sharing_layers(layer, (span for span in drawn if span.program == program_of_layer))
    return [span for span in drawn if span.layer in layers]


def sharing_layers(layer: int, spans: Iterable[StageSpan]) -> set[int]:
    """The layers that share a layer's schedule, itself included.

    Their computation takes turns; layers that share no schedule compute one after another.

    Args:
        layer: The layer.
        spans: Spans of one direction, of each layer's first pass.
    """
    times: dict[int, list[float]] = {}
    for span in spans:
        if span.lane == COMPUTE:
            times.setdefault(span.layer, []).extend((span.begin_us, span.end_us))
    groups: list[set[int]] = []
    until = 0.0
    for number in sorted(times, key=lambda number: min(times[number])):
        if not groups or min(times[number]) > until - _CLOCK_US:
            groups.append(set())
        groups[-1].add(number)
        until = max(until, *times[number])
    return next((group for group in groups if layer in group), {layer})


def misfit(predicted: Timeline, measured: Sequence[Timeline]) -> str | None:
    """Why ``predicted`` does not predict the measured layers of each rank, as a clause; None if it does.

    A prediction counts its layers from 1; they are compared with the layers of each rank in order.
    """
    if not predicted.is_predicted:
        return "was recorded by a run, not predicted"
    num_predicted = len(_layers(predicted.spans))
    for timeline in measured:
        for label in ("degree", "backward degree", "shares", "schedule"):
            expected, ran = (each.labels.get(label) for each in (predicted, timeline))
            if expected != ran:
                return f"predicts {label} {expected}, and rank {timeline.rank} ran {ran}"
        num_measured = len(_layers(timeline.spans))
        if num_predicted != num_measured:
            return (
                f"predicts a schedule of {num_predicted} layers, and {num_measured} of rank {timeline.rank} "
                "share one"
            )
        renumbered = with_layers_of(predicted, timeline.spans)
        for direction in DIRECTIONS:
            on_paper, recorded = (_stages(each, direction) for each in (renumbered, timeline))
            if recorded and on_paper != recorded:
                stages = ", ".join(sorted(stage for _, _, stage in on_paper ^ recorded)[:4])
                return f"has other stages {direction} than rank {timeline.rank} recorded: {stages}"
    return None


def _layers(spans: Iterable[StageSpan]) -> list[int]:
    return sorted({span.layer for span in spans})


def _stages(timeline: Timeline, direction: str) -> set[tuple[int, str, str]]:
    """Layer, lane and name of every stage: a collective on the compute lane does not overlap."""
    return {(span.layer, span.lane, span.stage) for span in timeline.spans if span.direction == direction}


def with_layers_of(predicted: Timeline, spans: Sequence[StageSpan]) -> Timeline:
    """A prediction with the layer numbers of recorded spans, of as many layers, in order."""
    numbers = dict(zip(_layers(predicted.spans), _layers(spans), strict=True))
    renumbered = (replace(span, layer=numbers[span.layer]) for span in predicted.spans)
    return replace(predicted, spans=tuple(renumbered))


def _how_to_predict(measured: Timeline) -> str:
    """The flags of a prediction of a run, as a sentence without a full stop."""
    stack = measured.labels.get("stack", "1")
    return (
        f"Write it with ampipe plan --stack {stack} --trace FILE --trace-of {measured.labels.get('degree')}, "
        "for a model file with this run's flags"
    )


def compare(predicted: Timeline, measured: Sequence[Timeline]) -> Table:
    """Predicted and measured milliseconds, the mean over ranks, of each direction and kind of stage.

    The last row of a direction is the whole pass, from the begin of its first stage to the end of its last.
    Directions that no rank recorded are left out.
    """
    names = ("direction", "stages", "predicted ms", "measured ms", "measured/predicted")
    layers = len(_layers(predicted.spans))
    blocks = "one block" if layers == 1 else f"{layers} layers with one schedule"
    table = Table(*names, title=f"{blocks}, one micro-batch, mean over the ranks drawn")
    for direction in DIRECTIONS:
        ran = [each for each in measured if any(span.direction == direction for span in each.spans)]
        kinds = dict.fromkeys(span.kind for span in predicted.spans if span.direction == direction)
        for kind in (*kinds, None) if ran else ():
            predicted_ms, *measured_ms = (_time_ms(each, direction, kind) for each in (predicted, *ran))
            mean = statistics.fmean(measured_ms)
            ratio = f"{mean / predicted_ms:.2f}" if predicted_ms else ""
            table.add_row(direction, kind or "first to last", f"{predicted_ms:.3f}", f"{mean:.3f}", ratio)
    return table


def _time_ms(timeline: Timeline, direction: str, kind: str | None) -> float:
    if kind is None:
        return timeline.length_us(direction) / 1e3
    spans = (span for span in timeline.spans if (span.direction, span.kind) == (direction, kind))
    return sum(span.end_us - span.begin_us for span in spans) / 1e3
