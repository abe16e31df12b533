"""The stress test of ``tests/gpu`` on a CPU: it detects inserted faults, and reports none otherwise.

All of its blocks run in ``test_gpu_check.py``, on stand-ins for CUDA.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.dist.launch import run_workers

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("stress")
    (found,) = run_workers("tests.dist.stress_worker", [], world_size=1, folder=folder)
    return found


@pytest.mark.parametrize("name", ["thread executor", "cuda executor", "stock"])
def test_equals_sequential_execution(name: str, reports: dict[str, Any]) -> None:
    assert "error" not in reports[name], reports[name]["error"]
    differences, filled = reports[name]
    assert {key: value for key, value in differences.items() if not value <= TOLERANCE} == {}
    assert filled > 0


@pytest.mark.parametrize("fault", ["early release", "missing wait"])
def test_an_inserted_fault_is_detected(fault: str, reports: dict[str, Any]) -> None:
    assert "error" not in reports[fault], reports[fault]["error"]
    differences, _ = reports[fault]
    assert any(math.isnan(value) for value in differences.values())
