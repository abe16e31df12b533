"""Chooses how to run a block: degrees, where chunks end, and the order of the stages.

Three steps, each never worse than what it starts from: the best named schedule over all degrees
(:func:`choose_degree`, some milliseconds), ends of chunks (:func:`improve_chunks`), order of stages
(:mod:`.order`). All are counted in evaluations, not in seconds, and draw no random numbers from the clock, so
that every rank that starts from the same figures comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from megatron_ampipe.plan.cost import Pair
from megatron_ampipe.plan.order import improve_order
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import Direction, Schedule, build, check, even_chunks, row_unit

DEGREES = (2, 3, 4, 6, 8, 12, 16)
"""The numbers of chunks that are tried: those with many divisors, as one degree has to divide the other."""
NAMED = ("ampipe", "moe-only")
"""The named schedules that hide something, the more usual one first: it wins a tie."""
SUFFERED = 2
"""So many larger degrees in a row may be slower before the search ends."""
CHUNK_EVALUATIONS = 1200
"""Trials of other lengths, times the chunks: a bound on the time of a search."""
SHORTEST = 4
"""No chunk becomes shorter than this part of an equal one."""
WORTHWHILE = 0.01
"""What unequal chunks or another order must save, as a share, to be chosen over the plainer form."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a block, with its predicted time.

    Attributes:
        schedule: Degrees and order of the stages.
        lengths: Rows of one rank in each chunk.
        time: Microseconds of a pass in each direction.
    """

    schedule: Schedule
    lengths: tuple[int, ...]
    time: Pair

    @property
    def total_us(self) -> float:
        """Forward and backward."""
        return self.time.forward + self.time.backward


def candidates(predictor: Predictor, degrees: Iterable[int] = DEGREES) -> Iterator[Candidate]:
    """The named schedules at each degree, the same in both directions, with equal chunks."""
    rows = predictor.workload.rows
    for degree in degrees:
        if degree <= rows:
            for name in NAMED:
                yield _named(predictor, name, degree, degree)


def choose_degree(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best named schedule with equal chunks, its degree chosen for each direction.

    One of the two degrees divides the other, because the runtime puts adjacent chunks together in the
    direction with the smaller one.

    Args:
        predictor: Of the workload on the cluster.
        degrees: What is tried, ascending.
    """
    best: Candidate | None = None
    slower = 0
    for degree in degrees:
        found = min(candidates(predictor, [degree]), key=lambda one: one.total_us, default=None)
        if found is None:
            break
        slower = 0 if best is None or found.total_us < best.total_us else slower + 1
        best = found if slower == 0 else best
        if slower == SUFFERED:
            break
    assert best is not None, "a sequence of one row cannot be cut"
    return _apart(predictor, best)


def improve_chunks(predictor: Predictor, start: Candidate) -> Candidate:
    """Move the ends of chunks while that saves time. The order of the stages stays.

    Args:
        predictor: Of the workload on the cluster.
        start: Where to begin; returned where nothing is better.
    """
    rows, count = predictor.workload.rows, len(start.lengths)
    # What is found must be what runs: chunks of a run end on these rows too.
    unit = row_unit(rows, count)
    shortest = max(1, rows // (SHORTEST * count))
    best, evaluations = start, 0
    step = max(unit, rows // (2 * count) // unit * unit)
    for lengths in (_tapered(rows, count, unit, ratio) for ratio in (0.8, 1.25)):
        best = min(best, _timed(predictor, start.schedule, lengths), key=lambda one: one.total_us)
    while step >= unit and evaluations < CHUNK_EVALUATIONS // count:
        improved = False
        for giver in range(count):
            for taker in (giver - 1, giver + 1):
                if not 0 <= taker < count or best.lengths[giver] - step < shortest:
                    continue
                moved = list(best.lengths)
                moved[giver] -= step
                moved[taker] += step
                found = _timed(predictor, start.schedule, tuple(moved))
                evaluations += 1
                if found.total_us < best.total_us * (1 - 1e-6):
                    best, improved = found, True
        if not improved:
            step = step // 2 // unit * unit
    return best


def full_plan(predictor: Predictor, degrees: Sequence[int] = DEGREES) -> Candidate:
    """The best that is found: degrees, ends of chunks, order of the stages.

    Args:
        predictor: Of the workload on the cluster.
        degrees: What is tried, ascending.

    Returns:
        A checked candidate, not slower than any named schedule with equal chunks that was tried.
    """
    plain = choose_degree(predictor, degrees)
    shaped = [improve_chunks(predictor, start) for start in _starts(predictor, plain, degrees)]
    best_shaped = min(shaped, key=lambda one: one.total_us)
    schedule = best_shaped.schedule
    even = _named(predictor, schedule.name, schedule.degree, schedule.backward_degree)
    # Each gains from the other: a small last chunk is worth more where experts stand before it.
    ordered = [
        reorder(predictor, improve_chunks(predictor, reorder(predictor, start)))
        for start in (even, best_shaped)
    ]
    best = plain
    for found in (best_shaped, min(ordered, key=lambda one: one.total_us)):
        # The plainer form stays unless the gain is more than a prediction can tell.
        if found.total_us < best.total_us * (1 - WORTHWHILE):
            best = found
    check(best.schedule, predictor.features)
    return best


def reorder(predictor: Predictor, start: Candidate) -> Candidate:
    """Search another order of the stages, in each direction; chunks and degrees stay.

    Returns:
        The start itself where no order is faster.
    """
    schedule = start.schedule
    programs = {
        direction: improve_order(predictor, schedule, start.lengths, direction) for direction in Direction
    }
    if all(programs[direction] == schedule.program(direction) for direction in Direction):
        return start
    found = Schedule(
        "searched",
        schedule.degree,
        programs[Direction.FORWARD],
        programs[Direction.BACKWARD],
        schedule.backward_degree,
    )
    check(found, predictor.features)
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


def _apart(predictor: Predictor, best: Candidate) -> Candidate:
    """Try a smaller degree, a divisor, in one of the two directions."""
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
    return Candidate(schedule, lengths, predictor.pass_us(schedule, lengths))


def _tapered(rows: int, count: int, unit: int, ratio: float) -> tuple[int, ...]:
    """Lengths that shrink or grow by a ratio from chunk to chunk; ends, but for the last, on whole units."""
    weights = [ratio**index for index in range(count)]
    lengths = [max(unit, round(rows * weight / sum(weights) / unit) * unit) for weight in weights]
    longest = lengths.index(max(lengths))
    lengths[longest] += rows // unit * unit - sum(lengths)
    lengths[-1] += rows % unit
    return tuple(lengths)
