"""Makes the plan of a model's blocks on a cluster.

Compares the results of :mod:`.search` for one block and for several layers that share a schedule, and
:mod:`.partners`, chooses the fastest and says why. Megatron's own layers are kept unless the speedup is
clear. What is found for a degree, an exchange or partners does not depend on what else is compared, so a
wider search never answers worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict, Unpack

from megatron_ampipe.plan.block import FLEX_BACKENDS
from megatron_ampipe.plan.operation_times import ZERO
from megatron_ampipe.plan.partners import DEGREES as TOGETHER_DEGREES
from megatron_ampipe.plan.partners import PartnerPrediction, as_megatron, best_partners
from megatron_ampipe.plan.plan_file import Plan, made_for
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import (
    DEGREES,
    MINIMUM_SAVING,
    NAMED,
    Candidate,
    by_time,
    fastest,
    in_one_chunk,
    least_of_degree,
    named,
)
from megatron_ampipe.plan.simulate import NOT_YET
from megatron_ampipe.schedule import ALL_LAYERS, Exchange, NodeLayout, Partner, Pipeline, Schedule, build
from megatron_ampipe.schedule.features import boundary

_WITH_WEIGHTS = ", and gradients of weights computed during transfers"
GROUPED = "--moe-grouped-gemm"
MINIMUM_SPEEDUP = 1 + MINIMUM_SAVING
"""The least predicted speedup for which blocks are split into chunks; smaller ones are within the error."""


Progress = Callable[[str], None]
"""Takes what is searched next, in a few words."""


def print_nothing(_: str) -> None:
    """The :data:`Progress` of a search that nobody watches."""


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans that were compared for the layers of a pipeline stage.

    ``alone`` is the plan of one block, with which all layers take ``blocks_ms`` one after another; ``shared``
    is the plan of layers that share a schedule, None if they cannot; ``chosen`` is one of them and why.
    If passes may have a partner, ``together`` is the best way to run two, ``as_megatron`` Megatron's way.
    If partners are chosen, ``partners_ms`` is the time of all layers in passes with one, and ``mixed_ms``
    the average over all passes of a step.
    ``fewer_bytes`` is the speedup by the chosen exchange over the first that was compared; ``by_exchange``
    are the milliseconds of the layers with each exchange (:attr:`step_ms`).
    """

    alone: Plan
    shared: Plan | None
    blocks_ms: float
    chosen: Plan
    together: PartnerPrediction | None = None
    as_megatron: PartnerPrediction | None = None
    partners_ms: float | None = None
    mixed_ms: float | None = None
    fewer_bytes: float = 1.0
    by_exchange: Mapping[Exchange, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """Predicted time of the same layers with the chosen plan, with partners where passes have them."""
        if self.mixed_ms is not None:
            return self.mixed_ms
        if self.chosen.num_layers == 1:
            return self.blocks_ms
        assert self.chosen.predicted_ms is not None
        return self.chosen.predicted_ms

    @property
    def alone_ms(self) -> float:
        """Predicted time of one block with its plan."""
        assert self.alone.predicted_ms is not None
        return self.alone.predicted_ms


class PlanOptions(TypedDict, total=False):
    """The options of :func:`make_plans`."""

    degrees: tuple[int, ...]
    full: bool
    stack: int
    exchanges: Sequence[Exchange]
    with_partner: float
    progress: Progress


def make_plan(predictor: Predictor, **options: Unpack[PlanOptions]) -> Plan:
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
    progress: Progress = print_nothing,
) -> Plans:
    """Make plans for the layers of a pipeline stage, block by block and with a shared schedule; choose one.

    Args:
        predictor: The predictor of all these layers.
        degrees: The degrees that are tried.
        full: Whether to search unequal chunks and other orders too, which takes seconds.
        stack: How many layers may share a schedule: 1 is block by block, 0 all.
        exchanges: The exchanges that are compared; of equally fast ones the first is chosen. Exchanges that
            do not apply are left out, unless none would be left.
        with_partner: Share of a step's passes that can run together with a pass of another micro-batch.
        progress: Called with what is searched next.

    Raises:
        BadInput: the predicted time of a block is 0.
    """
    block = predictor.block
    useful = block.exchanges(predictor.cluster.ranks_per_node)
    compared_exchanges = [exchange for exchange in exchanges if exchange in useful] or [Exchange.ROWS]
    searches = {
        exchange: _Search(predictor.changed(exchange=exchange), degrees, full, stack, with_partner)
        for exchange in compared_exchanges
    }
    plans_of: dict[Exchange, Plans] = {}
    below_ms = NOT_YET
    # The most promising first, because what is slower in any case is searched less.
    for exchange in sorted(searches, key=lambda exchange: searches[exchange].least_us):
        progress(
            f"{block.dispatcher}, exchange {exchange}" if block.expert > 1 else "one rank for all experts"
        )
        plans_of[exchange] = searches[exchange].plans(below_ms)
        below_ms = min(below_ms, plans_of[exchange].step_ms)
    by_exchange = {exchange: plans_of[exchange].step_ms for exchange in compared_exchanges}
    # Of equally fast ones, the first that was asked for.
    fastest_exchange = min(by_exchange, key=by_exchange.__getitem__)
    best = plans_of[fastest_exchange]
    first_ms = by_exchange[compared_exchanges[0]]
    best = replace(best, by_exchange=by_exchange, fewer_bytes=first_ms / best.step_ms)
    if len(by_exchange) == 1:
        return best
    reason = f"{best.chosen.reason} {_why_exchange(predictor, best)}"
    return replace(best, chosen=replace(best.chosen, reason=reason))


def _why_exchange(predictor: Predictor, plans: Plans) -> str:
    """Why the exchange of the chosen plan is the best of several."""
    exchange = plans.chosen.pipeline.exchange
    times = ", ".join(f"{name} {time_ms:.4g} ms" for name, time_ms in plans.by_exchange.items())
    reason = f"Exchange {exchange}: predicted are {times}."
    if not exchange.has_two_hops:
        return reason
    layout = NodeLayout.of(predictor.block.settings, predictor.cluster.ranks_per_node)
    assert layout is not None
    other_nodes = layout.num_nodes - 1
    other_ranks = other_nodes * layout.ranks_per_node
    return (
        f"{reason} In each all-to-all, a rank sends {other_nodes} instead of {other_ranks} messages to other "
        "nodes."
    )


def alternatives(predictor: Predictor, **options: Unpack[PlanOptions]) -> dict[str, Plans]:
    """The plans with further flags of Megatron, by these flags.

    They are grouped GEMMs of the experts, and other dispatchers for which the cluster has figures.

    Args:
        predictor: The predictor of all layers of a pipeline stage.
        options: The options of :func:`make_plans`.

    Raises:
        BadInput: as :func:`make_plans`.
    """
    block, cluster = predictor.block, predictor.cluster
    changes: dict[str, dict[str, object]] = {}
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


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the plans of a block with one exchange; the fields are options of :func:`make_plans`.

    Where another exchange is faster in any case (``below_ms``, milliseconds of all layers), named schedules
    with equal chunks are enough.
    """

    predictor: Predictor
    degrees: tuple[int, ...]
    full: bool
    stack: int
    with_partner: float

    @property
    def least_us(self) -> float:
        """A lower bound of the time of all layers as one schedule, without partners."""
        block = self.predictor.block
        possible = [degree for degree in self.degrees if block.splits_into(degree)]
        return min((least_of_degree(self.predictor, degree) for degree in possible), default=0.0)

    def plans(self, below_ms: float) -> Plans:
        """Compare all ways to run the layers, and choose the fastest."""
        return self._with_partner(self._without_partner(below_ms), below_ms)

    def _best(
        self, predictor: Predictor, degrees: Sequence[int], *, below_us: float = NOT_YET
    ) -> Candidate | None:
        """The best way to run the layers with AMPipe; None if nothing can overlap."""
        block = predictor.block
        ways: list[Candidate] = []
        possible = [degree for degree in degrees if block.splits_into(degree)]
        if block.expert > 1 and possible:
            ways.append(fastest(predictor, possible, full=self.full, below_us=below_us))
        if ways and block.exchange is not Exchange.ROWS and len(predictor.layers) == 1:
            # Without chunks nothing is hidden, but its exchange may be the faster one.
            ways.insert(0, named(predictor, NAMED[0], 1, 1))
        best = min(ways, key=by_time, default=None)
        whole = in_one_chunk(predictor)
        if whole is not None and (best is None or best.total_us > whole.total_us * (1 - MINIMUM_SAVING)):
            # It is simpler, and costs nothing if its prediction is wrong.
            best = whole
        return best

    def _without_partner(self, below_ms: float) -> Plans:
        """Block by block, and with a shared schedule."""
        predictor, block = self.predictor, self.predictor.block
        if not predictor.stock().total > 0:
            predictor.cluster.refuse(
                "compute",
                "has figures with which the time of a block is 0",
                "Write the times of its operations, or measure the cluster with ampipe profile.",
            )
        one_layer = predictor.of_layers(1)
        of_block_us = 1e3 * _of_block_ms(predictor, below_ms)
        alone = _block_plan(one_layer, self._best(one_layer, self.degrees, below_us=of_block_us))
        if self.stack == 1 or len(predictor.layers) == 1:
            return Plans(alone, None, _blocks_ms(predictor, alone.predicted_ms), alone)
        why_not = boundary(block.settings, whole_attention=False)
        all_dense = all(layer.dense for layer in predictor.layers)
        nothing_overlaps = block.expert == 1 or block.rows == 1 or all_dense
        if nothing_overlaps or why_not is not None:
            chosen = alone
            if why_not is not None:
                chosen = replace(alone, reason=f"{alone.reason} Layers do not share a schedule: {why_not}.")
            return Plans(alone, None, _blocks_ms(predictor, alone.predicted_ms), chosen)
        sharing = sharing_layers(predictor, self.stack)
        candidate = self._best(sharing, self.degrees, below_us=1e3 * below_ms)
        assert candidate is not None
        blocks_ms = _blocks_ms(sharing, alone.predicted_ms)
        shared = plan_of(sharing, candidate, stack=self.stack)
        blocks_speedup = sharing.stock().total / 1e3 / blocks_ms
        speedup = shared.predicted_speedup
        compared = f"predicted to be {speedup:.2f} times as fast as Megatron's, and block by block"
        if speedup < MINIMUM_SPEEDUP or speedup <= blocks_speedup:
            reason = (
                f"{alone.reason} Sharing a schedule saves nothing more: {len(sharing.layers)} layers that "
                f"share one are {compared} {blocks_speedup:.2f} times."
            )
            return Plans(alone, shared, blocks_ms, replace(alone, reason=reason))
        before = f"with {_degrees(alone.schedule)} each" if alone.helps else "as Megatron runs them"
        reason = (
            f"With {len(sharing.layers)} layers as one schedule in {_degrees(shared.schedule)}, "
            f"{_hidden(sharing, candidate)}: the layers are {compared}, {before}, {blocks_speedup:.2f} times."
        )
        return Plans(alone, shared, blocks_ms, replace(shared, reason=reason))

    def _with_partner(self, plans: Plans, below_ms: float) -> Plans:
        """Add the fastest way to run two passes together, and choose it if a step is faster with it."""
        block, share = self.predictor.block, self.with_partner
        if share == 0 or block.expert == 1 or block.rows == 1:
            return plans
        partners = self._fastest_partners(below_ms, share_schedule=plans.shared is not None)
        compared_with = partners.layers if plans.shared is not None else self.predictor.of_layers(1)
        plans = replace(plans, together=partners.shown, as_megatron=as_megatron(compared_with))
        others = self._plan_of_others(partners.running, plans, partners.best.partner)
        others_ms = others.predicted_ms
        if others.num_layers == 1:
            others_ms = _blocks_ms(partners.layers, others.predicted_ms)
        assert others_ms is not None
        step_ms = share * partners.layers_ms + (1 - share) * others_ms
        stock_ms = partners.layers.stock().total / 1e3
        speedup = f"{stock_ms / partners.layers_ms:.2f} times as fast as Megatron's, without one"
        if step_ms >= plans.step_ms or stock_ms < MINIMUM_SPEEDUP * step_ms:
            reason = (
                f"{plans.chosen.reason} Partners save nothing more: passes with one are predicted to be "
                f"{speedup} {stock_ms / plans.step_ms:.2f}."
            )
            return replace(plans, chosen=replace(plans.chosen, reason=reason))
        alone = others.reason if others.helps else "They run as Megatron's."
        reason = (
            "While the tokens of one micro-batch travel, another one computes: passes with a partner are "
            f"predicted to be {speedup} {stock_ms / others_ms:.2f}. Passes without one: {alone}"
        )
        chosen = replace(self._joined_plan(partners, others, others_ms), reason=reason)
        return replace(plans, chosen=chosen, partners_ms=partners.layers_ms, mixed_ms=step_ms)

    def _fastest_partners(self, below_ms: float, *, share_schedule: bool) -> _Partners:
        """The fastest way to run two passes of all layers together; ``share_schedule``: layers can do so."""
        layers = sharing_layers(self.predictor, self.stack) if share_schedule else self.predictor
        block = self.predictor.of_layers(1)
        degrees = (1, *(degree for degree in self.degrees if degree in TOGETHER_DEGREES))
        of_block = best_partners(block, degrees, below_us=1e3 * _of_block_ms(layers, below_ms))
        blocks_ms = _blocks_ms(layers, of_block.time_us / 1e3)
        if not share_schedule:
            return _Partners(of_block, block, layers, blocks_ms, shown=of_block)
        of_stack = best_partners(layers, degrees, below_us=1e3 * min(below_ms, blocks_ms))
        stack_ms = of_stack.time_us / 1e3
        if stack_ms <= blocks_ms:
            return _Partners(of_stack, layers, layers, stack_ms, shown=of_stack)
        return _Partners(of_block, block, layers, blocks_ms, shown=of_stack)

    def _joined_plan(self, partners: _Partners, others: Plan, others_ms: float) -> Plan:
        """The plan of passes with a partner and of the others, which ``others`` is the plan of."""
        layers = partners.layers
        if partners.share_schedule and others.num_layers == 1:
            # Passes without a partner run block by block, those with one as one schedule.
            others = replace(
                others,
                num_layers=len(layers.layers),
                stock_ms=layers.stock().total / 1e3,
                predicted_ms=others_ms,
                stages_forward_ms=None,
                stages_backward_ms=None,
            )
        # Two passes can only run together if they have the same number of layers.
        stack = self.stack if partners.share_schedule else 1
        return replace(
            others,
            pipeline=replace(others.pipeline, stack=stack, partner=partners.best.partner),
            partner_ms=partners.best.time_us / 1e3,
            partner_stock_ms=partners.running.stock().total / 1e3,
        )

    def _plan_of_others(self, running: Predictor, plans: Plans, partner: Partner) -> Plan:
        """The plan of the passes without a partner, whose degrees and the partner's divide each other."""
        plan = plans.alone
        share_schedule = plans.shared is not None and len(running.layers) > 1
        if plans.shared is not None and share_schedule and plans.chosen.helps:
            plan = replace(plans.shared, reason=plans.chosen.reason)
        degrees = (plan.pipeline.degree, plan.pipeline.backward_degree)
        if all(_divide_each_other(partner.degree, degree) for degree in degrees):
            return plan
        candidate = self._best(running, (partner.degree,))
        assert candidate is not None
        if not share_schedule:
            return _block_plan(running, candidate)
        plan = plan_of(running, candidate, stack=self.stack)
        speedup = f"{plan.predicted_speedup:.2f} times as fast as Megatron's"
        cut = f"With {len(running.layers)} layers as one schedule in {_degrees(plan.schedule)}"
        reason = f"{cut}, {_hidden(running, candidate)}: the layers are predicted to be {speedup}."
        return replace(plan, reason=reason)


@dataclass(frozen=True, slots=True)
class _Partners:
    """The fastest way to run two passes of all layers together.

    Attributes:
        best: The prediction for ``running``.
        running: One block, or the layers that share a schedule.
        layers: All layers.
        layers_ms: The time of all layers.
        shown: The prediction for the layers that can share a schedule, else for a block.
    """

    best: PartnerPrediction
    running: Predictor
    layers: Predictor
    layers_ms: float
    shown: PartnerPrediction

    @property
    def share_schedule(self) -> bool:
        """Whether the layers run as one schedule."""
        return self.running is self.layers


def sharing_layers(predictor: Predictor, stack: int) -> Predictor:
    """The predictor of those layers of a pipeline stage that share one schedule."""
    count = len(predictor.layers)
    return predictor if stack == ALL_LAYERS or stack >= count else predictor.of_layers(stack)


def _divide_each_other(one_degree: int, other_degree: int) -> bool:
    return max(one_degree, other_degree) % min(one_degree, other_degree) == 0


def _blocks_ms(predictor: Predictor, block_ms: float | None) -> float:
    """The time of all layers run block by block, from that of one block."""
    assert block_ms is not None
    others_ms, with_experts = _others_ms(predictor)
    return with_experts * block_ms + others_ms


def _of_block_ms(predictor: Predictor, layers_ms: float) -> float:
    """The time of one block if all layers take this time; the inverse of :func:`_blocks_ms`."""
    others_ms, with_experts = _others_ms(predictor)
    return (layers_ms - others_ms) / with_experts if with_experts else NOT_YET


def _others_ms(predictor: Predictor) -> tuple[float, int]:
    """The time of the layers without experts, and the number of those with them."""
    with_experts = sum(not features.dense for features in predictor.layers)
    stock_us = predictor.stock().total - with_experts * predictor.of_layers(1).stock().total
    return stock_us / 1e3, with_experts


def _block_plan(predictor: Predictor, best: Candidate | None) -> Plan:
    """The plan of one block, or Megatron's layer if no speedup is predicted."""
    stock, work = predictor.stock(), predictor.block
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
