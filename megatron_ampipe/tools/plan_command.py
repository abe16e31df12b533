"""``ampipe plan``: predicts a model's blocks on a cluster, and chooses how to run them.

Needs neither torch nor a GPU, except for ``--tape``. Shows what :mod:`megatron_ampipe.plan` predicts; decides
nothing itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import at_least, value_of
from megatron_ampipe.files.timeline import PREDICTED
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.model_file import block_of, find_model, layers_of, read_model
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import make_plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.recorded_routing import with_routing
from megatron_ampipe.plan.search import DEGREES
from megatron_ampipe.schedule import (
    Exchange,
    Pipeline,
    StageKind,
    parse_exchanges,
    parse_stack,
)
from megatron_ampipe.tools import timeline_picture
from megatron_ampipe.tools.plan_answer import answer_of, show

DRAWN_LAYERS = 4
"""Of layers that share a schedule, the number that a picture shows: those that follow repeat them."""
_MOST_CHUNKS = 64
"""A schedule of thousands of chunks would take minutes to build."""
_EPILOG = """\
examples:
  ampipe plan --model mixtral-8x7b --cluster dgx-h100
      which degree, how much it is predicted to save, and why
  ampipe plan --model deepseek-v2-lite --cluster dgx-h100 --ranks 64 --set expert-model-parallel-size=16
      another layout than the model file names
  ampipe plan --model mixtral-8x7b --cluster measured.yaml --output plan.yaml --picture timeline
      on figures measured on your machines; writes the plan, and a picture of the predicted timeline

A model is a YAML file of Megatron's flags without dashes, a cluster a YAML file of fitted times; both are
also found by name in configs/models and configs/clusters.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe plan``."""
    parser.description = (
        "Predict a model's blocks on a cluster, and choose degree, chunks and order of stages."
    )
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--model", required=True, metavar="FILE", help="model file, or the name of a shipped one")
    add("--cluster", required=True, metavar="FILE", help="cluster file, or the name of a shipped one")
    add(
        "--set",
        type=_override,
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="a Megatron flag that replaces the model file's, for example seq-length=8192; repeatable",
    )
    add("--ranks", type=at_least(1), metavar="N", help="ranks of the whole run (default: those of one node)")
    add(
        "--imbalance",
        type=float,
        metavar="X",
        help="tokens of the busiest rank over the mean (default: 1, experts evenly used)",
    )
    add(
        "--routing",
        type=Path,
        metavar="DIR",
        help="take from a training that ran with --ampipe-routing-dir how unevenly experts are used, how "
        "many ranks or nodes get a token, and how many tokens are similar",
    )
    add(
        "--condense",
        type=float,
        metavar="THRESHOLD",
        help="plan for --ampipe-condense THRESHOLD, with the share that --routing has for it",
    )
    add(
        "--degrees",
        type=_degrees,
        default=DEGREES,
        metavar="N,N",
        help=f"numbers of chunks to try (default: {','.join(map(str, DEGREES))})",
    )
    add(
        "--stack",
        default="all",
        metavar="N",
        help="how many consecutive layers may share a schedule: 1 (block by block), a number, or all of a "
        "pipeline stage (default: all)",
    )
    add(
        "--exchange",
        default=Exchange.ROWS.value,
        metavar="E,E",
        help="how the all-to-all groups copies of a token, as --ampipe-exchange: "
        f"{', '.join(Exchange)}, several of these, or {AUTO} for all that the layout allows; the "
        "first is kept unless another is predicted to save more than 1 %% (default: rows)",
    )
    add("--output", type=Path, metavar="FILE", help="write the plan, for --ampipe-plan FILE")
    add("--json", metavar="FILE", help="write the answer as JSON; - for stdout, in place of the table")
    add(
        "--picture",
        type=Path,
        metavar="NAME",
        help=f"draw the predicted timeline as NAME.svg and NAME.png, of the first {DRAWN_LAYERS} layers",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the predicted timeline in the form of a run's, for ampipe draw --predicted FILE",
    )
    add(
        "--trace-of",
        type=at_least(1, at_most=_MOST_CHUNKS),
        metavar="N",
        help="degree that --trace, --picture and --tape show, in equal chunks (default: the choice)",
    )
    add(
        "--tape",
        type=Path,
        metavar="FILE",
        help="write what a rank runs: calls with what each takes, gives, waits for and frees (needs torch)",
    )


def _override(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        found = value_of(value)
    except ValueError:
        found = None
    if not key or found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not FLAG=VALUE. Write for example seq-length=8192.")
    return key, found


def _degrees(text: str) -> tuple[int, ...]:
    return tuple(sorted({at_least(2, at_most=_MOST_CHUNKS)(word) for word in text.split(",")}))


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show it.

    Raises:
        BadInput: a file or a setting is wrong.
        EnvironmentMissing: what a picture or a tape needs is absent.
        RunFailed: an output cannot be written.
    """
    _check_outputs(arguments)
    stack = parse_stack(arguments.stack, flag="--stack")
    exchanges = parse_exchanges(arguments.exchange, flag="--exchange")
    cluster = read_cluster(find_cluster(arguments.cluster))
    model = read_model(find_model(arguments.model), overrides=dict(arguments.set))
    imbalance = 1.0 if arguments.imbalance is None else arguments.imbalance
    block, assumed = block_of(model, cluster, ranks=arguments.ranks, imbalance=imbalance)
    if arguments.routing is not None:
        if arguments.imbalance is not None:
            arguments.refuse("--routing says what --imbalance is; leave one of the two out")
        block, recorded = with_routing(block, arguments.routing, condense=arguments.condense)
        assumed += recorded
    elif arguments.condense is not None:
        arguments.refuse("--condense needs to know how many tokens are similar; add --routing DIR")
    layers = layers_of(model)
    predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
    if block.condense is not None and not all(exchange.sends_every_copy for exchange in exchanges):
        arguments.refuse("--exchange: with --condense, a row is of several experts; leave one of the two out")
    if not set(exchanges) & set(block.exchanges(cluster.ranks_per_node)):
        arguments.refuse(
            f"--exchange {arguments.exchange} saves nothing in this layout: no rank or node gets a token "
            "twice, or ranks are not spread equally over several nodes with several of them on each; use "
            f"--exchange {AUTO}, which leaves out what does not apply"
        )
    plans = make_plans(predictor, degrees=arguments.degrees, stack=stack, exchanges=exchanges)
    plan = plans.chosen
    predictor = predictor.with_exchange(plan.exchange)
    answer = answer_of(predictor, plans, arguments, list(assumed))
    text = json.dumps(answer, indent=1) + "\n"
    if arguments.trace is not None or arguments.picture is not None or arguments.tape is not None:
        _write_timeline(predictor, plan, arguments)
    if arguments.json not in (None, "-"):
        outputs.write_text(Path(arguments.json), text)
    if arguments.output is not None:
        head = f"ampipe plan --model {arguments.model} --cluster {arguments.cluster}"
        plan.write(arguments.output, head=head)
    if arguments.json == "-":
        print(text, end="")
    else:
        show(answer, plan, Console())
    return 0


def _check_outputs(arguments: argparse.Namespace) -> None:
    json_file = None if arguments.json in (None, "-") else Path(arguments.json)
    files = {name: getattr(arguments, name) for name in ("output", "trace", "tape")} | {"json": json_file}
    for name, path in files.items():
        if path is not None:
            outputs.check(path, flag=f"--{name}")
    if arguments.picture is not None:
        suffixes = timeline_picture.SUFFIXES
        outputs.check_prefix(arguments.picture, suffixes=suffixes, flag="--picture")
    elif arguments.trace_of is not None and arguments.trace is None and arguments.tape is None:
        arguments.refuse("--trace-of needs --trace FILE, --picture NAME or --tape FILE")


def _write_timeline(predictor: Predictor, plan: Plan, arguments: argparse.Namespace) -> None:
    """Write what ``--trace``, ``--picture`` and ``--tape`` show."""
    rows = predictor.block.rows
    pipeline = plan.pipeline(rows=rows)
    if arguments.trace_of is not None:
        pipeline = Pipeline.of(arguments.trace_of)
    if pipeline.num_chunks > rows:
        arguments.refuse(f"--trace-of is more chunks than the {rows} rows of a rank; use {rows} or less")
    shown = sharing_layers(predictor, pipeline.stack)
    if arguments.tape is not None:
        outputs.write_text(arguments.tape, tape_text(shown, pipeline))
    lengths = tuple(sum(span.length for span in chunk.hidden) for chunk in pipeline.chunks(rows))
    labels = {PREDICTED: f"{arguments.model} on {arguments.cluster}", **pipeline.labels}
    timeline = shown.timeline(pipeline.schedule_of(shown.layers), lengths, labels=labels)
    if arguments.trace is not None:
        timeline.write_chrome(arguments.trace)
    if (name := arguments.picture) is not None:
        spans = tuple(span for span in timeline.spans if span.layer <= DRAWN_LAYERS)
        targets = [name.with_name(name.name + suffix) for suffix in timeline_picture.SUFFIXES]
        drawn = dataclasses.replace(timeline, spans=spans)
        timeline_picture.draw([drawn], targets=targets, title=f"predicted, {pipeline}")


class Unnamed:
    """Stands for the functions of a block whose tape is only printed."""

    recomputed: tuple[StageKind, ...] = ()
    all_parameters: tuple[Any, ...] = ()
    stage_parameters: Mapping[StageKind, Any] = {}

    def run(self, kind: StageKind) -> tuple[int, None]:
        """No function."""
        return 0, None

    differentiate = run

    def weights_apart(self, kind: StageKind, products: Any) -> None:
        """No context."""


def tape_text(predictor: Predictor, pipeline: Pipeline) -> str:
    """The tapes of both passes of all layers of a predictor, as text.

    Raises:
        EnvironmentMissing: torch is absent.
    """
    try:
        # By name: planning itself needs no torch.
        compiler = importlib.import_module("megatron_ampipe.runtime.compile")
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(
            f"--tape needs {error.name}, which is not installed. Install torch, or leave --tape out."
        ) from error
    layers = predictor.layers
    tapes = compiler.compiled(
        pipeline.schedule_of(layers),
        layers,
        chunks=pipeline.chunks(predictor.block.rows),
        functions=[Unnamed()] * len(layers),
        keep_graph=True,
        host_waits=True,
        threads=False,
    )
    return f"{tapes}\n"
