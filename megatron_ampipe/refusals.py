"""The table of the combinations of settings that AMPipe does not support. Imports neither torch nor Megatron.

``launch`` checks Megatron's arguments against it before any process group is created.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ampipe import refusal_conditions as when
from megatron_ampipe.config import AMPipeConfig
from megatron_ampipe.errors import BadInput


@dataclass(frozen=True, slots=True)
class Refusal:
    """One combination of settings that AMPipe does not support.

    Attributes:
        setting: The Megatron flag, as users write it.
        applies: Takes Megatron's arguments; returns the refused value, or None if the combination is
            supported.
        rule: Why it is refused, as one clause.
        remedy: What to use instead.
    """

    setting: str
    applies: Callable[[Any], object]
    rule: str
    remedy: str


def refuse_unsupported(config: AMPipeConfig, arguments: Any) -> None:
    """Check Megatron's arguments against :data:`REFUSALS`.

    Args:
        config: AMPipe's settings; nothing is refused at degree 1.
        arguments: Megatron's parsed arguments (an ``argparse.Namespace``).

    Raises:
        BadInput: for the first row that applies, or for a degree above the sequence length.
    """
    if not config.pipelined:
        return
    pipeline = config.pipeline
    if pipeline.degree > arguments.seq_length:
        raise BadInput(
            "--ampipe-degree",
            pipeline.degree,
            rule=f"is larger than the sequence length (--seq-length {arguments.seq_length})",
            remedy=f"Use --ampipe-degree {min(4, arguments.seq_length)}.",
        )
    if pipeline.backward_degree > arguments.seq_length:
        raise BadInput(
            "--ampipe-backward-degree",
            pipeline.backward_degree,
            rule=f"is larger than the sequence length (--seq-length {arguments.seq_length})",
            remedy=f"Use --ampipe-backward-degree {pipeline.degree}.",
        )
    for refusal in REFUSALS:
        value = refusal.applies(arguments)
        if value is not None:
            flags, remedy = f"--ampipe-degree {config.degree}", refusal.remedy
            if config.degree == 1:
                # AMPipe's layers in one chunk, because of their exchange.
                flags = f"--ampipe-exchange {pipeline.exchange}"
                remedy = remedy.replace("--ampipe-degree 1", "--ampipe-exchange rows")
            raise BadInput(refusal.setting, value, rule=f"with {flags}, {refusal.rule}", remedy=remedy)


_QUANTIZED = "quantized layers update their weights if marked as the first micro-batch, which AMPipe undoes"
_OFF = "Leave it out, or train with --ampipe-degree 1."

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--num-experts",
        lambda arguments: None if getattr(arguments, "num_experts", None) else "(not set)",
        "there is nothing to pipeline: the model has no MoE layer",
        "Set --num-experts, or train with --ampipe-degree 1.",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        when.hybrid_without_pair,
        "there is nothing to pipeline: no attention layer (* or +) has an MoE layer (E) right after it in its"
        " pipeline stage",
        "Use a pattern such as M*EM*E, or train with --ampipe-degree 1.",
    ),
    Refusal(
        "--tensor-model-parallel-size",
        when.tensor_without_sequence_parallel,
        "Megatron supports MoE layers with tensor parallelism only together with sequence parallelism",
        "Add --sequence-parallel.",
    ),
    Refusal(
        "--expert-model-parallel-size",
        when.expert_parallel_above_ranks,
        "is larger than the number of ranks of a pipeline stage",
        "Use at most the number of ranks divided by --pipeline-model-parallel-size.",
    ),
    Refusal(
        "--moe-router-topk",
        when.topk_above_experts,
        "is larger than the number of experts",
        "Use at most the value of --num-experts.",
    ),
    Refusal(
        "--moe-apply-probs-on-input",
        when.probs_on_input_above_top1,
        "probabilities can be applied to the input only if every token has a single expert",
        "Use --moe-router-topk 1, or leave it out.",
    ),
    Refusal(
        "--fp32-residual-connection",
        when.fp32_residual_with_local_layers,
        "Megatron's local layers do not support a residual in a different precision",
        "Use --transformer-impl transformer_engine, or leave it out.",
    ),
    Refusal(
        "--ampipe-schedule",
        when.weights_apart_without_local_layers,
        "only the linear layers of --transformer-impl local can compute gradients of weights apart",
        "Use --transformer-impl local, or --ampipe-schedule ampipe and --ampipe-degree 4.",
    ),
    Refusal(
        "--position-embedding-type",
        when.equal("position_embedding_type", "mrope"),
        "it needs the position ids of a multimodal model",
        "Use --position-embedding-type rope.",
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        when.is_set("cpu_offloading_num_layers"),
        "activation offloading is not supported yet",
        _OFF,
    ),
    Refusal(
        "--cp-comm-type",
        when.unsupported_cp_comm_type,
        "AMPipe gathers keys and values; this can replace p2p, and a2a if the heads of a rank are divisible "
        "by --context-parallel-size, but no other type",
        "Use --cp-comm-type all_gather.",
    ),
    Refusal(
        "--hybrid-context-parallel",
        when.is_set("hybrid_context_parallel"),
        "hybrid context parallelism is not supported",
        _OFF,
    ),
    Refusal(
        "--hierarchical-context-parallel-sizes",
        when.is_set("hierarchical_context_parallel_sizes"),
        "hierarchical context parallelism is not supported",
        "Use --cp-comm-type all_gather.",
    ),
    Refusal(
        "--window-size",
        when.window_looks_ahead,
        "a window that includes later keys is not causal",
        "Use a second number of 0, for example --window-size 128,0.",
    ),
    Refusal(
        "--experimental-attention-variant",
        when.is_set("experimental_attention_variant"),
        "only softmax attention over all earlier tokens is supported",
        _OFF,
    ),
    Refusal(
        "--softmax-type",
        when.not_equal("softmax_type", "vanilla"),
        "attention sinks are not supported",
        "Use --softmax-type vanilla.",
    ),
    Refusal(
        "--attention-output-gate",
        when.is_set("attention_output_gate"),
        "gated attention is not supported yet",
        _OFF,
    ),
    Refusal(
        "--reset-attention-mask",
        when.document_mask_is_not_used,
        "Megatron applies the mask of the data loader only in local layers, with one or two pipeline stages, "
        "without a window and without context parallelism",
        "Use --dataloader-inter-document-masking.",
    ),
    Refusal(
        "--context-parallel-size",
        when.packs_documents_of_context_ranks,
        "chunks of packed documents are not supported with context parallelism yet",
        "Use --context-parallel-size 1, or leave out --sft and --dataloader-inter-document-masking.",
    ),
    Refusal(
        "--micro-batch-size",
        when.packs_several_sequences,
        "packed sequences are several documents already; more than one sequence is not supported with tensor "
        "parallelism, nor with fused rotary embeddings of latent attention",
        "Use --micro-batch-size 1 and a larger --seq-length.",
    ),
    Refusal(
        "--moe-router-load-balancing-type",
        when.balances_over_sequence,
        "its choice of experts depends on all tokens of the sequence, and a chunk has only some of them",
        "Use aux_loss, seq_aux_loss, global_aux_loss or none; or sinkhorn with --ampipe-router-scope chunk, "
        "which balances each chunk.",
    ),
    Refusal(
        "--ampipe-router-scope",
        when.router_scope_without_router,
        "has no effect: Megatron's router looks at one token at a time",
        "Leave it out, or choose a router that compares tokens, such as --ampipe-router expert-choice.",
    ),
    Refusal(
        "--moe-token-dispatcher-type",
        when.flex_other_than_deep_ep,
        "of its backends only deepep is supported, without --ampipe-memory: with others, chunks would share "
        "buffers",
        "Use --moe-flex-dispatcher-backend deepep, or --moe-token-dispatcher-type alltoall.",
    ),
    Refusal(
        "--moe-expert-capacity-factor",
        when.negative("moe_expert_capacity_factor"),
        "Megatron treats a negative factor as no capacity limit",
        "Leave it out for no capacity limit, or use for example 1.25.",
    ),
    Refusal(
        "--moe-aux-loss-coeff",
        when.negative("moe_aux_loss_coeff"),
        "Megatron silently ignores a loss with a negative coefficient",
        "Use for example 0.01, or leave it out.",
    ),
    Refusal(
        "--moe-z-loss-coeff",
        when.negative("moe_z_loss_coeff"),
        "with a negative coefficient the loss would increase the logits that it should keep small",
        "Use for example 0.001, or leave it out.",
    ),
    Refusal(
        "--moe-token-drop-policy",
        when.drops_by_probability,
        "dropping by probability needs the scores of all tokens before any token can be sent",
        "Use --moe-token-drop-policy position, which is exact, or --ampipe-capacity-scope chunk, which "
        "drops different tokens than stock Megatron.",
    ),
    Refusal(
        "--ampipe-capacity-scope",
        when.capacity_scope_without_capacity,
        "has no effect without an expert capacity",
        "Add --moe-expert-capacity-factor, or leave it out.",
    ),
    Refusal(
        "--skip-train",
        when.auto_degree_without_training,
        "degrees are measured in training iterations, and there are none",
        "Use --ampipe-degree 4, or add --ampipe-cluster FILE, which plans without measuring.",
    ),
    Refusal(
        "--ampipe-trace-dir",
        when.trace_without_training,
        "has no effect with --skip-train: only training iterations are recorded",
        "Leave it out.",
    ),
    Refusal(
        "--moe-pad-expert-input-to-capacity",
        when.pads_with_expert_bias,
        "the stock router counts padding as tokens when it updates the expert bias, AMPipe does not",
        "Leave it out; then only the kept tokens are sent.",
    ),
    Refusal(
        "--moe-routing-trace-path",
        when.is_set("moe_routing_trace_path"),
        "it records the calls of the stock router, and chunks call the router differently",
        _OFF,
    ),
    Refusal(
        "--moe-router-padding-for-fp8",
        when.is_set("moe_router_padding_for_fp8"),
        "padding for quantization is not supported yet",
        _OFF,
    ),
    Refusal(
        "--qk-clip", when.is_set("qk_clip"), "AMPipe's attention does not return the maximum logit", _OFF
    ),
    Refusal(
        "--log-max-attention-logit",
        when.is_set("log_max_attention_logit"),
        "AMPipe's attention does not return the maximum logit",
        _OFF,
    ),
    Refusal("--moe-latent-size", when.is_set("moe_latent_size"), "latent MoE is not supported yet", _OFF),
    Refusal(
        "--moe-router-force-biased",
        when.is_set("moe_router_force_biased"),
        "random routing would differ from that of a stock run",
        _OFF,
    ),
    Refusal(
        "--moe-enable-routing-replay",
        when.is_set("moe_enable_routing_replay"),
        "routing replay is not supported",
        _OFF,
    ),
    Refusal(
        "--moe-router-padding-for-quantization",
        when.is_set("moe_router_padding_for_quantization"),
        "padding for quantization is not supported yet",
        _OFF,
    ),
    Refusal("--fp8-format", when.is_set("fp8"), "8-bit training is not supported yet", "Use --bf16."),
    Refusal("--fp4-format", when.is_set("fp4"), "4-bit training is not supported yet", "Use --bf16."),
    Refusal(
        "--te-precision-config-file",
        when.is_given("te_precision_config_file"),
        _QUANTIZED,
        "Leave it out and use --bf16.",
    ),
    Refusal(
        "--kitchen-config-file",
        when.is_given("kitchen_config_file"),
        _QUANTIZED,
        "Leave it out and use --bf16.",
    ),
    Refusal(
        "--kitchen-recipe-number",
        when.is_given("kitchen_recipe_number"),
        _QUANTIZED,
        "Leave it out and use --bf16.",
    ),
    Refusal(
        "--ampipe-ranks-per-node",
        when.nodes_without_layout,
        "--ampipe-exchange nodes needs expert-parallel ranks that are spread equally over several nodes, "
        "with several of them on each",
        "Use --ampipe-exchange ranks, or say how many ranks a node has.",
    ),
    Refusal(
        "--ampipe-exchange",
        when.exchange_without_copies,
        "no rank gets a token twice: that needs several expert-parallel ranks with several experts each (for "
        "nodes: several ranks on each of several nodes), a top-k above 1 and the dispatcher alltoall",
        "Use --ampipe-exchange rows.",
    ),
    Refusal(
        "--ampipe-grad-reduce",
        when.places_no_reductions,
        "has no effect without --overlap-grad-reduce: gradients are then reduced after all backward passes",
        "Add --overlap-grad-reduce, or leave it out.",
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        when.places_reductions_of_instances,
        "several instances reduce gradients on a separate stream, which --ampipe-grad-reduce placed does not "
        "hold back",
        "Use --ampipe-grad-reduce stock.",
    ),
    Refusal(
        "--ampipe-wire",
        when.wire_has_nothing_to_encode,
        "it needs the dispatcher alltoall, which alone sends rows as they are; and bf16 needs rows of 32 bit",
        "Use --moe-token-dispatcher-type alltoall; with --bf16 or --fp16 also --ampipe-wire fp8.",
    ),
    Refusal(
        "--ampipe-condense",
        when.condenses_what_is_not_alike,
        "it needs the dispatcher alltoall, sequences of one document, and experts whose results are "
        "weighted, not their inputs",
        "Use --moe-token-dispatcher-type alltoall without --moe-apply-probs-on-input, --sft, "
        "--reset-attention-mask and --dataloader-inter-document-masking, or leave it out.",
    ),
    Refusal(
        "--recompute-modules",
        when.recomputes("layernorm", "moe_act"),
        "Megatron's recompute of this module cannot run inside a stage",
        "Use core_attn, moe, shared_experts, mla_up_proj or mlp, or --recompute-granularity full.",
    ),
    Refusal(
        "--ampipe-memory",
        when.restores_what_is_recomputed,
        "--recompute-granularity full and --recompute-modules moe keep less of the experts than this",
        "Leave it out, or recompute other modules: --recompute-granularity selective --recompute-modules "
        "core_attn.",
    ),
    Refusal(
        "--cuda-graph-impl",
        when.not_equal("cuda_graph_impl", "none"),
        "CUDA graphs are not supported",
        "Use --cuda-graph-impl none.",
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        when.is_set("fine_grained_activation_offloading"),
        "activation offloading is not supported yet",
        _OFF,
    ),
    Refusal(
        "--mlp-chunks-for-training",
        when.above_one("mlp_chunks_for_training"),
        "AMPipe already splits the MLP into chunks",
        "Leave it out.",
    ),
    Refusal(
        "--use-megatron-fsdp",
        when.is_set("use_megatron_fsdp"),
        "fully sharded parameters are not supported",
        "Use --use-distributed-optimizer.",
    ),
    Refusal(
        "--use-torch-fsdp2",
        when.is_set("use_torch_fsdp2"),
        "fully sharded parameters are not supported",
        "Use --use-distributed-optimizer.",
    ),
    Refusal(
        "--fused-residual-rmsnorm",
        when.is_set("fused_residual_rmsnorm"),
        "norms that are fused with the residual connection are not supported yet",
        _OFF,
    ),
)
"""All combinations that this version refuses; no other module refuses one."""
