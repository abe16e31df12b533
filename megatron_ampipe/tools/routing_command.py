"""``ampipe routing``: shows the experts that tokens used in a training with ``--ampipe-routing-dir``.

The figures are those of :mod:`megatron_ampipe.plan.recorded_routing`, which ``ampipe plan --routing`` uses
as well.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ampipe.block.settings import Settings, check_margin
from megatron_ampipe.files.inputs import at_least
from megatron_ampipe.plan.block import even_rows
from megatron_ampipe.plan.recorded_routing import RecordedRouting, busiest, divisors, read_routing
from megatron_ampipe.plan.replayed_budgets import replay
from megatron_ampipe.tools import pictures, routing_picture

EPILOG = """\
examples:
  ampipe routing runs/routing                        how evenly the experts are used, and what is sent
  ampipe routing runs/routing --ranks 8              as if the experts were divided between 8 ranks
  ampipe routing runs/routing --picture routing.png  the tokens of every expert over iterations and layers
  ampipe plan --model mixtral-8x7b --cluster dgx-h100 --routing runs/routing      a plan with these figures

A training records with --ampipe-routing-dir DIR. docs/routing.md explains the figures.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``ampipe routing``."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of --ampipe-routing-dir")
    ranks = "ranks between which the experts are divided (default: those of the training)"
    parser.add_argument("--ranks", type=at_least(1), metavar="N", help=ranks)
    margin = "replay the budgets of --ampipe-rows fixed with this --ampipe-rows-margin (default: %(default)s)"
    default = Settings().rows_margin
    parser.add_argument("--rows-margin", type=float, default=default, metavar="FACTOR", help=margin)
    picture = "draw the tokens of every expert over iterations and layers, and the imbalance; the suffix, "
    picture += f"{' or '.join(pictures.SUFFIXES)}, gives the format"
    parser.add_argument("--picture", type=Path, metavar="FILE", help=picture)


def run(arguments: argparse.Namespace) -> int:
    """Show the last iteration layer by layer, and means over all; draw all."""
    if arguments.picture is not None:
        pictures.check(arguments.picture, flag="--picture")
    check_margin(arguments.rows_margin, "--rows-margin")
    routing = read_routing(arguments.folder, flag="DIR")
    last, experts = routing.records[-1], routing.num_experts
    ranks = arguments.ranks or last.ranks
    if experts % ranks:
        numbers = ", ".join(map(str, divisors(experts)))
        arguments.refuse(f"--ranks {ranks} does not divide the {experts} experts; use {numbers}")
    table = Table(title=f"iteration {last.iteration}, {ranks} ranks", caption="load over the mean")
    for name in ("layer", "busiest expert", "idle experts", "busiest rank"):
        table.add_column(name, justify="right")
    for layer in last.layers:
        rows, rank = layer.per_expert(), busiest(layer.per_place(ranks))
        table.add_row(str(layer.layer), f"{busiest(rows):.2f}", str(rows.count(0)), f"{rank:.2f}")
    Console().print(table)
    print(
        f"{len(routing.records)} iterations, mean of all layers: the busiest of {ranks} ranks has "
        f"{routing.imbalance(ranks):.3f} times the mean of a sequence"
    )
    topk = round(last.layers[0].rows / (last.num_parts * sum(last.tokens)))
    for places in divisors(experts)[1:]:
        print(
            f"sent once per place, {places} ranks or nodes: {routing.rows_to(places):.3f} rows per token "
            f"({even_rows(experts, topk, places):.3f} if experts were chosen evenly)"
        )
    shares = ", ".join(f"{routing.condensed(limit):.1%} at {limit:g}" for limit in routing.thresholds)
    print(f"rows that --ampipe-condense would not send: {shares}")
    _print_budgets(routing, ranks, arguments.rows_margin)
    if arguments.picture is not None:
        routing_picture.draw(routing, ranks=ranks, target=arguments.picture)
        print(f"wrote {arguments.picture}")
    return 0


def _print_budgets(routing: RecordedRouting, ranks: int, margin: float) -> None:
    """Say what ``--ampipe-rows fixed`` would have done, if there are steps enough to learn from."""
    for dispatcher, joins_sources in (("alltoall", False), ("HybridEP", True)):
        replayed = replay(routing, ranks=ranks, margin=margin, joins_sources=joins_sources)
        if not replayed.num_steps:
            continue
        print(
            f"--ampipe-rows fixed, {dispatcher}: {replayed.num_repeated} of {replayed.num_steps} recorded "
            f"iterations exceed a budget, {replayed.padding:.2f} times the routed rows are sent or "
            f"kept, CUDA graphs are captured again after {replayed.num_changes}"
        )
