"""Predicts partners: the backward pass of a micro-batch and the forward pass of the next one, run as one.

The joint order is searched as for a single pass (:mod:`.search`): a period of one layer of each pass.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ampipe.files.timeline import Timeline
from megatron_ampipe.plan.order_search import OrderProblem, Period, improve_order
from megatron_ampipe.plan.predict import Predictor, timeline_of
from megatron_ampipe.plan.search import ROUNDING, short_stack
from megatron_ampipe.plan.simulate import NOT_YET, Compiled, TimedProgram, compile_named, compile_program
from megatron_ampipe.schedule import (
    IN_ONE_CHUNK,
    LISTED,
    MEGATRON,
    BlockFeatures,
    Direction,
    Partner,
    Program,
    Schedule,
    Stage,
    build,
    even_chunks,
    period,
)
from megatron_ampipe.schedule.partners import in_order_of, megatron_period, shared_lanes
from megatron_ampipe.schedule.stage_kind import COMPUTE

DEGREES = (1, 2, 4)
"""Degrees of passes with a partner. A partner hides most of the communication, so few chunks are enough."""


@dataclass(frozen=True, slots=True)
class PartnerPrediction:
    """A forward and a backward pass of all layers of a predictor, as one program.

    Attributes:
        partner: How they run.
        time_us: Predicted time of both.
    """

    partner: Partner
    time_us: float

    def bound_us(self, predictor: Predictor) -> float:
        """A lower bound of the time over all orders of the stages; ``predictor`` is of these layers."""
        return both_passes(predictor, self.partner).bound_us + _around_us(predictor, self.partner)


def best_partners(
    predictor: Predictor, degrees: Iterable[int], *, below_us: float = NOT_YET
) -> PartnerPrediction:
    """The fastest of these degrees, with a searched order if that is faster.

    What is found for a degree does not depend on the others. A degree is left out only if a lower bound shows
    that it is slower than another; an order is not searched if none can be faster than ``below_us``.
    """
    best: PartnerPrediction | None = None
    for degree in degrees:
        if predictor.block.rows < degree:
            continue
        partner = Partner(degree, _schedule(predictor))
        least_us = predictor.least_together_us(*_passes(predictor, partner)) * (1 - ROUNDING)
        if best is not None and least_us > best.time_us:
            continue
        # Passes with several chunks are listed by default. Of equal ones the first is chosen.
        named = [partner]
        if degree == 1:
            named.append(replace(partner, order=LISTED))
        compared = [] if best is None else [best]
        compared += [prediction(predictor, candidate) for candidate in named]
        fastest_us = min(prediction.time_us for prediction in compared)
        if least_us < min(below_us, fastest_us):
            compared.append(_searched(predictor, partner))
        best = min(compared, key=lambda prediction: prediction.time_us)
    assert best is not None, "there is no row"
    return best


def as_megatron(predictor: Predictor) -> PartnerPrediction:
    """The same layers, uncut, in the order of Megatron's own overlap."""
    return prediction(predictor, Partner(1, _schedule(predictor), MEGATRON))


def _schedule(predictor: Predictor) -> str:
    return IN_ONE_CHUNK if predictor.block.splits_weights else "ampipe"


def _passes(predictor: Predictor, partner: Partner) -> tuple[Schedule, tuple[int, ...]]:
    """The schedule of each pass, of one block or a period, and equal chunks for it."""
    schedule = build(partner.schedule, degree=partner.degree, features=predictor.features)
    lengths = even_chunks(predictor.block.rows, partner.degree)
    return schedule if len(predictor.layers) == 1 else period(schedule), lengths


def prediction(predictor: Predictor, partner: Partner) -> PartnerPrediction:
    """The time of both passes together, in the order that the partner says."""
    around_us = _around_us(predictor, partner)
    return PartnerPrediction(partner, both_passes(predictor, partner).end_us + around_us)


def _around_us(predictor: Predictor, partner: Partner) -> float:
    """The time outside the joint program: calls, and Megatron's recompute around a layer."""
    calls_us = sum(predictor.calls_us(direction) for direction in Direction)
    if not predictor.recomputes_around:
        return calls_us
    return calls_us + predictor.direction_us(*_passes(predictor, partner), Direction.FORWARD)


def _searched(predictor: Predictor, partner: Partner) -> PartnerPrediction:
    """The same with the best order of a short stack, searched from Megatron's order."""
    timed = both_passes(short_stack(predictor), replace(partner, order=LISTED))
    return prediction(predictor, replace(partner, period=best_period(timed)))


# Cached, as :func:`.search.best_program`.
@functools.lru_cache(maxsize=128)
def best_period(timed: TimedProgram) -> Program:
    """The best period, with one layer of each pass, for a program of both passes."""
    compiled = timed.compiled
    lane_of = {compiled.stages[place]: lane for lane, places in compiled.lanes for place in places}
    first = megatron_period({stage: lane for stage, lane in lane_of.items() if not stage.layer})
    problem = _WeightsWithinALayer(timed, direction=Direction.BACKWARD)
    stages = dict(first.lanes)
    in_lanes = Program.of({lane: stages[lane] for lane, _ in compiled.lanes})
    return problem.program(improve_order(problem, problem.period_of(in_lanes)))


class _WeightsWithinALayer(OrderProblem):
    """Limits orders to weight gradients that are at most a layer late, as reductions and memory need them."""

    def _is_allowed(self, period: Period) -> bool:
        # By how many layers stages are late: those of weight gradients, and the others of the backward pass.
        latest_weights = 0
        earliest_other = math.inf
        for lane in period:
            for number, relative_layer in lane:
                stage = self.stages[number]
                if stage.of_next_microbatch:
                    continue
                if stage.kind.weights_of is not None:
                    latest_weights = max(latest_weights, -relative_layer)
                else:
                    earliest_other = min(earliest_other, -relative_layer)
        return latest_weights <= 1 + earliest_other


def timeline(predictor: Predictor, partner: Partner, *, labels: Mapping[str, str] | None) -> Timeline:
    """Start and end of every stage; forward stages belong to the next micro-batch."""
    return timeline_of({Direction.BACKWARD: both_passes(predictor, partner)}, labels)


class _Joint(NamedTuple):
    """Both passes as one program, without times.

    Attributes:
        schedule: The schedule of all layers, each pass in the order that it has with a partner.
        compiled: The program.
        origins: For each of its stages, the pass that it belongs to, and its number in that pass.
    """

    schedule: Schedule
    compiled: Compiled
    origins: tuple[tuple[Direction, int], ...]


# Cached, because it does not depend on times: the same program is asked for with other links and hosts.
@functools.lru_cache(maxsize=64)
def _joint(partner: Partner, schedule: Schedule, layers: tuple[BlockFeatures, ...]) -> _Joint:
    """Both passes of a schedule of all layers."""
    for direction in Direction:
        schedule = in_order_of(partner, schedule, layers, direction)
    stages: list[tuple[str, Stage]] = []
    needs: dict[Stage, tuple[Stage, ...]] = {}
    origin_of: dict[Stage, tuple[Direction, int]] = {}
    for direction in reversed(Direction):
        compiled = compile_named(schedule, layers, direction)
        renamed = [
            replace(stage, of_next_microbatch=direction is Direction.FORWARD) for stage in compiled.stages
        ]
        origin_of |= {stage: (direction, number) for number, stage in enumerate(renamed)}
        lane_of = {place: lane for lane, places in compiled.lanes for place in places}
        stages += [(lane_of[place], renamed[place]) for place in compiled.issued]
        for stage, places in zip(renamed, compiled.needs, strict=True):
            needs[stage] = tuple(renamed[place] for place in places)
    lanes = shared_lanes(stages, needs, partner)
    # The compute lane comes first in a simulation.
    names = sorted(lanes, key=lambda lane: lane != COMPUTE)
    both = compile_program(Program.of({name: lanes[name] for name in names}), needs)
    return _Joint(schedule, both, tuple(origin_of[stage] for stage in both.stages))


def both_passes(predictor: Predictor, partner: Partner) -> TimedProgram:
    """Both passes as one program, in the order in which they run."""
    schedule, lengths = _passes(predictor, partner)
    joint = _joint(partner, predictor.whole(schedule), predictor.layers)
    timed = {way: predictor.timed(joint.schedule, lengths, way) for way in Direction}
    durations = tuple([timed[way].durations[number] for way, number in joint.origins])
    issue_us: tuple[float, ...] | None = None
    if any(program.issue_us is not None for program in timed.values()):
        issue_of = {way: timed[way].issue_us or (0.0,) * len(timed[way].durations) for way in Direction}
        issue_us = tuple([issue_of[way][number] for way, number in joint.origins])
    return TimedProgram(joint.compiled, durations, issue_us, predictor.cluster.overlap, predictor.host_waits)
