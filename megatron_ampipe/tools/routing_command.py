"""``ampipe routing``: shows who went where in a training that ran with ``--ampipe-routing-dir``.

The figures are those of :mod:`megatron_ampipe.plan.recorded_routing`, with which ``ampipe plan --routing``
plans.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import at_least
from megatron_ampipe.plan.block import even_rows
from megatron_ampipe.plan.recorded_routing import RecordedRouting, busiest, places_of, read_routing
from megatron_ampipe.tools.timeline_picture import SUFFIXES

_EPILOG = """\
examples:
  ampipe routing runs/routing                        how evenly the experts are used, and what is sent
  ampipe routing runs/routing --ranks 8              as if the experts were divided between 8 ranks
  ampipe routing runs/routing --picture routing      routing.svg and routing.png
  ampipe plan --model mixtral-8x7b --cluster dgx-h100 --routing runs/routing      a plan with these figures

A training records with --ampipe-routing-dir DIR. docs/routing.md explains the figures.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ampipe routing``."""
    parser.description = "Show who went where in a training that ran with --ampipe-routing-dir."
    parser.epilog = _EPILOG
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of --ampipe-routing-dir")
    parser.add_argument(
        "--ranks",
        type=at_least(1),
        metavar="N",
        help="ranks between which the experts are divided (default: those of the training)",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="NAME", help="draw the figures as NAME.svg and NAME.png"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures as JSON; - for stdout, in place of the tables"
    )


def run(arguments: argparse.Namespace) -> int:
    """Read, show, and draw.

    Raises:
        BadInput: the folder has no recorded routing.
        RunFailed: an output cannot be written.
    """
    if arguments.json not in (None, "-"):
        outputs.check(Path(arguments.json), flag="--json")
    if arguments.picture is not None:
        outputs.check_prefix(arguments.picture, suffixes=SUFFIXES, flag="--picture")
    routing = read_routing(arguments.folder, flag="DIR")
    ranks = arguments.ranks or routing.records[-1].ranks
    if routing.num_experts % ranks:
        numbers = ", ".join(map(str, divisors(routing.num_experts)))
        arguments.refuse(f"--ranks {ranks} does not divide the {routing.num_experts} experts; use {numbers}")
    figures = figures_of(routing, ranks)
    text = json.dumps(figures, indent=1) + "\n"
    if arguments.json == "-":
        sys.stdout.write(text)
    else:
        _show(figures, Console())
        if arguments.json is not None:
            outputs.write_text(Path(arguments.json), text)
    if arguments.picture is not None:
        _draw(routing, ranks, arguments.picture)
    return 0


def divisors(num_experts: int) -> tuple[int, ...]:
    """Numbers of ranks between which experts can be divided."""
    return tuple(dict.fromkeys((1, *places_of(num_experts), num_experts)))


def figures_of(routing: RecordedRouting, ranks: int) -> dict[str, Any]:
    """Everything that is shown, as plain data."""
    last = routing.records[-1]
    topk = last.layers[0].rows / (last.num_parts * sum(last.tokens))
    return {
        "iterations": [record.iteration for record in routing.records],
        "num_experts": routing.num_experts,
        "experts_per_token": topk,
        "chunks": len(last.tokens),
        "ranks": ranks,
        "imbalance": routing.imbalance(ranks),
        "chunk_imbalance": routing.chunk_imbalance(ranks),
        "rows_per_token": {
            str(places): [routing.rows_to(places), even_rows(routing.num_experts, round(topk), places)]
            for places in divisors(routing.num_experts)
            if round(topk) <= routing.num_experts
        },
        "condensed": {f"{one:g}": routing.condensed(one) for one in routing.thresholds},
        "layers": [
            {
                "layer": layer.layer,
                "busiest_expert": busiest(layer.per_expert()),
                "idle_experts": layer.per_expert().count(0),
                "busiest_rank": busiest(layer.per_place(ranks)),
                "condensed": {
                    f"{one:g}": routing.condensed_of(layer.layer, one) for one in routing.thresholds
                },
            }
            for layer in last.layers
        ],
    }


def _show(figures: dict[str, Any], console: Console) -> None:
    iterations, thresholds = figures["iterations"], list(figures["condensed"])
    table = Table(
        title=f"iteration {iterations[-1]}, {figures['ranks']} ranks",
        caption="load over the mean; share of rows similar to an earlier one, by cosine, over all iterations",
    )
    for name in ("layer", "busiest expert", "idle experts", "busiest rank", *thresholds):
        table.add_column(name, justify="right", no_wrap=name in thresholds)
    for layer in figures["layers"]:
        table.add_row(
            str(layer["layer"]),
            f"{layer['busiest_expert']:.2f}",
            str(layer["idle_experts"]),
            f"{layer['busiest_rank']:.2f}",
            *("-" if share is None else f"{share:.0%}" for share in layer["condensed"].values()),
        )
    console.print(table)
    print(
        f"{len(iterations)} iterations, mean of all layers: the busiest of {figures['ranks']} ranks has "
        f"{figures['imbalance']:.3f} times the mean of a sequence, {figures['chunk_imbalance']:.3f} times "
        f"that of a chunk ({figures['chunks']} chunks)"
    )
    for places, (seen, even) in figures["rows_per_token"].items():
        if places != "1":
            print(
                f"sent once per place, {places} ranks or nodes: {seen:.3f} rows per token ({even:.3f} if "
                "experts were chosen evenly)"
            )
    shares = ", ".join(f"{share:.1%} at {threshold}" for threshold, share in figures["condensed"].items())
    print(f"rows that --ampipe-condense would not send: {shares}")


def _draw(routing: RecordedRouting, ranks: int, prefix: Path) -> None:
    """Write the picture of the last iteration: load of the experts of each layer, and rows of each rank."""
    import matplotlib
    from matplotlib.figure import Figure

    record = routing.records[-1]
    loads = [
        [count * record.num_experts / layer.rows for count in layer.per_expert()] for layer in record.layers
    ]
    rows = [
        [sum(layer.per_place(ranks, chunk)[rank] for layer in record.layers) for rank in range(ranks)]
        for chunk in range(len(record.tokens))
    ]
    layers = [str(layer.layer) for layer in record.layers]
    chunks = [str(chunk) for chunk in range(len(record.tokens))]
    panels = (
        (loads, layers, "layer", "expert", "tokens over the mean"),
        (rows, chunks, "chunk", "rank of the experts", "rows, all layers"),
    )
    with matplotlib.rc_context({"svg.hashsalt": "ampipe"}):
        figure = Figure(figsize=(11, 4), layout="constrained")
        figure.suptitle(f"iteration {record.iteration}, {ranks} ranks")
        for axes, (values, names, ylabel, xlabel, what) in zip(figure.subplots(1, 2), panels, strict=True):
            image = axes.imshow(values, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
            figure.colorbar(image, ax=axes, label=what)
            axes.set(xlabel=xlabel, ylabel=ylabel)
            axes.set_yticks(range(len(names)), names)
            axes.xaxis.get_major_locator().set_params(integer=True)
        for suffix in SUFFIXES:
            with outputs.atomic_file(prefix.with_name(prefix.name + suffix)) as partial:
                figure.savefig(partial, format=suffix.removeprefix("."), dpi=110)
