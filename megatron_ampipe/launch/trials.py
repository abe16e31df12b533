"""Finds the fastest pipeline by trials of one iteration each, and the input sizes that need no trials.

Pure functions of times: the input is the time that an iteration spent in blocks, forward and backward; the
output is the pipeline of the next iteration. Times are reduced over the ranks first, so all ranks make the
same decisions. All pipelines compute the same function, so trials do not change results.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.plan.search import MINIMUM_SAVING
from megatron_ampipe.schedule import Pipeline, even_chunks
from megatron_ampipe.schedule.chunks import have_whole_tiles

Shape = tuple[int, int]
"""The rows of the residual stream on a rank, and the batch size."""

CANDIDATES = (1, 2, 4, 8, 16)
"""The degrees that are tried: powers of two, so that any two can be forward and backward degree."""

MINIMUM_ROWS = 8
"""The least number of rows per chunk of a degree that is tried."""

ROUNDS = 3
"""How often each candidate is timed, after a warm-up that does not count."""

DROPPED_FACTOR = 1.5
"""A candidate is dropped if it takes more than this factor times the best time, in both directions."""


Planner = Callable[[Shape], Plan]
"""Makes a plan from a cluster file, without measuring; all ranks choose the same."""


def candidates(rows: int, tile: int = 1) -> tuple[int, ...]:
    """The degrees to try for ``rows`` rows on a rank, if chunks must consist of tiles of ``tile`` rows."""
    return tuple(
        degree
        for degree in CANDIDATES
        if degree == 1
        or (rows >= degree * MINIMUM_ROWS and have_whole_tiles(even_chunks(rows, degree), tile))
    )


def most_iterations(count: int, *, warm_up: int = 1) -> int:
    """The most iterations that trials of ``count`` pipelines take, including the one that shows the shape."""
    # The best pipeline and the best pair of degrees are tried at the end.
    return 1 + (warm_up + ROUNDS) * (count + 2)


class Trials:
    """Tries every pipeline, then the best pair of degrees, and chooses one.

    Args:
        pipelines: The pipelines to try. Of two that are about as fast, the one with the lower degree is
            chosen; at the same degree, the first. Pairs of degrees use the schedule of the last pipeline.
        warm_up: Iterations of each pipeline that do not count, one after another.
    """

    def __init__(self, pipelines: Sequence[Pipeline], *, warm_up: int = 1) -> None:
        self._warm_up = warm_up
        self._times_us: dict[Pipeline, list[tuple[float, float]]] = {}
        self._steps = self._all_steps(pipelines)
        self.choice: Plan | None = None
        self.pipeline = next(self._steps)
        """The pipeline of the next iteration."""

    def add_times(self, forward_us: float, backward_us: float) -> None:
        """Add the time that the iteration with :attr:`pipeline` spent in blocks, in each direction."""
        self._last_us = (forward_us, backward_us)
        self.pipeline = next(self._steps)

    def _all_steps(self, pipelines: Sequence[Pipeline]) -> Iterator[Pipeline]:
        yield from self._timed(pipelines)
        best = self._fastest(pipelines)
        pair, saved = self._best_pair(best, schedule=pipelines[-1].schedule)
        if pair not in pipelines and saved > MINIMUM_SAVING:
            # Combining different degrees costs time (smaller GEMMs, copies), so the pair is tried as well.
            yield from self._timed([best, pair])
            if self._total_us(pair) < (1 - MINIMUM_SAVING) * self._total_us(best):
                best = pair
        self.choice = Plan(pipeline=best, reason=self._reason(best))
        while True:
            yield best

    def _timed(self, pipelines: Sequence[Pipeline]) -> Iterator[Pipeline]:
        """Warm up, then time each pipeline in turn; forgets all earlier times."""
        self._times_us = {}
        for pipeline in pipelines:
            yield from itertools.repeat(pipeline, self._warm_up)
        left = list(pipelines)
        for round_index in range(ROUNDS):
            # The order rotates, so that a machine that becomes slower affects all equally.
            start = round_index % len(left)
            for pipeline in left[start:] + left[:start]:
                yield pipeline
                self._times_us.setdefault(pipeline, []).append(self._last_us)
            least_us = [min(self._median_us(pipeline, way) for pipeline in left) for way in (0, 1)]
            left = [
                pipeline
                for pipeline in left
                if any(self._median_us(pipeline, way) <= DROPPED_FACTOR * least_us[way] for way in (0, 1))
            ]

    def _best_pair(self, best: Pipeline, *, schedule: str) -> tuple[Pipeline, float]:
        """The pair of the best degrees of both directions, and the share of time it is predicted to save."""
        same = [
            pipeline
            for pipeline in self._times_us
            if (pipeline.exchange, pipeline.schedule) == (best.exchange, schedule)
        ]
        same.sort(key=lambda pipeline: pipeline.degree)
        fastest, predicted_us = [], 0.0
        for way in (0, 1):
            limit = (1 + MINIMUM_SAVING) * min(self._median_us(pipeline, way) for pipeline in same)
            fastest.append(next(pipeline for pipeline in same if self._median_us(pipeline, way) <= limit))
            predicted_us += self._median_us(fastest[-1], way)
        pair = replace(fastest[0], backward_degree=fastest[1].degree)
        return pair, 1 - predicted_us / self._total_us(best)

    def _fastest(self, pipelines: Sequence[Pipeline]) -> Pipeline:
        """The lowest degree that is about as fast as the best; at degree 1, prefer Megatron's own layer."""
        limit = (1 + MINIMUM_SAVING) * min(map(self._total_us, pipelines))
        good = [pipeline for pipeline in pipelines if self._total_us(pipeline) <= limit]
        return min(good, key=lambda pipeline: (pipeline.degree, not pipeline.is_stock))

    def _median_us(self, pipeline: Pipeline, way: int) -> float:
        return statistics.median(times[way] for times in self._times_us[pipeline])

    def _total_us(self, pipeline: Pipeline) -> float:
        return self._median_us(pipeline, 0) + self._median_us(pipeline, 1)

    def _reason(self, best: Pipeline) -> str:
        others = ", ".join(
            f"{self._total_us(pipeline) / 1e3:.1f} ms with {pipeline}"
            for pipeline in self._times_us
            if pipeline != best
        )
        compared = f", compared with {others}" if others else ""
        spent = f"an iteration spent {self._total_us(best) / 1e3:.1f} ms in blocks"
        return f"{spent}{compared} (slowest rank, median)"


class SizeRanges:
    """Choices by the number of tokens of a rank's input, rows times batch.

    Algorithm 1 of MPipeMoE (section III-C). It assumes that the best number of chunks does not fall when the
    input grows. So a size between two sizes with the same choice needs no trials, and a size between two with
    different choices only tries degrees between those. The paper keeps a range of sizes per degree; here all
    sizes are kept.
    """

    def __init__(self) -> None:
        self._chosen: dict[int, Pipeline] = {}

    def add(self, tokens: int, pipeline: Pipeline) -> None:
        """Record a choice."""
        self._chosen[tokens] = pipeline

    def find(self, tokens: int, degrees: Iterable[int]) -> tuple[Pipeline, str] | None:
        """The common choice of the next smaller and larger size, and both sizes as text; None to try.

        ``degrees`` are the possible degrees of this input.
        """
        below, above = self._neighbours(tokens)
        if below is None or above is None or self._chosen[below] != self._chosen[above]:
            return None
        chosen = self._chosen[below]
        fits = {chosen.degree, chosen.backward_degree} <= set(degrees)
        return (chosen, f"{below} and {above} tokens") if fits else None

    def left(self, tokens: int, degrees: Sequence[int]) -> tuple[int, ...]:
        """The degrees that are left to try; all if the choices so far contradict the assumption."""
        below, above = self._neighbours(tokens)
        least, most = min(degrees), max(degrees)
        if below is not None:
            least = min(self._chosen[below].degree, self._chosen[below].backward_degree)
        if above is not None:
            most = self._chosen[above].num_chunks
        return tuple(degree for degree in degrees if least <= degree <= most) or tuple(degrees)

    def _neighbours(self, tokens: int) -> tuple[int | None, int | None]:
        """The next known size below (or equal), and the next above (or equal)."""
        below = max((size for size in self._chosen if size <= tokens), default=None)
        above = min((size for size in self._chosen if size >= tokens), default=None)
        return below, above
