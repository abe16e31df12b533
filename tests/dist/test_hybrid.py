"""Hybrid models: attention followed by MoE is pipelined; all other layers in the pattern are unchanged."""

from __future__ import annotations

from pathlib import Path

from tests.dist.launch import run_workers
from tests.dist.test_parity import assert_called_before_read


def test_hybrid_stack_equals_stock(tmp_path: Path) -> None:
    for result in run_workers("tests.dist.hybrid_worker", [], world_size=2, folder=tmp_path):
        # The attention layers in the pattern *E-*EE* that are followed by an MoE layer.
        assert result["joined"] == [0, 3]
        assert result["off"]
        wrong = {name: value for name, value in result["differences"].items() if not value <= 1e-5}
        assert not wrong
        assert any("router" in name for name in result["differences"])
        assert_called_before_read(result["parameter reads"])
