"""The search: never slower than named schedules, nearly optimal for small graphs, fast, deterministic."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import Overlap, find_cluster, read_cluster
from megatron_ampipe.plan.model_block import block_of, layers_of
from megatron_ampipe.plan.model_file import find_model, read_model
from megatron_ampipe.plan.order_search import OrderProblem, Period, _with_one_move, improve_order
from megatron_ampipe.plan.planner import Plans, make_plan, make_plans, plan_of
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import (
    DEGREES,
    MINIMUM_SAVING,
    Candidate,
    candidates,
    choose_degree,
    full_plan,
    improve_chunks,
    least_of_degree,
)
from megatron_ampipe.plan.simulate import NOT_YET, TimedProgram, compile_program
from megatron_ampipe.schedule import (
    ALL_LAYERS,
    BlockFeatures,
    Direction,
    Exchange,
    Schedule,
    build,
    check,
    even_chunks,
    needs_of,
    period,
)
from megatron_ampipe.tools.measuring.grid import block_of_case
from tests.plan_cases import NONE, cluster, grid_case, python_calls, sized_block, without_device

SLOWDOWNS = [(1.0, 1.0), (1.05, 1.1), (1.5, 1.3), (1.0, 1.8)]


def random_problem(seed: int) -> tuple[OrderProblem, Schedule, Direction]:
    """Any times of the stages of a block in two chunks, and its named schedule.

    Times differ by more than the simulator rounds to (``ROUNDING_US``), or not at all.
    """
    rng = random.Random(seed)
    features = BlockFeatures(
        losses=rng.random() < 0.25,
        chunked_qkv=rng.random() < 0.25,
        ordered_routing=rng.random() < 0.25,
        chooses=rng.random() < 0.25,
    )
    direction = rng.choice(list(Direction))
    schedule = build("ampipe", degree=2, features=features)
    compiled = compile_program(schedule.program(direction), needs_of(schedule, [features], direction))
    possible_times = rng.choice(
        [(0.0, 0.0, 0.0, 1.0, 2.0), range(7), [thousandth / 1000 for thousandth in range(8000)]]
    )
    times = tuple([float(rng.choice(possible_times)) for _ in compiled.stages])
    compute, communication = rng.choice(SLOWDOWNS)
    overlap = Overlap(compute_slowdown=compute, communication_slowdown=communication, **NONE)
    return (
        OrderProblem(TimedProgram(compiled, times, None, overlap), direction=direction),
        schedule,
        direction,
    )


def orders(problem: OrderProblem, stages: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every order of these stages of a lane that respects their dependencies."""
    needed: list[set[int]] = [set() for _ in problem.stages]
    for stage in problem.compiled.issued:
        for earlier in problem.compiled.needs[stage]:
            needed[stage] |= needed[earlier] | {earlier}
    if not stages:
        yield ()
    for stage in stages:
        others = [other for other in stages if other != stage]
        if not needed[stage].intersection(others):
            yield from (((stage, 0), *rest) for rest in orders(problem, others))


def fastest_of_all(problem: OrderProblem) -> float:
    """The optimal time, from all combinations of orders of the two lanes."""
    lanes = [list(orders(problem, stages)) for _, stages in problem.compiled.lanes]
    return min(problem.time((compute, comm)) for compute, comm in itertools.product(*lanes))


def test_orders_of_two_chunks_are_nearly_optimal() -> None:
    """The search does not try every order, so a few of the orders that it finds are not optimal."""
    ratios = []
    for seed in range(300):
        problem, schedule, direction = random_problem(seed)
        # Trying every order takes too long for more than about a thousand orders.
        if len(problem.compiled.lanes[0][1]) > 9:
            continue
        start = problem.period_of(schedule.program(direction))
        found = problem.time(improve_order(problem, start))
        assert found <= problem.time(start), seed
        optimum = fastest_of_all(problem)
        ratios.append(found / optimum if optimum else 1.0)
    assert len(ratios) > 100
    above = [ratio for ratio in ratios if ratio > 1.01]
    assert len(above) <= 0.05 * len(ratios)
    assert max(ratios) <= 1.15


def stack_problem(direction: Direction) -> tuple[OrderProblem, Period]:
    """Four layers that share a schedule, in two chunks, and their named period."""
    predictor = Predictor(sized_block(), cluster(), num_layers=4)
    schedule = period(build("ampipe", degree=2, features=predictor.features))
    lengths = even_chunks(predictor.block.rows, 2)
    problem = OrderProblem(
        predictor.timed(predictor.whole(schedule), lengths, direction), direction=direction
    )
    return problem, problem.period_of(schedule.program(direction))


def test_only_orders_that_deadlock_are_not_simulated() -> None:
    problems = [stack_problem(direction) for direction in Direction]
    for seed in range(8):
        problem, schedule, direction = random_problem(seed)
        problems.append((problem, problem.period_of(schedule.program(direction))))
    left_out = 0
    for problem, current in problems:
        generator = random.Random(0)
        for _ in range(100):
            moved = _with_one_move(problem, current, generator)
            _, end = problem._spans(problem.repeated(moved))
            if not problem._is_in_order(moved):
                left_out += 1
                assert max(end) == NOT_YET, moved
            elif max(end) < NOT_YET:
                current = moved
    assert left_out > 200


BLOCKS = {
    "balanced": sized_block(sequence_length=24576),
    "slow network": sized_block(topk=4, sequence_length=4096),
    "tensor-parallel, local layers": sized_block(tensor=2, sequence_length=16384, local=True),
    "context, experts of four ranks": sized_block(context=2, tensor=4, expert_tensor=4, expert=2),
    "all-gather, capacity": sized_block(dispatcher="allgather", expert=4, capacity=1.25),
    "latent, shared": sized_block(latent=True, shared_ffn=2048, losses=True),
    "short": sized_block(sequence_length=5),
    # Padding grows slower than chunks.
    "fixed rows, whole passes": sized_block(
        experts=16, sequence_length=4096, rows_margin=1.25, captures_passes=True, local=True
    ),
}


@pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))
@pytest.mark.parametrize("device", [True, False], ids=["GPU", "CPU"])
def test_a_plan_is_never_slower_than_any_named_schedule(block: object, device: bool) -> None:
    source = cluster() if device else without_device(cluster())
    predictor = Predictor(block, source)  # type: ignore[arg-type]
    assert all(cost.forward > 0 for cost in predictor.stages([predictor.block.rows]).values())
    degrees = [degree for degree in DEGREES if degree <= 8]
    found = full_plan(predictor, degrees)
    check(found.schedule, [predictor.block.features])
    assert sum(found.lengths) == predictor.block.rows and min(found.lengths) > 0
    assert len(found.lengths) == found.schedule.num_chunks
    assert found.time == predictor.pass_us(found.schedule, found.lengths)
    slower = [one for one in candidates(predictor, degrees) if one.total_us < found.total_us * (1 - 1e-9)]
    assert not slower


def test_unequal_chunks_and_a_searched_order_are_faster_on_a_causal_block() -> None:
    """Compared with the named schedule at its best degree with equal chunks; stated in docs/planner.md."""
    block = sized_block(sequence_length=16384, topk=2, ffn=1024)
    predictor = Predictor(block, without_device(cluster()))
    named = min(
        (one for one in candidates(predictor) if one.schedule.name == "ampipe"), key=lambda one: one.total_us
    )
    found = full_plan(predictor)
    assert max(found.lengths) > 1.1 * min(found.lengths)
    assert named.total_us / found.total_us > 1.05


@pytest.mark.parametrize(("rows", "degree"), [(24576, 3), (10000, 4), (900, 3)])
def test_a_run_has_the_chunks_of_the_plan(rows: int, degree: int) -> None:
    """Both equal chunks and searched ones, which a plan stores as shares."""
    predictor = Predictor(sized_block(sequence_length=rows), without_device(cluster()))
    (start,) = (one for one in candidates(predictor, [degree]) if one.schedule.name == "ampipe")
    for planned in (start, improve_chunks(predictor, start)):
        pipeline = plan_of(predictor, planned).pipeline_of(rows)
        assert (pipeline.shares is None) == (planned is start)
        run = [chunk.hidden[0].length for chunk in pipeline.chunks(rows)]
        assert run == list(planned.lengths)


def test_a_degree_is_chosen_in_20_ms_and_a_plan_is_made_in_a_second() -> None:
    """On a core that calls 5.2 million functions of Python in a second; every degree is compared.

    Counted were 103,000, for the largest degree 1,080,000, and for all degrees 4,670,000.
    """
    block = sized_block(sequence_length=65536)
    # Programs are compiled once per process.
    choose_degree(Predictor(block, cluster()), DEGREES)
    predictor = Predictor(block, cluster())
    assert python_calls(lambda: choose_degree(predictor, DEGREES)) < 0.020 * 5.2e6
    predictor = Predictor(block, cluster())
    assert python_calls(lambda: full_plan(predictor, (16,))) < 0.25 * 5.2e6
    predictor = Predictor(block, cluster())
    assert python_calls(lambda: full_plan(predictor)) < 5.2e6


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("local", [True, False])
@pytest.mark.parametrize(("choose", "num_layers"), [(choose_degree, 1), (full_plan, 1), (choose_degree, 2)])
def test_weight_gradients_are_joined_where_sums_cost_more(
    choose: Callable[..., Candidate], num_layers: int, local: bool, fused: bool
) -> None:
    """Mixtral's experts are large: a sum in fp32 of each chunk's gradients takes long."""
    large = {"hidden": 4096, "ffn": 14336, "gated": True, "projections": ((4096, 6144),), "heads": 32}
    sizes = large | {"head_size": 128, "value_size": 128, "sequence_length": 4096}
    block = sized_block(**sizes, splits_weights=True, local=local, fused_gradients=fused)
    found = choose(Predictor(block, cluster(), num_layers=num_layers), (2, 3))
    assert found.schedule.joins_weights == (local and not fused)
    if found.schedule.joins_weights:
        together = dataclasses.replace(block, splits_weights=False)
        other = choose(Predictor(together, cluster(), num_layers=num_layers), (2, 3))
        assert found.total_us < (1 - MINIMUM_SAVING) * other.total_us


def test_in_one_chunk_gradients_of_weights_overlap_where_cutting_costs_too_much() -> None:
    """Measured without a link: chunks cost more than they hide."""
    measured = read_cluster(Path("docs/measured/results/profile-none.yaml"))
    short = block_of_case(grid_case(hidden=256, ffn=1024), num_ranks=2, fused_gradients=True)
    plan = make_plan(Predictor(short, measured), full=False)
    assert (plan.schedule.name, plan.schedule.num_chunks, plan.helps) == ("lancet", 1, True)
    assert "With one chunk, and gradients of weights" in plan.reason
    assert plan.pipeline_of(512).splits_weights
    other = make_plan(Predictor(dataclasses.replace(short, splits_weights=False), measured), full=False)
    assert other.schedule.name != "lancet"


DEGREES_TRIED, EXCHANGES = (2, 3, 4, 8), (Exchange.ROWS, Exchange.RANKS, Exchange.NODES)
SPACES: dict[str, tuple[str, str, dict[str, Any], int | None]] = {
    "four nodes": ("qwen3-30b-a3b-like", "dgx-h100", {"expert-model-parallel-size": 32}, 32),
    "dense layers": ("deepseek-v2-lite", "a800x8-20gbps", {}, None),
    "slow network": ("mixtral-8x7b", "fsmoe-testbed-a", {}, None),
    "recompute": ("gpt-moe-base", "ampipe-a800", {"recompute-granularity": "full"}, None),
}
"""Shipped models and clusters, with what replaces flags of the model, and the number of ranks."""


@functools.cache
def planned(
    space: str, degrees: tuple[int, ...], exchanges: tuple[Exchange, ...], stack: int, partner: bool
) -> Plans:
    """The plans of the first layers of a model."""
    model, machines, overrides, ranks = SPACES[space]
    file, source = read_model(find_model(model), overrides=overrides), cluster(machines)
    block, _ = block_of(file, source, ranks=ranks)
    predictor = Predictor(block, source, num_layers=3, dense=(0,) if layers_of(file).dense else ())
    options = {"degrees": degrees, "exchanges": exchanges, "stack": stack}
    return make_plans(predictor, with_partner=float(partner), **options)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_passes_without_a_partner_count_for_all_layers(share: float) -> None:
    """They run as Megatron's, whose plan is that of one block; those with a partner share a schedule."""
    file, source = read_model(find_model("gpt-moe-base")), cluster("dgx-h100")
    block, _ = block_of(file, source)
    predictor = Predictor(block, source, num_layers=12)
    plans = make_plans(predictor, degrees=(2,), full=False, with_partner=share)
    assert plans.chosen.pipeline.partner is not None and plans.partners_ms is not None
    assert not plans.alone.helps and plans.chosen.num_layers == 12
    assert "without one 1.00. Passes without one: They run as Megatron's." in plans.chosen.reason
    stock_ms = predictor.stock().total / 1e3
    assert plans.step_ms == pytest.approx(share * plans.partners_ms + (1 - share) * stock_ms)
    assert plans.chosen.predicted_ms == pytest.approx(stock_ms)


def subsets[T](values: Sequence[T]) -> st.SearchStrategy[tuple[T, ...]]:
    """Not empty, in the same order."""
    return st.lists(st.sampled_from(values), min_size=1, unique=True).map(
        lambda chosen: tuple(value for value in values if value in chosen)
    )


@pytest.mark.parametrize("space", SPACES)
def test_a_wider_search_never_answers_worse(space: str) -> None:
    whole = planned(space, DEGREES_TRIED, EXCHANGES, ALL_LAYERS, True)

    @settings(
        max_examples=4,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.explicit, Phase.generate),
    )
    @given(subsets(DEGREES_TRIED), subsets(EXCHANGES), st.sampled_from([1, ALL_LAYERS]), st.booleans())
    @example((2,), (Exchange.NODES,), ALL_LAYERS, True)
    @example((3,), (Exchange.NODES,), 1, False)
    def compare(degrees: tuple[int, ...], exchanges: tuple[Exchange, ...], stack: int, partner: bool) -> None:
        part = planned(space, degrees, exchanges, stack, partner)
        assert whole.step_ms <= part.step_ms
        wider = planned(space, DEGREES_TRIED, exchanges, stack, partner)
        assert wider.step_ms <= part.step_ms
        assert wider.blocks_ms <= part.blocks_ms or wider.step_ms < wider.blocks_ms

    compare()


@pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))
@pytest.mark.parametrize("device", [True, False], ids=["GPU", "CPU"])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_no_lengths_and_no_order_beat_the_bound(block: Block, device: bool, num_layers: int) -> None:
    """A degree that the bound excludes is not searched."""
    source = cluster("h100-ethernet-100g")
    if not device:
        # Measured, with a table of times that are not linear in the size.
        source = read_cluster(Path("docs/measured/results/profile-100mbit.yaml"))
        block = dataclasses.replace(block, dtype="fp32", expert=2, tensor=1, context=1, expert_tensor=1)
    predictor = Predictor(block, source, num_layers=num_layers)
    for start in candidates(predictor, (2, 3, 4)):
        degree = start.schedule.degree
        least_us = predictor.least.least_us(start.schedule, start.lengths)
        assert least_of_degree(predictor, degree) <= least_us
        assert least_us <= predictor.least_us(start.schedule, start.lengths) * (1 + 1e-9)
        rows = block.rows
        for first in {1, rows // (2 * degree), rows - degree + 1} if rows > 2 * degree else ():
            others = even_chunks(rows - first, degree - 1)
            for lengths in ((first, *others), (*others, first)):
                exact_us = predictor.least_us(start.schedule, lengths)
                assert least_us <= exact_us * (1 + 1e-9)
                assert exact_us <= predictor.pass_us(start.schedule, lengths).total * (1 + 1e-6)


def test_chunks_of_whole_tiles_get_at_least_one_each() -> None:
    """Sixteen chunks of one tile: a shorter or longer chunk would leave none for another."""
    block = sized_block(sequence_length=2048, dtype="fp8", fp8_tile=128)
    predictor = Predictor(block, read_cluster(find_cluster("dgx-h100")))
    schedule, lengths = build("ampipe", degree=16, features=block.features), even_chunks(2048, 16)
    start = Candidate(schedule, lengths, predictor.pass_us(schedule, lengths))
    found = improve_chunks(predictor, start)
    assert sum(found.lengths) == 2048 and min(found.lengths) >= 128
