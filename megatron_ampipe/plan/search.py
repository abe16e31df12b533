"""Chooses how to run a block, or several layers that share a schedule: degrees, lengths of chunks, order.

There are three steps: the best named schedule over all degrees, the lengths of chunks, the order of stages.
No step makes the result slower. The number of evaluations is limited, not the time, and random seeds are
fixed, so that ranks with the same figures find the same plan. For layers that share a schedule, a short
stack of layers with experts is searched, and the result is predicted for all layers.
The order itself is searched in :mod:`.order_search`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.plan.order_search import OrderProblem, improve_order
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.simulate import NOT_YET, TimedProgram
from megatron_ampipe.schedule import (
    IN_ONE_CHUNK,
    Direction,
    Program,
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
CHUNK_EVALUATIONS = 1200
"""Number of other lengths that are tried, times the number of chunks and layers; it bounds the time."""
MAX_SHORTENING = 4
"""A chunk is at least as long as an equal chunk divided by this."""
MINIMUM_SAVING = 0.01
"""What is less simple must save this share of the time to be chosen, predicted or measured."""
ROUNDING = 1e-6
"""Share of a time by which the simulation may round it down (``simulate.ROUNDING_US`` for each stage)."""
SEARCHED = "searched"
"""The name of a schedule whose order was searched."""

SHORT = 4
"""Layers of the stack that is simulated: the first and the last one, and two that have both neighbors."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run the layers of a predictor, with its predicted time.

    The schedule repeats if several layers share it; ``lengths`` are rows of one rank in each chunk; ``time``
    is the time of a pass of all layers in each direction, in microseconds.
    """

    schedule: Schedule
    lengths: tuple[int, ...]
    time: Pair

    @property
    def total_us(self) -> float:
        """The time of both directions."""
        return self.time.total

    @property
    def cost(self) -> float:
        """The time for comparing named candidates: joined weight gradients hold memory, so must save more."""
        return self.total_us / (1 - MINIMUM_SAVING) if self.schedule.joins_weights else self.total_us


by_time = operator.attrgetter("total_us")
"""Key of the fastest of some candidates."""


def candidates(predictor: Predictor, degrees: Iterable[int] = DEGREES) -> Iterator[Candidate]:
    """The named schedules at each degree, the same in both directions, with equal chunks."""
    for degree in degrees:
        if predictor.block.splits_into(degree):
            for name in names_of(predictor):
                yield named(predictor, name, degree, degree)


def names_of(predictor: Predictor) -> tuple[str, ...]:
    """The named schedules that are compared, the preferred one first."""
    names = NAMED if len(predictor.layers) == 1 else NAMED[:1]
    if predictor.block.splits_weights and predictor.block.local:
        # Transformer Engine's layers have one product for each chunk.
        names = (*names, "joined")
    return names


def in_one_chunk(predictor: Predictor) -> Candidate | None:
    """The schedule that overlaps without cutting the sequence; None if the layers cannot run it."""
    if not predictor.block.splits_weights or predictor.block.expert == 1:
        return None
    return named(predictor, IN_ONE_CHUNK, 1, 1)


def named(predictor: Predictor, name: str, forward: int, backward: int) -> Candidate:
    """A named schedule with these degrees and equal chunks."""
    return _timed(predictor, *_equal(predictor, name, forward, backward))


def _equal(predictor: Predictor, name: str, forward: int, backward: int) -> tuple[Schedule, tuple[int, ...]]:
    """A named schedule with these degrees, and equal chunks for it."""
    schedule = build(name, degree=forward, backward_degree=backward, features=predictor.features)
    lengths = even_chunks(predictor.block.rows, schedule.num_chunks)
    return schedule if len(predictor.layers) == 1 else period(schedule), lengths


def choose_degree(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best named schedule with equal chunks and a degree for each direction."""
    return fastest(predictor, degrees, full=False)


def full_plan(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best candidate over degrees, lengths of chunks and order of the stages.

    It is checked, and not slower than the result of :func:`choose_degree`.
    """
    return fastest(predictor, degrees, full=True)


def fastest(
    predictor: Predictor, degrees: Sequence[int], *, full: bool, below_us: float = NOT_YET
) -> Candidate:
    """The fastest candidate over these numbers of chunks; of equal ones the first.

    What is found for a number of chunks does not depend on the others, so a further one never makes the
    result slower. One is left out only if a lower bound shows that it is slower than another.

    Args:
        predictor: The predictor of one block, or of layers that share a schedule.
        degrees: Numbers of chunks; at least one of them splits the rows.
        full: Whether to search unequal chunks and other orders too.
        below_us: These are not searched if no result can be faster than this.
    """
    possible = [degree for degree in degrees if predictor.block.splits_into(degree)]
    assert possible, "a sequence of one row cannot be split"
    bounds = {degree: least_of_degree(predictor, degree) for degree in possible}
    best: dict[int, Candidate] = {}
    plain: dict[int, Candidate] = {}
    named_us = NOT_YET
    for degree in sorted(possible, key=lambda degree: (bounds[degree], degree)):
        if bounds[degree] <= named_us:
            plain[degree] = _best_named(short_stack(predictor), degree)
            best[degree] = _timed(predictor, plain[degree].schedule, plain[degree].lengths)
            named_us = min(named_us, best[degree].total_us)
    below_us = min(below_us, named_us)
    for degree in sorted(best, key=lambda degree: best[degree].total_us) if full else ():
        best[degree] = improved(predictor, plain[degree], best[degree], below_us=below_us)
        below_us = min(below_us, best[degree].total_us)
    chosen = min((best[degree] for degree in possible if degree in best), key=by_time)
    if chosen.schedule.name == SEARCHED:
        check(predictor.whole(chosen.schedule), predictor.layers)
    return chosen


def least_of_degree(predictor: Predictor, degree: int) -> float:
    """A lower bound with so many chunks: compute stages by chunk, one transfer for all chunks."""
    schedules = (_equal(predictor, name, degree, degree) for name in names_of(predictor))
    bounds = (predictor.least.least_of_chunks_us(*equal) for equal in schedules)
    return min(bounds) * (1 - ROUNDING)


def improved(predictor: Predictor, plain: Candidate, best: Candidate, *, below_us: float) -> Candidate:
    """The candidate with other lengths of chunks and another order, if that is clearly faster.

    Args:
        predictor: The predictor of one block, or of layers that share a schedule.
        plain: The best named candidate with so many chunks, for the short stack.
        best: The same for all layers.
        below_us: Nothing is searched if no result can be faster than this.
    """
    short, count = short_stack(predictor), len(plain.lengths)
    needed_us = best.total_us * (1 - MINIMUM_SAVING)
    starts = [plain]
    if plain.schedule.name != NAMED[0] or plain.schedule.degree != plain.schedule.backward_degree:
        starts.append(named(short, NAMED[0], count, count))
    least_us = min(predictor.least.least_us(start.schedule, start.lengths) for start in starts)
    if least_us * (1 - ROUNDING) >= min(below_us, needed_us):
        return best
    shaped = min((improve_chunks(short, start) for start in starts), key=by_time)
    schedule = shaped.schedule
    even = named(short, schedule.name, schedule.degree, schedule.backward_degree)
    ways = [shaped]
    for start in {even.lengths: even, shaped.lengths: shaped}.values():
        # An order that cannot save enough is not searched, neither for all layers nor for the short stack.
        of_all_us = predictor.least_us(start.schedule, start.lengths)
        of_short_us = sum(_least_of(short, start, direction) for direction in Direction)
        if of_all_us < needed_us and of_short_us < plain.total_us * (1 - MINIMUM_SAVING):
            ways.append(_reordered(short, start))
    ordered = min(ways, key=by_time)
    for way in (shaped, ordered):
        candidate = _timed(predictor, way.schedule, way.lengths)
        # The simpler candidate is kept unless the gain exceeds the accuracy of the prediction.
        if candidate.total_us < best.total_us * (1 - MINIMUM_SAVING):
            best = candidate
    return best


def _least_of(predictor: Predictor, start: Candidate, direction: Direction) -> float:
    """A lower bound of one direction over all orders of its stages."""
    timed = predictor.timed(predictor.whole(start.schedule), start.lengths, direction)
    return timed.least_us + predictor.calls_us(direction)


def _best_named(predictor: Predictor, degree: int) -> Candidate:
    """The best named schedule with so many equal chunks, and a degree for each direction."""
    best = min(candidates(predictor, [degree]), key=operator.attrgetter("cost"))
    # The runtime groups adjacent chunks in the direction with the smaller degree, so that is a divisor.
    for divisor in (divisor for divisor in range(1, degree) if degree % divisor == 0):
        for pair in ((divisor, degree), (degree, divisor)):
            best = min(best, named(predictor, best.schedule.name, *pair), key=by_time)
    return best


def improve_chunks(predictor: Predictor, start: Candidate) -> Candidate:
    """Move rows between adjacent chunks while that saves time. The order of the stages is kept."""
    rows, count = predictor.block.rows, len(start.lengths)
    # A run rounds lengths to this number of rows, and must get the lengths that are chosen here.
    unit = max(row_unit(rows, count), predictor.block.rows_of_tile)
    shortest = max(1, rows // (MAX_SHORTENING * count))
    best, tries = start, CHUNK_EVALUATIONS // (count * len(predictor.layers))
    step = max(unit, rows // (2 * count) // unit * unit)
    for lengths in (_tapered(rows, count, unit, ratio) for ratio in (0.8, 1.25)):
        best = min(best, _timed(predictor, start.schedule, lengths), key=by_time)
    while step >= unit and tries > 0:
        improved = False
        for giver in range(count):
            for taker in (giver - 1, giver + 1):
                if not 0 <= taker < count or best.lengths[giver] - step < shortest:
                    continue
                moved = list(best.lengths)
                moved[giver] -= step
                moved[taker] += step
                candidate = _timed(predictor, start.schedule, tuple(moved))
                tries -= 1
                if candidate.total_us < best.total_us * (1 - 1e-6):
                    best, improved = candidate, True
        if not improved:
            step = step // 2 // unit * unit
    return best


def _reordered(predictor: Predictor, start: Candidate) -> Candidate:
    """Search the order, then the lengths and the order again, because they depend on each other."""
    ordered = reorder(predictor, start)
    shaped = improve_chunks(predictor, ordered)
    return shaped if shaped is ordered else reorder(predictor, shaped)


def reorder(predictor: Predictor, start: Candidate) -> Candidate:
    """Search a faster order of the stages in each direction; chunks and degrees are kept."""
    schedule, whole = start.schedule, predictor.whole(start.schedule)
    programs = []
    for direction in Direction:
        program = schedule.program(direction)
        # Skip the search if no order can save enough.
        time_us = predictor.direction_us(whole, start.lengths, direction)
        if _least_of(predictor, start, direction) < time_us * (1 - MINIMUM_SAVING / 2):
            timed = predictor.timed(whole, start.lengths, direction)
            program = best_program(timed, program, direction)
        programs.append(program)
    forward, backward = programs
    if (forward, backward) == (schedule.forward, schedule.backward):
        return start
    searched = replace(schedule, name=SEARCHED, forward=forward, backward=backward)
    return _timed(predictor, searched, start.lengths)


# Cached, because programs come back: with other numbers of chunks of one direction, with a host that takes
# longer but launches graphs only. A search takes tenths of a second.
@functools.lru_cache(maxsize=128)
def best_program(timed: TimedProgram, program: Program, direction: Direction) -> Program:
    """The fastest order of a program of one block or a period, ``timed`` for the short stack."""
    problem = OrderProblem(timed, direction=direction)
    first = problem.period_of(program)
    best = improve_order(problem, first)
    return program if best == first else problem.program(best)


def short_stack(predictor: Predictor) -> Predictor:
    """The predictor of a short stack, in place of all layers that share a schedule."""
    if len(predictor.layers) == 1:
        return predictor
    # Stages that run again are not part of a period: the order of the others places them.
    return predictor.of_layers(min(SHORT, len(predictor.layers)), recomputes=False)


def _timed(predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...]) -> Candidate:
    return Candidate(schedule, lengths, predictor.pass_us(schedule, lengths))


def _tapered(rows: int, count: int, unit: int, ratio: float) -> tuple[int, ...]:
    """Lengths with a constant ratio between adjacent chunks; multiples of the unit except for the last."""
    weights = [ratio**index for index in range(count)]
    lengths = [max(unit, round(rows * weight / sum(weights) / unit) * unit) for weight in weights]
    surplus = sum(lengths) - rows // unit * unit
    longest = lengths.index(max(lengths))
    if surplus < lengths[longest]:
        lengths[longest] -= surplus
        surplus = 0
    while surplus > 0:
        # Every chunk has at least one unit, so that several long ones may have to give some away.
        longest = lengths.index(max(lengths))
        lengths[longest] -= unit
        surplus -= unit
    lengths[-1] += rows % unit
    return tuple(lengths)
