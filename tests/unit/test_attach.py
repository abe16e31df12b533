"""The arguments that start-up changes for pipelined blocks; launches test the others."""

import argparse
from typing import Any

import pytest

pytest.importorskip("torch")

from megatron_ampipe.launch.captured import CapturedStages
from megatron_ampipe.launch.resolve import adjust_arguments, take_over_graphs
from megatron_ampipe.launch.run import Run
from megatron_ampipe.launch.startup import print_graphs
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


GRAPHS_OF_LAYERS = {"cuda_graph_impl": "local", "ampipe_rows": "fixed", "transformer_impl": "local"}
ALL_STAGES = "qkv attention route merge"
# An argument that forbids graphs of whole passes, the stages that are captured in their place, and the flag.
IN_PLACE_OF_PASSES = {
    "attention_dropout": (0.1, "route merge", "--attention-dropout"),
    "hidden_dropout": (0.1, "route", "--hidden-dropout"),
    "moe_input_jitter_eps": (0.1, "qkv attention", "--moe-input-jitter-eps"),
    "moe_router_force_load_balancing": (True, "qkv attention", "--moe-router-force-load-balancing"),
    "sft": (True, "route merge", "--sft:"),
    "dataloader_inter_document_masking": (True, "route merge", "--dataloader-inter-document-masking:"),
    "reset_attention_mask": (True, "route merge", "--reset-attention-mask:"),
    "ampipe_router": ("cosine", "qkv attention", "--ampipe-router:"),
    "ampipe_routing_dir": ("routing", "qkv attention", "--ampipe-routing-dir:"),
    "ampipe_wire": ("tests.wires:HalvesWire", ALL_STAGES, "--ampipe-wire:"),
    "moe_router_load_balancing_type": ("sinkhorn", "qkv attention", "--moe-router-load-balancing-type:"),
    "moe_expert_capacity_factor": (1.0, "qkv attention", "--moe-token-drop-policy"),
    "ampipe_memory": ("rebuild", ALL_STAGES, "--ampipe-memory:"),
    "ampipe_rows": ("exact", ALL_STAGES, "--ampipe-rows"),
}


def graphs_of(**changed: Any) -> CapturedStages:
    return take_over_graphs(argparse.Namespace(**SETTINGS | GRAPHS_OF_LAYERS | changed))


@pytest.mark.parametrize("name", IN_PLACE_OF_PASSES)
def test_graphs_of_stages_take_the_place_of_whole_passes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    value, stages, flag = IN_PLACE_OF_PASSES[name]
    print_graphs(graphs_of())
    assert graphs_of().of_passes and capsys.readouterr().out == "", "nothing takes their place"
    graphs = graphs_of(**{name: value})
    print_graphs(graphs)
    assert not graphs.of_passes and graphs.stages == stages
    line = f"AMPipe: CUDA graphs of the stages {stages}, not of whole passes: {graphs.no_passes}\n"
    assert capsys.readouterr().out == line
    assert graphs.no_passes is not None and graphs.no_passes.startswith(f"{flag} ")
    # What is named is captured, without a line.
    named = graphs_of(**{name: value}, cuda_graph_modules=["attn", "moe_router", "moe_preprocess"])
    assert (named.stages, named.no_passes) == (stages, None)


def test_values_that_change_nothing_forbid_no_graph() -> None:
    assert graphs_of(reset_attention_mask=True, transformer_impl="transformer_engine").of_passes
    assert graphs_of(moe_expert_capacity_factor=1.0, moe_token_drop_policy="position").of_passes
    assert graphs_of(ampipe_wire="fp8", ampipe_memory="keep").of_passes


def test_mamba_layers_of_steps_that_can_repeat_have_no_graphs() -> None:
    hybrid = {"hybrid_layer_pattern": "M*EM", "attention_dropout": 0.1}
    assert graphs_of(**hybrid, ampipe_rows="exact").keeps_mamba
    graphs = graphs_of(**hybrid)
    assert not graphs.keeps_mamba and graphs.stages
    assert graphs.notes[-1][0] == "mamba"
