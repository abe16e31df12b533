"""Chooses how to run a block: degrees, lengths of the chunks, and the order of the stages.

Three steps, none of which makes the result slower: the best named schedule over all degrees
(:func:`choose_degree`, a few milliseconds), lengths of chunks (:func:`improve_chunks`), order of stages
(:mod:`.order`). They are limited by a number of evaluations, not by time, and use fixed random seeds, so that
ranks with the same figures find the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.plan.order import improve_order
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import IN_ONE_CHUNK, Direction, Schedule, build, check, even_chunks, row_unit

DEGREES = (2, 3, 4, 6, 8, 12, 16)
"""Degrees that are tried: numbers with many divisors, as one degree has to divide the other."""
NAMED = ("ampipe", "moe-only")
"""Named schedules that overlap communication; the first one is chosen if both take the same time."""
MAX_SLOWER_DEGREES = 2
"""The search for a degree ends after this number of slower degrees in a row."""
CHUNK_EVALUATIONS = 1200
"""Number of other lengths that are tried, times the number of chunks: a bound on the time of a search."""
MAX_SHORTENING = 4
"""A chunk is at least as long as an equal chunk divided by this."""
MINIMUM_SAVING = 0.01
"""Unequal chunks, or a searched order, must save this share of the time to be chosen."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a block, or several that share a schedule, with its predicted time.

    Attributes:
        schedule: Degrees and order of the stages; it repeats if several layers share it.
        lengths: Rows of one rank in each chunk.
        time: Time of a pass of all of the layers in each direction, in microseconds.
        stack: How many layers share the schedule.
    """

    schedule: Schedule
    lengths: tuple[int, ...]
    time: Pair
    stack: int = 1

    @property
    def total_us(self) -> float:
        """Time of forward and backward pass."""
        return self.time.forward + self.time.backward


def cost_of(candidate: Candidate) -> float:
    """The predicted time by which named candidates are compared.

    Joined gradients of weights have to save more than predictions are exact: what they take waits for them.
    """
    total_us = candidate.total_us
    return total_us / (1 - MINIMUM_SAVING) if candidate.schedule.joins_weights else total_us


def with_joined(names: tuple[str, ...], predictor: Predictor) -> tuple[str, ...]:
    """These schedules, and ``joined`` where layers can compute gradients of weights apart."""
    return (*names, "joined") if predictor.workload.splits_weights else names


def candidates(predictor: Predictor, degrees: Iterable[int] = DEGREES) -> Iterator[Candidate]:
    """The named schedules at each degree, the same in both directions, with equal chunks."""
    rows = predictor.workload.rows
    for degree in degrees:
        if degree <= rows:
            for name in with_joined(NAMED, predictor):
                yield _named(predictor, name, degree, degree)


def in_one_chunk(predictor: Predictor) -> Candidate | None:
    """The schedule that overlaps without cutting the sequence; None where the layers cannot run it."""
    workload = predictor.workload
    if not workload.splits_weights or workload.expert == 1:
        return None
    return _named(predictor, IN_ONE_CHUNK, 1, 1)


def choose_degree(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best named schedule with equal chunks and a degree for each direction.

    One of the two degrees divides the other, because the runtime groups adjacent chunks in the direction with
    the smaller degree.

    Args:
        predictor: Of the workload on the cluster.
        degrees: The degrees that are tried, ascending.
    """
    best: Candidate | None = None
    slower = 0
    for degree in degrees:
        found = min(candidates(predictor, [degree]), key=cost_of, default=None)
        if found is None:
            break
        slower = 0 if best is None or found.total_us < best.total_us else slower + 1
        best = found if slower == 0 else best
        if slower == MAX_SLOWER_DEGREES:
            break
    assert best is not None, "a sequence of one row cannot be split"
    return _with_two_degrees(predictor, best)


def improve_chunks(
    predictor: Predictor, start: Candidate, *, evaluations: int = CHUNK_EVALUATIONS
) -> Candidate:
    """Move rows between adjacent chunks while that saves time. The order of the stages is kept.

    Args:
        predictor: Of the workload on the cluster.
        start: The candidate to start from; returned if none is faster.
        evaluations: How many other lengths are tried, times the number of chunks.
    """
    rows, count = predictor.workload.rows, len(start.lengths)
    # A run must use the lengths that are found here, and it rounds them to this number of rows.
    unit = row_unit(rows, count)
    shortest = max(1, rows // (MAX_SHORTENING * count))
    best, tried = start, 0
    step = max(unit, rows // (2 * count) // unit * unit)
    for lengths in (_tapered(rows, count, unit, ratio) for ratio in (0.8, 1.25)):
        best = min(best, _timed(predictor, start.schedule, lengths), key=lambda one: one.total_us)
    while step >= unit and tried < evaluations // count:
        improved = False
        for giver in range(count):
            for taker in (giver - 1, giver + 1):
                if not 0 <= taker < count or best.lengths[giver] - step < shortest:
                    continue
                moved = list(best.lengths)
                moved[giver] -= step
                moved[taker] += step
                found = _timed(predictor, start.schedule, tuple(moved))
                tried += 1
                if found.total_us < best.total_us * (1 - 1e-6):
                    best, improved = found, True
        if not improved:
            step = step // 2 // unit * unit
    return best


def full_plan(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best candidate over degrees, lengths of chunks and order of the stages.

    Args:
        predictor: Of the workload on the cluster.
        degrees: The degrees that are tried, ascending.

    Returns:
        A checked candidate, not slower than any named schedule with equal chunks that was tried.
    """
    plain = choose_degree(predictor, degrees)
    shaped = [improve_chunks(predictor, start) for start in _starts(predictor, plain, degrees)]
    best_shaped = min(shaped, key=lambda one: one.total_us)
    schedule = best_shaped.schedule
    even = _named(predictor, schedule.name, schedule.degree, schedule.backward_degree)
    # Lengths and order depend on each other, so both are searched again.
    ordered = [
        reorder(predictor, improve_chunks(predictor, reorder(predictor, start)))
        for start in (even, best_shaped)
    ]
    best = plain
    for found in (best_shaped, min(ordered, key=lambda one: one.total_us)):
        # The simpler candidate is kept unless the gain exceeds the accuracy of the prediction.
        if found.total_us < best.total_us * (1 - MINIMUM_SAVING):
            best = found
    check(best.schedule, [predictor.features])
    return best


def reorder(predictor: Predictor, start: Candidate) -> Candidate:
    """Search another order of the stages in each direction; chunks and degrees are kept.

    Returns:
        The candidate; ``start`` if no order is faster.
    """
    schedule = start.schedule
    programs = {
        direction: improve_order(predictor, schedule, start.lengths, direction) for direction in Direction
    }
    if all(programs[direction] == schedule.program(direction) for direction in Direction):
        return start
    forward, backward = programs[Direction.FORWARD], programs[Direction.BACKWARD]
    found = replace(schedule, name="searched", forward=forward, backward=backward)
    check(found, [predictor.features])
    return Candidate(found, start.lengths, predictor.pass_us(found, start.lengths))


def _starts(predictor: Predictor, plain: Candidate, degrees: Sequence[int]) -> list[Candidate]:
    """The best named candidate, and ``ampipe`` at its degree and the next larger one."""
    larger = [degree for degree in degrees if degree > len(plain.lengths)][:1]
    starts = [plain]
    for degree in (len(plain.lengths), *larger):
        if degree <= predictor.workload.rows:
            found = _named(predictor, "ampipe", degree, degree)
            if found.schedule != plain.schedule:
                starts.append(found)
    return starts


def _with_two_degrees(predictor: Predictor, best: Candidate) -> Candidate:
    """Try smaller degrees, divisors of the degree, in one of the two directions."""
    count = len(best.lengths)
    divisors = [degree for degree in range(1, count) if count % degree == 0]
    for degree in divisors:
        for forward, backward in ((degree, count), (count, degree)):
            found = _named(predictor, best.schedule.name, forward, backward)
            if found.total_us < best.total_us:
                best = found
    return best


def _named(predictor: Predictor, name: str, forward: int, backward: int) -> Candidate:
    features = predictor.features
    schedule = build(name, degree=forward, backward_degree=backward, features=features)
    return _timed(predictor, schedule, even_chunks(predictor.workload.rows, schedule.num_chunks))


def _timed(predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...]) -> Candidate:
    time = predictor.pass_us(schedule, lengths)
    return Candidate(schedule, lengths, time, stack=len(predictor.layers))


def _tapered(rows: int, count: int, unit: int, ratio: float) -> tuple[int, ...]:
    """Lengths with a constant ratio between adjacent chunks; multiples of the unit except for the last."""
    weights = [ratio**index for index in range(count)]
    lengths = [max(unit, round(rows * weight / sum(weights) / unit) * unit) for weight in weights]
    longest = lengths.index(max(lengths))
    lengths[longest] += rows // unit * unit - sum(lengths)
    lengths[-1] += rows % unit
    return tuple(lengths)
