"""A kind of stage is a row, a function and a cost: blocks with made-up ones run exactly on every executor."""

from __future__ import annotations

from typing import Any

import pytest

from tests.dist.added_worker import ADDED, BLOCKS
from tests.dist.launch import run_workers

TOLERANCE = 1e-5
"""Relative, in fp32; measured: 4e-7."""
DEGREES = {
    block: (fields.get("degree", 4), fields.get("backward_degree", fields.get("degree", 4)))
    for block, fields in BLOCKS.items()
}


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_workers(
        "tests.dist.added_worker", ["gloo"], world_size=2, folder=tmp_path_factory.mktemp("added")
    )


@pytest.fixture(scope="module")
def on_the_modelled_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("added-cuda")
    (found,) = run_workers("tests.dist.added_worker", ["device"], world_size=1, folder=folder)
    return dict(found)


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("executor", ["sequential", "thread"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_with_added_stages_equals_stock(
    block: str, executor: str, name: str, over_gloo: list[dict[str, Any]]
) -> None:
    for results in over_gloo:
        result = results[f"{block}-{executor}-{name}"]
        assert "error" not in result, result["error"]
        wrong = {key: value for key, value in result["differences"].items() if not value <= TOLERANCE}
        assert wrong == {}
        forward, backward = DEGREES[block]
        chunks = max(forward, backward)
        expected: dict[str, int] = {}
        if "delay" in name:
            expected |= {"forward delay": chunks, "backward delay": chunks}
            assert result["shortest delay us"] >= 1900
        if "copy" in name:
            # One transfer takes all chunks of a stage.
            expected |= {"forward copy": forward, "backward copy": backward}
            lane = "compute" if block == "in-order" else "copy"
            assert ["backward", lane, "copy.1"] in result["stages"]
        if "audit" in name:
            expected |= {"forward audit": 1}
            assert ["backward", "compute", "audit"] in result["stages"]
        assert result["ran"] == expected


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("block", BLOCKS)
def test_the_executor_of_a_gpu_runs_them_without_a_race(
    block: str, name: str, on_the_modelled_device: dict[str, Any]
) -> None:
    result = on_the_modelled_device[f"{block}-cuda-{name}"]
    assert "error" not in result, result["error"]
    assert set(result["differences"].values()) == {0.0}
    assert result["races"] == []
