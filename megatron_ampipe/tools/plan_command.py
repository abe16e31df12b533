"""``ampipe plan``: predicts a model's blocks on a cluster, and chooses how to run them.

Needs neither a GPU nor, except for ``--tape``, torch. Shows what :mod:`megatron_ampipe.plan` predicts;
decides nothing itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

from rich.console import Console

from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import adder, at_least, value_of
from megatron_ampipe.files.timeline import PREDICTED
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.host_times import by_host_time
from megatron_ampipe.plan.model_block import block_of, layers_of
from megatron_ampipe.plan.model_file import find_model, read_model
from megatron_ampipe.plan.planner import Progress, alternatives, make_plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.rank_memory import memory_by_stage
from megatron_ampipe.plan.recorded_routing import with_routing
from megatron_ampipe.plan.search import DEGREES
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    Exchange,
    Pipeline,
    Schedule,
    parse_exchanges,
    parse_stack,
)
from megatron_ampipe.tools.plan_answer import answer_of, host_of, show, timeline_of

_QUIET_SECONDS = 3.0
"""How long a search without a terminal prints nothing."""
_MOST_CHUNKS = 64
"""A schedule of thousands of chunks would take minutes to build."""
EPILOG = """\
examples:
  ampipe plan --model mixtral-8x7b --cluster dgx-h100
      which degree, how much it is predicted to save, and why
  ampipe plan --model deepseek-v2-lite --cluster dgx-h100 --ranks 64 --set expert-model-parallel-size=16
      another layout than the model file names
  ampipe plan --model mixtral-8x7b --cluster measured.yaml --output plan.yaml --trace predicted.json
      on figures measured on your machines; writes the plan, and the predicted timeline for ampipe draw

A model is a YAML file of Megatron's flags without dashes, a cluster a YAML file of fitted times; both are
also found by name in configs/models and configs/clusters.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``ampipe plan``."""
    add = adder(parser)
    add("--model", "FILE", "model file, or the name of a shipped one", required=True)
    add("--cluster", "FILE", "cluster file, or the name of a shipped one", required=True)
    override = "a Megatron flag that replaces the model file's, for example seq-length=8192; repeatable"
    add("--set", "FLAG=VALUE", override, type=_override, action="append", default=[])
    add("--ranks", "N", "ranks of the whole run (default: those of one node)", type=at_least(1))
    add_unevenness = adder(parser.add_mutually_exclusive_group())
    busiest = "tokens of the busiest rank over the mean; 1 if experts are evenly used"
    add_unevenness("--imbalance", "X", busiest, type=float, default=1.0)
    routing = (
        "take from a training that ran with --ampipe-routing-dir how unevenly experts are used, and how many "
        "ranks or nodes get a token"
    )
    add_unevenness("--routing", "DIR", routing, type=Path)
    add("--degrees", "N,N", "numbers of chunks to try", type=_degrees, default=",".join(map(str, DEGREES)))
    stack = "how many consecutive layers may share a schedule: 1 (block by block), a number, or all"
    add("--stack", "N", stack, default="all")
    exchange = (
        f"how the all-to-all groups copies of a token, as --ampipe-exchange: {', '.join(Exchange)}, several "
        f"of these, or {AUTO} for all that the layout allows, which compares Megatron's dispatchers and "
        "grouped products too; the fastest is chosen, of equal ones the first"
    )
    add("--exchange", "E,E", exchange, default=AUTO)
    no_partner = "do not consider partners, two micro-batches at once (--ampipe-partner)"
    add("--no-partner", None, no_partner, action="store_true")
    verbose = "show memory, reductions of gradients and MPipeMoE's choice too"
    add("--verbose", None, verbose, action="store_true")
    add("--output", "FILE", "write the plan, for --ampipe-plan FILE", type=Path)
    add("--json", "FILE", "write the answer as JSON; - for stdout, in place of the table")
    trace = "write the predicted timeline in the form of a run's, for ampipe draw"
    add("--trace", "FILE", trace, type=Path)
    shown = "degree that --trace and --tape show, in equal chunks (default: the choice)"
    add("--trace-of", "N", shown, type=at_least(1, at_most=_MOST_CHUNKS))
    tape = "write what a GPU runs: calls with what each takes, gives, waits for and frees (needs torch)"
    add("--tape", "FILE", tape, type=Path)


def _override(text: str) -> tuple[str, object]:
    key, _, value = text.partition("=")
    try:
        parsed = value_of(value)
    except ValueError:
        parsed = None
    if not key or parsed is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not FLAG=VALUE. Write for example seq-length=8192.")
    return key, parsed


def _degrees(text: str) -> tuple[int, ...]:
    return tuple(sorted({at_least(2, at_most=_MOST_CHUNKS)(word) for word in text.split(",")}))


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show it.

    Raises:
        BadInput: a file or a setting is wrong.
        RunFailed: an output cannot be written.
    """
    for name in ("output", "trace", "tape", "json"):
        if (path := getattr(arguments, name)) not in (None, "-"):
            outputs.check(Path(path), flag=f"--{name}")
    if arguments.trace_of is not None and arguments.trace is arguments.tape is None:
        arguments.refuse("--trace-of needs --trace FILE or --tape FILE")
    stack = parse_stack(arguments.stack, flag="--stack")
    exchanges = parse_exchanges(arguments.exchange, flag="--exchange")
    cluster = read_cluster(find_cluster(arguments.cluster))
    model = read_model(find_model(arguments.model), overrides=dict(arguments.set))
    block, notes = block_of(model, cluster, ranks=arguments.ranks, imbalance=arguments.imbalance)
    assumed = list(notes)
    if arguments.routing is not None:
        block, recorded = with_routing(block, arguments.routing)
        assumed += recorded
    layers = layers_of(model)
    predictor = Predictor(block, cluster, num_layers=layers.num_layers, dense=layers.dense)
    if not set(exchanges) & set(block.exchanges(cluster.ranks_per_node)):
        arguments.refuse(
            f"--exchange {arguments.exchange} saves nothing in this layout: no rank or node gets a token "
            "twice, or ranks are not spread equally over several nodes with several of them on each; use "
            f"--exchange {AUTO}, which leaves out what does not apply"
        )
    options = {
        "degrees": arguments.degrees,
        "stack": stack,
        "exchanges": exchanges,
        "with_partner": 0.0 if arguments.no_partner or layers.waits else 1.0,
    }
    with _shown_progress() as progress:
        plans = make_plans(predictor, progress=progress, **options)
        compares = arguments.exchange == AUTO
        others = alternatives(predictor, progress=progress, **options) if compares else {}
        progress("slower hosts")
        hosts = by_host_time(
            predictor,
            plans.chosen.pipeline,
            degrees=arguments.degrees,
            stack=stack,
            with_partner=options["with_partner"],
        )
    plan = plans.chosen
    if plan.pipeline.partner is not None:
        assumed.append("steps have many micro-batches: the first forward, last backward pass run alone")
    elif layers.waits and not arguments.no_partner:
        assumed.append("no partners: they need virtual stages (--num-layers-per-virtual-pipeline-stage)")
    predictor = predictor.changed(exchange=plan.pipeline.exchange)
    memory = memory_by_stage(model, predictor.block, plan.pipeline_of(predictor.block.rows))
    answer = answer_of(predictor, plans, others, memory, arguments, assumed) | host_of(predictor, hosts)
    text = json.dumps(answer, indent=1) + "\n"
    if arguments.trace is not None or arguments.tape is not None:
        shown = plan.pipeline_of(predictor.block.rows)
        if arguments.trace_of is not None:
            shown = Pipeline.of(arguments.trace_of, stack=stack)
        _write_shown(predictor, shown, arguments)
    if arguments.output is not None:
        plan.write(arguments.output, head=arguments.command_line)
        print(f"wrote {arguments.output}", file=sys.stderr)
    if arguments.json == "-":
        print(text, end="")
        return 0
    if arguments.json is not None:
        outputs.write_text(Path(arguments.json), text)
    show(answer, plan, Console(), verbose=arguments.verbose)
    return 0


@contextlib.contextmanager
def _shown_progress() -> Iterator[Progress]:
    """Shows on stderr what is searched: in place on a terminal, else a line for what begins late."""
    console, begun = Console(stderr=True), time.monotonic()
    if not console.is_terminal:

        def print_late(text: str) -> None:
            passed = time.monotonic() - begun
            if passed > _QUIET_SECONDS:
                console.print(f"ampipe plan: {passed:.0f} s, searching {text}", highlight=False)

        yield print_late
        return
    with console.status("searching") as status:
        yield lambda text: status.update(f"searching {text}")


def _write_shown(predictor: Predictor, pipeline: Pipeline, arguments: argparse.Namespace) -> None:
    """Write what ``--trace`` and ``--tape`` show."""
    if arguments.trace is not None:
        labels = {PREDICTED: f"{arguments.model} on {arguments.cluster}", **pipeline.labels}
        timeline_of(predictor, pipeline, labels=labels).write_chrome(arguments.trace)
    if arguments.tape is not None:
        layers = sharing_layers(predictor, pipeline.stack).layers
        tape = tape_text(pipeline.schedule_of(layers), layers, pipeline.chunks(predictor.block.rows))
        outputs.write_text(arguments.tape, tape)


UNNAMED = SimpleNamespace(
    stage_parameters={},
    run=lambda kind: (0, None),
    differentiate=lambda kind: (0, None),
    delay_wgrad=lambda kind, products: None,
)
"""Replaces the functions of a block whose tape is only printed."""


def tape_text(schedule: Schedule, layers: Sequence[BlockFeatures], chunks: Sequence[Chunk]) -> str:
    """The tapes of both passes, as text."""
    # By name: planning itself needs no torch.
    compiler = importlib.import_module("megatron_ampipe.runtime.compile")
    options = compiler.TapeOptions(keep_graph=True, host_waits=True, threads=False)
    functions = [UNNAMED] * len(layers)
    return f"{compiler.compiled(schedule, layers, chunks=chunks, functions=functions, options=options)}\n"
