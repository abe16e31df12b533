"""Makes the plan of a model's blocks on a cluster.

Compares the results of :mod:`.search` for one block and for several layers that share a schedule, chooses one
and says why. The simpler plan is kept unless another is predicted to be clearly faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ampipe.plan.block import FLEX_BACKENDS
from megatron_ampipe.plan.operation_times import ZERO
from megatron_ampipe.plan.partners import DEGREES as TOGETHER_DEGREES
from megatron_ampipe.plan.partners import Together, as_megatron, best_together
from megatron_ampipe.plan.plan_file import Plan, made_for
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import (
    DEGREES,
    MINIMUM_SAVING,
    Candidate,
    by_time,
    choose_degree,
    full_plan,
    in_one_chunk,
    named,
)
from megatron_ampipe.schedule import ALL_LAYERS, Exchange, NodeLayout, Pipeline, Schedule, build
from megatron_ampipe.schedule.features import boundary

_WITH_WEIGHTS = ", and gradients of weights computed during transfers"
GROUPED = "--moe-grouped-gemm"
MINIMUM_SPEEDUP = 1.01
"""The least predicted speedup for which blocks are split into chunks; smaller ones are within the error."""


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans that were compared for the layers of a pipeline stage.

    ``alone`` is the plan of one block, with which all layers take ``blocks_ms`` one after another; ``shared``
    is the plan of layers that share a schedule, None if they cannot; ``chosen`` is one of them and why.
    If passes may have a partner, ``together`` is the best way to run two, ``as_megatron`` Megatron's way.
    ``fewer_bytes`` is the speedup by the chosen exchange over the first that was compared; ``by_exchange``
    are the milliseconds of the layers with each exchange (:attr:`step_ms`).
    """

    alone: Plan
    shared: Plan | None
    blocks_ms: float
    chosen: Plan
    together: Together | None = None
    as_megatron: Together | None = None
    fewer_bytes: float = 1.0
    by_exchange: Mapping[Exchange, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """Predicted time of the same layers with the chosen plan, with partners if it has them."""
        if self.chosen.partner_ms is not None:
            return self.chosen.partner_ms * (1 if self.shared is not None else self.blocks_ms / self.alone_ms)
        if self.chosen.num_layers == 1:
            return self.blocks_ms
        assert self.chosen.predicted_ms is not None
        return self.chosen.predicted_ms

    @property
    def alone_ms(self) -> float:
        """Predicted time of one block with its plan."""
        assert self.alone.predicted_ms is not None
        return self.alone.predicted_ms


def make_plan(predictor: Predictor, **options: Any) -> Plan:
    """The chosen plan of :func:`make_plans`, with the same options."""
    return make_plans(predictor, **options).chosen


def make_plans(
    predictor: Predictor,
    *,
    degrees: tuple[int, ...] = DEGREES,
    full: bool = True,
    stack: int = ALL_LAYERS,
    exchanges: Sequence[Exchange] = (Exchange.ROWS,),
    with_partner: float = 0.0,
) -> Plans:
    """Make plans for the layers of a pipeline stage, block by block and with a shared schedule; choose one.

    Args:
        predictor: The predictor of all these layers.
        degrees: The degrees that are tried.
        full: Whether to search unequal chunks and other orders too, which takes seconds.
        stack: How many layers may share a schedule: 1 is block by block, 0 all.
        exchanges: The exchanges that are compared; the first is kept unless another is predicted to be
            clearly faster. Exchanges that do not apply are left out, unless none would be left.
        with_partner: Share of a step's passes that can run together with a pass of another micro-batch.

    Raises:
        BadInput: the predicted time of a block is 0.
    """
    work, near = predictor.block, predictor.cluster.ranks_per_node
    useful = [exchange for exchange in exchanges if exchange in work.exchanges(near)]
    compared: dict[Exchange, Plans] = {}
    for exchange in useful or [Exchange.ROWS]:
        changed = predictor.changed(exchange=exchange)
        plans = _plans_of_exchange(changed, degrees=degrees, full=full, stack=stack)
        compared[exchange] = _with_partner(changed, plans, with_partner, stack=stack)
    first, *others = compared.values()
    best = first
    for plans in others:
        if plans.step_ms < (1 - MINIMUM_SAVING) * best.step_ms:
            best = plans
    by_exchange = {exchange: plans.step_ms for exchange, plans in compared.items()}
    best = replace(best, by_exchange=by_exchange, fewer_bytes=first.step_ms / best.step_ms)
    if not others:
        return best
    exchange = best.chosen.pipeline.exchange
    times = ", ".join(f"{name} {plans.step_ms:.4g} ms" for name, plans in compared.items())
    reason = f"{best.chosen.reason} Exchange {exchange}: predicted are {times}."
    if exchange.has_two_hops:
        layout = NodeLayout.of(work.settings, near)
        assert layout is not None
        fewer = layout.num_nodes - 1
        reason += (
            f" In each all-to-all, a rank sends {fewer} instead of {fewer * layout.ranks_per_node} messages "
            "to other nodes."
        )
    return replace(best, chosen=replace(best.chosen, reason=reason))


def alternatives(predictor: Predictor, **options: Any) -> dict[str, Plans]:
    """The plans with further flags of Megatron, by these flags.

    They are grouped GEMMs of the experts, and other dispatchers for which the cluster has figures.

    Args:
        predictor: The predictor of all layers of a pipeline stage.
        options: The options of :func:`make_plans`.

    Raises:
        BadInput: as :func:`make_plans`.
    """
    block, cluster = predictor.block, predictor.cluster
    changes: dict[str, dict[str, Any]] = {}
    if not (block.grouped or block.local or block.local_experts == 1):
        changes[GROUPED] = {"grouped": True}
    if block.expert > 1 and block.dispatcher != "alltoall":
        changes["--moe-token-dispatcher-type alltoall"] = {"dispatcher": "alltoall"}
    for backend in FLEX_BACKENDS:
        needed = [cluster.intra, cluster.inter]
        if block.expert * block.expert_tensor <= cluster.ranks_per_node:
            needed.pop()
        is_known = all(backend in (figures or {}) for figures in needed)
        if block.expert > 1 and backend != block.dispatcher and is_known:
            flags = f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {backend}"
            changes[flags] = {"dispatcher": backend}
    return {flags: make_plans(predictor.changed(**fields), **options) for flags, fields in changes.items()}


def _plans_of_exchange(predictor: Predictor, *, degrees: tuple[int, ...], full: bool, stack: int) -> Plans:
    """:func:`make_plans` with the exchange of the block."""
    if not predictor.stock().total > 0:
        predictor.cluster.refuse(
            "compute",
            "has figures with which the time of a block is 0",
            "Write the times of its operations, or measure the cluster with ampipe profile.",
        )
    alone, work = _block_plan(predictor.of_layers(1), degrees, full=full), predictor.block
    if stack == 1 or len(predictor.layers) == 1:
        return Plans(alone, None, _blocks_ms(predictor, alone), alone)
    why = boundary(work.settings, whole_attention=False)
    nothing = work.expert == 1 or work.rows == 1 or all(layer.dense for layer in predictor.layers)
    if nothing or why is not None:
        cannot = "" if why is None else f" Layers do not share a schedule: {why}."
        because = replace(alone, reason=f"{alone.reason}{cannot}")
        return Plans(alone, None, _blocks_ms(predictor, alone), because)
    sharing = sharing_layers(predictor, stack)
    candidate = _best(sharing, degrees, full=full)
    assert candidate is not None
    blocks_ms, shared = _blocks_ms(sharing, alone), plan_of(sharing, candidate, stack=stack)
    blocks, together = sharing.stock().total / 1e3 / blocks_ms, shared.predicted_speedup
    compared = f"predicted to be {together:.2f} times as fast as Megatron's, and block by block"
    if together < max(blocks / (1 - MINIMUM_SAVING), MINIMUM_SPEEDUP):
        reason = (
            f"{alone.reason} Sharing a schedule saves nothing more: {len(sharing.layers)} layers that share "
            f"one are {compared} {blocks:.2f} times."
        )
        return Plans(alone, shared, blocks_ms, replace(alone, reason=reason))
    before = f"with {_degrees(alone.schedule)} each" if alone.helps else "as Megatron runs them"
    reason = (
        f"With {len(sharing.layers)} layers as one schedule in {_degrees(shared.schedule)}, "
        f"{_hidden(sharing, candidate)}: the layers are {compared}, {before}, {blocks:.2f} times."
    )
    return Plans(alone, shared, blocks_ms, replace(shared, reason=reason))


def _with_partner(predictor: Predictor, plans: Plans, share: float, *, stack: int) -> Plans:
    """Add the fastest way to run two passes together, and choose it if it saves enough for this share."""
    plan, block = plans.chosen, predictor.block
    if share == 0 or block.expert == 1 or block.rows == 1:
        return plans
    shares = plans.shared is not None
    running = sharing_layers(predictor, stack) if shares else predictor.of_layers(1)
    others = {plan.pipeline.degree, plan.pipeline.backward_degree}
    possible = (
        degree
        for degree in TOGETHER_DEGREES
        if all(max(degree, other) % min(degree, other) == 0 for other in others)
    )
    best = best_together(running, possible)
    plans = replace(plans, together=best, as_megatron=as_megatron(running))
    stock_ms, partner_ms = running.stock().total / 1e3, best.time_us / 1e3
    alone_ms = plans.step_ms if shares else plans.alone_ms
    compared = (
        f"{stock_ms / partner_ms:.2f} times as fast as Megatron's, without one {stock_ms / alone_ms:.2f}"
    )
    if share * partner_ms + (1 - share) * alone_ms >= (1 - MINIMUM_SAVING) * alone_ms:
        reason = f"{plan.reason} Partners save nothing more: passes with one are predicted to be {compared}."
        return replace(plans, chosen=replace(plan, reason=reason))
    if shares and plan.helps and plans.shared is not None:
        plan = replace(plans.shared, reason=plan.reason)
    alone = plan.reason if plan.helps else "They run as Megatron's."
    chosen = replace(
        plan,
        # Two passes can only run together if they have the same number of layers.
        pipeline=replace(plan.pipeline, stack=stack if shares else plan.pipeline.stack, partner=best.partner),
        partner_ms=partner_ms,
        partner_stock_ms=stock_ms,
        reason="While the tokens of one micro-batch travel, another one computes: passes with a partner are "
        f"predicted to be {compared}. Passes without one: {alone}",
    )
    return replace(plans, chosen=chosen)


def sharing_layers(predictor: Predictor, stack: int) -> Predictor:
    """The predictor of those layers of a pipeline stage that share one schedule."""
    count = len(predictor.layers)
    return predictor if stack == ALL_LAYERS or stack >= count else predictor.of_layers(stack)


def _blocks_ms(predictor: Predictor, alone: Plan) -> float:
    """The time of all layers run block by block, with the plan of one block."""
    assert alone.predicted_ms is not None and alone.stock_ms is not None
    with_experts = sum(not features.dense for features in predictor.layers)
    others_ms = predictor.stock().total / 1e3 - with_experts * alone.stock_ms
    return with_experts * alone.predicted_ms + others_ms


def _block_plan(predictor: Predictor, degrees: tuple[int, ...], *, full: bool) -> Plan:
    """The plan of one block, or Megatron's layer if no speedup is predicted."""
    stock, work = predictor.stock(), predictor.block
    best = _best(predictor, degrees, full=full)
    speedup = 0.0 if best is None else stock.total / best.total_us
    if best is not None and speedup >= MINIMUM_SPEEDUP:
        plan = plan_of(predictor, best)
        reason = (
            f"With {_degrees(plan.schedule)}, {_hidden(predictor, best)}: the block is predicted to be "
            f"{speedup:.2f} times as fast as Megatron's."
        )
        return replace(plan, reason=reason)
    why = "a sequence of one row cannot be split"
    if work.rows > 1:
        why = f"no degree cuts the {work.rows} rows of a rank into chunks, with FP8 of whole tiles"
    if work.expert == 1:
        why = "each rank holds all experts, so nothing is sent that could be hidden"
    elif best is not None:
        whole = predictor.stages((work.rows,)).items()
        sent = [time for stage, time in whole if stage.is_communication and not stage.kind.copies]
        why = (
            f"communication is {sum(sent, ZERO).total / stock.total:.0%} of the block, and the "
            "overhead of chunks is about as large as the time that they hide, or larger (the best, schedule "
            f"{best.schedule.name} in {_degrees(best.schedule)}, is predicted to be {speedup:.2f} times as "
            "fast)"
        )
    schedule = build("sequential", degree=1, features=predictor.features)
    megatron = plan_of(predictor, Candidate(schedule, (work.rows,), stock))
    pipeline = replace(megatron.pipeline, exchange=Exchange.ROWS)
    return replace(megatron, pipeline=pipeline, hidden_share=0.0, reason=f"AMPipe will not help: {why}.")


def _best(predictor: Predictor, degrees: tuple[int, ...], *, full: bool) -> Candidate | None:
    """The best way to run the layers with AMPipe; None if nothing can overlap."""
    best: Candidate | None = None
    block = predictor.block
    possible = [degree for degree in degrees if block.splits_into(degree)]
    if block.expert > 1 and possible:
        best = (full_plan if full else choose_degree)(predictor, possible)
        if block.exchange is not Exchange.ROWS and len(predictor.layers) == 1:
            # Without chunks nothing is hidden, but its exchange may be the faster one.
            best = min(named(predictor, "ampipe", 1, 1), best, key=by_time)
    whole = in_one_chunk(predictor)
    if whole is not None and (best is None or best.total_us > whole.total_us * (1 - MINIMUM_SAVING)):
        # It is simpler, and costs nothing if its prediction is wrong.
        best = whole
    return best


def plan_of(predictor: Predictor, candidate: Candidate, *, stack: int = 1) -> Plan:
    """The plan of a candidate, without a reason."""
    timeline, cluster = predictor.timeline(candidate.schedule, candidate.lengths), predictor.cluster
    pipeline = Pipeline.of(
        candidate.schedule.degree,
        backward_degree=candidate.schedule.backward_degree,
        shares=tuple(length / predictor.block.rows for length in candidate.lengths),
        order=candidate.schedule,
        stack=stack,
        memory=predictor.memory,
        exchange=predictor.block.exchange,
    )
    return Plan(
        pipeline=pipeline,
        num_layers=len(predictor.layers),
        stock_ms=predictor.stock().total / 1e3,
        predicted_ms=candidate.total_us / 1e3,
        stages_forward_ms=timeline.length_us("forward") / 1e3,
        stages_backward_ms=timeline.length_us("backward") / 1e3,
        hidden_share=timeline.hidden_share,
        memory_gib=predictor.peak_bytes(pipeline) / 2**30,
        reason="",
        made_for=made_for(
            predictor.block, cluster=cluster.description, ranks_per_node=cluster.ranks_per_node
        ),
    )


def _hidden(predictor: Predictor, candidate: Candidate) -> str:
    timeline = predictor.timeline(candidate.schedule, candidate.lengths)
    communication_ms = timeline.communication_us / 1e3
    share = f"{timeline.hidden_share:.0%} of {communication_ms:.4g} ms of communication"
    return f"{share} are hidden under computation"


def _degrees(schedule: Schedule) -> str:
    """The number of chunks of a schedule, in words."""
    if schedule.num_chunks == 1:
        return "one chunk" + (_WITH_WEIGHTS if schedule.backward.weights else "")
    if schedule.backward_degree == schedule.degree:
        return f"{schedule.degree} chunks"
    return f"{schedule.degree} chunks forward and {schedule.backward_degree} backward"
