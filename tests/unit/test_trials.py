"""The pipelines that the trials choose, for which sizes of input, and which choice becomes a plan file."""

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ampipe.launch import auto
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


def settle(pipelines: Sequence[Pipeline], cost: Cost, *, warm_up: int = 1) -> tuple[Trials, list[Pipeline]]:
    """Run iterations until the trials have ended; returns the pipelines that ran."""
    trials, ran = Trials(pipelines, warm_up=warm_up), []
    while trials.choice is None:
        ran.append(trials.pipeline)
        trials.add_times(*cost(trials.pipeline))
        assert len(ran) < most_iterations(len(pipelines), warm_up=warm_up), "never settles"
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


def test_what_a_pipeline_learns_first_is_not_timed() -> None:
    seen: Counter[Pipeline] = Counter()

    def cost(pipeline: Pipeline) -> tuple[float, float]:
        seen[pipeline] += 1
        return (1000.0, 1000.0) if seen[pipeline] <= 3 else (10.0 / pipeline.degree, 10.0)

    trials, ran = settle([Pipeline.of(1), Pipeline.of(2), Pipeline.of(4)], cost, warm_up=3)
    assert [pipeline.degree for pipeline in ran[:9]] == [1] * 3 + [2] * 3 + [4] * 3
    assert trials.choice is not None and "spent 0.0 ms" in trials.choice.reason
    assert trials.pipeline.degree == 4


def test_a_repeated_step_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its times are those of two runs, of which the second has exact rows."""
    passes: Any = SimpleNamespace(measuring=False, shape=(64, 1), restart=lambda: None)
    recorder = SimpleNamespace(passes=passes)
    context: Any = SimpleNamespace(recorder=recorder, pipeline=Pipeline.of(1), given=Pipeline.of(1))
    monkeypatch.setattr(auto, "_largest_over_ranks", lambda numbers: numbers)
    hook, ran, degrees_timed = auto.AutoDegree(context, planner=None), [], []
    monkeypatch.setattr(Trials, "add_times", _noting(Trials.add_times, degrees_timed))
    for number in range(60):
        hook.before_step()
        ran.append(context.pipeline.degree)
        is_repeated = number % 3 == 2
        if is_repeated:
            hook.before_repeat()
        passes.sum_us = lambda _: 1e9 if is_repeated else 1e3 / context.pipeline.degree  # noqa: B023
        hook.after_step()
        if is_repeated and hook._trials is not None:
            assert hook._next.pipeline.degree == ran[-1], "the same again"
    assert degrees_timed[:4] == [1, 2, 4, 8] and ran[-1] == 8
    assert max(sum(times) for times in _timed_us) < 1e9


_timed_us: list[tuple[float, float]] = []


def _noting(add_times: Callable[..., None], degrees: list[int]) -> Callable[..., None]:
    def add(trials: Trials, forward_us: float, backward_us: float) -> None:
        degrees.append(trials.pipeline.degree)
        _timed_us.append((forward_us, backward_us))
        add_times(trials, forward_us, backward_us)

    return add


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
