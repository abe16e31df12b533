"""Whether a router has losses: plans, launches and layers give the same answer."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.model import read_model, workload_of
from megatron_ampipe.router_losses import router_has_losses
from tests.unit.test_plan_workload import PLAIN

CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({"type": "none", "aux": 0.0, "z": None}, False),
    "none with a coefficient": ({"type": "none", "aux": 0.1, "z": None}, False),
    "z-loss of 0": ({"type": "none", "aux": 0.0, "z": 0.0}, True),
    "z-loss": ({"type": "none", "aux": 0.0, "z": 0.1}, True),
    "aux loss of 0": ({"type": "aux_loss", "aux": 0.0, "z": None}, False),
    "aux loss": ({"type": "aux_loss", "aux": 0.1, "z": None}, True),
    "negative aux loss": ({"type": "aux_loss", "aux": -0.1, "z": None}, False),
    "two, one off": ({"type": ["aux_loss", "seq_aux_loss"], "aux": [0.0, 0.1], "z": None}, True),
    "two, both off": ({"type": ["aux_loss", "seq_aux_loss"], "aux": [0.0, 0.0], "z": None}, False),
    "the coefficient of another kind": (
        {"type": ["seq_aux_loss", "none"], "aux": [0.0, 0.1], "z": None},
        False,
    ),
}


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> tuple[dict[str, Any], bool]:
    return CASES[request.param]


def test_the_answer(case: tuple[dict[str, Any], bool]) -> None:
    given, expected = case
    answer = router_has_losses(given["type"], coefficients=given["aux"], z_loss_coefficient=given["z"])
    assert answer is expected


def test_a_plan_and_a_launch_give_it(case: tuple[dict[str, Any], bool], tmp_path: Path) -> None:
    given, expected = case
    path = tmp_path / "model.yaml"
    path.write_text(PLAIN)
    settings = {"moe-router-load-balancing-type": given["type"], "moe-aux-loss-coeff": given["aux"]}
    if given["z"] is not None:
        settings["moe-z-loss-coeff"] = given["z"]
    cluster = read_cluster(find_cluster("dgx-h100"))
    if not isinstance(given["aux"], float) or given["aux"] >= 0:
        workload, _ = workload_of(read_model(path, overrides=settings), cluster)
        assert workload.features.losses is expected

    pytest.importorskip("megatron.core")
    from megatron_ampipe.launch.planned import features_of_args

    args = argparse.Namespace(
        moe_router_load_balancing_type=given["type"],
        moe_aux_loss_coeff=given["aux"],
        moe_z_loss_coeff=given["z"],
        moe_expert_capacity_factor=None,
        ampipe_capacity_scope=None,
        moe_shared_expert_intermediate_size=None,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        multi_latent_attention=False,
    )
    assert features_of_args(args).losses is expected


def test_megatron_s_router_and_ours_give_it(case: tuple[dict[str, Any], bool]) -> None:
    """Megatron's own decision for each, without building a router."""
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_ampipe.layers.router import ChunkRouter

    given, expected = case
    router = ChunkRouter.__new__(ChunkRouter)
    # Without torch's module attributes, which would need a complete module.
    router.__dict__["routing_type"] = given["type"]
    router.__dict__["config"] = argparse.Namespace(
        moe_aux_loss_coeff=given["aux"],
        moe_z_loss_coeff=given["z"],
        moe_router_load_balancing_type=given["type"],
    )
    assert router.has_losses is expected
    assert (TopKRouter.is_aux_loss_enabled(router) or given["z"] is not None) is expected
