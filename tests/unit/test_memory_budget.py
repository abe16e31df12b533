"""What ``--ampipe-memory auto`` chooses, and that it says so."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.memory_budget import choose_memory, in_flight
from megatron_ampipe.launch.memory_size import parse_size, size_to_text
from megatron_ampipe.schedule import STRATEGIES, Pipeline, of_chunks
from tests.unit.test_plan_made_for import run_of

PIPELINE = Pipeline.of(4)


def run(**changes: Any) -> Any:
    found = run_of(num_layers=8, **{"global_batch_size": 8, "data_parallel_size": 8} | changes)
    found.virtual_pipeline_model_parallel_size = changes.get("virtual_pipeline_model_parallel_size")
    found.pipeline_model_parallel_size = changes.get("pipeline_model_parallel_size", 1)
    found.transformer_impl = changes.get("transformer_impl", "local")
    return found


def peaks() -> dict[str, str]:
    """By strategy, what it is predicted to hold, from the message of a budget that none meets."""
    found = choose_memory(run(), PIPELINE, "999GiB").reason
    sizes = dict(re.findall(r"(\w+) ([0-9.]+[MG]iB)", found.partition("(")[2]))
    return {"keep": found.partition("activations ")[2].partition(" ")[0], **sizes}


def test_a_budget_that_one_strategy_meets_selects_that_one() -> None:
    sizes = peaks()
    assert list(sizes) == list(STRATEGIES)
    assert sorted(map(parse_size, sizes.values()), reverse=True) == list(map(parse_size, sizes.values()))
    for strategy, size in sizes.items():
        found = choose_memory(run(), PIPELINE, size)
        assert found.memory == strategy
        assert found.reason.startswith(
            f"the least work done again within {size}: predicted peak of the layers' activations"
        )


def test_a_budget_between_two_strategies_restores_in_some_chunks() -> None:
    keep, rebuild, redispatch = (parse_size(size) for size in peaks().values())
    found = choose_memory(run(), PIPELINE, size_to_text((keep + rebuild) / 2))
    assert of_chunks(found.memory).count("rebuild") == 2 and of_chunks(found.memory).count("keep") == 2
    found = choose_memory(run(), PIPELINE, size_to_text((rebuild + redispatch) / 2))
    assert set(of_chunks(found.memory)) == {"rebuild", "redispatch"}
    # The number of chunks is not known yet.
    found = choose_memory(run(), Pipeline.of(1), size_to_text((keep + rebuild) / 2))
    assert found.memory == "rebuild"


def test_with_a_cluster_the_fastest_by_simulation_is_chosen() -> None:
    """On a slow network a rebuild is hidden under transfers, and a third transfer is what costs time."""
    keep, rebuild, redispatch = (parse_size(size) for size in peaks().values())
    budget = size_to_text((keep + rebuild) / 2)
    slow = choose_memory(run(), PIPELINE, budget, "a800x8-20gbps")
    assert set(of_chunks(slow.memory)) == {"keep", "rebuild"}
    assert re.match(
        rf"the fastest by a800x8-20gbps within {re.escape(budget)}, -?\d+\.\d% slower than", slow.reason
    )
    tight = choose_memory(run(), PIPELINE, size_to_text(redispatch), "a800x8-20gbps")
    assert tight.memory == "redispatch"
    with pytest.raises(BadInput, match="--ampipe-cluster nowhere: "):
        choose_memory(run(), PIPELINE, budget, "nowhere")


def test_a_budget_that_none_meets_stops_with_the_least_that_would_do() -> None:
    least = peaks()["redispatch"]
    with pytest.raises(BadInput) as error:
        choose_memory(run(), PIPELINE, "1MiB")
    assert str(error.value).startswith(
        "--ampipe-memory-budget 1MiB: is met by no strategy: redispatch holds least, and is predicted to "
        f"hold {least}. Use at least --ampipe-memory-budget {least}, "
    )


def test_a_size_that_is_shown_can_be_given() -> None:
    for size_bytes in (1, 2**20 + 1, 123_456_789, 2**30, 77 * 2**30 + 5):
        assert size_bytes <= parse_size(size_to_text(size_bytes)) < size_bytes * 1.01 + 2**20


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 1),
        ({"global_batch_size": 64}, 1),
        ({"pipeline_model_parallel_size": 4, "global_batch_size": 64}, 4),
        # Fewer micro-batches than stages.
        ({"pipeline_model_parallel_size": 4, "global_batch_size": 16}, 2),
        # Warm-up of interleaved stages: 2 * 3 + 1 * 4, and the one in work.
        (
            {
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 2,
                "global_batch_size": 64,
            },
            11,
        ),
    ],
)
def test_micro_batches_that_wait_for_their_backward_count(changes: dict[str, Any], expected: int) -> None:
    assert in_flight(run(**changes)) == expected
