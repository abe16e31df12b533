"""The pipelines that the trials choose, for which sizes of input, and which choice becomes a plan file."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from megatron_ampipe.launch.trials import (
    DROPPED_FACTOR,
    ROUNDS,
    SizeRanges,
    Trials,
    candidates,
    most_iterations,
)
from megatron_ampipe.schedule import Exchange, Pipeline

Cost = Callable[[Pipeline], tuple[float, float]]
ROWS, RANKS = Exchange.ROWS, Exchange.RANKS


def settle(pipelines: Sequence[Pipeline], cost: Cost) -> tuple[Trials, list[Pipeline]]:
    """Run iterations until the trials have ended; returns the pipelines that ran."""
    trials, ran = Trials(pipelines), []
    while trials.choice is None:
        ran.append(trials.pipeline)
        trials.add_times(*cost(trials.pipeline))
        assert len(ran) < most_iterations(len(pipelines)), "never settles"
    assert trials.pipeline == trials.choice.pipeline
    return trials, ran


def of_degrees(*degrees: int) -> list[Pipeline]:
    return [Pipeline.of(degree) for degree in degrees]


def of_table(forward: dict[int, float], backward: dict[int, float], *, mixing: float = 0.0) -> Cost:
    def cost(pipeline: Pipeline) -> tuple[float, float]:
        extra = mixing if pipeline.backward_degree != pipeline.degree else 0.0
        return forward[pipeline.degree] + extra, backward[pipeline.backward_degree] + extra

    return cost


@pytest.mark.parametrize(
    ("forward", "backward", "mixing", "best"),
    [
        ((9.0, 6.0, 7.0), (19.0, 11.0, 12.0), 0.0, (2, 2)),
        ((9.0, 6.0, 8.0), (19.0, 14.0, 11.0), 0.0, (2, 4)),
        # A pair that is slower than its directions alone suggest is detected by its own trial.
        ((9.0, 6.0, 8.0), (19.0, 14.0, 11.0), 3.0, (4, 4)),
        # Less than a percent buys no higher degree.
        ((100.0, 99.5, 99.2), (100.0, 99.5, 99.2), 0.0, (1, 1)),
    ],
)
def test_the_fastest_degrees_stay(
    forward: tuple[float, ...], backward: tuple[float, ...], mixing: float, best: tuple[int, int]
) -> None:
    tables = (dict(zip((1, 2, 4), times, strict=True)) for times in (forward, backward))
    trials, _ = settle(of_degrees(1, 2, 4), of_table(*tables, mixing=mixing))
    assert trials.pipeline == Pipeline.of(best[0], backward_degree=best[1])
    assert trials.choice is not None and "compared with 0." in trials.choice.reason
    trials.add_times(1.0, 1.0)
    assert trials.pipeline == trials.choice.pipeline


@pytest.mark.parametrize(
    ("lancet", "uncut", "cut", "best"),
    [
        (3.0, 4.0, 5.0, Pipeline.of(1, schedule="lancet")),
        (4.0, 3.0, 5.0, Pipeline.of(1)),
        # The pair of one chunk forward and two backward is cut, so it has the other schedule.
        (3.0, 4.0, 2.0, Pipeline.of(1, backward_degree=2)),
    ],
)
def test_one_chunk_is_tried_with_two_schedules(
    lancet: float, uncut: float, cut: float, best: Pipeline
) -> None:
    def cost(pipeline: Pipeline) -> tuple[float, float]:
        backward = uncut if pipeline.schedule == "ampipe" else lancet
        return float(pipeline.degree), cut if pipeline.backward_degree == 2 else backward

    tried = [Pipeline.of(1, schedule="lancet"), *of_degrees(1, 2)]
    assert settle(tried, cost)[0].pipeline == best


@pytest.mark.parametrize(
    ("rows", "ranks", "degree", "exchange"),
    [
        # With less to hide, fewer chunks are enough.
        ({1: 40.0, 2: 30.0, 4: 20.0}, {1: 12.0, 2: 8.0, 4: 9.0}, 2, RANKS),
        ({1: 7.0, 2: 30.0, 4: 20.0}, {1: 12.0, 2: 8.0, 4: 9.0}, 1, ROWS),
        # Of two that are as fast, the first.
        ({1: 14.0, 2: 10.0, 4: 12.0}, {1: 14.0, 2: 9.95, 4: 12.0}, 2, ROWS),
    ],
)
def test_each_exchange_gets_the_degree_that_is_best_with_it(
    rows: dict[int, float], ranks: dict[int, float], degree: int, exchange: Exchange
) -> None:
    def cost(pipeline: Pipeline) -> tuple[float, float]:
        times = rows if pipeline.exchange is ROWS else ranks
        return times[pipeline.degree], times[pipeline.backward_degree]

    tried = [replace(pipeline, exchange=way) for way in (ROWS, RANKS) for pipeline in of_degrees(1, 2, 4)]
    trials, _ = settle(tried, cost)
    assert trials.pipeline == Pipeline.of(degree, exchange=exchange)
    assert trials.choice is not None and "exchange" in trials.choice.reason


def test_clearly_slower_degrees_and_the_first_iteration_count_little() -> None:
    costs = {1: 10.0, 2: 11.0, 4: 10.0 * DROPPED_FACTOR + 1}
    _, ran = settle(of_degrees(1, 2, 4), of_table(costs, costs))
    tried = [pipeline.degree for pipeline in ran]
    assert (tried.count(4), tried.count(2)) == (2, 1 + ROUNDS)
    seen: set[Pipeline] = set()

    def cost(pipeline: Pipeline) -> tuple[float, float]:
        is_first = pipeline not in seen
        seen.add(pipeline)
        return (1000.0, 1000.0) if is_first and pipeline.degree == 2 else (10.0 / pipeline.degree, 1.0)

    assert settle(of_degrees(1, 2), cost)[0].pipeline.degree == 2


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, (1,)), (31, (1, 2)), (64, (1, 2, 4, 8)), (4096, (1, 2, 4, 8, 16))]
)
def test_no_degree_is_tried_whose_chunks_would_be_tiny(rows: int, expected: tuple[int, ...]) -> None:
    assert candidates(rows) == expected


DEGREES = (1, 2, 4, 8, 16)


def test_a_pair_of_degrees_limits_both_ways_and_must_fit_the_rows() -> None:
    ranges = SizeRanges()
    pair = Pipeline.of(2, backward_degree=8)
    ranges.add(100, pair)
    assert ranges.left(50, DEGREES) == (1, 2, 4, 8)
    assert ranges.left(200, DEGREES) == (2, 4, 8, 16)
    ranges.add(200, pair)
    assert ranges.find(150, DEGREES) == (pair, "100 and 200 tokens")
    # As many tokens in more and shorter sequences.
    assert ranges.find(150, (1, 2)) is None
