"""Emulated ranks: they send data like real ranks, and all layers compute the same results.

Outputs and gradients equal those of one rank with all experts, in which the experts of other ranks have this
rank's weights, negated. So a row that is lost, overwritten or sent to a wrong rank is detected.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.dist.launch import run_workers

TOLERANCE = 1e-5
CASES = (
    {"name": "one expert each", "experts": 4, "topk": 1, "activation": "gelu"},
    {"name": "two experts each", "experts": 8, "topk": 2, "activation": "swiglu", "shared_ffn": 48},
    {
        "name": "grouped",
        "experts": 8,
        "topk": 2,
        "activation": "swiglu",
        "shared_ffn": 48,
        "expert_kind": "torch-grouped",
    },
    {"name": "capacity", "experts": 8, "topk": 2, "activation": "gelu", "capacity": 0.8},
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pretended")
    words = [json.dumps(case) for case in CASES]
    (found,) = run_workers("tests.dist.pretended_worker", words, world_size=1, folder=folder)
    return found


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_all_layers_compute_the_same_and_no_exchanged_row_is_zero(name: str, reports: dict[str, Any]) -> None:
    found = reports[name]
    assert "error" not in found, found["error"]
    assert len(found["cuts"]) == 5
    for compared in (*found["cuts"].values(), found["whole"]):
        assert {key: value for key, value in compared.items() if not value <= TOLERANCE} == {}
    # Dispatch of tokens and probabilities, and combine of outputs, forward and backward.
    assert found["exchanges"] == 6
    assert found["zero rows"] == [0] * 6


def test_experts_that_cannot_run_here_are_refused(reports: dict[str, Any]) -> None:
    refusals = reports["refusals"]
    assert "needs a GPU and Transformer Engine" in refusals["no GPU"]
    assert "takes no fp32 on a GPU" in refusals["precision"]
    assert refusals["nothing"] is None
