"""Compares blocks with Megatron's layers, on the older supported versions of Megatron and on a checkout.

One case of each kind in :mod:`.test_parity`, which tests the newest version. Complete training runs with the
older versions are in tests/megatron/test_checkout.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ampipe.compat import SUPPORTED_MEGATRON
from tests.dist.launch import run_workers
from tests.dist.test_parity import TOLERANCE, assert_called_before_read
from tests.megatrons import OLDER, at_hand, folder_of, installed

CASES = (
    *("degree1-ampipe-thread", "degree4-ampipe-thread", "degree3-moe-only-sequential"),
    *("top2-several", "only-z-batch3", "capacity-aux-z", "length33-degree4-batch1"),
    *("rope-gqa-swiglu-rms", "qk-layernorm", "shared", "recompute-moe", "fp32-residual"),
    *("tp-ampipe", "cp-ampipe", "tp-experts-moe-only"),
)


@pytest.fixture(scope="module", params=[version for version in at_hand() if version != installed()])
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder_of(request.param)))
        return run_workers(
            "tests.dist.parity_worker",
            CASES,
            world_size=2,
            folder=tmp_path_factory.mktemp("versions"),
            preloaded=False,
        )


@pytest.mark.parametrize("name", CASES)
def test_equals_stock_of_that_version(name: str, reports: list[Any]) -> None:
    for rank, results in enumerate(reports):
        result = results[name]
        assert "error" not in result, f"rank {rank}:\n{result['error']}"
        expected = "TransformerLayer" if "degree1" in name else "AMPipeTransformerLayer"
        assert result["classes"] == [expected]
        wrong = {name: value for name, value in result["differences"].items() if not value <= TOLERANCE}
        assert not wrong, f"rank {rank} differs from stock: {wrong}"
        assert_called_before_read(result["parameter reads"])


def test_all_supported_versions_are_tested() -> None:
    assert {*OLDER, installed()} == set(SUPPORTED_MEGATRON)
