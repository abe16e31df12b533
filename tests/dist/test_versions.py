"""Compares blocks with Megatron's layers, on the older supported versions of Megatron and on a checkout.

One case of each kind in :mod:`.test_parity`, which tests the newest version. Complete training runs with the
older versions are in tests/megatron/test_checkout.py.
"""

from typing import Any

import pytest

from megatron_ampipe.compat import SUPPORTED_MEGATRON
from tests.forked import run_workers
from tests.megatrons import OLDER, at_hand, folder_of, installed

CASES = (
    *("degree1-ampipe-thread", "degree4-ampipe-thread", "degree3-moe-only-sequential"),
    *("top2-several", "only-z-batch3", "capacity-aux-z", "length33-degree4-batch1"),
    *("rope-gqa-swiglu-rms", "qk-layernorm", "shared", "recompute-moe", "fp32-residual"),
    *("tp-shared-gqa", "cp-odd", "gathers-two-degrees", "again-layernorm", "again-moe-act", "delta-tp"),
)
TESTS = [f"tests/dist/test_parity.py::test_equals_stock[{name}]" for name in CASES]


@pytest.fixture(scope="module", params=[version for version in at_hand() if version != installed()])
def reports(request: pytest.FixtureRequest) -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(folder_of(request.param)))
        return run_workers("tests.ranks", TESTS, world_size=2, preloaded=False)


@pytest.mark.parametrize("test", TESTS)
def test_equals_stock_of_that_version(test: str, reports: list[dict[str, str]]) -> None:
    assert [outcomes[test] for outcomes in reports] == ["passed"] * 2


def test_all_supported_versions_are_tested() -> None:
    assert {*OLDER, installed()} == set(SUPPORTED_MEGATRON)
