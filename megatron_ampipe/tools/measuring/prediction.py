"""What the planner chooses for cases, and what it predicts for every row of a result. Needs no torch.

Also which row the planner would have chosen, and how much slower that is than the fastest one: so a result
says how good predictions are, and choices made from them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.planner import make_plans
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import KEEP, Exchange, Pipeline, to_text
from megatron_ampipe.tools.measuring.bench_job import PLANNED, BenchJob, Cut, Variant
from megatron_ampipe.tools.measuring.grid import Case, block_of_case

CLOSE = 0.03
"""A choice that is slower than the best by no more than this counts as equal."""


def predict(document: dict[str, Any], cluster: Cluster) -> None:
    """Add predictions to a result.

    Every row gets ``predicted_ms`` and ``error`` (predicted / measured - 1), every case ``choice``: the row
    with the least predicted time, and ``loss``, by how much it is slower than the fastest row; the document
    ``prediction``, a summary over all.

    Args:
        document: What ``ampipe bench --json`` holds; changed.
        cluster: Measured on the same machine and link.

    Raises:
        BadInput: the cluster has no figure for something that a block does.
    """
    cases, layers = document["cases"], document["layers"]
    for case in cases:
        predictor = Predictor(_block(case, document["ranks"]), cluster)
        stock = predictor.of_layers(layers).stock()
        case["predicted_stock_ms"] = round((stock.forward + stock.backward) / 1e3, 4)
        for row in case["rows"]:
            row["predicted_ms"] = round(_predicted_ms(row, predictor, layers=layers), 4)
            row["error"] = round(row["predicted_ms"] / row["ms"] - 1, 4)
        chosen = min(case["rows"], key=lambda row: row["predicted_ms"])
        loss = round(chosen["ms"] / min(row["ms"] for row in case["rows"]) - 1, 4)
        case["choice"] = {key: chosen[key] for key in ("schedule", "cut", "stack", "exchange")} | {
            "loss": loss
        }
    errors = [abs(row["error"]) for case in cases for row in case["rows"]]
    losses = [case["choice"]["loss"] for case in cases]
    document["prediction"] = {
        "cluster": cluster.description,
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(max(errors), 4),
        "close_choices": sum(loss <= CLOSE for loss in losses),
        "cases": len(losses),
        "worst_loss": max(losses),
    }


def predict_peaks(document: dict[str, Any]) -> None:
    """Add ``predicted_peak_bytes`` to every row of a result, ``stock_predicted_peak_bytes`` to every case.

    Of all layers, gradients of parameters included, as ``peak_bytes`` is measured. Needs no cluster.
    """
    for case in document["cases"]:
        block, num_layers = _block(case, document["ranks"]), case.get("layers", 1)

        def predicted(pipeline: Pipeline, block: Block = block, num_layers: int = num_layers) -> int:
            return round(peak_bytes(block, pipeline, num_layers=num_layers, local=True, gathers=True))

        case["stock_predicted_peak_bytes"] = predicted(Pipeline.of(1))
        for row in case["rows"]:
            row["predicted_peak_bytes"] = predicted(_variant(row).pipeline)


def planned(job: BenchJob, case: Case, cluster: Cluster, *, fused_gradients: bool) -> tuple[Variant, ...]:
    """What the planner chooses for a case of a job, for each number of layers that share a schedule.

    Args:
        job: Gives these numbers, the exchanges that are compared, and the ranks.
        case: The block.
        cluster: Measured on the same machine and link.
        fused_gradients: Whether linear layers add their weights' gradients to ``main_grad`` themselves.

    Raises:
        BadInput: the cluster has no figure for something that the block does.
    """
    block = block_of_case(case, num_ranks=job.num_ranks, fused_gradients=fused_gradients)
    predictor = Predictor(block, cluster)
    variants = []
    for size in job.stacks:
        layers = predictor.of_layers(size)
        # All layers under one schedule if possible, also where that is not predicted to help.
        plans = make_plans(layers, exchanges=job.exchanges)
        plan = plans.shared or plans.alone
        if not plan.helps:
            variants.append(Variant(PLANNED, Cut.of(1)))
            continue
        pipeline = plan.pipeline(rows=block.rows)
        cut = Cut(pipeline.degree, pipeline.backward_degree, pipeline.shares)
        stack, order = pipeline.stack_of(len(layers.layers)), to_text(plan.schedule)
        variants.append(Variant(PLANNED, cut, order, stack, memory=plan.memory, exchange=plan.exchange))
    return tuple(dict.fromkeys(variants))


def _predicted_ms(row: Mapping[str, Any], predictor: Predictor, *, layers: int) -> float:
    """Of one pass through so many layers; ``predictor`` is of one."""
    variant = _variant(row)
    predictor = predictor.with_exchange(variant.exchange)

    def predicted_us(num_layers: int) -> float:
        of_layers = predictor.of_layers(num_layers, memory=variant.memory)
        if not variant.pipelined:
            time = of_layers.stock()
        else:
            chunks = variant.pipeline.chunks(predictor.block.sequence_length)
            schedule = variant.pipeline.schedule_of(of_layers.layers)
            time = of_layers.pass_us(schedule, [chunk.hidden[0].length for chunk in chunks])
        return time.forward + time.backward

    stacks, others = divmod(layers, variant.stack)
    return (stacks * predicted_us(variant.stack) + (predicted_us(others) if others else 0.0)) / 1e3


def _variant(row: Mapping[str, Any]) -> Variant:
    """What a row measured."""
    shares = tuple(row["shares"]) if row["shares"] else None
    cut = Cut.of(row["degree"], row["backward_degree"], shares)
    memory, exchange = row.get("memory", KEEP), Exchange(row.get("exchange", Exchange.ROWS))
    return Variant(row["schedule"], cut, row.get("order"), row.get("stack", 1), memory, exchange)


def _block(case: Mapping[str, Any], num_ranks: int) -> Block:
    # Results of older versions were of gradients that AMPipe summed itself.
    fused = case.get("fused_gradients", False)
    return block_of_case(Case(**case["block"]), num_ranks=num_ranks, fused_gradients=fused)
