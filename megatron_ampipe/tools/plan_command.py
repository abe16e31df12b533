"""``ampipe plan``: predicts a model's blocks on a cluster, and chooses how to run them.

Needs neither torch nor a GPU, except for ``--tape``. Shows what :mod:`megatron_ampipe.plan` predicts; decides
nothing itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import at_least, value_of
from megatron_ampipe.files.timeline import PREDICTED, Timeline
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.model_file import block_of, find_model, layers_of, read_model
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import make_plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.recorded_routing import places_of, read_routing
from megatron_ampipe.plan.search import DEGREES
from megatron_ampipe.schedule import (
    ALL_EXCHANGES,
    SCHEDULE_NAMES,
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
  ampipe plan --model deepseek-v2-lite --cluster dgx-h100 --exchange auto --stack 4
      each token sent for each of its experts, or once to each rank or node: the one predicted to be fastest;
      up to four layers as one schedule
  ampipe plan --model mixtral-8x7b --cluster measured.yaml --output plan.yaml --picture timeline
      on figures measured on your machines; writes the plan, and a picture of the predicted timeline
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
    add = parser.add_argument
    add("--model", required=True, metavar="FILE", help="model file, or the name of a shipped one")
    add("--cluster", required=True, metavar="FILE", help="cluster file, or the name of a shipped one")
    add(
        "--set",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="a Megatron flag that replaces the model file's, for example seq-length=8192; repeatable",
    )
    add("--ranks", type=at_least(1), metavar="N", help="ranks of the whole run (default: those of one node)")
    add(
        "--imbalance",
        type=_at_least_one,
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
        type=_of(parse_stack, "--stack"),
        default="all",
        metavar="N",
        help="how many consecutive layers may share a schedule: 1 (block by block), a number, or all of a "
        "pipeline stage (default: all)",
    )
    add(
        "--exchange",
        type=_of(parse_exchanges, "--exchange"),
        default=Exchange.ROWS.value,
        metavar="E,E",
        help="how the all-to-all groups copies of a token, as --ampipe-exchange: "
        f"{', '.join(Exchange)}, several of these, or {ALL_EXCHANGES} for all that the layout allows; the "
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
        type=_pipeline,
        metavar="N[:M][,ORDER]",
        help="degree (N forward, M backward) and order of stages that --trace, --picture and --tape show, in "
        "equal chunks, for example 4 or 4:2,moe-only (default: the choice)",
    )
    add(
        "--tape",
        type=Path,
        metavar="FILE",
        help="write what a rank runs: calls with what each takes, gives, waits for and frees (needs torch)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show it.

    Raises:
        BadInput: a file or a setting is wrong.
        EnvironmentMissing: what a picture or a tape needs is absent.
        RunFailed: an output cannot be written.
    """
    _check_outputs(arguments)
    cluster = read_cluster(find_cluster(arguments.cluster))
    model = read_model(find_model(arguments.model), overrides=_overrides(arguments.set))
    imbalance = arguments.imbalance or 1.0
    block, assumed = block_of(model, cluster, ranks=arguments.ranks, imbalance=imbalance)
    block, recorded = with_routing(
        block, arguments.routing, condense=arguments.condense, given=arguments.imbalance
    )
    layers = layers_of(model)
    predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
    _check_exchanges(arguments.exchange, predictor)
    plans = make_plans(
        predictor, degrees=arguments.degrees, stack=arguments.stack, exchanges=arguments.exchange
    )
    plan = plans.chosen
    predictor = predictor.with_exchange(plan.exchange)
    answer = answer_of(predictor, plans, arguments, [*assumed, *recorded])
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
        show(answer, Console())
    return 0


# What is given


def _refuse(flag: str, value: object, rule: str, remedy: str) -> NoReturn:
    raise BadInput(flag, value, rule=rule, remedy=remedy)


def _check_outputs(arguments: argparse.Namespace) -> None:
    files = {"--output": arguments.output, "--trace": arguments.trace, "--tape": arguments.tape}
    if arguments.json not in (None, "-"):
        files["--json"] = Path(arguments.json)
    before: dict[Path, str] = {}
    for flag, path in files.items():
        if path is not None:
            outputs.check(path, flag=flag)
            other = before.setdefault(path.absolute(), flag)
            if other != flag:
                _refuse(flag, path, f"is the file of {other} too", "Name two files.")
    if arguments.picture is not None:
        suffixes = timeline_picture.SUFFIXES
        outputs.check_prefix(arguments.picture, suffixes=suffixes, flag="--picture")
    elif arguments.trace_of is not None and arguments.trace is None and arguments.tape is None:
        rule = "chooses the timeline that is written, and none is written"
        remedy = "Add --trace FILE, --picture NAME or --tape FILE."
        _refuse("--trace-of", arguments.trace_of.degree, rule, remedy)


def _overrides(texts: Sequence[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if not key or not value:
            _refuse("--set", text, "is not FLAG=VALUE", "Write for example --set seq-length=8192.")
        try:
            values[key] = value_of(value)
        except ValueError:
            _refuse("--set", text, "has a value that is not YAML", "Quote it.")
    return values


def with_routing(
    block: Block, folder: Path | None, *, condense: float | None, given: float | None
) -> tuple[Block, tuple[str, ...]]:
    """A block whose experts are used as in a training, and a sentence for each figure that was taken.

    ``given`` is the value of ``--imbalance``; the others are those of ``--routing`` and ``--condense``.
    """
    if folder is None:
        if condense is not None:
            remedy = "Add --routing DIR, of a training with --ampipe-routing-dir."
            _refuse("--condense", f"{condense:g}", "needs to know how many tokens are similar", remedy)
        return block, ()
    if given is not None:
        rule = f"is what --routing {folder} says"
        _refuse("--imbalance", f"{given:g}", rule, "Leave one of the two out.")
    routing = read_routing(folder, flag="--routing")
    if routing.num_experts != block.experts:
        rule = f"is of {routing.num_experts} experts, and the model has {block.experts}"
        _refuse("--routing", folder, rule, "Give the model that was trained.")
    places = (*places_of(block.experts), block.experts)
    rows = tuple((count, routing.rows_to(count)) for count in places)
    block = dataclasses.replace(block, imbalance=routing.imbalance(block.expert), rows_seen=rows)
    said = [
        f"imbalance {block.imbalance:.3f} of {block.expert} ranks: {len(routing.records)} iterations in "
        f"{folder}"
    ]
    if block.expert in places:
        said.append(f"{block.rows_to(block.expert):.3f} ranks get a token, from the same")
    if condense is not None:
        block = dataclasses.replace(block, condense=condense, condensed=routing.condensed(condense))
        said.append(
            f"{block.condensed:.1%} of the rows are not sent with --ampipe-condense {condense:g}, from the "
            f"same; they were compared in {len(routing.records[-1].tokens)} chunks"
        )
    return block, tuple(said)


def _check_exchanges(exchanges: Sequence[Exchange], predictor: Predictor) -> None:
    """Refuse a single exchange that saves nothing; of several, those are left out."""
    given = ",".join(exchanges)
    if predictor.block.condense is not None and not all(one.sends_every_copy for one in exchanges):
        rule = "with --condense, a row is of several experts, and its result their sum"
        _refuse("--exchange", given, rule, "Leave one of the two out.")
    if not set(exchanges) & set(predictor.block.exchanges(predictor.cluster.ranks_per_node)):
        rule = "saves nothing in this layout: no rank or node gets a token twice, or ranks are not spread "
        rule += "equally over several nodes with several of them on each"
        remedy = f"Use --exchange {ALL_EXCHANGES}, which leaves out what does not apply."
        _refuse("--exchange", given, rule, remedy)


def _at_least_one(text: str) -> float:
    if not 1 <= (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def _of[Value](parse: Callable[..., Value], flag: str) -> Callable[[str], Value]:
    """A type of arguments from a function that raises BadInput."""

    def parsed(text: str) -> Value:
        try:
            return parse(text, flag=flag)
        except BadInput as error:
            raise argparse.ArgumentTypeError(f"{text!r} {error.rule}") from None

    return parsed


def _degrees(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and len(word) < 3 and 2 <= int(word) <= _MOST_CHUNKS for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of degrees from 2 to 64, such as 2,4,8")
    return tuple(sorted({int(word) for word in words}))


def _pipeline(text: str) -> Pipeline:
    """What ``--trace-of`` takes: ``4``, ``4:2`` (2 backward), ``4,moe-only`` (another order)."""
    degrees, comma, schedule = text.partition(",")
    forward, colon, backward = degrees.partition(":")
    try:
        numbers = int(forward), int(backward) if colon else int(forward)
        known = max(numbers) <= _MOST_CHUNKS and (not comma or schedule in SCHEDULE_NAMES)
        pipeline = Pipeline.of(numbers[0], backward_degree=numbers[1], schedule=schedule or SCHEDULE_NAMES[0])
    except ValueError:
        known = False
    if not known:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no degree such as 4, 4:2 or 4,moe-only: degrees are 1 to {_MOST_CHUNKS}, one of "
            f"the two divides the other, and orders are {', '.join(SCHEDULE_NAMES)}"
        )
    return pipeline


# The timeline


def _write_timeline(predictor: Predictor, plan: Plan, arguments: argparse.Namespace) -> None:
    """Write what ``--trace``, ``--picture`` and ``--tape`` show."""
    rows = predictor.block.rows
    pipeline = arguments.trace_of or plan.pipeline(rows=rows)
    if pipeline.num_chunks > rows:
        rule = f"is more chunks than the {rows} rows that a rank holds"
        _refuse("--trace-of", pipeline.num_chunks, rule, f"Use --trace-of {rows} or less.")
    shown = sharing_layers(predictor, pipeline.stack)
    if arguments.tape is not None:
        outputs.write_text(arguments.tape, tape_text(shown, pipeline))
    lengths = tuple(sum(span.length for span in chunk.hidden) for chunk in pipeline.chunks(rows))
    labels = {PREDICTED: f"{arguments.model} on {arguments.cluster}", **pipeline.labels}
    timeline = shown.timeline(pipeline.schedule_of(shown.layers), lengths, labels=labels)
    if arguments.trace is not None:
        timeline.write_chrome(arguments.trace)
    if arguments.picture is not None:
        _draw(timeline, arguments.picture)


def _draw(timeline: Timeline, name: Path) -> None:
    spans = tuple(span for span in timeline.spans if span.layer <= DRAWN_LAYERS)
    targets = [name.with_name(name.name + suffix) for suffix in timeline_picture.SUFFIXES]
    degree, backward = timeline.labels["degree"], timeline.labels.get("backward degree")
    title = f"predicted, degree {degree}" + (f" forward, {backward} backward" if backward else "")
    drawn = dataclasses.replace(timeline, spans=spans)
    timeline_picture.draw([drawn], targets=targets, title=title, split=True)


class Unnamed:
    """Stands for the functions of a block whose tape is only printed."""

    recomputed: Sequence[StageKind] = ()
    all_parameters: Sequence[Any] = ()

    def __init__(self) -> None:
        self.stage_parameters: dict[StageKind, Any] = {}

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
