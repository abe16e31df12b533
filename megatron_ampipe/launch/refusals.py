"""The table of the combinations of settings that AMPipe does not support. Imports neither torch nor Megatron.

``launch`` checks Megatron's arguments against it before any process group is created.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch import refusal_conditions as when
from megatron_ampipe.schedule.config import AMPipeConfig
from megatron_ampipe.schedule.features import has_capacity


@dataclass(frozen=True, slots=True)
class Refusal:
    """One combination of settings that AMPipe does not support.

    Attributes:
        setting: The Megatron flag, as users write it.
        applies: Takes Megatron's arguments; returns the refused value, or None if the combination is
            supported.
        rule: Why it is refused, as one clause.
        remedy: What to use instead.
        needs: What would have to be there for the combination to run; if nothing can be done, why.
    """

    setting: str
    applies: Callable[[Any], object]
    rule: str
    remedy: str
    needs: str


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
            degree = AUTO if config.automatic else pipeline.degree
            flags, remedy = f"--ampipe-degree {degree}", refusal.remedy
            if degree == 1:
                # AMPipe's layers in one chunk, because of their exchange.
                flags = f"--ampipe-exchange {pipeline.exchange}"
                remedy = remedy.replace("--ampipe-degree 1", "--ampipe-exchange rows")
            raise BadInput(refusal.setting, value, rule=f"with {flags}, {refusal.rule}", remedy=remedy)


def refuse_with_token_ids(router: str, arguments: Any) -> None:
    """Check Megatron's arguments against :data:`TOKEN_ID_REFUSALS`, at any degree.

    Args:
        router: The value of ``--ampipe-router``, a class that reads the ids of tokens.
        arguments: Megatron's parsed arguments.

    Raises:
        BadInput: for the first row that applies.
    """
    for refusal in TOKEN_ID_REFUSALS:
        value = refusal.applies(arguments)
        if value is not None:
            rule = f"with --ampipe-router {router}, {refusal.rule}"
            raise BadInput(refusal.setting, value, rule=rule, remedy=refusal.remedy)


_QUANTIZED = "quantized layers update their weights if marked as the first micro-batch, which AMPipe undoes"
_OFF = "Leave it out, or train with --ampipe-degree 1."

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--num-experts",
        lambda arguments: None if getattr(arguments, "num_experts", None) else "(not set)",
        "there is nothing to pipeline: the model has no MoE layer",
        "Set --num-experts, or train with --ampipe-degree 1.",
        "nothing: no token is sent between ranks",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        when.hybrid_without_pair,
        "there is nothing to pipeline: no attention layer (* or +) has an MoE layer (E) right after it in its"
        " pipeline stage",
        "Use a pattern such as M*EM*E, or train with --ampipe-degree 1.",
        "a block that begins with a Mamba layer, whose state passes from chunk to chunk",
    ),
    Refusal(
        "--tensor-model-parallel-size",
        when.tensor_without_sequence_parallel,
        "Megatron supports MoE layers with tensor parallelism only together with sequence parallelism",
        "Add --sequence-parallel.",
        "an MoE layer of Megatron that trains that way",
    ),
    Refusal(
        "--expert-model-parallel-size",
        when.expert_parallel_above_ranks,
        "is larger than the number of ranks of a pipeline stage",
        "Use at most the number of ranks divided by --pipeline-model-parallel-size.",
        "more ranks",
    ),
    Refusal(
        "--moe-router-topk",
        when.topk_above_experts,
        "is larger than the number of experts",
        "Use at most the value of --num-experts.",
        "more experts",
    ),
    Refusal(
        "--moe-apply-probs-on-input",
        when.probs_on_input_above_top1,
        "probabilities can be applied to the input only if every token has a single expert",
        "Use --moe-router-topk 1, or leave it out.",
        "a meaning for a token with several experts; Megatron has none",
    ),
    Refusal(
        "--fp32-residual-connection",
        when.fp32_residual_with_local_layers,
        "Megatron's local layers do not support a residual in a different precision",
        "Use --transformer-impl transformer_engine, or leave it out.",
        "local norms of Megatron that take another precision than their parameters",
    ),
    Refusal(
        "--ampipe-schedule",
        when.weights_apart_without_local_layers,
        "only the linear layers of --transformer-impl local can compute gradients of weights apart",
        "Use --transformer-impl local, or --ampipe-schedule ampipe and --ampipe-degree 4.",
        "Transformer Engine's delayed weight gradients, kept for each chunk, not for each layer",
    ),
    Refusal(
        "--position-embedding-type",
        when.equal("position_embedding_type", "mrope"),
        "it needs the position ids of a multimodal model",
        "Use --position-embedding-type rope.",
        "a data loader of Megatron's GPT script that makes such position ids",
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        when.is_set("cpu_offloading_num_layers"),
        "activation offloading is not supported yet",
        _OFF,
        "copies to the host as stages of a separate lane",
    ),
    Refusal(
        "--hybrid-context-parallel",
        when.is_set("hybrid_context_parallel"),
        "hybrid context parallelism is not supported",
        _OFF,
        "groups of ranks, and chunks, that change from micro-batch to micro-batch",
    ),
    Refusal(
        "--window-size",
        when.window_looks_ahead,
        "a window that includes later keys is not causal",
        "Use a second number of 0, for example --window-size 128,0.",
        "chunks whose attention waits for the keys of the next chunk",
    ),
    Refusal(
        "--experimental-attention-variant",
        when.is_set("experimental_attention_variant"),
        "only softmax attention over all earlier tokens is supported",
        _OFF,
        "stages for each variant: a state between chunks (gated delta net), an index over all keys "
        "(sparse attention)",
    ),
    Refusal(
        "--context-parallel-size",
        when.packs_documents_of_context_ranks,
        "chunks of packed documents are not supported with context parallelism yet",
        "Use --context-parallel-size 1, or leave out --sft and --dataloader-inter-document-masking.",
        "Transformer Engine's division of every document over the ranks, as spans of chunks",
    ),
    Refusal(
        "--moe-flex-dispatcher-backend",
        when.flex_backend_with_shared_buffers,
        "its zero-copy mode has one buffer for all calls, which chunks in flight would overwrite; without "
        "that mode, this backend is not supported yet",
        "Use --moe-flex-dispatcher-backend hybridep or deepep, or --moe-token-dispatcher-type alltoall.",
        "a Transport over Transformer Engine's calls, and for its zero-copy mode buffers for each chunk in "
        "flight",
    ),
    Refusal(
        "--moe-token-dispatcher-type",
        when.flex_with_what_it_cannot,
        "is not supported with --ampipe-memory, --moe-expert-rank-capacity-factor or "
        "--moe-hybridep-pad-uneven-dispatch-inputs",
        "Leave them out, or use --moe-token-dispatcher-type alltoall, with which --ampipe-memory works.",
        "a dispatch that can be repeated or stored; a budget that counts the tokens of all chunks; padding, "
        "whose size the ranks agree on, as a stage of the communication lane",
    ),
    Refusal(
        "--skip-train",
        when.auto_degree_without_training,
        "degrees are measured in training iterations, and there are none",
        "Use --ampipe-degree 4, or add --ampipe-cluster FILE, which plans without measuring.",
        "nothing: nothing is measured",
    ),
    Refusal(
        "--fp8-format",
        when.is_set("fp8"),
        "8-bit training is not supported yet",
        "Use --bf16.",
        "scaling factors that the chunks of a layer share, tested on a GPU",
    ),
    Refusal(
        "--fp4-format",
        when.is_set("fp4"),
        "4-bit training is not supported yet",
        "Use --bf16.",
        "scaling factors that the chunks of a layer share, tested on a GPU",
    ),
    Refusal(
        "--te-precision-config-file",
        when.is_given("te_precision_config_file"),
        _QUANTIZED,
        "Leave it out and use --bf16.",
        "weights that are quantized once for all chunks of an iteration, tested on a GPU",
    ),
    Refusal(
        "--kitchen-config-file",
        when.is_given("kitchen_config_file"),
        _QUANTIZED,
        "Leave it out and use --bf16.",
        "the same, and the library, which is internal to NVIDIA",
    ),
    Refusal(
        "--kitchen-recipe-number",
        when.is_given("kitchen_recipe_number"),
        _QUANTIZED,
        "Leave it out and use --bf16.",
        "the same, and the library, which is internal to NVIDIA",
    ),
    Refusal(
        "--ampipe-ranks-per-node",
        when.nodes_without_layout,
        "--ampipe-exchange nodes and 2dh need expert-parallel ranks that are spread equally over several "
        "nodes, with several of them on each",
        "Use --ampipe-exchange ranks, or say how many ranks a node has.",
        "groups of ranks for nodes that hold different numbers of expert-parallel ranks",
    ),
    Refusal(
        "--ampipe-exchange",
        when.exchange_without_copies,
        "has nothing to save: ranks needs several expert-parallel ranks with several experts each, nodes and "
        "2dh several ranks on each of several nodes, ranks and nodes a top-k above 1, and all of them the "
        "dispatcher alltoall",
        "Use --ampipe-exchange rows.",
        "nothing: every row is sent once already",
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        when.places_reductions_of_instances,
        "several instances reduce gradients on a separate stream, which --ampipe-grad-reduce placed does not "
        "hold back",
        "Use --ampipe-grad-reduce stock.",
        "reductions of all instances on a stream that the schedule orders",
    ),
    Refusal(
        "--recompute-modules",
        when.recomputes("layernorm", "moe_act"),
        "Megatron's recompute of this module cannot run inside a stage",
        "Use core_attn, moe, shared_experts, mla_up_proj or mlp, or --recompute-granularity full.",
        "outputs that are released after the last stage that reads them, and stages that compute them again",
    ),
    Refusal(
        "--cuda-graph-impl",
        when.not_equal("cuda_graph_impl", "none"),
        "CUDA graphs are not supported",
        "Use --cuda-graph-impl none.",
        "graphs of single stages, and numbers of tokens that the host need not read",
    ),
    Refusal(
        "--fine-grained-activation-offloading",
        when.is_set("fine_grained_activation_offloading"),
        "activation offloading is not supported yet",
        _OFF,
        "copies to the host as stages of a separate lane",
    ),
    Refusal(
        "--mlp-chunks-for-training",
        when.above_one("mlp_chunks_for_training"),
        "AMPipe already splits the MLP into chunks",
        "Leave it out.",
        "nothing: Megatron would route, and count losses, by its own chunks",
    ),
    Refusal(
        "--tp-comm-overlap",
        when.is_set("tp_comm_overlap"),
        "Transformer Engine's buffers for it have the size of the whole sequence, and it aborts at a chunk",
        "Leave it out; chunks overlap with the communication of tensor parallelism without it.",
        "buffers of the size of a chunk, tested on a GPU",
    ),
    Refusal(
        "--use-megatron-fsdp",
        when.is_set("use_megatron_fsdp"),
        "fully sharded parameters are not supported",
        "Use --use-distributed-optimizer.",
        "gathers of parameters as stages of a lane",
    ),
    Refusal(
        "--use-torch-fsdp2",
        when.is_set("use_torch_fsdp2"),
        "fully sharded parameters are not supported",
        "Use --use-distributed-optimizer.",
        "gathers of parameters as stages of a lane",
    ),
    Refusal(
        "--ampipe-memory",
        when.of_setting("memory", lambda memory, args: memory != "keep" and when.recomputes_experts(args)),
        "--recompute-granularity full and --recompute-modules moe keep less of the experts than this",
        "Leave it out, or recompute other modules: --recompute-granularity selective --recompute-modules "
        "core_attn.",
        "nothing: there is nothing left to save",
    ),
    Refusal(
        "--ampipe-grad-reduce",
        when.of_setting(
            "grad_reduce", lambda time, args: time == "placed" and not when.has(args, "overlap_grad_reduce")
        ),
        "has no effect without --overlap-grad-reduce: gradients are then reduced after all backward passes",
        "Add --overlap-grad-reduce, or leave it out.",
        "nothing: there is nothing left to place",
    ),
    Refusal(
        "--ampipe-capacity-scope",
        when.of_setting("capacity_scope", lambda scope, args: scope == "chunk" and not has_capacity(args)),
        "has no effect without an expert capacity",
        "Add --moe-expert-capacity-factor, or leave it out.",
        "nothing: there is nothing that a scope would change",
    ),
    Refusal(
        "--ampipe-router-scope",
        when.of_setting(
            "router_scope",
            # Of a user's class, only the class can tell.
            lambda scope, args: (
                scope == "chunk"
                and not when.has(args, "ampipe_router")
                and when.load_balancing("sinkhorn")(args) is None
            ),
        ),
        "has no effect: of Megatron's own routing, only sinkhorn can balance each chunk",
        "Leave it out, or choose a router that compares tokens, such as --ampipe-router expert-choice.",
        "nothing: there is nothing that a scope would change",
    ),
    Refusal(
        "--ampipe-wire",
        when.of_setting(
            "wire",
            lambda wire, args: (
                not when.sends_rows(args) or (wire == "bf16" and when.has(args, "bf16", "fp16"))
            ),
        ),
        "it needs the dispatcher alltoall, which alone sends rows as they are; and bf16 needs rows of 32 bit",
        "Use --moe-token-dispatcher-type alltoall; with --bf16 or --fp16 also --ampipe-wire fp8.",
        "an encoding of the rows of the other dispatchers, whose libraries send them",
    ),
    Refusal(
        "--ampipe-condense",
        when.of_setting(
            "condense",
            lambda _, args: (
                not when.sends_rows(args)
                or when.packs_documents(args)
                or when.has(args, "moe_apply_probs_on_input", "reset_attention_mask")
            ),
        ),
        "it needs the dispatcher alltoall, sequences of one document, and experts whose results are "
        "weighted, not their inputs",
        "Use --moe-token-dispatcher-type alltoall without --moe-apply-probs-on-input, --sft, "
        "--reset-attention-mask and --dataloader-inter-document-masking, or leave it out.",
        "a comparison of tokens that knows where documents begin, and the rows of other dispatchers",
    ),
    Refusal(
        "--ampipe-trace-dir",
        when.of_setting("trace_dir", lambda _, args: when.has(args, "skip_train")),
        "has no effect with --skip-train: only training iterations are recorded",
        "Leave it out.",
        "a trace of evaluations",
    ),
)
"""All combinations that this version refuses with a degree above 1; no other module refuses one."""

_OTHER_ROUTER = "Leave it out, or use a router that reads hidden states, such as --ampipe-router cosine."

TOKEN_ID_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--mtp-num-layers",
        when.is_set("mtp_num_layers"),
        "layers of multi-token prediction embed later tokens than those whose ids a router is told",
        _OTHER_ROUTER,
        "ids that are shifted by the depth of the layer",
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        when.is_set("overlap_moe_expert_parallel_comm"),
        "a model runs two micro-batches at once, and its routers are told the ids of one",
        "Leave it out; --ampipe-degree 4 overlaps the same exchanges within a micro-batch.",
        "ids as part of the state of a micro-batch in Megatron's schedule plan",
    ),
    Refusal(
        "--cuda-graph-impl",
        when.not_equal("cuda_graph_impl", "none"),
        "a captured graph would read the ids of the micro-batch with which it was captured",
        "Use --cuda-graph-impl none.",
        "ids in a buffer that is written before every replay",
    ),
    Refusal(
        "--mlp-chunks-for-training",
        when.above_one("mlp_chunks_for_training"),
        "Megatron routes parts of a sequence, and does not say which",
        _OTHER_ROUTER,
        "the place of each part in the sequence, which a router is not told",
    ),
    Refusal(
        "--moe-token-drop-policy",
        when.drops_equal_weights,
        "all weights are equal, so which tokens have the lowest probability is not defined",
        "Use --moe-token-drop-policy position.",
        "nothing: there is nothing to compare",
    ),
    Refusal(
        "--moe-router-load-balancing-type",
        when.balances_fixed_experts,
        "experts are a fixed function of the id, which nothing can balance",
        "Use --moe-router-load-balancing-type none.",
        "nothing: there is nothing to balance",
    ),
)
"""What cannot be combined with a router that reads the ids of tokens, at any degree; the last two rows are
about ``--ampipe-router hash`` alone."""
