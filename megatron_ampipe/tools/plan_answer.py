"""What ``ampipe plan`` answers, as plain data and as tables. Called by :mod:`.plan_command`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.planner import Plans, sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import candidates, in_one_chunk
from megatron_ampipe.schedule import KEEP, STRATEGIES, stack_to_text


def answer_of(
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
    stock = predictor.stock()
    total = stock.forward + stock.backward
    peak = {KEEP: predictor.peak_bytes(forward_degree=1, backward_degree=1, memory=KEEP)}
    rows = [_row(1, "stock", stock.forward, stock.backward, total, 0.0, peak)]
    whole = in_one_chunk(predictor)
    for one in (*([] if whole is None else [whole]), *candidates(predictor, degrees)):
        degree, name = one.schedule.degree, one.schedule.name
        hidden = predictor.timeline(one.schedule, one.lengths).hidden_share
        memory = {
            strategy: predictor.peak_bytes(forward_degree=degree, backward_degree=degree, memory=strategy)
            for strategy in STRATEGIES
        }
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
    table = Table(title="one block, one micro-batch, predicted")
    others = [strategy for strategy in STRATEGIES if strategy != KEEP]
    for name in (
        *("degree", "schedule", "forward", "backward", "both ms", "speedup", "hidden", "GiB"),
        *(f"GiB {strategy}" for strategy in others),
    ):
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
            f"{row['hidden_share']:.0%}" if row["schedule"] != "stock" else "",
            f"{row['memory_gib']:.2f}",
            *(
                f"{row['memory_gib_by_strategy'][strategy]:.2f}" if row["degree"] > 1 else ""
                for strategy in others
            ),
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
