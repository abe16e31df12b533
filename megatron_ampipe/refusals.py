"""The one table of what AMPipe refuses. Imports neither torch nor Megatron.

``launch`` holds Megatron's arguments against it before any process group is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ampipe.config import AUTO, AMPipeConfig
from megatron_ampipe.errors import BadInput


@dataclass(frozen=True, slots=True)
class Refusal:
    """One combination of settings that AMPipe does not run.

    Attributes:
        setting: The Megatron flag, as users write it.
        applies: Given Megatron's arguments, the refused value, or None when the combination is fine.
        rule: Why, as one clause.
        remedy: What to use instead.
    """

    setting: str
    applies: Callable[[Any], object]
    rule: str
    remedy: str


def refuse_unsupported(config: AMPipeConfig, arguments: Any) -> None:
    """Hold Megatron's arguments against :data:`REFUSALS`.

    Args:
        config: AMPipe's settings; nothing is refused at degree 1.
        arguments: Megatron's parsed arguments (an ``argparse.Namespace``).

    Raises:
        BadInput: for the first row that applies, or a degree that the sequence cannot be cut into.
    """
    if not config.pipelined:
        return
    pipeline = config.pipeline
    if pipeline.degree > arguments.seq_length:
        raise BadInput(
            "--ampipe-degree",
            pipeline.degree,
            rule=f"is more than the sequence has rows (--seq-length {arguments.seq_length})",
            remedy=f"Use --ampipe-degree {min(4, arguments.seq_length)}.",
        )
    if pipeline.backward_degree > arguments.seq_length:
        raise BadInput(
            "--ampipe-backward-degree",
            pipeline.backward_degree,
            rule=f"is more than the sequence has rows (--seq-length {arguments.seq_length})",
            remedy=f"Use --ampipe-backward-degree {pipeline.degree}.",
        )
    for refusal in REFUSALS:
        value = refusal.applies(arguments)
        if value is not None:
            rule = f"with --ampipe-degree {config.degree}, {refusal.rule}"
            raise BadInput(refusal.setting, value, rule=rule, remedy=refusal.remedy)


def _above_one(name: str) -> Callable[[Any], object]:
    return lambda arguments: value if (value := getattr(arguments, name, 1) or 1) > 1 else None


def _set(name: str) -> Callable[[Any], object]:
    """Refuses every value but None, False and 0."""
    return lambda arguments: value if (value := getattr(arguments, name, None)) else None


def _given(name: str) -> Callable[[Any], object]:
    """Refuses every value, also 0."""
    return lambda arguments: getattr(arguments, name, None)


def _equal(name: str, *values: object) -> Callable[[Any], object]:
    return lambda arguments: value if (value := getattr(arguments, name, None)) in values else None


def _not_equal(name: str, expected: object) -> Callable[[Any], object]:
    return lambda arguments: (
        value if (value := getattr(arguments, name, expected)) not in (expected, None) else None
    )


def _routing(*kinds: str) -> Callable[[Any], object]:
    def applies(arguments: Any) -> object:
        chosen = getattr(arguments, "moe_router_load_balancing_type", None)
        chosen = chosen if isinstance(chosen, list) else [chosen]
        return next((kind for kind in chosen if kind in kinds), None)

    return applies


def _negative(name: str) -> Callable[[Any], object]:
    def applies(arguments: Any) -> object:
        found = getattr(arguments, name, None)
        return next((one for one in (found if isinstance(found, list) else [found]) if one and one < 0), None)

    return applies


def _has_capacity(arguments: Any) -> bool:
    """Megatron takes a negative factor for none."""
    factor = getattr(arguments, "moe_expert_capacity_factor", None)
    return factor is not None and factor >= 0


def _drops_by_probability(arguments: Any) -> object:
    if not _has_capacity(arguments):
        return None
    if getattr(arguments, "ampipe_capacity_scope", None) == "chunk":
        return None
    return _equal("moe_token_drop_policy", "probs")(arguments)


def _scope_without_capacity(arguments: Any) -> object:
    if _has_capacity(arguments):
        return None
    return _equal("ampipe_capacity_scope", "chunk")(arguments)


def _tries_without_training(arguments: Any) -> object:
    if getattr(arguments, "ampipe_degree", None) != AUTO or getattr(arguments, "ampipe_cluster", None):
        return None
    saved = getattr(arguments, "ampipe_save_plan", None)
    if saved is not None and os.path.isfile(saved):
        return None
    return _set("skip_train")(arguments)


def _records_without_training(arguments: Any) -> object:
    if not getattr(arguments, "skip_train", False):
        return None
    return _set("ampipe_trace_dir")(arguments)


def _pads_with_expert_bias(arguments: Any) -> object:
    if not getattr(arguments, "moe_router_enable_expert_bias", False):
        return None
    return _set("moe_pad_expert_input_to_capacity")(arguments)


def _tensor_without_sequence(arguments: Any) -> object:
    if getattr(arguments, "sequence_parallel", False):
        return None
    return _above_one("tensor_model_parallel_size")(arguments)


def _experts_above_ranks(arguments: Any) -> object:
    experts = getattr(arguments, "expert_model_parallel_size", 1) or 1
    stages = getattr(arguments, "pipeline_model_parallel_size", 1) or 1
    ranks = getattr(arguments, "world_size", None) or int(os.environ.get("WORLD_SIZE", "1"))
    return experts if experts * stages > ranks else None


def _topk_above_experts(arguments: Any) -> object:
    topk = getattr(arguments, "moe_router_topk", 1)
    return topk if topk > (getattr(arguments, "num_experts", None) or topk) else None


def _probs_on_input_of_many(arguments: Any) -> object:
    if getattr(arguments, "moe_router_topk", 1) == 1:
        return None
    return _set("moe_apply_probs_on_input")(arguments)


def _wide_residual_of_local_layers(arguments: Any) -> object:
    sixteen_bit = getattr(arguments, "bf16", False) or getattr(arguments, "fp16", False)
    if not sixteen_bit or getattr(arguments, "transformer_impl", "local") != "local":
        return None
    return _set("fp32_residual_connection")(arguments)


def _looks_ahead(arguments: Any) -> object:
    window = getattr(arguments, "window_size", None)
    return window if window and window[1] != 0 else None


def _other_context_mode(arguments: Any) -> object:
    if (getattr(arguments, "context_parallel_size", 1) or 1) == 1:
        return None
    chosen = getattr(arguments, "cp_comm_type", None)
    chosen = chosen if isinstance(chosen, list) else [chosen]
    taken = {"all_gather", "p2p", *(["a2a"] if _ranks_divide_heads(arguments) else [])}
    return next((mode for mode in chosen if mode not in taken), None)


def _ranks_divide_heads(arguments: Any) -> bool:
    """Whether an all-to-all over the context-parallel ranks could share out the heads of one rank."""
    tensor = getattr(arguments, "tensor_model_parallel_size", 1) or 1
    heads = [getattr(arguments, "num_attention_heads", None) or 1]
    if getattr(arguments, "group_query_attention", False):
        heads.append(getattr(arguments, "num_query_groups", None) or 1)
    return all(number // tensor % arguments.context_parallel_size == 0 for number in heads)


def _recomputes(*modules: str) -> Callable[[Any], object]:
    def applies(arguments: Any) -> object:
        if getattr(arguments, "recompute_granularity", None) != "selective":
            return None
        chosen = getattr(arguments, "recompute_modules", None) or []
        return next((module for module in chosen if module in modules), None)

    return applies


_QUANTIZED = "a quantized layer updates its weights at a mark of the first micro-batch, which chunks remove"
_OFF = "Leave it out, or train with --ampipe-degree 1."

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--num-experts",
        lambda arguments: None if getattr(arguments, "num_experts", None) else "(not set)",
        "there is nothing to pipeline: the model has no MoE layer",
        "Set --num-experts, or train with --ampipe-degree 1.",
    ),
    Refusal(
        "--tensor-model-parallel-size",
        _tensor_without_sequence,
        "Megatron trains MoE layers under tensor parallelism with sequence parallelism alone",
        "Add --sequence-parallel.",
    ),
    Refusal(
        "--expert-model-parallel-size",
        _experts_above_ranks,
        "is more than the ranks of a pipeline stage",
        "Use at most the number of ranks divided by --pipeline-model-parallel-size.",
    ),
    Refusal(
        "--moe-router-topk",
        _topk_above_experts,
        "is more than there are experts",
        "Use at most the value of --num-experts.",
    ),
    Refusal(
        "--moe-apply-probs-on-input",
        _probs_on_input_of_many,
        "a token of several experts has no one probability",
        "Use --moe-router-topk 1, or leave it out.",
    ),
    Refusal(
        "--fp32-residual-connection",
        _wide_residual_of_local_layers,
        "Megatron's local layers do not take a residual of another precision",
        "Use --transformer-impl transformer_engine, or leave it out.",
    ),
    Refusal(
        "--position-embedding-type",
        _equal("position_embedding_type", "mrope"),
        "it needs the positions of a multimodal model",
        "Use --position-embedding-type rope.",
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        _set("cpu_offloading_num_layers"),
        "activation offloading is not supported yet",
        _OFF,
    ),
    Refusal(
        "--cp-comm-type",
        _other_context_mode,
        "keys and values are gathered, which can take the place of p2p, of a2a where the ranks divide the "
        "heads, and of nothing else",
        "Use --cp-comm-type all_gather.",
    ),
    Refusal(
        "--hybrid-context-parallel",
        _set("hybrid_context_parallel"),
        "hybrid context parallelism is not supported",
        _OFF,
    ),
    Refusal(
        "--hierarchical-context-parallel-sizes",
        _set("hierarchical_context_parallel_sizes"),
        "hierarchical context parallelism is not supported",
        "Use --cp-comm-type all_gather.",
    ),
    Refusal(
        "--window-size",
        _looks_ahead,
        "a window that looks ahead is not causal",
        "Use a second number of 0, for example --window-size 128,0.",
    ),
    Refusal(
        "--spec",
        _set("spec"),
        "a layer specification of one's own cannot be pipelined yet",
        "Leave --spec out.",
    ),
    Refusal(
        "--experimental-attention-variant",
        _set("experimental_attention_variant"),
        "only softmax attention over all earlier tokens is supported",
        _OFF,
    ),
    Refusal(
        "--softmax-type",
        _not_equal("softmax_type", "vanilla"),
        "attention sinks are not supported",
        "Use --softmax-type vanilla.",
    ),
    Refusal(
        "--attention-output-gate", _set("attention_output_gate"), "gated attention is not supported yet", _OFF
    ),
    Refusal(
        "--reset-attention-mask",
        _set("reset_attention_mask"),
        "attention masks other than causal are not supported",
        "Leave it out: documents in a sequence then see each other, as in a stock run without the flag.",
    ),
    Refusal(
        "--dataloader-inter-document-masking",
        _set("dataloader_inter_document_masking"),
        "packed sequences are not supported",
        _OFF,
    ),
    Refusal("--sft", _set("sft"), "packed sequences are not supported", _OFF),
    Refusal(
        "--moe-router-load-balancing-type",
        _routing("sinkhorn", "quantile_balancing"),
        "the choice of experts depends on all tokens of the sequence at once, which a chunk does not have",
        "Use aux_loss, seq_aux_loss, global_aux_loss or none.",
    ),
    Refusal(
        "--moe-token-dispatcher-type",
        _equal("moe_token_dispatcher_type", "flex"),
        "DeepEP and HybridEP fuse the all-to-all with their own overlap and cannot be cut into stages",
        "Use --moe-token-dispatcher-type alltoall or allgather.",
    ),
    Refusal(
        "--moe-expert-capacity-factor",
        _negative("moe_expert_capacity_factor"),
        "a negative factor means no capacity at all, to Megatron",
        "Leave it out for no capacity, or use for example 1.25.",
    ),
    Refusal(
        "--moe-aux-loss-coeff",
        _negative("moe_aux_loss_coeff"),
        "Megatron leaves out a loss with a negative coefficient without a word",
        "Use for example 0.01, or leave it out.",
    ),
    Refusal(
        "--moe-z-loss-coeff",
        _negative("moe_z_loss_coeff"),
        "a negative coefficient makes the loss reward what it is to keep small",
        "Use for example 0.001, or leave it out.",
    ),
    Refusal(
        "--moe-token-drop-policy",
        _drops_by_probability,
        "dropping by probability needs the scores of all tokens before any can be sent",
        "Use --moe-token-drop-policy position, which is exact, or --ampipe-capacity-scope chunk, which "
        "drops other tokens than a stock run.",
    ),
    Refusal(
        "--ampipe-capacity-scope",
        _scope_without_capacity,
        "has no effect without a capacity",
        "Add --moe-expert-capacity-factor, or leave it out.",
    ),
    Refusal(
        "--skip-train",
        _tries_without_training,
        "there is no training iteration in which a degree could be tried",
        "Use --ampipe-degree 4, or add --ampipe-cluster FILE, which plans and tries nothing.",
    ),
    Refusal(
        "--ampipe-trace-dir",
        _records_without_training,
        "has no effect with --skip-train: the iterations of training are what is recorded",
        "Leave it out.",
    ),
    Refusal(
        "--moe-pad-expert-input-to-capacity",
        _pads_with_expert_bias,
        "the stock router counts padding as tokens when it updates the expert bias, which chunks do not",
        "Leave it out: only the kept tokens are sent then.",
    ),
    Refusal(
        "--moe-routing-trace-path",
        _set("moe_routing_trace_path"),
        "it records what the stock router is called with, and chunks call it otherwise",
        _OFF,
    ),
    Refusal(
        "--moe-router-padding-for-fp8",
        _set("moe_router_padding_for_fp8"),
        "padding for quantization is not supported yet",
        _OFF,
    ),
    Refusal("--qk-clip", _set("qk_clip"), "attention does not report its largest score", _OFF),
    Refusal(
        "--log-max-attention-logit",
        _set("log_max_attention_logit"),
        "attention does not report its largest score",
        _OFF,
    ),
    Refusal("--moe-latent-size", _set("moe_latent_size"), "latent MoE is not supported yet", _OFF),
    Refusal(
        "--moe-router-force-biased",
        _set("moe_router_force_biased"),
        "random routing would differ from the stock run's",
        _OFF,
    ),
    Refusal(
        "--moe-enable-routing-replay", _set("moe_enable_routing_replay"), "replay is not supported", _OFF
    ),
    Refusal(
        "--moe-router-padding-for-quantization",
        _set("moe_router_padding_for_quantization"),
        "padding for quantization is not supported yet",
        _OFF,
    ),
    Refusal("--fp8-format", _set("fp8"), "8-bit training is not supported yet", "Use --bf16."),
    Refusal("--fp4-format", _set("fp4"), "4-bit training is not supported yet", "Use --bf16."),
    Refusal(
        "--te-precision-config-file",
        _given("te_precision_config_file"),
        _QUANTIZED,
        "Leave it out and use --bf16.",
    ),
    Refusal(
        "--kitchen-config-file", _given("kitchen_config_file"), _QUANTIZED, "Leave it out and use --bf16."
    ),
    Refusal(
        "--kitchen-recipe-number",
        _given("kitchen_recipe_number"),
        _QUANTIZED,
        "Leave it out and use --bf16.",
    ),
    Refusal(
        "--recompute-modules",
        _recomputes("layernorm", "moe_act"),
        "Megatron's recompute of this module cannot run inside a stage",
        "Use core_attn, moe, shared_experts, mla_up_proj or mlp, or --recompute-granularity full.",
    ),
    Refusal(
        "--cuda-graph-impl",
        _not_equal("cuda_graph_impl", "none"),
        "CUDA graphs are not supported",
        "Use --cuda-graph-impl none.",
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        _set("fine_grained_activation_offloading"),
        "activation offloading is not supported yet",
        _OFF,
    ),
    Refusal(
        "--mlp-chunks-for-training",
        _above_one("mlp_chunks_for_training"),
        "the MLP is already cut into chunks",
        "Leave it out.",
    ),
    Refusal(
        "--use-megatron-fsdp",
        _set("use_megatron_fsdp"),
        "fully sharded parameters are not supported",
        "Use --use-distributed-optimizer.",
    ),
    Refusal(
        "--use-torch-fsdp2",
        _set("use_torch_fsdp2"),
        "fully sharded parameters are not supported",
        "Use --use-distributed-optimizer.",
    ),
    Refusal(
        "--fused-residual-rmsnorm",
        _set("fused_residual_rmsnorm"),
        "norms that carry the residual are not supported yet",
        _OFF,
    ),
)
"""Every combination this version refuses. There is no other place that refuses one."""


@dataclass(frozen=True, slots=True)
class PutAside:
    """A flag that asks for another overlap alone: without it the run computes the same function.

    Attributes:
        setting: The Megatron flag.
        reason: What AMPipe does in its place.
    """

    setting: str
    reason: str

    @property
    def name(self) -> str:
        """In parsed arguments."""
        return self.setting.removeprefix("--").replace("-", "_")


_SAME_EXCHANGES = "AMPipe schedules the same all-to-alls inside each micro-batch"
_SAME_WEIGHTS = "it delays weight gradients for an overlap that AMPipe takes the place of"

PUT_ASIDE: tuple[PutAside, ...] = (
    PutAside("--moe-shared-expert-overlap", "AMPipe schedules the shared experts itself"),
    PutAside("--overlap-moe-expert-parallel-comm", _SAME_EXCHANGES),
    PutAside("--ep-overlap-early-attn-memory-release", _SAME_EXCHANGES),
    PutAside("--overlap-dispatch-backward-with-experts-wgrad", _SAME_WEIGHTS),
    PutAside("--delay-wgrad-compute", _SAME_WEIGHTS),
)
"""What is switched off, with a line in the start-up table, where layers are AMPipe's."""


def put_aside(arguments: Any) -> tuple[PutAside, ...]:
    """Switch off what :data:`PUT_ASIDE` names.

    Args:
        arguments: Parsed and not validated yet: Megatron's checks ask what these flags need.

    Returns:
        What was on.
    """
    found = tuple(one for one in PUT_ASIDE if getattr(arguments, one.name, False))
    for one in found:
        setattr(arguments, one.name, False)
    return found
