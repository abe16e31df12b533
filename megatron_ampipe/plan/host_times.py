"""How a plan depends on the host, which issues every stage to a device: the plans for slower hosts.

Cluster files assume a time to issue a stage, or ``ampipe profile`` has measured it. With more chunks a host
issues more stages, so on a slow host fewer chunks are faster, or none. Quick searches with multiples of the
assumed time show from where on another plan is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from megatron_ampipe.plan.cluster import Cluster, IssuedKind, Overhead
from megatron_ampipe.plan.planner import PlanOptions, make_plans
from megatron_ampipe.plan.predict import GRAPH_LAUNCH_US, Predictor
from megatron_ampipe.plan.search import DEGREES, MINIMUM_SAVING
from megatron_ampipe.plan.whole_passes import WholePasses
from megatron_ampipe.schedule import Exchange, Pipeline

FACTORS = (1.0, 2.0, 4.0, 8.0)
"""Multiples of the assumed time. An H200's host took four to five times what the cluster files assume."""
NUM_HALVINGS = 2
"""How often the range between two of them is halved, on a logarithmic scale, to find where a plan changes."""
_DEGREES = (1, 2, 3, 4)
CAPTURED: tuple[IssuedKind, ...] = ("qkv", "attention", "route")
"""The stages of the modules ``attn``, ``moe_router`` and ``moe_preprocess``."""


@dataclass(frozen=True, slots=True)
class HostRow:
    """The plan for a host's time.

    Attributes:
        forward_us: Time to issue a stage of a forward pass, in microseconds.
        backward_us: The same of a backward pass.
        choice: What is chosen, in words.
        speedup: Predicted speed over Megatron's layers.
    """

    forward_us: float
    backward_us: float
    choice: str
    speedup: float


def with_host_times(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with a host that takes ``factor`` times as long to issue any stage."""
    host = cluster.host
    issue_of = host.issue_of
    if issue_of is not None:
        issue_of = {kind: _scaled(overhead, factor) for kind, overhead in issue_of.items()}
    graph = None if host.graph is None else _scaled(host.graph, factor)
    issue = _scaled(host.issue, factor)
    return replace(cluster, host=replace(host, issue=issue, issue_of=issue_of, graph=graph))


def with_graphs(cluster: Cluster) -> Cluster:
    """The cluster with a host for which a captured stage is one launch (``--cuda-graph-modules``)."""
    launch = replace(cluster.host.issue, forward_us=GRAPH_LAUNCH_US, backward_us=GRAPH_LAUNCH_US)
    issue_of = {**(cluster.host.issue_of or {}), **dict.fromkeys(CAPTURED, launch)}
    return replace(cluster, host=replace(cluster.host, issue_of=issue_of))


def by_host_time(
    predictor: Predictor,
    chosen: Pipeline,
    *,
    further: Sequence[WholePasses] = (),
    **options: Unpack[PlanOptions],
) -> list[HostRow]:
    """The plans for the assumed host and for slower ones, each with the time from which on it is chosen.

    Compared are equal chunks in named orders, with the exchange of the chosen plan, so the first row can be
    a little slower than that plan. Empty where no host issues stages to a device (training on a CPU).

    Args:
        predictor: The predictor of all layers of a pipeline stage.
        chosen: The plan for the assumed host.
        further: The same layers with further flags, which are chosen where they are clearly faster.
        options: The options of :func:`~.planner.make_plans`; of the degrees, those up to four are compared.
    """
    if not predictor.cluster.host.issue.forward_us:
        return []
    degrees = options.get("degrees", DEGREES)
    few_degrees = tuple(degree for degree in degrees if degree in _DEGREES)
    options["full"] = False
    options["exchanges"] = (chosen.exchange,)
    options["degrees"] = few_degrees or degrees
    rows: dict[float, HostRow] = {}

    def row(factor: float) -> HostRow:
        if factor not in rows:
            rows[factor] = _row(predictor, further, factor, options)
        return rows[factor]

    return list(_changes(row))


def _changes(row: Callable[[float], HostRow]) -> Iterator[HostRow]:
    """The first row, and every row from which on another plan is chosen."""
    yield row(FACTORS[0])
    below = FACTORS[0]
    for factor in FACTORS[1:]:
        above = factor
        if row(above).choice != row(below).choice:
            for _ in range(NUM_HALVINGS):
                middle = (below * above) ** 0.5
                if row(middle).choice == row(below).choice:
                    below = middle
                else:
                    above = middle
            yield row(above)
        below = factor


def _row(
    predictor: Predictor, further: Sequence[WholePasses], factor: float, options: PlanOptions
) -> HostRow:
    cluster = with_host_times(predictor.cluster, factor)
    slower = predictor.on(cluster)
    plans = make_plans(slower, **options)
    choice, speedup = in_words(plans.chosen.pipeline), plans.chosen.predicted_speedup
    step_ms, stock_ms = plans.step_ms, slower.stock().total / 1e3
    of_rows: PlanOptions = {**options, "exchanges": (Exchange.ROWS,)}
    for whole in further:
        other = make_plans(whole.predictor.on(cluster), **of_rows)
        if other.chosen.helps and other.step_ms < step_ms * (1 - MINIMUM_SAVING):
            step_ms = other.step_ms
            choice, speedup = f"{in_words(other.chosen.pipeline)}, {whole.name}", stock_ms / step_ms
    issue = cluster.host.issue
    return HostRow(issue.forward_us, issue.backward_us, choice, speedup)


def in_words(pipeline: Pipeline) -> str:
    """The chunks and partners of a plan, without its order and shares."""
    if pipeline.partner is not None:
        cut = "uncut" if pipeline.partner.degree == 1 else f"in {pipeline.partner.degree} chunks"
        return f"partners {cut}"
    if pipeline.is_stock:
        return "Megatron's layers"
    if pipeline.num_chunks == 1:
        return "one chunk, weight gradients during transfers" if pipeline.overlaps else "one chunk"
    return f"{pipeline.num_chunks} chunks"


def _scaled(overhead: Overhead, factor: float) -> Overhead:
    forward_us, backward_us = factor * overhead.forward_us, factor * overhead.backward_us
    return replace(overhead, forward_us=forward_us, backward_us=backward_us)
