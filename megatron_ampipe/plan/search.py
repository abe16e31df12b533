"""Chooses how to run a block, or several layers that share a schedule: degrees, lengths of chunks, order.

Three steps, none of which makes the result slower: the best named schedule over all degrees
(:func:`choose_degree`, a few milliseconds), lengths of chunks (:func:`improve_chunks`), order of stages
(:mod:`.order`). They are limited by a number of evaluations, not by time, and use fixed random seeds, so that
ranks with the same figures find the same plan. Layers that share a schedule are searched on a short stack of
layers with experts, and the result is predicted for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.plan.order import SHORT, OrderProblem, improve_order
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import (
    IN_ONE_CHUNK,
    Direction,
    Schedule,
    build,
    check,
    even_chunks,
    period,
    row_unit,
)

DEGREES = (2, 3, 4, 6, 8, 12, 16)
"""Degrees that are tried: numbers with many divisors, as one degree has to divide the other."""
NAMED = ("ampipe", "moe-only")
"""Named schedules that overlap communication; the first one is chosen if both take the same time, and is the
only one that layers can share."""
MAX_SLOWER_DEGREES = 2
"""The search for a degree ends after this number of slower degrees in a row."""
CHUNK_EVALUATIONS = 1200
"""Number of other lengths that are tried, times the number of chunks and layers: a bound on the time."""
MAX_SHORTENING = 4
"""A chunk is at least as long as an equal chunk divided by this."""
MINIMUM_SAVING = 0.01
"""Unequal chunks, or a searched order, must save this share of the time to be chosen."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the layers of a predictor, with its predicted time.

    Attributes:
        schedule: Degrees and order of the stages; it repeats if several layers share it.
        lengths: Rows of one rank in each chunk.
        time: Time of a pass of all of the layers in each direction, in microseconds.
    """

    schedule: Schedule
    lengths: tuple[int, ...]
    time: Pair

    @property
    def total_us(self) -> float:
        """Time of forward and backward pass."""
        return self.time.total

    @property
    def cost(self) -> float:
        """The predicted time by which named candidates are compared.

        Joined gradients of weights have to save more than predictions are exact: what they take waits for
        them.
        """
        return self.total_us / (1 - MINIMUM_SAVING) if self.schedule.joins_weights else self.total_us


def candidates(predictor: Predictor, degrees: Iterable[int] = DEGREES) -> Iterator[Candidate]:
    """The named schedules at each degree, the same in both directions, with equal chunks."""
    names = NAMED if len(predictor.layers) == 1 else NAMED[:1]
    if predictor.workload.splits_weights:
        names = (*names, "joined")
    for degree in degrees:
        if degree <= predictor.workload.rows:
            for name in names:
                yield named(predictor, name, degree, degree)


def in_one_chunk(predictor: Predictor) -> Candidate | None:
    """The schedule that overlaps without cutting the sequence; None where the layers cannot run it."""
    if not predictor.workload.splits_weights or predictor.workload.expert == 1:
        return None
    return named(predictor, IN_ONE_CHUNK, 1, 1)


def named(predictor: Predictor, name: str, forward: int, backward: int) -> Candidate:
    """A named schedule with these degrees and equal chunks."""
    schedule = build(name, degree=forward, backward_degree=backward, features=predictor.features)
    lengths = even_chunks(predictor.workload.rows, schedule.num_chunks)
    return _timed(predictor, schedule if len(predictor.layers) == 1 else period(schedule), lengths)


def choose_degree(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best named schedule with equal chunks and a degree for each direction, of ascending degrees.

    One of the two degrees divides the other, because the runtime groups adjacent chunks in the direction with
    the smaller degree.
    """
    best = _best_named(_short(predictor), degrees)
    return _timed(predictor, best.schedule, best.lengths)


def _best_named(predictor: Predictor, degrees: Sequence[int]) -> Candidate:
    best: Candidate | None = None
    slower = 0
    for degree in degrees:
        found = min(candidates(predictor, [degree]), key=lambda one: one.cost, default=None)
        if found is None:
            break
        slower = 0 if best is None or found.total_us < best.total_us else slower + 1
        best = found if slower == 0 else best
        if slower == MAX_SLOWER_DEGREES:
            break
    assert best is not None, "a sequence of one row cannot be split"
    # Smaller degrees, divisors of the degree, in one of the two directions.
    count = len(best.lengths)
    for degree in (degree for degree in range(1, count) if count % degree == 0):
        for pair in ((degree, count), (count, degree)):
            best = min(best, named(predictor, best.schedule.name, *pair), key=lambda one: one.total_us)
    return best


def improve_chunks(predictor: Predictor, start: Candidate) -> Candidate:
    """Move rows between adjacent chunks while that saves time. The order of the stages is kept."""
    rows, count = predictor.workload.rows, len(start.lengths)
    # A run must use the lengths that are found here, and it rounds them to this number of rows.
    unit = row_unit(rows, count)
    shortest = max(1, rows // (MAX_SHORTENING * count))
    best, tries = start, CHUNK_EVALUATIONS // (count * len(predictor.layers))
    step = max(unit, rows // (2 * count) // unit * unit)
    for lengths in (_tapered(rows, count, unit, ratio) for ratio in (0.8, 1.25)):
        best = min(best, _timed(predictor, start.schedule, lengths), key=lambda one: one.total_us)
    while step >= unit and tries > 0:
        improved = False
        for giver in range(count):
            for taker in (giver - 1, giver + 1):
                if not 0 <= taker < count or best.lengths[giver] - step < shortest:
                    continue
                moved = list(best.lengths)
                moved[giver] -= step
                moved[taker] += step
                found = _timed(predictor, start.schedule, tuple(moved))
                tries -= 1
                if found.total_us < best.total_us * (1 - 1e-6):
                    best, improved = found, True
        if not improved:
            step = step // 2 // unit * unit
    return best


def full_plan(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best candidate over ascending degrees, lengths of chunks and order of the stages.

    It is checked, and not slower than that of :func:`choose_degree`.
    """
    short = _short(predictor)
    plain = _best_named(short, degrees)
    shaped = min(
        (improve_chunks(short, start) for start in _starts(short, plain, degrees)),
        key=lambda one: one.total_us,
    )
    schedule = shaped.schedule
    even = named(short, schedule.name, schedule.degree, schedule.backward_degree)
    ordered = min((_reordered(short, start) for start in (even, shaped)), key=lambda one: one.total_us)
    best, *others = (_timed(predictor, one.schedule, one.lengths) for one in (plain, shaped, ordered))
    for found in others:
        # The simpler candidate is kept unless the gain exceeds the accuracy of the prediction.
        if found.total_us < best.total_us * (1 - MINIMUM_SAVING):
            best = found
    check(predictor.whole(best.schedule), predictor.layers)
    return best


def _reordered(predictor: Predictor, start: Candidate) -> Candidate:
    """Lengths and order depend on each other, so both are searched again."""
    ordered = reorder(predictor, start)
    shaped = improve_chunks(predictor, ordered)
    return shaped if shaped is ordered else reorder(predictor, shaped)


def reorder(predictor: Predictor, start: Candidate) -> Candidate:
    """Search a faster order of the stages in each direction; chunks and degrees are kept."""
    schedule, whole = start.schedule, predictor.whole(start.schedule)
    programs = []
    for direction in Direction:
        program = schedule.program(direction)
        time = predictor.direction_us(whole, start.lengths, direction)
        # Unless no order can save enough.
        if predictor.direction_bound_us(whole, start.lengths, direction) < time * (1 - MINIMUM_SAVING / 2):
            problem = OrderProblem.of(predictor, schedule, start.lengths, direction)
            first = problem.period_of(program)
            best = improve_order(problem, first)
            program = program if best == first else problem.program(best)
        programs.append(program)
    forward, backward = programs
    if (forward, backward) == (schedule.forward, schedule.backward):
        return start
    found = replace(schedule, name="searched", forward=forward, backward=backward)
    return _timed(predictor, found, start.lengths)


def _starts(predictor: Predictor, plain: Candidate, degrees: Sequence[int]) -> list[Candidate]:
    """The best named candidate, and ``ampipe`` at its degree and the next larger one."""
    count = len(plain.lengths)
    larger = [degree for degree in degrees if count < degree <= predictor.workload.rows][:1]
    others = (named(predictor, NAMED[0], degree, degree) for degree in (count, *larger))
    return [plain, *(one for one in others if one.schedule != plain.schedule)]


def _short(predictor: Predictor) -> Predictor:
    """Of a short stack, in place of all layers that share a schedule."""
    if len(predictor.layers) == 1:
        return predictor
    # Stages that run again are placed by the order of the others, and are no part of a period.
    return predictor.of_layers(min(SHORT, len(predictor.layers)), recomputes=False)


def _timed(predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...]) -> Candidate:
    return Candidate(schedule, lengths, predictor.pass_us(schedule, lengths))


def _tapered(rows: int, count: int, unit: int, ratio: float) -> tuple[int, ...]:
    """Lengths with a constant ratio between adjacent chunks; multiples of the unit except for the last."""
    weights = [ratio**index for index in range(count)]
    lengths = [max(unit, round(rows * weight / sum(weights) / unit) * unit) for weight in weights]
    longest = lengths.index(max(lengths))
    lengths[longest] += rows // unit * unit - sum(lengths)
    lengths[-1] += rows % unit
    return tuple(lengths)
