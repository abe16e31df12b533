"""Finding the fastest degrees by trying them, an iteration each: the decisions alone.

Pure: it is told how long an iteration spent in the blocks, forward and backward, and says with which
pipeline the next one runs. Ranks that are told the same numbers decide the same, so the numbers have to be
reduced over the ranks first; :mod:`.auto` does that. Every pipeline computes the same function, so trying
changes no result.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ampipe.schedule import Pipeline

CANDIDATES = (1, 2, 4, 8, 16)
"""Degrees that are tried; powers of two, so that any two of them can be forward and backward degree."""

MINIMUM_ROWS = 8
"""Rows of a chunk below which a degree is not tried."""

ROUNDS = 3
"""How often every candidate counts. One more round comes before, which warms caches and is not counted."""

HOPELESS = 1.5
"""A degree that was so many times slower than the best in both directions is not tried again."""

WORTH = 0.01
"""Another backward degree, or a higher degree, has to save this share of the time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was decided.

    Attributes:
        pipeline: With which to run from now on.
        reason: Why, as a clause.
        predicted_ms: Of a pass through a block, forward and backward, from its first stage to its last;
            None where nothing was predicted.
        notes: What the user should know besides, a sentence each.
    """

    pipeline: Pipeline
    reason: str
    predicted_ms: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()


def candidates(rows: int) -> tuple[int, ...]:
    """The degrees worth a trial for so many rows of a rank."""
    return tuple(degree for degree in CANDIDATES if degree == 1 or rows >= degree * MINIMUM_ROWS)


def longest(count: int) -> int:
    """Iterations that trials of so many degrees take at most, the first one of this shape counted."""
    # Then one round to warm up and the rounds that count; and likewise for the pair of the two best.
    return 1 + (1 + ROUNDS) * count + (1 + ROUNDS) * 2


class Trials:
    """Tries every degree in both directions, then the best pair of them, and settles.

    Args:
        degrees: To be tried.
        schedule: Name of the order of stages, for all of them.
    """

    def __init__(self, degrees: Sequence[int], *, schedule: str) -> None:
        self._schedule = schedule
        self._times_us: dict[Pipeline, list[tuple[float, float]]] = {}
        self._steps = self._all_steps([self._pipeline(degree) for degree in degrees])
        self.choice: Choice | None = None
        self.pipeline = next(self._steps)
        """With which the next iteration runs."""

    def tell(self, forward_us: float, backward_us: float) -> None:
        """How long the iteration with :attr:`pipeline` spent in blocks, in each direction."""
        self._last_us = (forward_us, backward_us)
        self.pipeline = next(self._steps)

    def _all_steps(self, pipelines: list[Pipeline]) -> Iterator[Pipeline]:
        yield from self._rounds(pipelines)
        best = self._fastest(pipelines)
        forward, backward = (self._best_degree(pipelines, way) for way in (0, 1))
        pair = self._pipeline(forward, backward)
        saved = 1 - (self._of(forward, 0) + self._of(backward, 1)) / self._total_us(best)
        if pair not in pipelines and saved > WORTH:
            # What the pair costs beyond its halves (smaller products, merged copies) only a trial shows.
            contenders = [best, pair]
            self._times_us = {}
            yield from self._rounds(contenders)
            if self._total_us(pair) < (1 - WORTH) * self._total_us(best):
                best = pair
        self.choice = Choice(best, self._reason(best))
        while True:
            yield best

    def _rounds(self, pipelines: Sequence[Pipeline]) -> Iterator[Pipeline]:
        for pipeline in pipelines:
            yield pipeline
        left = list(pipelines)
        for number in range(ROUNDS):
            # Another order each time, so that a machine that becomes slower hits all alike.
            start = number % len(left)
            for pipeline in left[start:] + left[:start]:
                yield pipeline
                self._times_us.setdefault(pipeline, []).append(self._last_us)
            left = [pipeline for pipeline in left if not self._is_hopeless(pipeline, left)]

    def _is_hopeless(self, pipeline: Pipeline, others: Sequence[Pipeline]) -> bool:
        return all(
            self._median_us(pipeline, way) > HOPELESS * min(self._median_us(other, way) for other in others)
            for way in (0, 1)
        )

    def _best_degree(self, pipelines: Sequence[Pipeline], way: int) -> int:
        """The lowest degree that is as good as the best in one direction."""
        least = min(self._median_us(pipeline, way) for pipeline in pipelines)
        return min(p.degree for p in pipelines if self._median_us(p, way) <= (1 + WORTH) * least)

    def _fastest(self, pipelines: Sequence[Pipeline]) -> Pipeline:
        """Likewise over both directions."""
        least = min(map(self._total_us, pipelines))
        good = [p for p in pipelines if self._total_us(p) <= (1 + WORTH) * least]
        return min(good, key=lambda pipeline: pipeline.degree)

    def _of(self, degree: int, way: int) -> float:
        return self._median_us(self._pipeline(degree), way)

    def _median_us(self, pipeline: Pipeline, way: int) -> float:
        return statistics.median(times[way] for times in self._times_us[pipeline])

    def _total_us(self, pipeline: Pipeline) -> float:
        return sum(self._median_us(pipeline, way) for way in (0, 1))

    def _reason(self, best: Pipeline) -> str:
        total_us = self._total_us(best)
        others = ", ".join(
            f"{self._total_us(pipeline) / 1e3:.1f} ms with {_degrees(pipeline)}"
            for pipeline in self._times_us
            if pipeline != best
        )
        beside = f", against {others}" if others else ""
        return f"an iteration spent {total_us / 1e3:.1f} ms in blocks{beside} (slowest rank, median)"

    def _pipeline(self, degree: int, backward: int | None = None) -> Pipeline:
        return Pipeline.of(degree, backward_degree=backward, schedule=self._schedule)


def _degrees(pipeline: Pipeline) -> str:
    if pipeline.backward_degree == pipeline.degree:
        return f"degree {pipeline.degree}"
    return f"degree {pipeline.degree}, backward {pipeline.backward_degree}"
