"""The pipelines that the trials choose, for which sizes of input, and which choice becomes a plan file."""

from collections.abc import Callable, Sequence

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


LANCET = Pipeline.of(1, schedule="lancet")
Times = dict[Pipeline, tuple[float, float]]
"""Of both passes."""


def of_degrees(*times: tuple[float, float], exchange: Exchange = ROWS) -> Times:
    """Of degrees 1, 2 and 4."""
    return {
        Pipeline.of(degree, exchange=exchange): pair for degree, pair in zip((1, 2, 4), times, strict=False)
    }


def both_exchanges(rows: tuple[float, ...], ranks: tuple[float, ...]) -> Times:
    """Of either pass, of degrees 1, 2 and 4 with each exchange."""
    of_ranks = of_degrees(*zip(ranks, ranks, strict=True), exchange=RANKS)
    return of_degrees(*zip(rows, rows, strict=True)) | of_ranks


def of_table(times: Times, *, mixing: float = 0.0) -> Cost:
    """A pass takes what it takes in the pipeline that has its degree in both passes, and ``mixing`` more."""

    def cost(pipeline: Pipeline) -> tuple[float, float]:
        extra = mixing if pipeline.backward_degree != pipeline.degree else 0.0
        how = {"schedule": pipeline.schedule, "exchange": pipeline.exchange}
        forward, _ = times[Pipeline.of(pipeline.degree, **how)]
        _, backward = times[Pipeline.of(pipeline.backward_degree, **how)]
        return forward + extra, backward + extra

    return cost


PAIR = of_degrees((9.0, 19.0), (6.0, 14.0), (8.0, 11.0))


@pytest.mark.parametrize(
    ("times", "mixing", "best"),
    [
        (of_degrees((9.0, 19.0), (6.0, 11.0), (7.0, 12.0)), 0.0, Pipeline.of(2)),
        (PAIR, 0.0, Pipeline.of(2, backward_degree=4)),
        # A pair that is slower than its directions alone suggest is detected by its own trial.
        (PAIR, 3.0, Pipeline.of(4)),
        # Less than a percent buys no higher degree.
        (of_degrees((100.0, 100.0), (99.5, 99.5), (99.2, 99.2)), 0.0, Pipeline.of(1)),
        # One chunk is tried with two schedules.
        ({LANCET: (1.0, 3.0)} | of_degrees((1.0, 4.0), (2.0, 5.0)), 0.0, LANCET),
        ({LANCET: (1.0, 4.0)} | of_degrees((1.0, 3.0), (2.0, 5.0)), 0.0, Pipeline.of(1)),
        # The pair of one chunk forward and two backward is cut, so it has the other schedule.
        ({LANCET: (1.0, 3.0)} | of_degrees((1.0, 4.0), (2.0, 2.0)), 0.0, Pipeline.of(1, backward_degree=2)),
        # With less to hide, fewer chunks are enough.
        (both_exchanges((40.0, 30.0, 20.0), (12.0, 8.0, 9.0)), 0.0, Pipeline.of(2, exchange=RANKS)),
        (both_exchanges((7.0, 30.0, 20.0), (12.0, 8.0, 9.0)), 0.0, Pipeline.of(1)),
        # Of two that are as fast, the first.
        (both_exchanges((14.0, 10.0, 12.0), (14.0, 9.95, 12.0)), 0.0, Pipeline.of(2)),
    ],
)
def test_the_fastest_pipeline_stays(times: Times, mixing: float, best: Pipeline) -> None:
    trials, _ = settle([*times], of_table(times, mixing=mixing))
    assert trials.pipeline == best
    assert trials.choice is not None and "compared with 0." in trials.choice.reason
    assert ("exchange" in trials.choice.reason) == any(pipeline.exchange is RANKS for pipeline in times)
    trials.add_times(1.0, 1.0)
    assert trials.pipeline == best


def test_clearly_slower_degrees_and_the_first_iteration_count_little() -> None:
    slow = 10.0 * DROPPED_FACTOR + 1
    times = of_degrees((10.0, 10.0), (11.0, 11.0), (slow, slow))
    _, ran = settle([*times], of_table(times))
    tried = [pipeline.degree for pipeline in ran]
    assert (tried.count(4), tried.count(2)) == (2, 1 + ROUNDS)
    seen: set[Pipeline] = set()

    def cost(pipeline: Pipeline) -> tuple[float, float]:
        is_first = pipeline not in seen
        seen.add(pipeline)
        return (1000.0, 1000.0) if is_first and pipeline.degree == 2 else (10.0 / pipeline.degree, 1.0)

    assert settle([Pipeline.of(1), Pipeline.of(2)], cost)[0].pipeline.degree == 2


@pytest.mark.parametrize(
    ("rows", "tile", "expected"),
    [
        (1, 1, (1,)),
        (31, 1, (1, 2)),
        (64, 1, (1, 2, 4, 8)),
        (4096, 1, (1, 2, 4, 8, 16)),
        # Of whole tiles, as FP8 needs them.
        (1024, 128, (1, 2, 4, 8)),
        (1000, 128, (1,)),
    ],
)
def test_no_degree_is_tried_whose_chunks_would_be_tiny_or_cut_a_tile(
    rows: int, tile: int, expected: tuple[int, ...]
) -> None:
    assert candidates(rows, tile) == expected


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
