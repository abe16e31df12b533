"""The planner's prediction for every row of a result, and the row that it would choose. Needs no torch."""

from __future__ import annotations

from dataclasses import replace

from megatron_ampipe.files.outputs import Report, ReportView
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import KEEP, SCHEDULE_NAMES, Exchange, Pipeline, from_text
from megatron_ampipe.tools.measuring.bench_job import EXACT
from megatron_ampipe.tools.measuring.grid import Case, block_of_case


def predict(document: Report, cluster: Cluster) -> None:
    """Add predictions to a result, from a cluster that was measured on the same machine and link.

    Every row with exact rows and without graphs gets ``predicted_ms`` and ``error`` (predicted / measured -
    1). Every case gets ``choice``, the one of them with the least predicted time, and ``loss``, how much
    slower than the fastest of them it was. BadInput if the cluster's nodes have another number of ranks.
    """
    layers, ranks = document["layers"], document["ranks"]
    ranks_per_node = document.get("ranks_per_node") or ranks
    if min(cluster.ranks_per_node, ranks) != ranks_per_node:
        rule = f"{cluster.ranks_per_node} is not that of the result: {ranks} ranks, {ranks_per_node} per node"
        cluster.refuse("ranks_per_node", rule, "Profile with the --ranks and --ranks-per-node of the result.")
    for case in document["cases"]:
        predictor = Predictor(block_of(case, document["ranks"]), cluster)
        case["predicted_stock_ms"] = round(_predicted_ms(Pipeline.of(1), predictor, layers=layers), 4)
        known = [row for row in case["rows"] if is_predicted(row)]
        for row in known:
            row["predicted_ms"] = round(_predicted_ms(pipeline_of(row), predictor, layers=layers), 4)
            row["error"] = round(row["predicted_ms"] / row["ms"] - 1, 4)
        chosen = min(known, key=lambda row: row["predicted_ms"])
        loss = round(chosen["ms"] / min(row["ms"] for row in known) - 1, 4)
        keys = ("schedule", "cut", "stack", "exchange")
        case["choice"] = {**{key: chosen.get(key) for key in keys}, "loss": loss}


def predict_peaks(document: Report) -> None:
    """Add predictions of ``peak_bytes`` to every row and case of a result. Needs no cluster."""
    for case in document["cases"]:
        block = block_of(case, document["ranks"])
        num_layers: int = case.get("layers", 1)
        case["stock_predicted_peak_bytes"] = round(_peak_bytes(block, Pipeline.of(1), num_layers))
        for row in filter(is_predicted, case["rows"]):
            pipeline = pipeline_of(row)
            block_of_row = replace(block, exchange=pipeline.exchange)
            row["predicted_peak_bytes"] = round(_peak_bytes(block_of_row, pipeline, num_layers))


def is_predicted(row: ReportView) -> bool:
    """Whether predictions know what a row measured: not padding of fixed rows, and no graphs."""
    return row.get("rows", EXACT) == EXACT and not row.get("graphs")


def _peak_bytes(block: Block, pipeline: Pipeline, num_layers: int) -> float:
    return peak_bytes(block, pipeline, local=block.local, gathers=True, num_layers=num_layers)


def _predicted_ms(pipeline: Pipeline, predictor: Predictor, *, layers: int) -> float:
    """The time of one pass through ``layers`` layers; ``predictor`` is for one layer."""
    predictor = predictor.changed(exchange=pipeline.exchange)

    def predicted_us(num_layers: int) -> float:
        stack = predictor.of_layers(num_layers, memory=pipeline.memory)
        if pipeline.is_stock:
            time = stack.stock()
        else:
            chunks = pipeline.chunks(predictor.block.sequence_length)
            schedule = pipeline.schedule_of(stack.layers)
            time = stack.pass_us(schedule, [chunk.hidden[0].length for chunk in chunks])
        return time.forward + time.backward

    stacks, others = divmod(layers, pipeline.stack)
    return (stacks * predicted_us(pipeline.stack) + (predicted_us(others) if others else 0.0)) / 1e3


def pipeline_of(row: ReportView) -> Pipeline:
    """The pipeline that a row measured; older results lack some of the fields."""
    return Pipeline.of(
        row["degree"],
        backward_degree=row["backward_degree"],
        shares=tuple(row["shares"]) if row.get("shares") else None,
        schedule=row["schedule"] if row["schedule"] in SCHEDULE_NAMES else "ampipe",
        order=from_text(row["order"]) if row.get("order") else None,
        stack=row.get("stack", 1),
        memory=row.get("memory", KEEP),
        exchange=Exchange(row.get("exchange", Exchange.ROWS)),
    )


def block_of(case: ReportView, num_ranks: int) -> Block:
    """The block of a case of a result."""
    # Results of older versions have gradients that AMPipe summed.
    fused = case.get("fused_gradients", False)
    return block_of_case(Case(**case["block"]), num_ranks=num_ranks, fused_gradients=fused)
