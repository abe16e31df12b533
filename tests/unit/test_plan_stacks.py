"""Plans of several layers that share a schedule: prediction, bound, and the search of a period."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ampipe.plan.cluster import read_cluster
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import OrderProblem, choose_degree, full_plan
from megatron_ampipe.schedule import (
    Direction,
    build,
    check,
    even_chunks,
    period,
    unrolled,
)
from megatron_ampipe.tools.measuring.grid import Case, block_of_case
from tests.plan_cases import cluster, sized_block, without_device

BLOCKS = {
    "balanced": sized_block(sequence_length=8192),
    "slow network": sized_block(topk=4, sequence_length=4096),
    "losses, shared": sized_block(shared_ffn=2048, losses=True),
}
DENSE = sized_block(dense_ffn=8192)


def test_in_one_chunk_gradients_of_weights_overlap_where_cutting_costs_too_much() -> None:
    """Measured without a link: chunks cost more than they hide."""
    measured = read_cluster(Path("docs/measured/profile-none.yaml"))
    block = Case(
        name="short",
        sequence_length=512,
        batch=1,
        hidden=256,
        heads=4,
        experts=4,
        topk=1,
        ffn=1024,
        activation="gelu",
        dtype="fp32",
    )
    short = block_of_case(block, num_ranks=2, fused_gradients=True)
    plan = make_plan(Predictor(short, measured), full=False)
    assert (plan.schedule.name, plan.schedule.num_chunks, plan.helps) == ("lancet", 1, True)
    assert "With one chunk, and gradients of weights" in plan.reason
    assert plan.pipeline_of(512).splits_weights
    other = make_plan(Predictor(replace(short, splits_weights=False), measured), full=False)
    assert other.schedule.name != "lancet"


@pytest.mark.parametrize("dense", [(), (0,), (1, 3)])
def test_layers_with_and_without_experts_are_predicted(dense: tuple[int, ...]) -> None:
    alone, stack = Predictor(DENSE, cluster()), Predictor(DENSE, cluster(), num_layers=4, dense=dense)
    assert [layer for layer, features in enumerate(stack.layers) if features.dense] == list(dense)
    lengths = even_chunks(8192, 2)
    block = build("ampipe", degree=2, features=alone.features)
    time, stock = stack.pass_us(block, lengths), stack.stock()
    # The same whether it is given the schedule of a block, a period, or of all layers.
    assert time == stack.pass_us(period(block), lengths)
    assert time == stack.pass_us(unrolled(period(block), stack.layers), lengths)
    bound = stack.bound_us(block, lengths)
    assert bound.forward <= time.forward < stock.forward and bound.backward <= time.backward
    spans = stack.timeline(block, lengths).spans
    assert {span.layer - 1 for span in spans if span.stage == "mlp.0"} == set(dense)


@pytest.mark.parametrize("device", [True, False], ids=["GPU", "CPU"])
@pytest.mark.parametrize("degrees", [(2, 2), (4, 2)], ids=str)
def test_a_period_is_repeated_as_a_run_repeats_it(device: bool, degrees: tuple[int, int]) -> None:
    predictor = Predictor(sized_block(), cluster() if device else without_device(cluster()), num_layers=3)
    forward, backward = degrees
    schedule = period(build("ampipe", degree=forward, backward_degree=backward, features=predictor.features))
    lengths = even_chunks(8192, max(degrees))
    whole = predictor.whole(schedule)
    for direction in Direction:
        problem = OrderProblem(predictor.timed(whole, lengths, direction), direction=direction)
        entries = problem.period_of(schedule.program(direction))
        assert problem.program(entries) == schedule.program(direction)
        stages = problem.compiled.stages
        assert [[stages[number] for number in lane] for lane in problem.repeated(entries)] == [
            list(order) for _, order in whole.program(direction).lanes
        ]
        assert problem.time(entries) == pytest.approx(
            predictor.direction_us(whole, lengths, direction) - predictor.calls_us(direction)
        )


@pytest.mark.parametrize("block", BLOCKS.values(), ids=list(BLOCKS))
@pytest.mark.parametrize("device", [True, False], ids=["GPU", "CPU"])
def test_a_stack_is_not_slower_than_block_by_block(block: object, device: bool) -> None:
    alone = Predictor(block, cluster() if device else without_device(cluster()))  # type: ignore[arg-type]
    predictor = alone.of_layers(6)
    named, found = choose_degree(predictor, (2, 4)), full_plan(predictor, (2,))
    assert found.schedule.repeats
    assert found.time == predictor.pass_us(found.schedule, found.lengths)
    assert max(found.total_us, named.total_us) < 6 * choose_degree(alone, (2, 4)).total_us
    assert sum(predictor.bound_us(found.schedule, found.lengths)) <= found.total_us * (1 + 1e-9)
    for layers in (1, 2, 5):
        features = [predictor.features] * layers
        check(unrolled(found.schedule, features), features)
