"""What draws random numbers is reproducible and distributed as in stock; and capacity per chunk."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.launch import run_workers


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_workers("tests.dist.random_worker", [], world_size=2, folder=tmp_path_factory.mktemp("random"))


@pytest.mark.parametrize("name", ["dropout", "recomputed core attention", "input jitter"])
def test_random_numbers_come_again_from_the_same_seed(name: str, reports: list[dict[str, Any]]) -> None:
    for rank in reports:
        found = rank["dropout"][name]
        assert max(found["again"].values()) == 0
        assert max(found["recomputed"].values()) <= 1e-6
        assert found["another seed"] > 1e-3


def test_dropout_has_the_mean_of_stock(reports: list[dict[str, Any]]) -> None:
    for rank in reports:
        # 1 for equal distributions; scaling or masking once too often moves every element.
        assert rank["dropout"]["z-score of the mean"] < 1.3


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_per_chunk_is_stock_per_chunk(policy: str, reports: list[dict[str, Any]]) -> None:
    for rank in reports:
        assert rank["chunk capacity"][policy] <= 1e-5
        assert rank["chunk capacity"][f"{policy}, another function than the whole sequence"] > 1e-3
