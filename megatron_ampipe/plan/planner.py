"""Makes the plan of a model's blocks on a cluster: block by block, or several layers as one schedule.

Chooses between what :mod:`.search` finds for one block and for several layers, and says why.
The simpler plan is kept unless another is predicted to be faster by more than predictions are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.plan.plan_file import MadeFor, Plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import (
    DEGREES,
    MINIMUM_SAVING,
    Candidate,
    candidates,
    choose_degree,
    full_plan,
    in_one_chunk,
    named,
)
from megatron_ampipe.schedule import ALL_LAYERS, Exchange, NodeLayout, build
from megatron_ampipe.schedule.features import boundary

MINIMUM_SPEEDUP = 1.01
"""Blocks are not split into chunks for a smaller predicted speedup: predictions are not that exact."""


@dataclass(frozen=True, slots=True)
class Plans:
    """What was compared for the layers of a pipeline stage.

    Attributes:
        alone: The plan of one block; with it, blocks run one after another.
        shared: The plan of layers that share a schedule; None if they cannot.
        blocks_ms: Time of the same layers block by block.
        chosen: One of the two, with the reason.
    """

    alone: Plan
    shared: Plan | None
    blocks_ms: float
    chosen: Plan

    @property
    def chosen_ms(self) -> float:
        """Predicted time of the same layers with the chosen plan."""
        if self.shared is None or self.chosen.stack == 1:
            return self.blocks_ms
        assert self.shared.predicted_ms is not None
        return self.shared.predicted_ms


def make_plan(predictor: Predictor, **options: Any) -> Plan:
    """The chosen one of :func:`make_plans`, with the same options."""
    return make_plans(predictor, **options).chosen


def make_plans(
    predictor: Predictor,
    *,
    degrees: tuple[int, ...] = DEGREES,
    full: bool = True,
    stack: int = ALL_LAYERS,
    exchanges: Sequence[Exchange] = (Exchange.ROWS,),
) -> Plans:
    """Make a plan for the layers of a pipeline stage, block by block and together, and choose.

    Args:
        predictor: Of all of these layers.
        degrees: The degrees that are tried.
        full: Whether unequal chunks and other orders are searched too; without them, the search takes a few
            milliseconds.
        stack: How many layers may share a schedule: 1 is block by block, 0 all.
        exchanges: Those that are compared; the first is kept unless another is predicted to save more than
            predictions are exact. One that does not apply is left out if others are left.

    Returns:
        The plans with the chosen exchange.

    Raises:
        BadInput: the predicted time of a block is 0.
    """
    possible = predictor.workload.exchanges(predictor.cluster.ranks_per_node)
    useful = [one for one in exchanges if one in possible]
    found = [
        _plans_of_exchange(predictor.with_exchange(one), degrees=degrees, full=full, stack=stack)
        for one in useful or [Exchange.ROWS]
    ]
    best = found[0]
    for plans in found[1:]:
        if plans.chosen_ms < (1 - MINIMUM_SAVING) * best.chosen_ms:
            best = plans
    if len(found) == 1:
        return best
    compared = ", ".join(f"{plans.chosen.exchange} {plans.chosen_ms:.4g} ms" for plans in found)
    reason = f"{best.chosen.reason} Exchange {best.chosen.exchange}: predicted are {compared}."
    if best.chosen.exchange.has_two_hops:
        work, near = predictor.workload, predictor.cluster.ranks_per_node
        layout = NodeLayout.of(expert=work.expert, expert_tensor=work.expert_tensor, ranks_per_node=near)
        assert layout is not None
        fewer = layout.num_nodes - 1
        reason += (
            f" In each all-to-all, a rank sends {fewer} instead of {fewer * layout.ranks_per_node} messages "
            "to other nodes."
        )
    return replace(best, chosen=replace(best.chosen, reason=reason))


def _plans_of_exchange(predictor: Predictor, *, degrees: tuple[int, ...], full: bool, stack: int) -> Plans:
    """:func:`make_plans` with the exchange of the workload.

    Block by block is chosen if sharing a schedule saves nothing; its degree is 1 if no speedup is predicted.
    """
    stock = predictor.stock()
    if not stock.total > 0:
        raise BadInput(
            "cluster",
            predictor.cluster.path,
            rule="has figures with which the time of a block is 0",
            remedy="Write the times of its operations, or measure the cluster with ampipe profile.",
        )
    alone = _block_plan(predictor.of_layers(1), degrees, full=full)
    if stack == 1 or len(predictor.layers) == 1:
        return Plans(alone, None, _blocks_ms(predictor, alone), alone)
    if (why := _cannot_share(predictor)) is not None:
        because = replace(alone, reason=f"{alone.reason} {why}")
        return Plans(alone, None, _blocks_ms(predictor, alone), because)
    sharing = sharing_layers(predictor, stack)
    found = _best(sharing, degrees, full=full)
    assert found is not None
    blocks_ms = _blocks_ms(sharing, alone)
    shared = replace(_plan_without_reason(sharing, found), stack=stack)
    blocks = sharing.stock().total / 1e3 / blocks_ms
    if shared.predicted_speedup < max(blocks / (1 - MINIMUM_SAVING), MINIMUM_SPEEDUP):
        why = (
            f"Sharing a schedule saves nothing more: {len(sharing.layers)} layers that share one are "
            f"predicted to be {shared.predicted_speedup:.2f} times as fast as Megatron's, block by block "
            f"{blocks:.2f} times."
        )
        return Plans(alone, shared, blocks_ms, replace(alone, reason=f"{alone.reason} {why}"))
    before = "as Megatron runs them" if not alone.helps else f"with {_degrees(alone)} each"
    communication_ms = sharing.timeline(found.schedule, found.lengths).communication_us / 1e3
    reason = (
        f"With {len(sharing.layers)} layers as one schedule in {_degrees(shared)}, {shared.hidden_share:.0%} "
        f"of {communication_ms:.4g} ms of communication are hidden under computation: the layers are "
        f"predicted to be {shared.predicted_speedup:.2f} times as fast as Megatron's, and block by block, "
        f"{before}, {blocks:.2f} times."
    )
    return Plans(alone, shared, blocks_ms, replace(shared, reason=reason))


def sharing_layers(predictor: Predictor, stack: int) -> Predictor:
    """A predictor of the layers that share one schedule, of those of a pipeline stage."""
    count = len(predictor.layers)
    return predictor if stack == ALL_LAYERS or stack >= count else predictor.of_layers(stack)


def _cannot_share(predictor: Predictor) -> str | None:
    """Why layers do not share a schedule, as a sentence; None if they can."""
    workload = predictor.workload
    with_experts = sum(features.experts for features in predictor.layers)
    if workload.expert == 1 or workload.rows == 1:
        return "Nothing is hidden, so layers do not share a schedule."
    if len(predictor.layers) == 1 or not with_experts:
        return "A pipeline stage has one layer, so none share a schedule."
    reason = boundary(workload.settings, whole_attention=False)
    if reason is not None:
        return f"Layers do not share a schedule: {reason}."
    return None


def _blocks_ms(predictor: Predictor, alone: Plan) -> float:
    """The time of all layers of a predictor block by block, with the plan of one block."""
    assert alone.predicted_ms is not None and alone.stock_ms is not None
    with_experts = sum(features.experts for features in predictor.layers)
    others_ms = predictor.stock().total / 1e3 - with_experts * alone.stock_ms
    return with_experts * alone.predicted_ms + others_ms


def _block_plan(predictor: Predictor, degrees: tuple[int, ...], *, full: bool) -> Plan:
    stock = predictor.stock()
    workload = predictor.workload
    best = _best(predictor, degrees, full=full)
    if best is None or _speedup(stock, best) < MINIMUM_SPEEDUP:
        schedule = build("sequential", degree=1, features=predictor.features)
        megatron = _plan_without_reason(predictor, Candidate(schedule, (workload.rows,), stock))
        return replace(
            megatron, exchange=Exchange.ROWS, hidden_share=0.0, reason=_reason_against(predictor, best)
        )
    return plan_of(predictor, best, degrees=degrees)


def _best(predictor: Predictor, degrees: tuple[int, ...], *, full: bool) -> Candidate | None:
    """The best way to run the layers in AMPipe's; None if nothing can overlap."""
    best: Candidate | None = None
    if predictor.workload.rows > 1 and predictor.workload.expert > 1:
        best = (full_plan if full else choose_degree)(predictor, degrees)
        if predictor.workload.exchange is not Exchange.ROWS and len(predictor.layers) == 1:
            # Without chunks nothing is hidden, but its exchange may be the faster one.
            best = min(named(predictor, "ampipe", 1, 1), best, key=lambda one: one.total_us)
    whole = in_one_chunk(predictor)
    if whole is not None and (best is None or best.total_us > whole.total_us * (1 - MINIMUM_SAVING)):
        # The simpler one, and the one that costs nothing where its prediction is wrong.
        best = whole
    return best


def plan_of(predictor: Predictor, found: Candidate, *, degrees: tuple[int, ...] = DEGREES) -> Plan:
    """The plan of a chosen candidate; its reason compares the next smaller and the next larger degree."""
    plan = _plan_without_reason(predictor, found)
    communication_ms = predictor.timeline(found.schedule, found.lengths).communication_us / 1e3
    return replace(plan, reason=_reason(predictor, plan, communication_ms, degrees))


def _plan_without_reason(predictor: Predictor, found: Candidate) -> Plan:
    timeline, cluster = predictor.timeline(found.schedule, found.lengths), predictor.cluster
    return Plan(
        schedule=found.schedule,
        shares=tuple(length / predictor.workload.rows for length in found.lengths),
        memory=predictor.memory,
        exchange=predictor.workload.exchange,
        num_layers=len(predictor.layers),
        stock_ms=predictor.stock().total / 1e3,
        predicted_ms=found.total_us / 1e3,
        stages_forward_ms=timeline.length_us("forward") / 1e3,
        stages_backward_ms=timeline.length_us("backward") / 1e3,
        hidden_share=timeline.hidden_share,
        memory_gib=predictor.peak_bytes(found.schedule) / 2**30,
        reason="",
        made_for=MadeFor.of(
            predictor.workload, cluster=cluster.description, ranks_per_node=cluster.ranks_per_node
        ),
    )


def _degrees(plan: Plan) -> str:
    """How many chunks a plan has, as words."""
    if plan.schedule.num_chunks == 1:
        weights = ", and gradients of weights computed during transfers"
        return "one chunk" + (weights if plan.schedule.backward.weights else "")
    if plan.backward_degree == plan.forward_degree:
        return f"{plan.forward_degree} chunks"
    return f"{plan.forward_degree} chunks forward and {plan.backward_degree} backward"


def _reason(predictor: Predictor, plan: Plan, communication_ms: float, degrees: tuple[int, ...]) -> str:
    count = plan.schedule.num_chunks
    fewer = [degree for degree in degrees if degree < count][-1:]
    more = [degree for degree in degrees if count < degree <= predictor.workload.rows][:1]
    others = []
    for degree in (*fewer, *more):
        best = min(candidates(predictor, [degree]), key=lambda one: one.total_us)
        others.append(f"{_speedup(predictor.stock(), best):.2f} with {degree}")
    compared = f", compared with {' and '.join(others)} equal chunks" if others else ""
    return (
        f"With {_degrees(plan)}, {plan.hidden_share:.0%} of {communication_ms:.3g} ms of communication are "
        f"hidden under computation: the block is predicted to be {plan.predicted_speedup:.2f} times as fast "
        f"as Megatron's{compared}."
    )


def _reason_against(predictor: Predictor, best: Candidate | None) -> str:
    if predictor.workload.expert == 1:
        return "AMPipe will not help: each rank holds all experts, so nothing is sent that could be hidden."
    if best is None:
        return "AMPipe will not help: a sequence of one row cannot be split."
    found = f"degree that was found, {best.schedule.num_chunks}"
    if best.schedule.num_chunks == 1:
        found = "schedule that was found, which overlaps gradients of weights alone"
    stock = predictor.stock()
    share = predictor.communication_us() / stock.total
    return (
        f"AMPipe will not help: communication is {share:.0%} of the block, and the overhead of chunks is "
        f"about as large as the time that they hide, or larger (the best {found}, "
        f"is predicted to be {_speedup(stock, best):.2f} times as fast)."
    )


def _speedup(stock: Pair, found: Candidate) -> float:
    return stock.total / found.total_us
