"""Chooses how several layers share a schedule: degrees, lengths of the chunks, and the order of one period.

Layers that share a schedule pay the edges of a pass once, not once each, so fewer chunks may be enough. As
for one block, no step makes the result slower, and all are limited by numbers of evaluations. Periods are
searched on a short stack of layers with experts (:mod:`.period`), and the result is predicted for all layers,
those without experts included. Called by :mod:`.planner`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_ampipe.plan.period import SHORT, PeriodProblem, improve_period
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import (
    DEGREES,
    MAX_SLOWER_DEGREES,
    MINIMUM_SAVING,
    NAMED,
    Candidate,
    cost_of,
    improve_chunks,
    with_joined,
)
from megatron_ampipe.schedule import (
    IN_ONE_CHUNK,
    Direction,
    Program,
    Schedule,
    build,
    check,
    even_chunks,
    period,
)

COUNTS = 2
"""For how many numbers of chunks an order is searched: those with which the named one is fastest."""
STACK_CHUNK_EVALUATIONS = 120
"""Number of other lengths that are tried for a stack, times the number of chunks."""


def choose_stack(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best named order of a stack, ``ampipe`` or ``joined``, and its degrees, with equal chunks.

    Args:
        predictor: Of all layers that share the schedule.
        degrees: The degrees that are tried, ascending.
    """
    short = _short(predictor)
    return _timed(predictor, min(_named_ones(short, degrees), key=lambda one: one.total_us))


def full_stack(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best candidate over degrees, lengths of chunks and the order of one period.

    Args:
        predictor: Of all layers that share the schedule.
        degrees: The degrees that are tried, ascending.

    Returns:
        A checked candidate, whose schedule repeats; not slower than :func:`choose_stack`.
    """
    short = _short(predictor)
    named = sorted(_named_ones(short, degrees), key=lambda one: one.total_us)
    # For all layers, and for the short stack.
    best, simplest = _timed(predictor, named[0]), named[0]
    starts = _of_different_counts(named)
    # An order that is searched may make the same degree in both directions the better one.
    for one in starts.copy():
        count = one.schedule.num_chunks
        if one.schedule.degree != one.schedule.backward_degree:
            starts.append(_named(short, one.schedule.name, count, count))
    for start in starts:
        ordered = _searched(short, start)
        # Lengths and order depend on each other, so the order is searched again.
        shaped = improve_chunks(short, ordered, evaluations=STACK_CHUNK_EVALUATIONS)
        shaped = shaped if shaped is ordered else _searched(short, shaped)
        for found in (ordered, shaped):
            # The simpler candidate is kept unless the gain exceeds the accuracy of the prediction.
            if found.total_us < simplest.total_us * (1 - MINIMUM_SAVING):
                timed = _timed(predictor, found)
                best, simplest = min((best, simplest), (timed, found), key=lambda pair: pair[0].total_us)
    check(predictor.whole(best.schedule), predictor.layers)
    return best


def _short(predictor: Predictor) -> Predictor:
    # Stages that run again are placed by the order of the others, and are no part of a period.
    return predictor.of_layers(min(SHORT, len(predictor.layers)), recomputes=False)


def _named_ones(predictor: Predictor, degrees: Sequence[int]) -> list[Candidate]:
    """For each number of chunks the named order with its best degrees; larger ones until they are slower."""
    found: list[Candidate] = []
    slower = 0
    names = with_joined(NAMED[:1], predictor)
    for count in degrees:
        if count > predictor.workload.rows:
            break
        pairs = {(count, count)}
        for degree in range(1, count):
            if count % degree == 0:
                pairs |= {(degree, count), (count, degree)}
        named = (_named(predictor, name, *pair) for name in names for pair in sorted(pairs))
        one = min(named, key=cost_of)
        slower = 0 if not found or one.total_us < min(found, key=_total).total_us else slower + 1
        found.append(one)
        if slower == MAX_SLOWER_DEGREES:
            break
    if predictor.workload.splits_weights:
        lengths = (predictor.workload.rows,)
        schedule = build(IN_ONE_CHUNK, degree=1, features=predictor.features)
        found.append(_with_time(predictor, period(schedule), lengths))
    assert found, "a sequence of one row cannot be split"
    return found


def _total(candidate: Candidate) -> float:
    return candidate.total_us


def _named(predictor: Predictor, name: str, forward: int, backward: int) -> Candidate:
    schedule = build(name, degree=forward, backward_degree=backward, features=predictor.features)
    lengths = even_chunks(predictor.workload.rows, schedule.num_chunks)
    return _with_time(predictor, period(schedule), lengths)


def _of_different_counts(ordered: Sequence[Candidate]) -> list[Candidate]:
    """The first few candidates, each with another number of chunks."""
    found: dict[int, Candidate] = {}
    for one in ordered:
        found.setdefault(one.schedule.num_chunks, one)
    return list(found.values())[:COUNTS]


def _searched(predictor: Predictor, start: Candidate) -> Candidate:
    """Search the period of each direction; chunks and degrees are kept."""
    schedule = start.schedule
    programs: dict[Direction, Program] = {}
    whole = predictor.whole(schedule)
    for direction in Direction:
        time = predictor.direction_us(whole, start.lengths, direction)
        if predictor.direction_bound_us(whole, start.lengths, direction) >= time * (1 - MINIMUM_SAVING / 2):
            # No order can save enough.
            programs[direction] = schedule.program(direction)
            continue
        problem = PeriodProblem.of(predictor, schedule, start.lengths, direction)
        first = problem.period_of(schedule.program(direction))
        best = improve_period(problem, first)
        # A tie keeps the start.
        is_faster = problem.time(best) < problem.time(first) * (1 - 1e-9)
        programs[direction] = problem.program(best) if is_faster else schedule.program(direction)
    if all(programs[direction] == schedule.program(direction) for direction in Direction):
        return start
    forward, backward = programs[Direction.FORWARD], programs[Direction.BACKWARD]
    found = replace(schedule, name="searched", forward=forward, backward=backward)
    return _with_time(predictor, found, start.lengths)


def _timed(predictor: Predictor, candidate: Candidate) -> Candidate:
    """The same candidate for other layers."""
    return _with_time(predictor, candidate.schedule, candidate.lengths)


def _with_time(predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...]) -> Candidate:
    return Candidate(schedule, lengths, predictor.pass_us(schedule, lengths), stack=len(predictor.layers))
