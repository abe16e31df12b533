"""The arguments that start-up changes for pipelined blocks; launches test the others."""

import argparse
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_ampipe.launch.resolve import adjust_arguments, take_over_graphs
from megatron_ampipe.launch.run import Run
from tests.golden.write import SETTINGS

MASK, ROTARY = "--no-create-attention-mask-in-dataloader", "--no-rope-fusion"
FUSED_SUM = "--no-gradient-accumulation-fusion"
IN_LOADER = {"create_attention_mask_in_dataloader": True, "reset_attention_mask": True}
WINDOW = {"window_size": (8, 0)}
PACKED = {"sft": True, "micro_batch_size": 2, "multi_latent_attention": True, "apply_rope_fusion": True}


def adjusted(*, on_gpu: bool = False, **changed: Any) -> list[str]:
    of_run = {
        "create_attention_mask_in_dataloader": False,
        "sft": False,
        "moe_pad_expert_input_to_capacity": False,
        "transformer_impl": "local",
        "window_attn_skip_freq": None,
        "micro_batch_size": 1,
    }
    args = argparse.Namespace(**SETTINGS | of_run | changed)
    return [*adjust_arguments(args, Run(), on_gpu=on_gpu)]


def test_exchanges_run_at_high_priority_and_nothing_is_taken_away() -> None:
    groups = ["dp_cp", "ep"]

    def prioritized(**changed: Any) -> list[str]:
        return adjusted(on_gpu=True, high_priority_stream_groups=groups, **changed)

    assert prioritized() == ["--high-priority-stream-groups dp_cp ep tp_ep_mp"]
    assert prioritized() == []
    prioritized(context_parallel_size=2)
    assert groups == ["dp_cp", "ep", "tp_ep_mp", "cp"], "a ring"
    prioritized(expert_tensor_parallel_size=2)
    assert groups == ["dp_cp", "ep", "tp_ep_mp", "cp", "ep_tp"], "ranks that share an expert"


@pytest.mark.parametrize(
    ("changed", "flags"),
    [
        # Some stock layer reads the mask.
        (IN_LOADER, []),
        (IN_LOADER | WINDOW | {"window_attn_skip_freq": 2}, []),
        (IN_LOADER | WINDOW, [MASK]),
        (IN_LOADER | {"transformer_impl": "transformer_engine"}, [MASK]),
        (IN_LOADER | {"multi_latent_attention": True, "apply_rope_fusion": False}, [MASK]),
        # Several packed sequences of latent attention.
        (PACKED, [ROTARY]),
        (PACKED | {"sft": False, "dataloader_inter_document_masking": True}, [ROTARY]),
        (PACKED | {"sft": False}, []),
        (PACKED | {"micro_batch_size": 1}, []),
        (PACKED | {"apply_rope_fusion": False}, []),
        ({"use_megatron_fsdp": True, "gradient_accumulation_fusion": True}, [FUSED_SUM]),
        ({"moe_pad_expert_input_to_capacity": True}, ["--moe-pad-expert-input-to-capacity"]),
    ],
)
def test_what_does_not_fit_or_help_is_switched_off(changed: dict[str, Any], flags: list[str]) -> None:
    assert adjusted(**changed) == flags


def test_graphs_of_layers_become_those_of_stages() -> None:
    args = argparse.Namespace(
        **SETTINGS
        | {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn", "mlp"], "moe_layer_freq": [0, 1]}
    )
    assert take_over_graphs(args).modules == {"attn", "mlp"}
    assert (args.cuda_graph_impl, args.cuda_graph_modules) == ("none", []), "Megatron would capture as well"


def test_graphs_of_mamba_layers_stay_megatrons() -> None:
    from megatron.core.transformer.enums import CudaGraphModule

    given = {"cuda_graph_impl": "local", "cuda_graph_modules": [CudaGraphModule.attn, CudaGraphModule.mamba]}
    args = argparse.Namespace(**SETTINGS | given | {"hybrid_layer_pattern": "M*EM"})
    graphs = take_over_graphs(args)
    assert graphs.modules == {"attn"} and graphs.keeps_mamba
    assert (args.cuda_graph_impl, args.cuda_graph_modules) == ("local", [CudaGraphModule.mamba])


def test_nothing_is_captured_of_layers_that_run_again() -> None:
    """Also where the schedules recompute in place of Megatron."""
    given = {"cuda_graph_impl": "local", "cuda_graph_modules": ["attn"], "recompute_granularity": "full"}
    args = argparse.Namespace(**SETTINGS | given)
    graphs = take_over_graphs(args)
    assert graphs.is_empty and args.cuda_graph_impl == "none"
    assert graphs.notes == (
        ("qkv attention", "--recompute-granularity full: the backward pass runs them again"),
    )
