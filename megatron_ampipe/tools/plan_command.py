"""``ampipe plan``: predicts a model's blocks on a cluster, and chooses how to run them.

Needs neither torch nor a GPU. Shows what :mod:`megatron_ampipe.plan` finds; decides nothing itself. Called by
:mod:`megatron_ampipe.cli`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import value_of
from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.gradient_buckets import tensors_of
from megatron_ampipe.plan.gradient_plan import PLACED, STOCK
from megatron_ampipe.plan.model_file import find_model, read_model
from megatron_ampipe.plan.model_workload import layers_of, workload_of
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import make_plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import DEGREES
from megatron_ampipe.schedule import ALL_EXCHANGES, ALL_LAYERS, Exchange, parse_exchanges, parse_stack
from megatron_ampipe.tools import plan_answer, plan_routing, plan_tape, plan_timeline, timeline_picture
from megatron_ampipe.tools.whole_numbers import at_least

DRAWN_LAYERS = 4
"""Of layers that share a schedule, the number that a picture shows."""
_EPILOG = """\
examples:
  ampipe plan --model mixtral-8x7b --cluster dgx-h100
      which degree, how much it is predicted to save, and why
  ampipe plan --model deepseek-v2-lite --cluster dgx-h100 --ranks 64 --set expert-model-parallel-size=16
      another layout than the model file names
  ampipe plan --model qwen3-30b-a3b-like --cluster a800x8-20gbps --stack 4
      four layers as one schedule, compared with block by block
  ampipe plan --model deepseek-v2-lite --cluster dgx-h100 --exchange auto
      each token sent for each of its experts, or once to each rank or node: the one predicted to be fastest
  ampipe plan --model mixtral-8x7b --cluster measured.yaml --output plan.yaml --picture timeline
      on figures measured on your machines; writes the plan, and a picture of the predicted timeline
  ampipe plan --model mixtral-8x7b --cluster dgx-h100 --trace-of 2 --tape tape.txt
      what a rank runs at degree 2: every call with its tensors, what it waits for and what it frees
  ampipe plan --model mixtral-8x7b --cluster measured.yaml --trace predicted.json --trace-of 4
      the predicted timeline of a run with --ampipe-degree 4, to compare with its traces by ampipe draw

A model is a YAML file of Megatron's flags without dashes, a cluster a YAML file of fitted times; both are
also found by name in configs/models and configs/clusters.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe plan``."""
    parser.description = (
        "Predict a model's blocks on a cluster, and choose degree, chunks and order of stages."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "--model", required=True, metavar="FILE", help="model file, or the name of a shipped one"
    )
    parser.add_argument(
        "--cluster", required=True, metavar="FILE", help="cluster file, or the name of a shipped one"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="a Megatron flag that replaces the model file's, for example seq-length=8192; repeatable",
    )
    parser.add_argument(
        "--ranks", type=at_least(1), metavar="N", help="ranks of the whole run (default: those of one node)"
    )
    parser.add_argument(
        "--imbalance",
        type=_at_least_one,
        metavar="X",
        help="tokens of the busiest rank over the mean (default: 1, experts evenly used)",
    )
    parser.add_argument(
        "--routing",
        type=Path,
        metavar="DIR",
        help="take from a training that ran with --ampipe-routing-dir how unevenly experts are used, how "
        "many ranks or nodes get a token, and how many tokens are similar",
    )
    parser.add_argument(
        "--condense",
        type=float,
        metavar="THRESHOLD",
        help="plan for --ampipe-condense THRESHOLD, with the share that --routing has for it",
    )
    parser.add_argument(
        "--degrees",
        type=_degrees,
        default=DEGREES,
        metavar="N,N",
        help=f"numbers of chunks to try (default: {','.join(map(str, DEGREES))})",
    )
    parser.add_argument(
        "--stack",
        type=_stack,
        default=ALL_LAYERS,
        metavar="N",
        help="how many consecutive layers may share a schedule: 1 (block by block), a number, or all of a "
        "pipeline stage (default: all)",
    )
    parser.add_argument(
        "--exchange",
        type=_exchanges,
        default=(Exchange.ROWS,),
        metavar="E,E",
        help="how the all-to-all groups copies of a token, as --ampipe-exchange: "
        f"{', '.join(Exchange)}, several of these, or {ALL_EXCHANGES} for all that the layout allows; the "
        "first is kept unless another is predicted to save more than 1 %% (default: rows)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the plan, for --ampipe-plan FILE")
    parser.add_argument(
        "--json", metavar="FILE", help="write the answer as JSON; - for stdout, in place of the table"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="NAME",
        help="draw the predicted timeline as NAME.svg and NAME.png; of layers that share a schedule, the "
        "first few",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the predicted timeline in the form of a run's, for ampipe draw --predicted FILE",
    )
    parser.add_argument(
        "--trace-of",
        type=plan_timeline.parse_pipeline,
        metavar="N[:M][,ORDER]",
        help="degree (N forward, M backward) and order of stages that --trace and --picture show, in equal "
        "chunks, for example 4 or 4:2,moe-only (default: the choice)",
    )
    parser.add_argument(
        "--tape",
        type=Path,
        metavar="FILE",
        help="write what a rank runs, of the choice or of --trace-of: every call with what it takes, gives, "
        "waits for and frees (needs torch)",
    )
    parser.add_argument(
        "--grad-reduce",
        choices=(STOCK, PLACED),
        default=STOCK,
        help="with placed, --trace and --picture show the last micro-batch of an iteration, with the "
        "reductions of --ampipe-grad-reduce placed (default: stock, an earlier one)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show it.

    Raises:
        BadInput: a file or a setting is wrong.
        EnvironmentMissing: matplotlib is absent, and a picture was asked for.
        RunFailed: an output cannot be written.
    """
    _check_outputs(arguments)
    cluster = read_cluster(find_cluster(arguments.cluster))
    overrides = _settings(arguments.set)
    model = read_model(find_model(arguments.model), overrides=overrides)
    imbalance = arguments.imbalance or 1.0
    workload, assumed = workload_of(model, cluster, ranks=arguments.ranks, imbalance=imbalance)
    workload, recorded = plan_routing.with_routing(
        workload, arguments.routing, condense=arguments.condense, given=arguments.imbalance
    )
    layers = layers_of(model)
    predictor = Predictor(workload, cluster, num_layers=layers.num_layers, dense=layers.dense)
    _require_useful(arguments.exchange, predictor)
    plans = make_plans(
        predictor, degrees=arguments.degrees, stack=arguments.stack, exchanges=arguments.exchange
    )
    plan = plans.chosen
    predictor = predictor.with_exchange(plan.exchange)
    answer = plan_answer.answer_of(predictor, plans, arguments, (*assumed, *recorded))
    timeline = _timeline(predictor, plan, arguments)
    if arguments.json not in (None, "-"):
        outputs.write_text(Path(arguments.json), json.dumps(answer, indent=1) + "\n")
    if arguments.output is not None:
        plan.write(
            arguments.output, head=f"ampipe plan --model {arguments.model} --cluster {arguments.cluster}"
        )
    if timeline is not None and arguments.trace is not None:
        timeline.write_chrome(arguments.trace)
    if timeline is not None and arguments.picture is not None:
        plan_timeline.draw(_first_layers(timeline), arguments.picture)
    if arguments.json == "-":
        json.dump(answer, sys.stdout, indent=1)
        print()
    else:
        plan_answer.show(answer, plan, Console())
    return 0


def _require_useful(exchanges: Sequence[Exchange], predictor: Predictor) -> None:
    """Refuse a single exchange that saves nothing; of several, those are left out."""
    possible = predictor.workload.exchanges(predictor.cluster.ranks_per_node)
    if predictor.workload.condense is not None and not all(one.sends_every_copy for one in exchanges):
        raise BadInput(
            "--exchange",
            ",".join(exchanges),
            rule="with --condense, a row is of several experts, and its result their sum",
            remedy="Leave one of the two out.",
        )
    if not set(exchanges) & set(possible):
        raise BadInput(
            "--exchange",
            ",".join(exchanges),
            rule="saves nothing in this layout: no rank or node gets a token twice, or ranks are not spread "
            "equally over several nodes with several of them on each",
            remedy=f"Use --exchange {ALL_EXCHANGES}, which leaves out what does not apply.",
        )


def _check_outputs(arguments: argparse.Namespace) -> None:
    before: dict[Path, str] = {}
    for flag, path in (
        ("--json", None if arguments.json in (None, "-") else Path(arguments.json)),
        ("--output", arguments.output),
        ("--trace", arguments.trace),
    ):
        if path is not None:
            outputs.check(path, flag=flag, makes_folder=True)
            other = before.setdefault(path.absolute(), flag)
            if other != flag:
                raise BadInput(flag, path, rule=f"is the file of {other} too", remedy="Name two files.")
    if arguments.picture is not None:
        outputs.check_prefix(
            arguments.picture, suffixes=timeline_picture.SUFFIXES, flag="--picture", makes_folder=True
        )


def _timeline(predictor: Predictor, plan: Plan, arguments: argparse.Namespace) -> Timeline | None:
    """What ``--trace`` and ``--picture`` show; None if neither was asked for."""
    if arguments.trace is None and arguments.picture is None and arguments.tape is None:
        degree = None if arguments.trace_of is None else arguments.trace_of.degree
        reduce = None if arguments.grad_reduce == STOCK else arguments.grad_reduce
        for flag, value in (("--trace-of", degree), ("--grad-reduce", reduce)):
            if value is not None:
                raise BadInput(
                    flag,
                    value,
                    rule="chooses the timeline that is written, and none is written",
                    remedy="Add --trace FILE, --picture NAME or --tape FILE.",
                )
        return None
    _check_grad_reduce(predictor, arguments)
    pipeline = arguments.trace_of or plan.pipeline(rows=predictor.workload.rows)
    source = f"{arguments.model} on {arguments.cluster}"
    shown = sharing_layers(predictor, pipeline.stack) if pipeline.stack != 1 else predictor.of_layers(1)
    if arguments.grad_reduce == PLACED:
        shown = shown.with_reductions()
    if arguments.tape is not None:
        outputs.write_text(arguments.tape, plan_tape.text(shown, pipeline))
    return plan_timeline.predicted_timeline(shown, pipeline, source=source)


def _check_grad_reduce(predictor: Predictor, arguments: argparse.Namespace) -> None:
    if arguments.grad_reduce == PLACED and not tensors_of(predictor.workload, dense=False).parameters:
        raise BadInput(
            "--grad-reduce",
            PLACED,
            rule="shows reductions of gradients, and each rank has parameters that no other one has",
            remedy="Leave it out, or give more --ranks.",
        )


def _first_layers(timeline: Timeline) -> Timeline:
    """The layers that a picture shows: those that follow repeat them."""
    spans = tuple(span for span in timeline.spans if span.layer <= DRAWN_LAYERS)
    return dataclasses.replace(timeline, spans=spans)


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in texts:
        key, value = _setting(text)
        if key in found:
            raise BadInput("--set", text, rule=f"{key} was set before", remedy="Set each flag once.")
        found[key] = value
    return found


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key or not value:
        raise BadInput(
            "--set", text, rule="is not FLAG=VALUE", remedy="Write for example --set seq-length=8192."
        )
    try:
        return key, value_of(value)
    except ValueError:
        raise BadInput("--set", text, rule="has a value that is not YAML", remedy="Quote it.") from None


def _at_least_one(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def _stack(text: str) -> int:
    try:
        return parse_stack(text, flag="--stack")
    except BadInput as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.rule}") from None


def _exchanges(text: str) -> tuple[Exchange, ...]:
    try:
        return parse_exchanges(text, flag="--exchange")
    except BadInput as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.rule}") from None


def _degrees(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and len(word) < 3 and 2 <= int(word) <= 64 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of degrees from 2 to 64, such as 2,4,8")
    return tuple(sorted({int(word) for word in words}))
