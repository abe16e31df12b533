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
from rich.table import Table

from megatron_ampipe import outputs
from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.model import find_model, layers_of, read_model, workload_of
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import Plans, make_plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import DEGREES, candidates
from megatron_ampipe.schedule import ALL_LAYERS, parse_stack, stack_to_text
from megatron_ampipe.timeline import Timeline
from megatron_ampipe.tools import plan_timeline, timeline_picture
from megatron_ampipe.tools.whole_numbers import at_least
from megatron_ampipe.yaml_lines import value_of

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
        default=1.0,
        metavar="X",
        help="tokens of the busiest rank over the mean (default: 1, experts evenly used)",
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
    workload, assumed = workload_of(model, cluster, ranks=arguments.ranks, imbalance=arguments.imbalance)
    layers = layers_of(model)
    predictor = Predictor(workload, cluster, num_layers=layers.num_layers, dense=layers.dense)
    plans = make_plans(predictor, degrees=arguments.degrees, stack=arguments.stack)
    plan = plans.chosen
    answer = _answer(predictor, plans, arguments, assumed)
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
        _show(answer, plan, Console())
    return 0


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
    if arguments.trace is None and arguments.picture is None:
        if arguments.trace_of is not None:
            raise BadInput(
                "--trace-of",
                arguments.trace_of.degree,
                rule="chooses the timeline that is written, and none is written",
                remedy="Add --trace FILE or --picture NAME.",
            )
        return None
    pipeline = arguments.trace_of or plan.pipeline(rows=predictor.workload.rows)
    source = f"{arguments.model} on {arguments.cluster}"
    shown = sharing_layers(predictor, pipeline.stack) if pipeline.stack != 1 else predictor.of_layers(1)
    return plan_timeline.predicted_timeline(shown, pipeline, source=source)


def _first_layers(timeline: Timeline) -> Timeline:
    """The layers that a picture shows: those that follow repeat them."""
    spans = tuple(span for span in timeline.spans if span.layer <= DRAWN_LAYERS)
    return dataclasses.replace(timeline, spans=spans)


def _answer(
    predictor: Predictor, plans: Plans, arguments: argparse.Namespace, assumed: tuple[str, ...]
) -> dict[str, Any]:
    """Everything that is shown, as plain data."""
    plan = plans.chosen
    return {
        "model": arguments.model,
        "cluster": arguments.cluster,
        "assumed": list(assumed),
        "stock_ms": plan.stock_ms,
        "degrees": _rows(predictor.of_layers(1), arguments.degrees),
        "stacks": _stacks(predictor, plans),
        "forward_degree": plan.forward_degree,
        "backward_degree": plan.backward_degree,
        "stack": plan.stack,
        "num_layers": plan.num_layers,
        "shares": list(plan.shares),
        "schedule": plan.schedule.name,
        "predicted_ms": plan.predicted_ms,
        "predicted_speedup": plan.predicted_speedup,
        "hidden_share": plan.hidden_share,
        "memory_gib": plan.memory_gib,
        "device_memory_gib": predictor.cluster.device_memory_gib,
        "helps": plan.helps,
        "reason": plan.reason,
    }


def _rows(predictor: Predictor, degrees: tuple[int, ...]) -> list[dict[str, Any]]:
    """The named schedules at each degree, chunks equal."""
    workload = predictor.workload
    stock = predictor.stock()
    total = stock.forward + stock.backward
    rows = [
        _row(
            1,
            "stock",
            stock.forward,
            stock.backward,
            total,
            0.0,
            peak_bytes(workload, forward_degree=1, backward_degree=1),
        )
    ]
    for one in candidates(predictor, degrees):
        degree, name = one.schedule.degree, one.schedule.name
        hidden = predictor.timeline(one.schedule, one.lengths).hidden_share
        memory = peak_bytes(workload, forward_degree=degree, backward_degree=degree)
        rows.append(_row(degree, name, one.time.forward, one.time.backward, total, hidden, memory))
    return rows


def _stacks(predictor: Predictor, plans: Plans) -> list[dict[str, Any]]:
    """The layers of a pipeline stage block by block, and sharing a schedule; empty if they cannot."""
    if plans.shared is None:
        return []
    shared = plans.shared
    assert shared.stock_ms is not None and shared.predicted_ms is not None
    lengths = [round(share * predictor.workload.rows) for share in shared.shares]
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
    together["share_of_bound"] = (bound.forward + bound.backward) / 1e3 / shared.predicted_ms
    return [blocks, together]


def _row(
    degree: int, schedule: str, forward: float, backward: float, stock: float, hidden: float, memory: float
) -> dict[str, Any]:
    return {
        "degree": degree,
        "schedule": schedule,
        "forward_ms": forward / 1e3,
        "backward_ms": backward / 1e3,
        "predicted_ms": (forward + backward) / 1e3,
        "speedup": stock / (forward + backward),
        "hidden_share": hidden,
        "memory_gib": memory / 2**30,
    }


def _show(answer: dict[str, Any], plan: Plan, console: Console) -> None:
    table = Table(title="one block, one micro-batch, predicted")
    for name in ("degree", "schedule", "forward", "backward", "both ms", "speedup", "hidden", "GiB"):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    fastest = max(answer["degrees"], key=lambda row: row["speedup"])
    for row in answer["degrees"]:
        table.add_row(
            str(row["degree"]),
            row["schedule"],
            f"{row['forward_ms']:.3f}",
            f"{row['backward_ms']:.3f}",
            f"{row['predicted_ms']:.3f}",
            f"{row['speedup']:.2f}",
            f"{row['hidden_share']:.0%}" if row["degree"] > 1 else "",
            f"{row['memory_gib']:.2f}",
            style="bold" if row is fastest else None,
        )
    console.print(table)
    if answer["stacks"]:
        console.print(_table_of_stacks(answer["stacks"]))
    for sentence in answer["assumed"]:
        console.print(f"assumed: {sentence}", style="dim", soft_wrap=True)
    if plan.helps:
        shares = " ".join(f"{share:.3g}" for share in plan.shares)
        console.print(
            f"choice: degree {plan.forward_degree} forward, {plan.backward_degree} backward, schedule "
            f"{plan.schedule.name}, shares {shares}, {_together(plan)}: {plan.predicted_ms:.3f} ms, "
            f"{plan.predicted_speedup:.2f} times as fast",
            soft_wrap=True,
        )
    else:
        console.print("choice: degree 1, Megatron's own layers", soft_wrap=True)
    console.print(plan.reason, soft_wrap=True)


def _together(plan: Plan) -> str:
    if plan.stack == 1:
        return "block by block"
    return f"{plan.num_layers} layers together"


def _table_of_stacks(rows: list[dict[str, Any]]) -> Table:
    table = Table(title=f"{rows[0]['layers']} layers of a pipeline stage, one micro-batch, predicted")
    for name in ("together", "degree", "schedule", "both ms", "speedup", "share of the bound"):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    fastest = max(rows, key=lambda row: row["speedup"])
    for row in rows:
        forward, backward = row["forward_degree"], row["backward_degree"]
        table.add_row(
            "no" if row["stack"] == 1 else stack_to_text(row["stack"]),
            str(forward) if forward == backward else f"{forward}:{backward}",
            row["schedule"],
            f"{row['predicted_ms']:.3f}",
            f"{row['speedup']:.2f}",
            f"{row['share_of_bound']:.0%}" if "share_of_bound" in row else "",
            style="bold" if row is fastest else None,
        )
    return table


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


def _degrees(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and len(word) < 3 and 2 <= int(word) <= 64 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of degrees from 2 to 64, such as 2,4,8")
    return tuple(sorted({int(word) for word in words}))
