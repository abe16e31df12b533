"""What is refused of the model: its layers, attention, router and precision."""

from __future__ import annotations

from collections.abc import Callable

from megatron_ampipe.block.hybrid_pattern import runs_of, stages_of
from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.launch.refusals.refusal import Refusal, documents_flag, first_set, named_with
from megatron_ampipe.schedule import Pipeline
from megatron_ampipe.schedule.features import (
    OTHER_FP8_RECIPE,
    WEIGHTS_TOGETHER,
    fp8_recipe,
    has_capacity,
    has_other_fp8_recipe,
    splits_weights,
)

_SCORES = (
    "only Transformer Engine's attention keeps the largest scores, and not of context-parallel layers or "
    "packed documents",
    "Leave it out, or change the flag that is named with it.",
)


def _has_no_experts(args: Arguments) -> bool:
    return "E" not in "".join(stages_of(args) or ())


def _has_no_pairs(args: Arguments) -> str | None:
    if runs_of(stages_of(args) or ()):
        return None
    return named_with(
        args, "--hybrid-layer-pattern", first_set(args, "--ampipe-cluster", "--ampipe-memory-budget")
    )


def _splits_weights_elsewhere(args: Arguments) -> bool:
    return args.transformer_impl is not None and not splits_weights(args) and _names_weights(args)


def _names_weights(args: Arguments) -> bool:
    """Whether the named schedule computes weight gradients in separate stages."""
    return args.ampipe_schedule and Pipeline.of(1, schedule=args.ampipe_schedule).splits_weights


def _keeps_no_scores(setting: str) -> Callable[[Arguments], str | None]:
    """A check that names the flag with which no attention keeps the largest scores."""

    def conflict(args: Arguments) -> str | None:
        is_local, is_ring = args.transformer_impl in (None, "local"), (args.context_parallel_size or 1) > 1
        local, ring = (
            "--transformer-impl" if is_local else None,
            "--context-parallel-size" if is_ring else None,
        )
        return named_with(args, setting, local, ring, documents_flag(args))

    return conflict


MODEL: tuple[Refusal, ...] = (
    Refusal(
        "--num-experts",
        "there is nothing to pipeline: the model has no MoE layer",
        "Set --num-experts, or train with --ampipe-degree 1.",
        required=True,
    ),
    Refusal(
        "--hybrid-layer-pattern",
        "there is nothing to pipeline without an MoE layer (E)",
        "Use a pattern such as M*EM*E, or train with --ampipe-degree 1.",
        _has_no_experts,
    ),
    Refusal(
        "--hybrid-layer-pattern",
        "predictions need an MoE layer right after an attention layer (* or +)",
        "Use a pattern such as M*EM*E, or leave out the flag that is named with it.",
        _has_no_pairs,
    ),
    Refusal("--ampipe-schedule", *WEIGHTS_TOGETHER, _splits_weights_elsewhere),
    Refusal(
        "--position-embedding-type",
        "it needs the position ids of a multimodal model",
        "Use --position-embedding-type rope.",
        lambda args: args.position_embedding_type == "mrope",
    ),
    Refusal(
        "--moe-router-force-biased",
        "its bias of the experts is drawn for a whole sequence",
        "Use --moe-router-force-load-balancing, or leave it out.",
    ),
    Refusal("--qk-clip", *_SCORES, _keeps_no_scores("--qk-clip")),
    Refusal(
        "--log-max-attention-logit",
        *_SCORES,
        _keeps_no_scores("--log-max-attention-logit"),
    ),
    Refusal(
        "--window-size",
        "a window that includes later keys is not causal",
        "Use a second number of 0, for example --window-size 128,0.",
        lambda args: args.window_size[1] != 0,
    ),
    Refusal(
        "--experimental-attention-variant",
        "sparse attention is not supported",
        "Use --experimental-attention-variant gated_delta_net, or train with --ampipe-degree 1.",
        lambda args: args.experimental_attention_variant != "gated_delta_net",
    ),
    Refusal(
        "--ampipe-capacity-scope",
        "has no effect without an expert capacity",
        "Add --moe-expert-capacity-factor, or leave it out.",
        lambda args: args.ampipe_capacity_scope == "chunk" and not has_capacity(args),
    ),
    Refusal(
        "--ampipe-router-scope",
        "has no effect: of Megatron's own routing, only sinkhorn can balance each chunk",
        "Leave it out, or choose a router that compares tokens, such as --ampipe-router expert-choice.",
        # For a user's class, ``find_gate`` checks it.
        lambda args: (
            args.ampipe_router_scope == "chunk"
            and not (args.ampipe_router or "sinkhorn" in (args.moe_router_load_balancing_type or ()))
        ),
    ),
    Refusal(
        "--mlp-chunks-for-training",
        "AMPipe already splits the MLP into chunks",
        "Leave it out.",
        lambda args: args.mlp_chunks_for_training > 1,
    ),
    Refusal(
        "--fp8-format",
        "FP8 needs a GPU with Transformer Engine: Megatron's local layers compute as without it",
        "Use --transformer-impl transformer_engine on a GPU, or leave it out.",
        lambda args: args.transformer_impl in (None, "local"),
    ),
    Refusal(
        "--fp8-recipe",
        *OTHER_FP8_RECIPE,
        lambda args: has_other_fp8_recipe(args) and fp8_recipe(args),
    ),
    Refusal("--fp4-format", "4-bit training is not supported yet", "Use --fp8-format e4m3, or --bf16."),
    Refusal(
        "--te-precision-config-file",
        "the recipe of each layer is in a file that AMPipe does not read",
        "Use --fp8-format e4m3 --fp8-recipe blockwise, or --bf16.",
    ),
)
"""Refused settings of the model and its precision."""
