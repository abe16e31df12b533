"""What a block contains: one answer from a model file, from arguments and from a layer's configuration."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.plan.model_block import block_of
from megatron_ampipe.plan.model_file import read_model
from megatron_ampipe.schedule import BlockFeatures, Pipeline
from megatron_ampipe.schedule.features import boundary, features_of_settings
from tests.golden.write import SETTINGS
from tests.plan_cases import cluster, model_file


def arguments(**settings: Any) -> argparse.Namespace:
    """Megatron's arguments, as far as the features of a block depend on them."""
    of_run = {
        "expert_model_parallel_size": 1,
        "recompute_granularity": None,
        "sequence_parallel": settings.get("tensor_model_parallel_size", 1) > 1,
        "transformer_impl": "transformer_engine",
    }
    return argparse.Namespace(**SETTINGS | of_run | settings)


SHARED_EXPERTS = {"expert_tensor_parallel_size": 2, "moe_token_dispatcher_type": "alltoall"}
LOCAL_TENSOR = {
    "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "transformer_impl": "local",
}  # fmt: skip
DEEPEP = {
    "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep",
    "expert_model_parallel_size": 8,
}  # fmt: skip
WHOLE_QKV = {"chunked_qkv": False}
RING = {"context_parallel_size": 2, "attention_dropout": 0.0, "cp_comm_type": "p2p"}
CAPACITY, POSITION = {"moe_expert_capacity_factor": 1.25}, {"moe_token_drop_policy": "position"}
ORDERED, CHOOSING, LOSSES = {"ordered_routing": True}, {"chooses": True}, {"losses": True}
TWO = {"moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}
FEATURES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "shared experts": ({"moe_shared_expert_intermediate_size": 64}, {"shared": True}),
    "capacity": (CAPACITY | POSITION, ORDERED),
    "capacity of a chunk": (CAPACITY, {}),
    "capacity of nothing": (POSITION | {"moe_expert_capacity_factor": 0.0}, ORDERED),
    "capacity of the most probable": (CAPACITY, CHOOSING),
    "sinkhorn": ({"moe_router_load_balancing_type": "sinkhorn"}, CHOOSING),
    "quantiles": ({"moe_router_load_balancing_type": "quantile_balancing"}, CHOOSING),
    "tensor-parallel": ({"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, WHOLE_QKV),
    # Rows that attention projects go over the links of a node, if tokens leave it.
    "local layers": (
        LOCAL_TENSOR | {"expert_model_parallel_size": 8}, WHOLE_QKV | {"row_links": "network"}
    ),
    "local layers and experts on two nodes": (
        LOCAL_TENSOR | SHARED_EXPERTS | {"expert_model_parallel_size": 8},
        WHOLE_QKV | {"row_links": "node", "gathers": "comm.intra"},
    ),
    # On two nodes of 8 ranks; where the tokens of an expert do not leave a node, they use the same links.
    "experts on two ranks": (SHARED_EXPERTS | {"expert_model_parallel_size": 8}, {"gathers": "comm.intra"}),
    "experts of a node": (SHARED_EXPERTS | {"expert_model_parallel_size": 4}, {"gathers": "comm"}),
    "gathered by the dispatch": (SHARED_EXPERTS | {"moe_token_dispatcher_type": "allgather"}, {}),
    # DeepEP has to be told how many rows arrive, on up to 8 ranks.
    "flex": (DEEPEP, {}),
    "flex of HybridEP": (DEEPEP | {"moe_flex_dispatcher_backend": "hybridep"}, {"flex": True}),
    "flex on 16 ranks": (DEEPEP | {"expert_tensor_parallel_size": 2}, {"flex": True}),
    "ring": (RING, WHOLE_QKV | {"ring_ranks": 2}),
    "gathered keys": (RING | {"cp_comm_type": "all_gather"}, WHOLE_QKV),
    "gathered keys of a window": (RING | {"window_size": (8, 0)}, WHOLE_QKV),
    "gathered keys, dropped weights": (RING | {"attention_dropout": 0.1}, WHOLE_QKV),
    "latent attention": ({"multi_latent_attention": True}, {}),
    "z-loss of 0": ({"moe_z_loss_coeff": 0.0}, LOSSES),
    "aux loss": ({"moe_aux_loss_coeff": 0.1}, LOSSES),
    "no aux loss": ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, {}),
    "two aux losses, one off": (TWO | {"moe_aux_loss_coeff": [0.0, 0.1]}, LOSSES),
    "two aux losses, both off": (TWO | {"moe_aux_loss_coeff": [0.0, 0.0]}, {}),
}  # fmt: skip
"""Settings, and what differs from a block whose queries are projected chunk by chunk."""


@pytest.mark.parametrize("name", FEATURES)
def test_features_are_the_same_from_every_source(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, differs = FEATURES[name]
    expected = BlockFeatures(**{"chunked_qkv": True} | differs)
    scope = "chunk" if name == "capacity of a chunk" else "sequence"
    # As the cluster file says.
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    path = model_file(tmp_path, f"ampipe:\n  capacity-scope: {scope}\n")
    overrides = {key.replace("_", "-"): value for key, value in settings.items()}
    block, _ = block_of(read_model(path, overrides=overrides), cluster("dgx-h100"), ranks=16)
    assert block.features == expected

    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from megatron_ampipe.launch.environment import features_of_args

    args = arguments(**settings)
    alone, _ = features_of_args(args, Settings(capacity_scope=scope, ranks_per_node=8))
    assert Pipeline.of(4).trained(alone) == expected

    settings = dict(settings)
    kind = MLATransformerConfig if settings.pop("multi_latent_attention", False) else TransformerConfig
    sharded = "tensor_model_parallel_size" in settings
    size = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_moe_experts": 8}
    config = kind(**size, **settings, sequence_parallel=sharded, add_bias_linear=False)
    own, local = Settings(capacity_scope=scope, ranks_per_node=8), args.transformer_impl == "local"
    assert features_of_settings(config, own, local=local) == expected
    evaluated = features_of_settings(config, own, local=local, with_losses=False)
    assert evaluated == dataclasses.replace(expected, losses=False)


TENSOR = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "schedule", "expected"),
    [
        ({}, "ampipe", None),
        ({}, "moe-only", None),
        ({"multi_latent_attention": True}, "ampipe", None),
        ({"moe_expert_capacity_factor": 1.25}, "ampipe", None),
        (TENSOR, "ampipe", None),
        # A stack spreads each chunk over the tensor-parallel ranks: all chunks together are not in order.
        (TENSOR, "moe-only", "unchunked attention requires"),
        (TENSOR | {"moe_expert_capacity_factor": 1.25}, "ampipe", "which tokens a capacity drops"),
        (TENSOR | {"moe_expert_capacity_factor": -1.0}, "ampipe", None),
        ({"context_parallel_size": 2}, "ampipe", "needs keys and values"),
        ({"recompute_granularity": "selective"}, "ampipe", None),
        ({"recompute_granularity": "full"}, "ampipe", "full recompute works around one layer"),
    ],
)
def test_where_layers_cannot_share_a_schedule(
    settings: dict[str, Any], schedule: str, expected: str | None
) -> None:
    """Only where projections of a chunk need other chunks, and under full recompute."""
    args = arguments(**settings)
    reason = boundary(args, whole_attention=Pipeline.of(4, schedule=schedule).whole_attention)
    assert reason is None if expected is None else expected in str(reason)
