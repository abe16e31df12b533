"""Hybrid models: pairs of attention and MoE are pipelined; all other layers in the pattern are unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist.launch import run_workers
from tests.dist.test_parity import assert_called_before_read


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("hybrid")
    return run_workers("tests.dist.hybrid_worker", [], world_size=2, folder=folder)


@pytest.mark.parametrize(
    ("name", "begins", "paired"),
    [
        # Of *E-*EE*, the two pairs; the MLP, an MoE layer and an attention layer are alone.
        ("pairs", [0, 3], [0, 1, 3, 4]),
        # Of *-*E*E-*E, one schedule for the dense pair and the two after it.
        ("stack", [0, 7], [0, 1, 2, 3, 4, 5, 7, 8]),
        ("stacks-of-two", [0, 4], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_hybrid_stack_equals_stock(
    name: str, begins: list[int], paired: list[int], reports: list[Any]
) -> None:
    for results in reports:
        result = results[name]
        assert result["begins"] == begins
        assert result["paired"] == paired
        assert result["off"]
        wrong = {name: value for name, value in result["differences"].items() if not value <= 1e-5}
        assert not wrong
        assert any("router" in name for name in result["differences"])
        assert_called_before_read(result["parameter reads"])
        assert "run as one, so it would see other tensors" in result["refused hook"]
