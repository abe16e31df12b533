"""Features with random numbers are reproducible and have stock's distribution; and capacity per chunk."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.launch import run_workers


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_workers("tests.dist.random_worker", [], world_size=2, folder=tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("name", ["dropout", "recomputed core attention", "input jitter"])
def test_the_same_seed_gives_the_same_random_numbers(name: str, reports: list[dict[str, Any]]) -> None:
    for rank in reports:
        found = rank["dropout"][name]
        assert max(found["again"].values()) == 0
        assert max(found["recomputed"].values()) <= 1e-6
        assert found["another seed"] > 1e-3


@pytest.mark.parametrize("name", ["dropout", "two degrees", "input jitter", "no random numbers"])
def test_layers_that_are_recomputed_in_their_schedule_give_the_same_bits(
    name: str, reports: list[dict[str, Any]]
) -> None:
    for rank in reports:
        assert set(rank["dropout"]["stack"][name].values()) == {0.0}


def test_dropout_has_the_same_mean_as_stock(reports: list[dict[str, Any]]) -> None:
    for rank in reports:
        # 1 for equal distributions; wrong scaling or masking would change every element.
        assert rank["dropout"]["z-score of the mean"] < 1.3


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_per_chunk_equals_stock_called_per_chunk(policy: str, reports: list[dict[str, Any]]) -> None:
    for rank in reports:
        assert rank["chunk capacity"][policy] <= 1e-5
        assert rank["chunk capacity"][f"{policy}, another function than the whole sequence"] > 1e-3
