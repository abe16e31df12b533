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

FOR_EXCHANGES = 4
"""The highest degree at which exchanges are compared."""

ROUNDS = 3
"""How often every candidate is timed, after one round of warmup that is not counted."""

MOST_ROUNDS = 9
"""How often those are timed that stay close to the best one."""

CLOSE_FACTOR = 1.1
"""A candidate that takes more than this times the best time is not close to it."""

TIED_FACTOR = 1.03
"""If the second exchange takes no more than this times the best time, it is tried with all degrees too."""

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
    # One round of warmup and the timed rounds; before it the same for each exchange, and then for the best
    # degree and the best pair. Where the exchange is not Megatron's, its layer is tried with the degrees.
    others = 2 + (exchanges + 1 if exchanges > 1 else 0)
    if thorough:
        return 1 + (1 + MOST_ROUNDS) * (count * min(2, exchanges) + others)
    return 1 + (1 + ROUNDS) * (count + others)


class Trials:
    """Tries every degree in both directions, then the best pair of degrees, and chooses one.

    Exchanges are compared first, at one degree: how much each sends does not depend on the degree. Single
    iterations vary, so whatever is close to the best is timed more often than the rest, in a run that is long
    enough for it.

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
        self._exchange, self._tied = exchanges[0], tuple(exchanges[:1])
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
        if len(self._exchanges) > 1:
            yield from self._choose_exchanges(max(degree for degree in degrees if degree <= FOR_EXCHANGES))
        pipelines = [self._pipeline(degree, exchange=one) for one in self._tied for degree in degrees]
        others = []
        if self._in_one_chunk is not None:
            others += [
                replace(self._pipeline(1, exchange=one), schedule=self._in_one_chunk) for one in self._tied
            ]
        if self._exchanges[0] not in self._tied:
            # Megatron's own layer, where none of these is.
            others.append(self._pipeline(1, exchange=self._exchanges[0]))
        yield from self._rounds([*others, *pipelines])
        best = self._fastest([*others, *pipelines])
        if best in pipelines:
            self._exchange = best.exchange
        pipelines = [pipeline for pipeline in pipelines if pipeline.exchange is self._exchange]
        forward, backward = (self._best_degree(pipelines, direction) for direction in (0, 1))
        pair = self._pipeline(forward, backward)
        saved = 1 - (self._time_us(forward, 0) + self._time_us(backward, 1)) / self._total_us(best)
        if pair not in pipelines and saved > MINIMUM_GAIN:
            # Different degrees have a cost of their combination (smaller GEMMs, copies), so the pair is
            # tried.
            finalists = [best, pair]
            self._times_us = {}
            yield from self._rounds(finalists)
            if self._total_us(pair) < (1 - MINIMUM_GAIN) * self._total_us(best):
                best = pair
        self.choice = Choice(best, self._reason(best))
        while True:
            yield best

    def _choose_exchanges(self, degree: int) -> Iterator[Pipeline]:
        compared = [self._pipeline(degree, exchange=exchange) for exchange in self._exchanges]
        yield from self._rounds(compared)
        total_us = {one: self._total_us(one) for one in compared}
        # Megatron's has to be slower by more than that.
        total_us[compared[0]] *= 1 - MINIMUM_GAIN
        fastest, second, *_ = sorted(compared, key=lambda one: total_us[one])
        is_tied = self._thorough and total_us[second] <= TIED_FACTOR * total_us[fastest]
        self._tied = (fastest.exchange, *((second.exchange,) if is_tied else ()))
        self._exchange, self._times_us = fastest.exchange, {}

    def _rounds(self, pipelines: Sequence[Pipeline]) -> Iterator[Pipeline]:
        for pipeline in pipelines:
            yield pipeline
        left = list(pipelines)
        for round_index in range(MOST_ROUNDS if self._thorough else ROUNDS):
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

    def _time_us(self, degree: int, direction: int) -> float:
        return self._median_us(self._pipeline(degree), direction)

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
