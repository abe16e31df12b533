"""The degrees that the trials choose, and that the choice depends only on the given times."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ampipe.launch.trials import (
    DROPPED_FACTOR,
    MOST_ROUNDS,
    ROUNDS,
    Trials,
    candidates,
    most_iterations,
)
from megatron_ampipe.schedule import Exchange, Pipeline

Cost = Callable[[Pipeline], tuple[float, float]]


def settle(
    degrees: Sequence[int],
    cost: Cost,
    *,
    exchanges: Sequence[Exchange] = (Exchange.ROWS,),
    iterations_left: int | None = None,
) -> tuple[Trials, list[Pipeline]]:
    """Run iterations until the trials have ended; returns the pipelines that ran."""
    trials, ran = (
        Trials(degrees, schedule="ampipe", exchanges=exchanges, iterations_left=iterations_left),
        [],
    )
    while trials.choice is None:
        ran.append(trials.pipeline)
        trials.add_times(*cost(trials.pipeline))
        assert len(ran) < 200, "never settles"
    return trials, ran


def of_table(forward: dict[int, float], backward: dict[int, float], *, mixing: float = 0.0) -> Cost:
    def cost(pipeline: Pipeline) -> tuple[float, float]:
        extra = mixing if pipeline.backward_degree != pipeline.degree else 0.0
        return forward[pipeline.degree] + extra, backward[pipeline.backward_degree] + extra

    return cost


def of_exchanges(rows: dict[int, float], others: dict[int, float]) -> Cost:
    """Times of each degree in each direction, with Megatron's exchange and with any other one."""

    def cost(pipeline: Pipeline) -> tuple[float, float]:
        of_degree = rows if pipeline.exchange is Exchange.ROWS else others
        return of_degree[pipeline.degree], of_degree[pipeline.backward_degree]

    return cost


def chosen(trials: Trials) -> tuple[int, int]:
    assert trials.choice is not None
    pipeline = trials.choice.pipeline
    assert trials.pipeline == pipeline
    return pipeline.degree, pipeline.backward_degree


def test_the_fastest_degree_stays() -> None:
    trials, ran = settle([1, 2, 4], of_table({1: 9.0, 2: 6.0, 4: 7.0}, {1: 19.0, 2: 11.0, 4: 12.0}))
    assert chosen(trials) == (2, 2)
    assert len(ran) == 3 + 3 * ROUNDS
    assert trials.choice is not None
    assert "compared with 0.0 ms with degree 1" in trials.choice.reason
    trials.add_times(1.0, 1.0)
    assert chosen(trials) == (2, 2)


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
    trials = Trials([1, 2], schedule="ampipe", in_one_chunk="lancet")
    ran = []
    while trials.choice is None:
        ran.append(trials.pipeline)
        one = trials.pipeline
        backward = cut if one.backward_degree == 2 else lancet if one.schedule == "lancet" else uncut
        trials.add_times(1.0 if one.degree == 1 else 2.0, backward)
    begun = {Pipeline.of(1, schedule="lancet"), Pipeline.of(1), Pipeline.of(2)}
    assert set(ran[: trials.num_tried]) == begun and trials.num_tried == len(begun)
    assert trials.choice.pipeline == best


def test_each_direction_gets_its_own_degree_where_that_is_faster() -> None:
    costs = ({1: 9.0, 2: 6.0, 4: 8.0}, {1: 19.0, 2: 14.0, 4: 11.0})
    trials, ran = settle([1, 2, 4], of_table(*costs))
    assert chosen(trials) == (2, 4)
    # Two of the three are close, the pair and the best of them are not; warmup counts.
    assert len(ran) == 3 + 3 * ROUNDS + 2 * (MOST_ROUNDS - ROUNDS) + 2 * (1 + ROUNDS)
    # The iteration that detects the shape comes before.
    assert len(ran) <= most_iterations(3, thorough=True) - 1
    # A pair that is slower than its directions alone suggest is detected by its own trial.
    assert chosen(settle([1, 2, 4], of_table(*costs, mixing=3.0))[0]) == (4, 4)


@pytest.mark.parametrize(("saved", "exchange"), [(2.0, Exchange.RANKS), (0.05, Exchange.ROWS)])
def test_the_exchange_is_chosen_with_its_degrees(saved: float, exchange: Exchange) -> None:
    of_degrees = of_table({1: 9.0, 2: 6.0, 4: 8.0}, {1: 19.0, 2: 14.0, 4: 11.0})

    def cost(pipeline: Pipeline) -> tuple[float, float]:
        forward, backward = of_degrees(pipeline)
        return forward - (saved if pipeline.exchange is Exchange.RANKS else 0.0), backward

    trials, ran = settle([1, 2, 4], cost, exchanges=tuple(Exchange))
    assert chosen(trials) == (2, 4)
    assert trials.pipeline.exchange is exchange
    assert len(ran) <= most_iterations(3, exchanges=len(Exchange), thorough=True) - 1
    assert trials.choice is not None and "exchange" in trials.choice.reason


def test_each_exchange_gets_the_degrees_that_are_best_with_it() -> None:
    """With less to hide, fewer chunks are enough: the degree that is best with the other one is not taken."""
    rows, ranks = {1: 40.0, 2: 30.0, 4: 20.0}, {1: 12.0, 2: 8.0, 4: 9.0}

    trials, _ = settle([1, 2, 4], of_exchanges(rows, ranks), exchanges=(Exchange.ROWS, Exchange.RANKS))
    assert (chosen(trials), trials.pipeline.exchange) == ((2, 2), Exchange.RANKS)
    # Megatron's own layer is compared too, and not only AMPipe's in one chunk.
    rows[1] = 7.0
    trials, _ = settle([1, 2, 4], of_exchanges(rows, ranks), exchanges=(Exchange.ROWS, Exchange.RANKS))
    assert trials.pipeline.is_stock


def test_two_exchanges_that_are_close_get_all_degrees() -> None:
    """At the degree that is best with the first, the second is 1 % slower; its best degree is a lower one."""
    rows, ranks = {1: 14.0, 2: 10.0, 4: 12.0}, {1: 9.5, 2: 10.1, 4: 12.0}

    trials, ran = settle([1, 2, 4], of_exchanges(rows, ranks), exchanges=(Exchange.ROWS, Exchange.RANKS))
    assert (chosen(trials), trials.pipeline.exchange) == ((1, 1), Exchange.RANKS)
    ranks[2] = 10.5
    trials, fewer = settle([1, 2, 4], of_exchanges(rows, ranks), exchanges=(Exchange.ROWS, Exchange.RANKS))
    assert (chosen(trials), trials.pipeline.exchange) == ((2, 2), Exchange.ROWS)
    assert len(fewer) < len(ran)


def test_exchanges_are_compared_at_the_best_degree_of_the_first() -> None:
    """At degree 4 the cheaper of two would be the one that is slower at degree 2, where both are faster."""
    rows, nodes = {1: 20.0, 2: 13.0, 4: 15.0}, {1: 14.0, 2: 12.0, 4: 16.0}

    trials, _ = settle([1, 2, 4], of_exchanges(rows, nodes), exchanges=(Exchange.ROWS, Exchange.NODES))
    assert (chosen(trials), trials.pipeline.exchange) == ((2, 2), Exchange.NODES)


def test_what_is_close_is_chosen_by_more_samples() -> None:
    """Iterations vary by 20 %, the degrees differ by 7 %."""
    noise, costs = random.Random(1), {1: 10.7, 2: 10.0}

    def cost(pipeline: Pipeline) -> tuple[float, float]:
        return costs[pipeline.degree] * noise.uniform(1, 1.2), 1e-6

    found = [chosen(settle([1, 2], cost)[0])[0] for _ in range(200)]
    assert found.count(2) >= 180
    # With three samples only, more are wrong.
    fewer = [chosen(settle([1, 2], cost, iterations_left=40)[0])[0] for _ in range(200)]
    assert fewer.count(2) <= 175


def test_a_run_that_is_not_long_enough_gets_fewer_samples() -> None:
    costs = {1: 10.0, 2: 10.05, 4: 10.02, 8: 10.04}
    thorough = most_iterations(4, thorough=True)
    for left, most in ((None, thorough), (thorough, thorough), (thorough - 1, most_iterations(4))):
        trials, ran = settle([1, 2, 4, 8], of_table(costs, costs), iterations_left=left)
        assert trials.most_iterations == most > len(ran)
        assert ran.count(Pipeline.of(1)) == 1 + (MOST_ROUNDS if most == thorough else ROUNDS)
    assert most_iterations(4) == 25


def test_a_difference_of_less_than_a_percent_buys_no_higher_degree() -> None:
    costs = {1: 100.0, 2: 99.5, 4: 99.2, 8: 120.0}
    assert chosen(settle([1, 2, 4, 8], of_table(costs, costs))[0]) == (1, 1)


def test_clearly_slower_degrees_are_not_tried_again() -> None:
    costs = {1: 10.0, 2: 11.0, 4: 10.0 * DROPPED_FACTOR + 1}
    _, ran = settle([1, 2, 4], of_table(costs, costs))
    tried = [pipeline.degree for pipeline in ran]
    assert tried.count(4) == 2
    assert tried.count(2) == 1 + MOST_ROUNDS, "a close one is timed more often"


def test_a_first_slow_iteration_does_not_count() -> None:
    seen: set[Pipeline] = set()

    def cost(pipeline: Pipeline) -> tuple[float, float]:
        first = pipeline not in seen
        seen.add(pipeline)
        return (1000.0, 1000.0) if first and pipeline.degree == 2 else (10.0 / pipeline.degree, 1.0)

    assert chosen(settle([1, 2], cost)[0])[0] == 2


@given(st.lists(st.floats(1, 1e6), min_size=60, max_size=60), st.integers(1, 4))
def test_who_is_told_the_same_decides_the_same(times: list[float], count: int) -> None:
    degrees = (1, 2, 4, 8)[:count]

    def told() -> tuple[list[Pipeline], tuple[int, int]]:
        numbers = iter(times * 4)
        trials, ran = settle(degrees, lambda _: (next(numbers), next(numbers)))
        return ran, chosen(trials)

    assert told() == told()


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, (1,)), (31, (1, 2)), (64, (1, 2, 4, 8)), (4096, (1, 2, 4, 8, 16))]
)
def test_no_degree_is_tried_whose_chunks_would_be_tiny(rows: int, expected: tuple[int, ...]) -> None:
    assert candidates(rows) == expected
