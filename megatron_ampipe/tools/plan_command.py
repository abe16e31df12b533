"""``ampipe plan``: predicts a model's blocks on a cluster, and chooses how to run them.

Needs neither a GPU nor, except for ``--tape``, torch. Shows what :mod:`megatron_ampipe.plan` predicts;
decides nothing itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.files import outputs
from megatron_ampipe.files.inputs import at_least, value_of
from megatron_ampipe.files.timeline import PREDICTED, Timeline
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.gradients import PLACED, STOCK, plan_gradients
from megatron_ampipe.plan.model_file import block_of, find_model, layers_of, read_model
from megatron_ampipe.plan.partners import timeline as partner_timeline
from megatron_ampipe.plan.plan_file import SHARE_TOLERANCE, Plan
from megatron_ampipe.plan.planner import Plans, equation_10_us, make_plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.recorded_routing import with_routing
from megatron_ampipe.plan.search import DEGREES, candidates, in_one_chunk
from megatron_ampipe.schedule import (
    KEEP,
    MEGATRON,
    SCHEDULE_NAMES,
    STRATEGIES,
    BlockFeatures,
    Chunk,
    Exchange,
    Pipeline,
    Schedule,
    even_chunks,
    parse_exchanges,
    parse_stack,
)

_MOST_CHUNKS = 64
"""A schedule of thousands of chunks would take minutes to build."""
_EPILOG = """\
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
    unevenness = parser.add_mutually_exclusive_group()
    unevenness.add_argument(
        "--imbalance",
        type=float,
        default=1.0,
        metavar="X",
        help="tokens of the busiest rank over the mean (default: 1, experts evenly used)",
    )
    unevenness.add_argument(
        "--routing",
        type=Path,
        metavar="DIR",
        help="take from a training that ran with --ampipe-routing-dir how unevenly experts are used, and "
        "how many ranks or nodes get a token",
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
        default=AUTO,
        metavar="E,E",
        help="how the all-to-all groups copies of a token, as --ampipe-exchange: "
        f"{', '.join(Exchange)}, several of these, or {AUTO} for all that the layout allows; the "
        f"first is kept unless another is predicted to save more than 1 %% (default: {AUTO})",
    )
    add(
        "--no-partner",
        action="store_true",
        help="do not consider partners, two micro-batches at once (--ampipe-partner)",
    )
    add(
        "--verbose",
        action="store_true",
        help="show memory, reductions of gradients and MPipeMoE's choice too",
    )
    add("--output", type=Path, metavar="FILE", help="write the plan, for --ampipe-plan FILE")
    add("--json", metavar="FILE", help="write the answer as JSON; - for stdout, in place of the table")
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the predicted timeline in the form of a run's, for ampipe draw",
    )
    add(
        "--trace-of",
        type=at_least(1, at_most=_MOST_CHUNKS),
        metavar="N",
        help="degree that --trace and --tape show, in equal chunks (default: the choice)",
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
        EnvironmentMissing: what a tape needs is absent.
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
    plans = make_plans(
        predictor,
        degrees=arguments.degrees,
        stack=stack,
        exchanges=exchanges,
        with_partner=0.0 if arguments.no_partner or layers.waits else 1.0,
    )
    plan = plans.chosen
    if plan.partner is not None:
        assumed.append("steps have many micro-batches: the first forward, last backward pass run alone")
    elif layers.waits and not arguments.no_partner:
        assumed.append("no partners: they need virtual stages (--num-layers-per-virtual-pipeline-stage)")
    predictor = predictor.with_exchange(plan.exchange)
    answer = answer_of(predictor, plans, arguments, assumed)
    text = json.dumps(answer, indent=1) + "\n"
    if arguments.trace is not None or arguments.tape is not None:
        _write_shown(predictor, plan, arguments)
    if arguments.output is not None:
        plan.write(arguments.output, head=arguments.command_line.replace("\n", " "))
    if arguments.json == "-":
        print(text, end="")
        return 0
    if arguments.json is not None:
        outputs.write_text(Path(arguments.json), text)
    show(answer, plan, Console(), verbose=arguments.verbose)
    return 0


def _write_shown(predictor: Predictor, plan: Plan, arguments: argparse.Namespace) -> None:
    """Write what ``--trace`` and ``--tape`` show."""
    rows = predictor.block.rows
    pipeline = plan.pipeline(rows=rows)
    if arguments.trace_of is not None:
        pipeline = Pipeline.of(arguments.trace_of)
    shown = sharing_layers(predictor, pipeline.stack)
    lengths = tuple(sum(span.length for span in chunk.hidden) for chunk in pipeline.chunks(rows))
    labels = {PREDICTED: f"{arguments.model} on {arguments.cluster}", **pipeline.labels}
    schedule = pipeline.schedule_of(shown.layers)
    if arguments.trace is not None:
        if pipeline.partner is not None:
            timeline_of(predictor, plan, labels=labels).write_chrome(arguments.trace)
        else:
            shown.timeline(schedule, lengths, labels=labels).write_chrome(arguments.trace)
    if arguments.tape is not None:
        outputs.write_text(arguments.tape, tape_text(schedule, shown.layers, pipeline.chunks(rows)))


UNNAMED = SimpleNamespace(
    recomputed=(),
    all_parameters=(),
    stage_parameters={},
    run=lambda kind: (0, None),
    differentiate=lambda kind: (0, None),
    weights_apart=lambda kind, products: None,
)
"""Stands for the functions of a block whose tape is only printed."""


def tape_text(schedule: Schedule, layers: Sequence[BlockFeatures], chunks: Sequence[Chunk]) -> str:
    """The tapes of both passes, as text.

    Raises:
        EnvironmentMissing: torch is absent.
    """
    try:
        # By name: planning itself needs no torch.
        compiler = importlib.import_module("megatron_ampipe.runtime.compile")
    except ModuleNotFoundError as error:
        raise EnvironmentMissing(f"--tape needs {error.name}. Install torch, or leave --tape out.") from error
    options = {"keep_graph": True, "host_waits": True, "threads": False}
    functions = [UNNAMED] * len(layers)
    return f"{compiler.compiled(schedule, layers, chunks=chunks, functions=functions, **options)}\n"


def answer_of(
    predictor: Predictor, plans: Plans, arguments: argparse.Namespace, assumed: list[str]
) -> dict[str, Any]:
    """Everything that is shown, as plain data; ``predictor`` is of all layers of a pipeline stage."""
    plan = plans.chosen
    try:
        gradients = _gradients(predictor, plan)
    except BadInput as error:
        # Nothing else of the plan needs this figure.
        gradients = None
        assumed.append(f"reductions of gradients are not predicted: {error.value} {error.rule}")
    block = predictor.of_layers(1)
    return {
        "model": arguments.model,
        "cluster": arguments.cluster,
        "assumed": assumed,
        "stock_ms": plan.stock_ms,
        "degrees": _rows(block, arguments.degrees),
        "stacks": _stacks(predictor, plans),
        "layers": _layers(predictor, plans),
        "basis": predictor.cluster.basis,
        "gradients": gradients,
        "forward_degree": plan.forward_degree,
        "backward_degree": plan.backward_degree,
        "stack": plan.stack,
        "num_layers": plan.num_layers,
        "shares": list(plan.shares),
        "schedule": plan.schedule.name,
        "exchange": plan.exchange,
        "predicted_ms": plan.predicted_ms,
        "predicted_speedup": plan.predicted_speedup,
        "hidden_share": plan.hidden_share,
        "partner": plan.partner is not None,
        # The product of both is the speedup.
        "speedup_by_overlap": plan.predicted_speedup / plans.fewer_bytes,
        "speedup_by_fewer_bytes": plans.fewer_bytes,
        "hidden_by": timeline_of(predictor, plan).hidden_by if plan.helps else None,
        "memory_gib": plan.memory_gib,
        "device_memory_gib": predictor.cluster.device_memory_gib,
        "helps": plan.helps,
        "reason": plan.reason,
        "memory_strategies": _memory_strategies(block, plan) if plan.helps else None,
    }


def _rows(predictor: Predictor, degrees: tuple[int, ...]) -> list[dict[str, Any]]:
    """Megatron's layer, and the named schedules at each degree in equal chunks."""
    stock = predictor.stock()
    ways = [("stock", 1, stock, 0.0, {KEEP: predictor.peak_bytes(None, memory=KEEP)})]
    whole = in_one_chunk(predictor)
    for way in (*([] if whole is None else [whole]), *candidates(predictor, degrees)):
        hidden = predictor.timeline(way.schedule, way.lengths).hidden_share
        memory = {strategy: predictor.peak_bytes(way.schedule, memory=strategy) for strategy in STRATEGIES}
        ways.append((way.schedule.name, way.schedule.degree, way.time, hidden, memory))
    return [
        {
            "degree": degree,
            "schedule": name,
            "forward_ms": time.forward / 1e3,
            "backward_ms": time.backward / 1e3,
            "predicted_ms": time.total / 1e3,
            "speedup": stock.total / time.total,
            "hidden_share": hidden,
            "memory_gib": memory[KEEP] / 2**30,
            # By what the experts keep, for --ampipe-memory.
            "memory_gib_by_strategy": {strategy: size / 2**30 for strategy, size in memory.items()},
        }
        for name, degree, time, hidden, memory in ways
    ]


def _memory_strategies(predictor: Predictor, plan: Plan) -> dict[str, Any]:
    """What MPipeMoE's equation 10 chooses of its strategies, and which is fastest by simulation."""
    degree = plan.backward_degree
    costs_us = equation_10_us(predictor, degree=degree)
    times = {}
    for name in (KEEP, *costs_us):
        of_memory = predictor.of_layers(1, memory=name)
        schedule = Pipeline.of(degree, memory=name).schedule_of(of_memory.layers)
        times[name] = of_memory.pass_us(schedule, even_chunks(predictor.block.rows, degree)).total / 1e3
    return {
        "degree": degree,
        "equation_10": min(costs_us, key=lambda name: costs_us[name]),
        "equation_10_ms": {name: cost / 1e3 for name, cost in costs_us.items()},
        "simulated": min(costs_us, key=lambda name: times[name]),
        "simulated_ms": times,
    }


def _stacks(predictor: Predictor, plans: Plans) -> list[dict[str, Any]]:
    """The layers of a pipeline stage block by block, and sharing a schedule; empty if they cannot."""
    shared = plans.shared
    if shared is None:
        return []
    assert shared.stock_ms is not None and shared.predicted_ms is not None
    lengths = [round(share * predictor.block.rows) for share in shared.shares]
    bound = sharing_layers(predictor, shared.stack).bound_us(shared.schedule, lengths)
    blocks, together = (
        {
            "stack": plan.stack,
            "layers": shared.num_layers,
            "forward_degree": plan.forward_degree,
            "backward_degree": plan.backward_degree,
            "schedule": plan.schedule.name if plan.helps else "stock",
            "predicted_ms": time_ms,
            "speedup": shared.stock_ms / time_ms,
        }
        for plan, time_ms in ((plans.alone, plans.blocks_ms), (shared, shared.predicted_ms))
    )
    together["share_of_bound"] = bound.total / 1e3 / shared.predicted_ms
    return [blocks, together]


def _layers(predictor: Predictor, plans: Plans) -> list[dict[str, Any]]:
    """The layers of a pipeline stage in chunks and with partners; empty if neither can be."""
    running = _with_a_partner(predictor, plans)
    stock_us = running.stock().total
    rows = []
    for row in _stacks(predictor, plans):
        way = "block by block" if row["stack"] == 1 else "one schedule"
        bound = f"{row['share_of_bound']:.1%}" if "share_of_bound" in row else ""
        rows.append(row | {"way": f"{way}, degree {row['forward_degree']}", "of_bound": bound})
    for name, together in ((f"partners, {MEGATRON}", plans.as_megatron), ("partners", plans.together)):
        if together is not None:
            row = {"way": name, "predicted_ms": together.time_us / 1e3}
            row |= {"speedup": stock_us / together.time_us}
            rows.append(row | {"of_bound": f"{together.bound_us / together.time_us:.1%}"})
    return rows


def _with_a_partner(predictor: Predictor, plans: Plans) -> Predictor:
    """Of the layers that :attr:`Plans.together` is predicted for."""
    return predictor.of_layers(1) if plans.shared is None else sharing_layers(predictor, plans.shared.stack)


def timeline_of(predictor: Predictor, plan: Plan, *, labels: Mapping[str, str] | None = None) -> Timeline:
    """The predicted timeline of the layers that a plan is for; with a partner, of both passes."""
    if plan.partner is not None:
        layers = predictor.of_layers(1) if plan.stack == 1 else sharing_layers(predictor, plan.stack)
        return partner_timeline(layers, plan.partner, labels=labels)
    rows = predictor.block.rows
    lengths = [chunk.hidden[0].length for chunk in plan.pipeline(rows=rows).chunks(rows)]
    return sharing_layers(predictor, plan.stack).timeline(plan.schedule, lengths, labels=labels)


def _gradients(predictor: Predictor, plan: Plan) -> dict[str, Any] | None:
    """How gradients are reduced with the chosen plan; None without a plan or without anything to reduce."""
    if not plan.helps:
        return None
    running = sharing_layers(predictor, plan.stack)
    lengths = [round(share * predictor.block.rows) for share in plan.shares]
    with_experts = sum(not features.dense for features in predictor.layers)
    num_layers = len(running.layers) if running is predictor else with_experts
    return plan_gradients(running, plan.schedule, lengths, num_layers=num_layers)


def _table(title: str, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> Table:
    """A table of rows; ``columns`` are their headings, and formats of a row."""
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(text.format_map(row) for text in columns.values()))
    return table


def show(answer: Mapping[str, Any], plan: Plan, console: Console, *, verbose: bool = False) -> None:
    """Print an answer of :func:`answer_of` and the chosen plan: what to do first, then what was compared."""

    def say(text: str, **style: Any) -> None:
        console.print(text, soft_wrap=True, **style)

    if plan.helps:
        say(f"choice: {plan.pipeline()}")
        say(f"predicted: {plan.predicted_speedup:.2f} times as fast as Megatron's layers ({answer['basis']})")
        if answer["speedup_by_fewer_bytes"] != 1:
            say(
                "of which {speedup_by_overlap:.2f} by overlap, {speedup_by_fewer_bytes:.2f} by fewer bytes "
                "or messages between ranks".format_map(answer)
            )
        say(f"flags: {' '.join(flags_of(plan))}")
        if plan.searched:
            say("Its order was searched: use --output FILE, and --ampipe-plan FILE in place of these flags.")
    else:
        say("choice: degree 1, Megatron's own layers")
    say(answer["reason"])
    if answer["hidden_by"] is not None:
        shares = (f"{share:.0%} under {source}" for source, share in answer["hidden_by"].items() if share)
        say(f"communication hidden: {', '.join(shares) or 'none'}")
    for sentence in answer["assumed"]:
        say(f"assumed: {sentence}", style="dim")
    if answer["layers"]:
        columns = {"layers": "{way}", "predicted ms": "{predicted_ms:.3f}", "speedup": "{speedup:.2f}"}
        columns["of bound"] = "{of_bound}"
        title = "layers of a pipeline stage, a micro-batch forward and backward"
        console.print(_table(title, answer["layers"], columns))
    ways = {"degree": "{degree}", "schedule": "{schedule}"}
    directions = {name: f"{{{name}_ms:.3f}}" for name in ("forward", "backward", "predicted")}
    gains = {"speedup": "{speedup:.2f}", "hidden": "{hidden_share:.1%}"}
    rows = answer["degrees"]
    console.print(_table("one block, one micro-batch, predicted ms", rows, ways | directions | gains))
    if not verbose:
        return
    sizes = [{name: f"{size:.2f}" for name, size in row["memory_gib_by_strategy"].items()} for row in rows]
    rows = [dict.fromkeys(STRATEGIES, "") | row | size for row, size in zip(rows, sizes, strict=True)]
    title = "GiB of activations, one block, by --ampipe-memory"
    console.print(_table(title, rows, ways | {name: f"{{{name}}}" for name in STRATEGIES}))
    if (gradients := answer["gradients"]) is not None:
        say(_advice_on_gradients(gradients))
    if (memory := answer["memory_strategies"]) is not None:
        times = ", ".join(f"{name} {time_ms:.3f}" for name, time_ms in memory["simulated_ms"].items())
        say(
            f"to hold less, degree {memory['degree']}: {memory['equation_10']} by MPipeMoE's equation 10, "
            f"{memory['simulated']} by simulation (ms of the block: {times})"
        )


def flags_of(plan: Plan) -> list[str]:
    """The flags of a training run that come nearest to a plan without its file."""
    pipeline = plan.pipeline()
    if max(plan.shares) - min(plan.shares) > SHARE_TOLERANCE:
        flags = ["--ampipe-chunks", ",".join(f"{share:.4g}" for share in plan.shares)]
    else:
        flags = ["--ampipe-degree", str(plan.forward_degree)]
    if plan.backward_degree != plan.forward_degree:
        flags += ["--ampipe-backward-degree", str(plan.backward_degree)]
    if plan.schedule.name in SCHEDULE_NAMES and plan.schedule.name not in ("ampipe", "sequential"):
        flags += ["--ampipe-schedule", plan.schedule.name]
    if plan.stack == 1 and pipeline.num_chunks > 1:
        flags += ["--ampipe-stack", "1"]
    if plan.memory != KEEP:
        flags += ["--ampipe-memory", plan.memory]
    if plan.exchange is not Exchange.ROWS:
        flags += ["--ampipe-exchange", plan.exchange]
    if plan.partner is not None:
        flags.append("--ampipe-partner")
        if plan.partner.degree > 1:
            flags += ["--ampipe-partner-degree", str(plan.partner.degree)]
    return flags


def _advice_on_gradients(gradients: Mapping[str, Any]) -> str:
    ways, name = {way["name"]: way for way in gradients["ways"]}, gradients["chosen"]
    both = {name: way["pass_ms"] + way["left_ms"] for name, way in ways.items()}
    compared = f"placed {both[PLACED]:.3f} ms, stock {both[STOCK]:.3f} ms"
    if name not in (STOCK, PLACED):
        return f"gradients: overlapping their reductions saves nothing ({compared})"
    flags, size = "--overlap-grad-reduce", ways[name]["bucket_size"]
    flags += "" if name == STOCK else f" --ampipe-grad-reduce {PLACED}"
    flags += "" if size is None else f" --ddp-bucket-size {size}"
    return f"gradients: use {flags} ({compared}); {ways[name]['left_ms']:.3f} ms are left after the pass"
