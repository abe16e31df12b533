"""How sure a plan is: its predicted speedup if the host or the links are other than the cluster file says.

The plan stays the same; only what it is predicted from changes. :mod:`.host_times` says from where on another
plan would be chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.plan.cluster import Cluster, Operation, TransferCost
from megatron_ampipe.plan.host_times import with_host_times
from megatron_ampipe.plan.partners import prediction
from megatron_ampipe.plan.planner import sharing_layers
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import Pipeline

FACTORS = (0.25, 0.35, 0.5, 0.71, 1.0, 1.41, 2.0, 2.83, 4.0, 5.66, 8.0)
"""Multiples of the host's time, and of the rate of the links."""


@dataclass(frozen=True, slots=True)
class Line:
    """The predicted speedup of one plan over a figure of the cluster file.

    Attributes:
        name: What the figure is, with its unit.
        basis: How the file knows it (``Figure.basis``).
        given: Its value in the file.
        values: Other values, ascending.
        speedups: The predicted speedup over Megatron's layers at each value.
    """

    name: str
    basis: str
    given: float
    values: Sequence[float]
    speedups: Sequence[float]


def speedup_of(predictor: Predictor, pipeline: Pipeline) -> float:
    """The predicted speedup of a pipeline over Megatron's layers, with a partner where it has one.

    ``predictor`` is of all layers of a pipeline stage.
    """
    running = sharing_layers(predictor.changed(exchange=pipeline.exchange), pipeline.stack)
    stock_us = running.stock().total
    if pipeline.partner is not None:
        return stock_us / prediction(running, pipeline.partner).time_us
    if pipeline.is_stock:
        return 1.0
    lengths = [chunk.hidden[0].length for chunk in pipeline.chunks(predictor.block.rows)]
    return stock_us / running.pass_us(pipeline.schedule_of(running.layers), lengths).total


def with_link_rate(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with ``factor`` times the rate of all links between ranks; latencies stay."""
    return replace(cluster, intra=_faster(cluster.intra, factor), inter=_faster(cluster.inter, factor))


def _faster(
    figures: Mapping[Operation, TransferCost] | None, factor: float
) -> dict[Operation, TransferCost] | None:
    return None if figures is None else {name: _scaled(cost, factor) for name, cost in figures.items()}


def _scaled(cost: TransferCost, factor: float) -> TransferCost:
    table = cost.table
    if table is not None:
        table = tuple(
            replace(point, us=cost.alpha_us + (point.us - cost.alpha_us) / factor) for point in table
        )
    return replace(cost, beta_us_per_mb=cost.beta_us_per_mb / factor, table=table)


def over_host_time(predictor: Predictor, pipeline: Pipeline) -> Line | None:
    """The speedup over the host's time to issue a stage; None in training on a CPU, where no host issues."""
    issue = predictor.cluster.host.issue
    if not issue.forward_us:
        return None

    def speedup(factor: float) -> float:
        return speedup_of(predictor.on(with_host_times(predictor.cluster, factor)), pipeline)

    name = "host's time to issue a stage forward, us"
    return _line(name, issue.basis, issue.forward_us, speedup)


def over_link_rate(predictor: Predictor, pipeline: Pipeline) -> Line | None:
    """The speedup over the rate of the slowest links of the all-to-alls; None without such links."""
    block, cluster = predictor.block, predictor.cluster
    if block.expert == 1:
        return None
    crosses_nodes = block.expert * block.expert_tensor > cluster.ranks_per_node
    figures = cluster.inter if crosses_nodes else cluster.intra
    cost = (figures or {}).get("all_to_all")
    if cost is None or not cost.beta_us_per_mb:
        return None

    def speedup(factor: float) -> float:
        return speedup_of(predictor.on(with_link_rate(cluster, factor)), pipeline)

    where = "between nodes" if crosses_nodes else "within a node"
    return _line(
        f"rate of an all-to-all {where}, GB/s per rank", cost.basis, 1e3 / cost.beta_us_per_mb, speedup
    )


def _line(name: str, basis: str, given: float, speedup: Callable[[float], float]) -> Line:
    values = [factor * given for factor in FACTORS]
    return Line(name, basis, given, values, [speedup(factor) for factor in FACTORS])
