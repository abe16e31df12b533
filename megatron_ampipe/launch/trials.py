"""Finds the fastest degrees by trials of one iteration each: the decisions only.

Pure: the input is the time that an iteration spent in the blocks, forward and backward; the output is the
pipeline of the next iteration. Ranks with the same input make the same decisions, so the times have to be
reduced over the ranks first; :mod:`.auto` does that. All pipelines compute the same function, so trials do
not change results.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.schedule import KEEP, Exchange, Pipeline

CANDIDATES = (1, 2, 4, 8, 16)
"""Degrees that are tried: powers of two, so that any two can be combined as forward and backward degree."""

MINIMUM_ROWS = 8
"""A degree is not tried if its chunks would have fewer rows."""

ROUNDS = 3
"""How often every candidate is timed, after one round of warmup that is not counted."""

MOST_ROUNDS = 9
"""How often those are timed that stay close to the best one."""

CLOSE_FACTOR = 1.1
"""A candidate that takes more than this times the best time is not close to it."""

TIED_FACTOR = 1.03
"""If the second exchange takes no more than this times the best time, it gets all degrees too."""

DROPPED_FACTOR = 1.5
"""A degree is dropped if it takes more than this times the best time in both directions."""

MINIMUM_GAIN = 0.01
"""A different backward degree, or a higher degree, has to save this share of the time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The pipeline that was chosen.

    Attributes:
        pipeline: The pipeline of the following iterations.
        reason: Why it was chosen, as a clause.
        predicted_ms: Predicted time of a pass of a block, forward and backward, from its first stage to its
            last; None without a prediction.
        notes: Further information for the user, one sentence each.
    """

    pipeline: Pipeline
    reason: str
    predicted_ms: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


def candidates(rows: int) -> tuple[int, ...]:
    """The degrees to try for this number of rows of a rank."""
    return tuple(degree for degree in CANDIDATES if degree == 1 or rows >= degree * MINIMUM_ROWS)


def most_iterations(count: int, *, exchanges: int = 1, thorough: bool = False) -> int:
    """The most iterations of trials that begin with this number of pipelines, including the first one.

    Args:
        count: Of pipelines.
        exchanges: How many are compared.
        thorough: What is close is timed more often.
    """
    # The first iteration shows the shape. What is tried gets one more of warmup. The best degree and the best
    # pair come last.
    rounds = MOST_ROUNDS if thorough else ROUNDS
    if exchanges == 1:
        return 1 + (1 + rounds) * (count + 2)
    # All degrees with the first exchange, and again with the fastest, next to what was best before.
    again = (2 if thorough else 1) * count + 1
    return 1 + (1 + ROUNDS) * count + (1 + rounds) * (exchanges + again + 2)


class Trials:
    """Tries every degree in both directions, then the best pair of degrees, and chooses one.

    Where there are several exchanges, the degree that is best with the first is that at which they are
    compared; the fastest then gets all degrees. Single iterations vary, so whatever is close to the best is
    timed more often than the rest, in a run that is long enough for it.

    Args:
        degrees: The degrees to try.
        schedule: Name of the order of stages, for all degrees.
        in_one_chunk: A second order that is tried at degree 1, both ways; none if None.
        stack: How many layers share a schedule, as in ``Pipeline.stack``.
        memory: What the experts keep, as in ``Pipeline.memory``.
        exchanges: What is chosen from; the first is kept unless another is faster.
        iterations_left: Of the run; None if it has no end.
    """

    def __init__(
        self,
        degrees: Sequence[int],
        *,
        schedule: str,
        in_one_chunk: str | None = None,
        stack: int = 1,
        memory: str = KEEP,
        exchanges: Sequence[Exchange] = (Exchange.ROWS,),
        iterations_left: int | None = None,
    ) -> None:
        self._schedule = schedule
        self._stack, self._memory, self._exchanges = stack, memory, exchanges
        self._times_us: dict[Pipeline, list[tuple[float, float]]] = {}
        self._exchange = exchanges[0]
        self._in_one_chunk = in_one_chunk if in_one_chunk != schedule and 1 in degrees else None
        self.num_tried = len(degrees) + (self._in_one_chunk is not None)
        """With how many pipelines the trials of degrees begin."""
        most = functools.partial(most_iterations, self.num_tried, exchanges=len(exchanges))
        self._thorough = iterations_left is None or iterations_left >= most(thorough=True)
        self.most_iterations = most(thorough=self._thorough)
        """How many iterations the trials take at most."""
        self._steps = self._all_steps(degrees)
        self.choice: Choice | None = None
        self.pipeline = next(self._steps)
        """The pipeline of the next iteration."""

    def add_times(self, forward_us: float, backward_us: float) -> None:
        """Add the time that the iteration with :attr:`pipeline` spent in blocks, in each direction."""
        self._last_us = (forward_us, backward_us)
        self.pipeline = next(self._steps)

    def _all_steps(self, degrees: Sequence[int]) -> Iterator[Pipeline]:
        candidates = self._candidates(degrees, self._exchanges[:1])
        if len(self._exchanges) > 1:
            yield from self._rounds(candidates, most=ROUNDS)
            before = self._fastest(candidates)
            compared = [replace(before, exchange=exchange) for exchange in self._exchanges]
            yield from self._rounds(compared)
            candidates = self._candidates(degrees, self._fastest_exchanges(compared))
            if before not in candidates:
                candidates.append(before)
        yield from self._rounds(candidates)
        best = self._fastest(candidates)
        self._exchange = best.exchange
        pair, saved = self._best_pair(candidates, best)
        if pair not in candidates and saved > MINIMUM_GAIN:
            # Different degrees have a cost of their combination (smaller GEMMs, copies), so the pair is
            # tried.
            yield from self._rounds([best, pair])
            if self._total_us(pair) < (1 - MINIMUM_GAIN) * self._total_us(best):
                best = pair
        self.choice = Choice(best, self._reason(best))
        while True:
            yield best

    def _best_pair(self, candidates: Sequence[Pipeline], best: Pipeline) -> tuple[Pipeline, float]:
        """The best degree of each direction, and which share of the best time it is predicted to save."""
        same = [one for one in candidates if one == self._pipeline(one.degree)] or [best]
        forward, backward = (self._best_degree(same, direction) for direction in (0, 1))
        times_us = (
            self._median_us(next(one for one in same if one.degree == degree), direction)
            for direction, degree in enumerate((forward, backward))
        )
        return self._pipeline(forward, backward), 1 - sum(times_us) / self._total_us(best)

    def _candidates(self, degrees: Sequence[int], exchanges: Sequence[Exchange]) -> list[Pipeline]:
        found = [self._pipeline(degree, exchange=exchange) for exchange in exchanges for degree in degrees]
        if self._in_one_chunk is None:
            return found
        uncut = (self._pipeline(1, exchange=exchange) for exchange in exchanges)
        return [*(replace(one, schedule=self._in_one_chunk) for one in uncut), *found]

    def _fastest_exchanges(self, compared: Sequence[Pipeline]) -> list[Exchange]:
        """One, or two that are close: which of them is faster can depend on the degree."""
        total_us = {one: self._total_us(one) for one in compared}
        # Another one than the first has to save more than that.
        total_us[compared[0]] *= 1 - MINIMUM_GAIN
        fastest, second, *_ = sorted(compared, key=lambda one: total_us[one])
        is_tied = self._thorough and total_us[second] <= TIED_FACTOR * total_us[fastest]
        return [fastest.exchange, *([second.exchange] if is_tied else [])]

    def _rounds(self, pipelines: Sequence[Pipeline], *, most: int | None = None) -> Iterator[Pipeline]:
        """Warmup, then each in turn; afterwards only times of these are known."""
        self._times_us = {}
        for pipeline in pipelines:
            yield pipeline
        left = list(pipelines)
        for round_index in range(most or (MOST_ROUNDS if self._thorough else ROUNDS)):
            if round_index >= ROUNDS:
                limit = CLOSE_FACTOR * min(map(self._total_us, left))
                left = [pipeline for pipeline in left if self._total_us(pipeline) <= limit]
                if len(left) == 1:
                    break
            # The order changes each round, so that a machine that becomes slower affects all equally.
            start = round_index % len(left)
            for pipeline in left[start:] + left[:start]:
                yield pipeline
                self._times_us.setdefault(pipeline, []).append(self._last_us)
            left = [pipeline for pipeline in left if not self._is_clearly_slower(pipeline, left)]

    def _is_clearly_slower(self, pipeline: Pipeline, others: Sequence[Pipeline]) -> bool:
        return all(
            self._median_us(pipeline, direction)
            > DROPPED_FACTOR * min(self._median_us(other, direction) for other in others)
            for direction in (0, 1)
        )

    def _best_degree(self, pipelines: Sequence[Pipeline], direction: int) -> int:
        """The lowest degree that is about as fast as the best one in one direction."""
        limit = (1 + MINIMUM_GAIN) * min(self._median_us(pipeline, direction) for pipeline in pipelines)
        return min(p.degree for p in pipelines if self._median_us(p, direction) <= limit)

    def _fastest(self, pipelines: Sequence[Pipeline]) -> Pipeline:
        """The lowest degree that is about as fast as the best one; at degree 1 rather Megatron's layer."""
        least = min(map(self._total_us, pipelines))
        good = [p for p in pipelines if self._total_us(p) <= (1 + MINIMUM_GAIN) * least]
        return min(good, key=lambda pipeline: (pipeline.degree, not pipeline.is_stock))

    def _median_us(self, pipeline: Pipeline, direction: int) -> float:
        return statistics.median(times[direction] for times in self._times_us[pipeline])

    def _total_us(self, pipeline: Pipeline) -> float:
        return sum(self._median_us(pipeline, direction) for direction in (0, 1))

    def _reason(self, best: Pipeline) -> str:
        total_us = self._total_us(best)
        others = ", ".join(
            f"{self._total_us(pipeline) / 1e3:.1f} ms with {self._called(pipeline)}"
            for pipeline in self._times_us
            if pipeline != best
        )
        compared = f", compared with {others}" if others else ""
        return f"an iteration spent {total_us / 1e3:.1f} ms in blocks{compared} (slowest rank, median)"

    def _pipeline(
        self, degree: int, backward: int | None = None, *, exchange: Exchange | None = None
    ) -> Pipeline:
        return Pipeline.of(
            degree,
            backward_degree=backward,
            schedule=self._schedule,
            stack=self._stack,
            memory=self._memory,
            exchange=exchange or self._exchange,
        )

    def _called(self, pipeline: Pipeline) -> str:
        name = f"degree {pipeline.degree}"
        if pipeline.backward_degree != pipeline.degree:
            name += f", backward {pipeline.backward_degree}"
        if pipeline.schedule != self._schedule:
            name += f", schedule {pipeline.schedule}"
        return name + (f", exchange {pipeline.exchange}" if len(self._exchanges) > 1 else "")
