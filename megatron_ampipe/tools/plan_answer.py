"""What ``ampipe plan`` answers, as plain data and as tables. Called by :mod:`.plan_command`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.cost import CostModel
from megatron_ampipe.plan.gradient_plan import PLACED, STOCK, plan_gradients
from megatron_ampipe.plan.memory_choice import equation_10_us
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import Plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import candidates, in_one_chunk
from megatron_ampipe.schedule import (
    KEEP,
    STRATEGIES,
    Exchange,
    Pipeline,
    even_chunks,
    stack_to_text,
)


def answer_of(
    predictor: Predictor,
    plans: Plans,
    arguments: argparse.Namespace,
    assumed: tuple[str, ...],
) -> dict[str, Any]:
    """Everything that is shown, as plain data.

    Args:
        predictor: Of all layers of a pipeline stage.
        plans: What was planned for them.
        arguments: Of the command.
        assumed: Sentences about what the model file does not say.
    """
    plan = plans.chosen
    try:
        gradients, unknown = _gradients(predictor, plan), []
    except BadInput as error:
        # Nothing else of the plan needs this figure.
        gradients, unknown = None, [f"reductions of gradients are not predicted: {error.value} {error.rule}"]
    return {
        "model": arguments.model,
        "cluster": arguments.cluster,
        "assumed": [*assumed, *unknown],
        "stock_ms": plan.stock_ms,
        "degrees": _rows(predictor.of_layers(1), arguments.degrees),
        "stacks": _stacks(predictor, plans),
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
        "memory_gib": plan.memory_gib,
        "device_memory_gib": predictor.cluster.device_memory_gib,
        "helps": plan.helps,
        "reason": plan.reason,
        "memory_strategies": _memory_strategies(predictor.of_layers(1), plan) if plan.helps else None,
    }


def _rows(predictor: Predictor, degrees: tuple[int, ...]) -> list[dict[str, Any]]:
    """The named schedules at each degree, chunks equal."""
    stock = predictor.stock()
    total = stock.forward + stock.backward
    peak = {KEEP: predictor.peak_bytes(None, memory=KEEP)}
    rows = [_row(1, "stock", stock.forward, stock.backward, total, 0.0, peak)]
    whole = in_one_chunk(predictor)
    for one in (*([] if whole is None else [whole]), *candidates(predictor, degrees)):
        degree, name = one.schedule.degree, one.schedule.name
        hidden = predictor.timeline(one.schedule, one.lengths).hidden_share
        memory = {strategy: predictor.peak_bytes(one.schedule, memory=strategy) for strategy in STRATEGIES}
        rows.append(_row(degree, name, one.time.forward, one.time.backward, total, hidden, memory))
    return rows


def _memory_strategies(predictor: Predictor, plan: Plan) -> dict[str, Any]:
    """What MPipeMoE's equation 10 chooses of its strategies, and which is fastest by simulation."""
    degree = plan.backward_degree
    costs_us = equation_10_us(CostModel(predictor.workload, predictor.cluster), degree=degree)
    times = {}
    for name in (KEEP, *costs_us):
        of_memory = predictor.of_layers(1, memory=name)
        schedule = Pipeline.of(degree, memory=name).schedule_of(of_memory.layers)
        pair = of_memory.pass_us(schedule, even_chunks(predictor.workload.rows, degree))
        times[name] = (pair.forward + pair.backward) / 1e3
    return {
        "degree": degree,
        "equation_10": min(costs_us, key=lambda name: costs_us[name]),
        "equation_10_ms": {name: cost / 1e3 for name, cost in costs_us.items()},
        "simulated": min(costs_us, key=lambda name: times[name]),
        "simulated_ms": times,
    }


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


def _gradients(predictor: Predictor, plan: Plan) -> dict[str, Any] | None:
    """How gradients are reduced with the chosen plan; None without a plan or without anything to reduce."""
    if not plan.helps:
        return None
    running = predictor.of_layers(1) if plan.stack == 1 else sharing_layers(predictor, plan.stack)
    lengths = [round(share * predictor.workload.rows) for share in plan.shares]
    with_experts = sum(features.experts for features in predictor.layers)
    num_layers = len(running.layers) if running is predictor else with_experts
    found = plan_gradients(running, plan.schedule, lengths, num_layers=num_layers)
    return None if found is None else asdict(found)


def _row(
    degree: int,
    schedule: str,
    forward: float,
    backward: float,
    stock: float,
    hidden: float,
    memory: Mapping[str, float],
) -> dict[str, Any]:
    return {
        "degree": degree,
        "schedule": schedule,
        "forward_ms": forward / 1e3,
        "backward_ms": backward / 1e3,
        "predicted_ms": (forward + backward) / 1e3,
        "speedup": stock / (forward + backward),
        "hidden_share": hidden,
        "memory_gib": memory[KEEP] / 2**30,
        # By what the experts keep, for --ampipe-memory.
        "memory_gib_by_strategy": {strategy: size / 2**30 for strategy, size in memory.items()},
    }


def show(answer: dict[str, Any], plan: Plan, console: Console) -> None:
    console.print(_table_of_degrees(answer["degrees"]))
    console.print(_table_of_memory(answer["degrees"]))
    if answer["stacks"]:
        console.print(_table_of_stacks(answer["stacks"]))
    for sentence in answer["assumed"]:
        console.print(f"assumed: {sentence}", style="dim", soft_wrap=True)
    if answer["gradients"] is not None:
        console.print(_table_of_gradients(answer["gradients"]))
        console.print(_advice_on_gradients(answer["gradients"]), soft_wrap=True)
    if answer["memory_strategies"] is not None:
        console.print(_sentence_of(answer["memory_strategies"]), soft_wrap=True)
    if plan.helps:
        shares = " ".join(f"{share:.3g}" for share in plan.shares)
        console.print(
            f"choice: degree {plan.forward_degree} forward, {plan.backward_degree} backward, schedule "
            f"{plan.schedule.name}, shares {shares}, {_together(plan)}{_exchange(plan)}: "
            f"{plan.predicted_ms:.3f} ms, "
            f"{plan.predicted_speedup:.2f} times as fast",
            soft_wrap=True,
        )
    else:
        console.print("choice: degree 1, Megatron's own layers", soft_wrap=True)
    console.print(plan.reason, soft_wrap=True)


def _table_of_degrees(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="one block, one micro-batch, predicted")
    for name in ("degree", "schedule", "forward", "backward", "both ms", "speedup", "hidden"):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    fastest = max(rows, key=lambda row: row["speedup"])
    for row in rows:
        table.add_row(
            str(row["degree"]),
            row["schedule"],
            f"{row['forward_ms']:.3f}",
            f"{row['backward_ms']:.3f}",
            f"{row['predicted_ms']:.3f}",
            f"{row['speedup']:.2f}",
            f"{row['hidden_share']:.0%}" if row["schedule"] != "stock" else "",
            style="bold" if row is fastest else None,
        )
    return table


def _table_of_memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    """The peak of one block; Megatron's layers keep everything."""
    table = Table(title="GiB of activations, one block, by --ampipe-memory")
    for name in ("degree", "schedule", *STRATEGIES):
        table.add_column(name, justify="left" if name == "schedule" else "right", no_wrap=True)
    for row in rows:
        is_stock = row["schedule"] == "stock"
        table.add_row(
            str(row["degree"]),
            row["schedule"],
            *(
                f"{row['memory_gib_by_strategy'][name]:.2f}" if name == KEEP or not is_stock else ""
                for name in STRATEGIES
            ),
        )
    return table


def _table_of_gradients(found: Mapping[str, Any]) -> Table:
    """The ways to reduce the gradients of all layers."""
    ways = Table(title="backward pass of all layers and its reductions in the last micro-batch, ms")
    for name in ("gradients reduced", "bucket size", "pass", "left after it", "both", "saves"):
        ways.add_column(name, justify="left" if name == "gradients reduced" else "right", no_wrap=True)
    for way in found["ways"]:
        ways.add_row(
            way["name"],
            "" if way["bucket_size"] is None else str(way["bucket_size"]),
            f"{way['pass_ms']:.3f}",
            f"{way['left_ms']:.3f}",
            f"{way['pass_ms'] + way['left_ms']:.3f}",
            f"{way['saves']:.1%}",
            style="bold" if way["name"] == found["chosen"] else None,
        )
    return ways


def _advice_on_gradients(found: Mapping[str, Any]) -> str:
    ways = {way["name"]: way for way in found["ways"]}
    chosen = ways[found["chosen"]]
    stock, placed = (ways[name]["pass_ms"] + ways[name]["left_ms"] for name in (STOCK, PLACED))
    compared = f"placed {placed:.3f} ms, stock {stock:.3f} ms"
    if found["chosen"] not in (STOCK, PLACED):
        return f"gradients: overlapping their reductions saves nothing ({compared})"
    flags = ["--overlap-grad-reduce"]
    flags += [] if found["chosen"] == STOCK else [f"--ampipe-grad-reduce {PLACED}"]
    flags += [] if chosen["bucket_size"] is None else [f"--ddp-bucket-size {chosen['bucket_size']}"]
    left = f"{chosen['left_ms']:.3f} ms are left after the pass"
    return f"gradients: use {' '.join(flags)} ({compared}); {left}"


def _exchange(plan: Plan) -> str:
    return "" if plan.exchange is Exchange.ROWS else f", exchange {plan.exchange}"


def _sentence_of(found: Mapping[str, Any]) -> str:
    formula, simulated = (
        ", ".join(f"{name} {found[key][name]:.3f}" for name in found["equation_10_ms"])
        for key in ("equation_10_ms", "simulated_ms")
    )
    return (
        f"to hold less, degree {found['degree']}: by MPipeMoE's equation 10 {found['equation_10']} (ms of a "
        f"chunk's experts: {formula}); by simulation {found['simulated']} (ms of the block: {simulated}, "
        f"keep {found['simulated_ms'][KEEP]:.3f})"
    )


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
