"""The table of the combinations of settings that AMPipe does not support. Imports neither torch nor Megatron.

A launch checks Megatron's arguments against it before any process group is created. docs/supported.md is
generated from it. What only a file or a module says is refused where it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ampipe.block.hybrid_pattern import stages_of
from megatron_ampipe.block.settings import AUTO, settings_of
from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import KEEP, STRATEGIES, Exchange, Pipeline, of_chunks, useful_exchanges
from megatron_ampipe.schedule.chunks import SequenceLayout, require_whole_tiles
from megatron_ampipe.schedule.features import (
    BALANCED,
    FP8_TILES,
    OTHER_FP8_RECIPE,
    WEIGHTS_TOGETHER,
    expert_tensor_ranks,
    fp8_recipe,
    has_capacity,
    rows_of_tile,
    splits_weights,
)
from megatron_ampipe.schedule.pipeline import AMPipeConfig

_DESTS = {"--fp8-format": "fp8", "--fp4-format": "fp4"}
"""Flags that Megatron stores under another name than their own."""


class _Arguments:
    """Parsed arguments, in which absent ones are None: older versions of Megatron have fewer."""

    def __init__(self, arguments: Any) -> None:
        self.all = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.all, name, None)


@dataclass(frozen=True, slots=True)
class Refusal:
    """One combination of settings that AMPipe does not support, and why, as one clause."""

    setting: str
    """The flag, as users write it."""
    rule: str
    remedy: str
    when: Callable[[Any], object] | None = None
    """Whether arguments are refused; or the part of the value that is; None: if the flag is set."""

    def applies(self, arguments: Any) -> object:
        """The refused value; None if the combination is supported."""
        args = _Arguments(arguments)
        value = getattr(args, _DESTS.get(self.setting, self.setting[2:].replace("-", "_")))
        refused = bool(value) if self.when is None else self.when(args)
        if refused is None or refused is False:
            return None
        return value if refused is True else refused


def refuse_unsupported(config: AMPipeConfig, arguments: Any) -> None:
    """Raise :class:`BadInput` for the first row of :data:`REFUSALS` that applies, or for too many chunks.

    ``arguments`` are Megatron's, parsed; at degree 1 nothing is refused.
    """
    if not config.pipelined:
        return
    pipeline = config.pipeline
    pipeline.chunks(arguments.seq_length)
    if pipeline.partner is not None and pipeline.degree == 1:
        flags, off = "--ampipe-partner", "no --ampipe-partner"
    elif pipeline.degree > 1 or config.automatic:
        flags, off = f"--ampipe-degree {AUTO if config.automatic else pipeline.degree}", "--ampipe-degree 1"
    else:
        # AMPipe's layers in one chunk, because of their exchange.
        flags, off = f"--ampipe-exchange {pipeline.exchange}", "--ampipe-exchange rows"
    _refuse(REFUSALS, arguments, flags, off)
    tile = rows_of_tile(arguments, getattr(arguments, "micro_batch_size", None) or 1)
    if tile > 1 and config.plan is None:
        require_whole_tiles(pipeline.chunks(arguments.seq_length, layout_of_args(arguments)), tile)


def layout_of_args(arguments: Any) -> SequenceLayout:
    """How the rows of a sequence are distributed over ranks."""
    return SequenceLayout(
        tensor_ranks=arguments.tensor_model_parallel_size if arguments.sequence_parallel else 1,
        context_ranks=arguments.context_parallel_size,
    )


def refuse_with_token_ids(router: str, arguments: Any) -> None:
    """:func:`refuse_unsupported` with :data:`TOKEN_ID_REFUSALS`, at any degree; ``router`` is the flag's."""
    _refuse(TOKEN_ID_REFUSALS, arguments, f"--ampipe-router {router}", "--ampipe-degree 1")


def _refuse(table: tuple[Refusal, ...], arguments: Any, flags: str, off: str) -> None:
    for row in table:
        value = row.applies(arguments)
        if value is not None:
            remedy = row.remedy.replace("--ampipe-degree 1", off)
            raise BadInput(row.setting, value, rule=f"with {flags}, {row.rule}", remedy=remedy)


WAITS_FOR_STAGE = (
    "a pipeline stage without virtual stages waits for the next stage before every backward pass, so that no "
    "other micro-batch can run next to it"
)


def no_moe_layer(spec: Sequence[str]) -> BadInput:
    """The error for a layer specification of ``--spec`` without anything to pipeline."""
    rule = "there is nothing to pipeline: this layer specification has no MoE layer"
    remedy = "Name one with MoE layers, or train with --ampipe-degree 1."
    return BadInput("--spec", " ".join(spec), rule=rule, remedy=remedy)


def waits_for_stage(arguments: Any) -> bool:
    """Whether no pass has a partner, see :data:`WAITS_FOR_STAGE`."""
    stages = arguments.pipeline_model_parallel_size or 1
    return stages > 1 and arguments.virtual_pipeline_model_parallel_size is None


def load_balancing(arguments: Any, *kinds: str) -> str | None:
    """The first of these load balancing types that is used."""
    chosen = getattr(arguments, "moe_router_load_balancing_type", None)
    chosen = chosen if isinstance(chosen, list) else [chosen]
    return next((kind for kind in chosen if kind in kinds), None)


def recomputes(arguments: Any, *modules: str) -> str | None:
    """The first of these modules that Megatron recomputes selectively."""
    if getattr(arguments, "recompute_granularity", None) != "selective":
        return None
    chosen = getattr(arguments, "recompute_modules", None) or []
    return next((module for module in chosen if module in modules), None)


def offloads_experts(arguments: Any) -> bool:
    """Whether ``--ampipe-memory offload`` can take the place of Megatron's fine-grained offloading.

    It puts away all that experts keep: more than ``--offload-modules`` may name, with the same result.
    """
    args = _Arguments(arguments)
    chosen = (args.ampipe_memory, args.ampipe_memory_budget, args.ampipe_plan)
    return bool(
        args.fine_grained_activation_offloading
        and args.offload_modules
        and {*args.offload_modules} <= {"expert_fc1", "moe_act"}
        and chosen == (None, None, None)
        and not (_recomputes_experts(args) or _keeps_other_tensors(args))
    )


def packs_documents(arguments: Any) -> bool:
    """Whether sequences are packed from documents, which do not attend to one another."""
    return bool(arguments.sft or getattr(arguments, "dataloader_inter_document_masking", False))


def exchanges_of(arguments: Any) -> tuple[Exchange, ...]:
    """What the layers can choose from, by Megatron's arguments."""
    num_experts = getattr(arguments, "num_experts", None) or 1
    return useful_exchanges(arguments, num_experts, ranks_per_node(arguments))


def ranks_per_node(arguments: Any) -> int | None:
    """Ranks of a node: as the flag says, else the launcher, such as torchrun; None if neither does."""
    given: int | None = getattr(arguments, "ampipe_ranks_per_node", None)
    of_launcher = os.environ.get("LOCAL_WORLD_SIZE", "")
    return given if given is not None or not of_launcher.isdecimal() else int(of_launcher)


def _splits_weights_elsewhere(args: Any) -> bool:
    if args.ampipe_schedule is None or args.transformer_impl is None or splits_weights(args):
        return False
    return Pipeline.of(1, schedule=args.ampipe_schedule).splits_weights


def _measures_without_training(args: Any) -> bool:
    chosen = args.ampipe_cluster or (args.ampipe_save_plan and os.path.isfile(args.ampipe_save_plan))
    return bool(args.ampipe_degree == AUTO and not chosen and args.skip_train)


def _saves_nothing(args: Any) -> bool:
    chosen = args.ampipe_exchange
    return chosen not in (None, AUTO) and chosen not in exchanges_of(args.all)


def _in_flex(args: Any) -> bool:
    return bool(args.moe_token_dispatcher_type == "flex")


def _resends(memory: str | None) -> bool:
    """Whether tokens of a chunk are sent once more with this ``--ampipe-memory``, or may be."""
    return memory == AUTO or any("redispatch" in STRATEGIES[name] for name in of_chunks(memory or KEEP))


def _sends_rows(args: Any) -> bool:
    """Whether the dispatcher sends each row to the ranks that need it, in a collective of AMPipe's."""
    return args.moe_token_dispatcher_type in (None, "alltoall")


def _keeps_no_scores(args: Any) -> bool:
    is_local = args.transformer_impl in (None, "local")
    return is_local or (args.context_parallel_size or 1) > 1 or packs_documents(args)


def _recomputes_experts(args: Any) -> bool:
    return args.recompute_granularity == "full" or recomputes(args.all, "moe") is not None


def _keeps_other_tensors(args: Any) -> bool:
    """Whether experts keep other tensors for their backward pass than the inputs of two products."""
    return bool(args.fp8 or args.use_transformer_engine_op_fuser)


def captured_modules(arguments: Any) -> tuple[str, ...]:
    """Megatron's names of what its flags have captured as CUDA graphs, layer by layer; empty without any."""
    if getattr(arguments, "cuda_graph_impl", None) not in _OF_LAYERS:
        return ()
    flags = ("cuda_graph_modules", "cuda_graph_scope_deprecated", "cuda_graph_scope")
    given: Any = next((modules for flag in flags if (modules := getattr(arguments, flag, None))), "full")
    modules = given if isinstance(given, list) else [given]
    return tuple(str(getattr(module, "name", module)) for module in modules)


_OF_LAYERS = ("local", "transformer_engine")
"""Values of ``--cuda-graph-impl`` with graphs of layers."""
_CAPTURED = ("attn", "mlp", "moe_router", "moe_preprocess")


def _captures_too_much(args: Any) -> str | None:
    return next((name for name in captured_modules(args.all) if name not in _CAPTURED), None)


def _cannot_capture(args: Any) -> str | None:
    """``--cuda-graph-impl`` and what forbids it."""
    implementation = args.cuda_graph_impl
    if implementation not in _OF_LAYERS:
        return None if implementation in (None, "none") else implementation
    forbidden = {
        "--ampipe-degree auto": args.ampipe_degree == AUTO,
        "--ampipe-plan": args.ampipe_plan or args.ampipe_save_plan or args.ampipe_cluster,
        "--ampipe-schedule": args.ampipe_schedule
        and Pipeline.of(1, schedule=args.ampipe_schedule).splits_weights,
        "--ampipe-partner": args.ampipe_partner,
        "--ampipe-memory": args.ampipe_memory not in (None, KEEP) or args.ampipe_memory_budget,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
        "--ampipe-exchange": args.ampipe_exchange not in (None, AUTO, Exchange.ROWS),
        "--ampipe-condense": args.ampipe_condense is not None,
        "--ampipe-router": args.ampipe_router,
        "--ampipe-grad-reduce placed": args.ampipe_grad_reduce == "placed",
        "--recompute-granularity": args.recompute_granularity,
        "--fp8-format": args.fp8,
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--tensor-model-parallel-size": (args.tensor_model_parallel_size or 1) > 1,
        "--context-parallel-size": (args.context_parallel_size or 1) > 1,
        "--attention-dropout": args.attention_dropout,
        "--hidden-dropout": args.hidden_dropout,
        "--moe-input-jitter-eps": args.moe_input_jitter_eps,
        "--moe-router-force-load-balancing": args.moe_router_force_load_balancing,
        "--moe-router-load-balancing-type": load_balancing(args.all, *BALANCED),
        "--moe-expert-capacity-factor": has_capacity(args.all),
        "--moe-expert-rank-capacity-factor": args.moe_expert_rank_capacity_factor is not None,
        "--moe-enable-routing-replay": args.moe_enable_routing_replay,
        "packed or masked documents": args.reset_attention_mask or packs_documents(args),
    }
    found = next((what for what, is_set in forbidden.items() if is_set), None)
    return None if found is None else f"{implementation} with {found}"


_OFF = "Leave it out, or train with --ampipe-degree 1."
_GATHERED = "a layer gathers its weights and reduces their gradients in every call, and chunks are more calls"

_SCORES = (
    "only Transformer Engine's attention keeps the largest scores, which context-parallel layers and packed "
    "documents do not use",
    "Leave it out, or use --transformer-impl transformer_engine and --context-parallel-size 1, without --sft "
    "and --dataloader-inter-document-masking.",
)


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--num-experts",
        "there is nothing to pipeline: the model has no MoE layer",
        "Set --num-experts, or train with --ampipe-degree 1.",
        lambda args: None if args.num_experts else "(not set)",
    ),
    Refusal(
        "--hybrid-layer-pattern",
        "there is nothing to pipeline: it has no MoE layer (E)",
        "Use a pattern such as M*EM*E, or train with --ampipe-degree 1.",
        lambda args: "E" not in "".join(stages_of(args.all) or "E"),
    ),
    Refusal(
        "--ampipe-partner",
        WAITS_FOR_STAGE,
        "Add --num-layers-per-virtual-pipeline-stage 1, or leave it out.",
        lambda args: args.ampipe_partner and waits_for_stage(args),
    ),
    Refusal(
        "--tensor-model-parallel-size",
        "Megatron supports MoE layers with tensor parallelism only together with sequence parallelism",
        "Add --sequence-parallel.",
        lambda args: (args.tensor_model_parallel_size or 1) > 1 and not args.sequence_parallel,
    ),
    Refusal(
        "--ampipe-schedule",
        *WEIGHTS_TOGETHER,
        _splits_weights_elsewhere,
    ),
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
        lambda args: args.moe_router_force_biased is not None,
    ),
    Refusal("--qk-clip", *_SCORES, lambda args: bool(args.qk_clip) and _keeps_no_scores(args)),
    Refusal(
        "--log-max-attention-logit",
        *_SCORES,
        lambda args: bool(args.log_max_attention_logit) and _keeps_no_scores(args),
    ),
    Refusal("--cpu-offloading-num-layers", "activation offloading is not supported yet", _OFF),
    Refusal(
        "--fine-grained-activation-offloading",
        "--ampipe-memory offload does it for experts in their own order: for --offload-modules expert_fc1 "
        "and moe_act, without FP8, --use-transformer-engine-op-fuser, --ampipe-memory or --ampipe-plan",
        "Use --offload-modules expert_fc1 moe_act, or --recompute-modules layernorm moe_act in place of it.",
    ),
    Refusal("--hybrid-context-parallel", "hybrid context parallelism is not supported", _OFF),
    Refusal(
        "--window-size",
        "a window that includes later keys is not causal",
        "Use a second number of 0, for example --window-size 128,0.",
        lambda args: bool(args.window_size and args.window_size[1] != 0),
    ),
    Refusal(
        "--experimental-attention-variant",
        "sparse attention is not supported",
        "Use --experimental-attention-variant gated_delta_net, or train with --ampipe-degree 1.",
        lambda args: args.experimental_attention_variant not in (None, "gated_delta_net"),
    ),
    Refusal(
        "--context-parallel-size",
        "chunks of packed documents are not supported with context parallelism yet",
        "Use --context-parallel-size 1, or leave out --sft and --dataloader-inter-document-masking.",
        lambda args: (args.context_parallel_size or 1) > 1 and packs_documents(args),
    ),
    Refusal(
        "--moe-flex-dispatcher-backend",
        "its zero-copy mode has one buffer for all calls, which chunks in flight would overwrite; without "
        "that mode, this backend is not supported yet",
        "Use --moe-flex-dispatcher-backend hybridep or deepep, or --moe-token-dispatcher-type alltoall.",
        lambda args: _in_flex(args) and args.moe_flex_dispatcher_backend not in (None, "deepep", "hybridep"),
    ),
    Refusal(
        "--moe-token-dispatcher-type",
        "is not supported with --moe-hybridep-pad-uneven-dispatch-inputs, or --ampipe-memory redispatch, S2, "
        "S4 and auto, for which tokens would be sent once more",
        "Leave them out, or use --ampipe-memory rebuild, or --moe-token-dispatcher-type alltoall.",
        lambda args: (
            _in_flex(args)
            and (_resends(args.ampipe_memory) or bool(args.moe_hybridep_pad_uneven_dispatch_inputs))
        ),
    ),
    Refusal(
        "--skip-train",
        "degrees are measured in training iterations, and there are none",
        "Use --ampipe-degree 4, or add --ampipe-cluster FILE, which plans without measuring.",
        _measures_without_training,
    ),
    Refusal(
        "--fp8-format",
        "FP8 needs a GPU with Transformer Engine: Megatron's local layers compute as without it",
        "Use --transformer-impl transformer_engine on a GPU, or leave it out.",
        lambda args: bool(args.fp8) and args.transformer_impl in (None, "local"),
    ),
    Refusal(
        "--fp8-recipe",
        *OTHER_FP8_RECIPE,
        lambda args: fp8_recipe(args) not in (None, *FP8_TILES) and fp8_recipe(args),
    ),
    Refusal("--fp4-format", "4-bit training is not supported yet", "Use --fp8-format e4m3, or --bf16."),
    Refusal(
        "--te-precision-config-file",
        "the recipe of each layer is in a file that AMPipe does not read",
        "Use --fp8-format e4m3 --fp8-recipe blockwise, or --bf16.",
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: ranks needs several expert-parallel ranks with several experts each, nodes and "
        "2dh several ranks on each of several nodes, ranks and nodes a top-k above 1, and all of them the "
        "dispatcher alltoall",
        "Use --ampipe-exchange rows, or say how many ranks a node has: --ampipe-ranks-per-node.",
        _saves_nothing,
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        "several instances reduce gradients on a separate stream, which --ampipe-grad-reduce placed does not "
        "hold back",
        "Use --ampipe-grad-reduce stock.",
        lambda args: (
            (args.num_distributed_optimizer_instances or 1) > 1
            and settings_of(args.all).grad_reduce == "placed"
        ),
    ),
    Refusal(
        "--cuda-graph-modules",
        "a graph has a fixed number of rows, and experts compute another one in every pass, so whole layers "
        "and moe cannot be captured; mamba layers stay Megatron's",
        "Use --cuda-graph-modules attn moe_router moe_preprocess, or --cuda-graph-impl none.",
        _captures_too_much,
    ),
    Refusal(
        "--cuda-graph-impl",
        "graphs are captured of stages that run once, in an order that flags name, on the rows of one rank, "
        "and that neither draw random numbers nor depend on documents or on other chunks",
        "Use local or transformer_engine without the flag that is named with it, or --cuda-graph-impl none.",
        _cannot_capture,
    ),
    Refusal(
        "--mlp-chunks-for-training",
        "AMPipe already splits the MLP into chunks",
        "Leave it out.",
        lambda args: (args.mlp_chunks_for_training or 1) > 1,
    ),
    Refusal(
        "--tp-comm-overlap",
        "Transformer Engine's buffers for it have the size of the whole sequence, and it aborts at a chunk",
        "Leave it out; chunks overlap with the communication of tensor parallelism without it.",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        _GATHERED,
        _OFF,
        lambda args: (args.tensor_parallel_num_weight_shards or 0) > (args.tensor_model_parallel_size or 1),
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        _GATHERED,
        _OFF,
        lambda args: (args.expert_tensor_parallel_num_weight_shards or 0) > (expert_tensor_ranks(args) or 1),
    ),
    Refusal(
        "--use-megatron-fsdp",
        "it gathers parameters for one pass at a time, and reduces gradients itself: not with "
        "--ampipe-partner, --overlap-moe-expert-parallel-comm or --ampipe-grad-reduce placed",
        "Leave these out, or use --use-distributed-optimizer.",
        lambda args: (
            args.use_megatron_fsdp
            and bool(args.ampipe_partner or settings_of(args.all).grad_reduce == "placed")
        ),
    ),
    Refusal(
        "--use-torch-fsdp2",
        "Megatron combines it with no expert-parallel ranks",
        "Use --use-megatron-fsdp or --use-distributed-optimizer.",
    ),
    Refusal(
        "--ampipe-memory",
        "--recompute-granularity full and --recompute-modules moe keep less of the experts than this, and "
        "--fp8-format and --use-transformer-engine-op-fuser keep other tensors",
        "Leave it out, or recompute other modules without FP8 and that fuser: --recompute-granularity "
        "selective --recompute-modules core_attn.",
        lambda args: (
            args.ampipe_memory not in (None, KEEP)
            and (_recomputes_experts(args) or _keeps_other_tensors(args))
        ),
    ),
    Refusal(
        "--ampipe-memory-budget",
        "it chooses --ampipe-memory, and --fp8-format and --use-transformer-engine-op-fuser keep other "
        "tensors than that knows",
        "Leave it out.",
        lambda args: args.ampipe_memory_budget is not None and _keeps_other_tensors(args),
    ),
    Refusal(
        "--save-tokens-per-expert-interval",
        "Megatron would record every chunk as a micro-batch",
        "Leave it out; --ampipe-routing-dir DIR records how many tokens each expert gets.",
    ),
    Refusal(
        "--moe-paged-stash",
        "it puts tensors away in the order of Megatron's layers, and chunks run in another",
        _OFF,
    ),
    Refusal(
        "--ampipe-grad-reduce",
        "has no effect without --overlap-grad-reduce: gradients are then reduced after all backward passes",
        "Add --overlap-grad-reduce, or leave it out.",
        lambda args: args.ampipe_grad_reduce == "placed" and not args.overlap_grad_reduce,
    ),
    Refusal(
        "--ampipe-capacity-scope",
        "has no effect without an expert capacity",
        "Add --moe-expert-capacity-factor, or leave it out.",
        lambda args: args.ampipe_capacity_scope == "chunk" and not has_capacity(args.all),
    ),
    Refusal(
        "--ampipe-router-scope",
        "has no effect: of Megatron's own routing, only sinkhorn can balance each chunk",
        "Leave it out, or choose a router that compares tokens, such as --ampipe-router expert-choice.",
        # Of a user's class, only the class can tell.
        lambda args: (
            args.ampipe_router_scope == "chunk"
            and not args.ampipe_router
            and load_balancing(args.all, "sinkhorn") is None
        ),
    ),
    Refusal(
        "--ampipe-wire",
        "it needs the dispatcher alltoall, which alone sends rows as they are; and bf16 needs rows of 32 bit",
        "Use --moe-token-dispatcher-type alltoall; with --bf16 or --fp16 also --ampipe-wire fp8.",
        lambda args: (
            args.ampipe_wire is not None
            and (not _sends_rows(args) or (args.ampipe_wire == "bf16" and bool(args.bf16 or args.fp16)))
        ),
    ),
    Refusal(
        "--ampipe-condense",
        "it needs the dispatcher alltoall, sequences of one document, and experts whose results are "
        "weighted, not their inputs",
        "Use --moe-token-dispatcher-type alltoall without --moe-apply-probs-on-input, --sft, "
        "--reset-attention-mask and --dataloader-inter-document-masking, or leave it out.",
        lambda args: (
            args.ampipe_condense is not None
            and (
                not _sends_rows(args)
                or packs_documents(args)
                or bool(args.moe_apply_probs_on_input or args.reset_attention_mask)
            )
        ),
    ),
    Refusal(
        "--ampipe-trace-dir",
        "has no effect with --skip-train: only training iterations are recorded",
        "Leave it out.",
        lambda args: args.ampipe_trace_dir is not None and bool(args.skip_train),
    ),
)
"""All combinations that this version refuses with a degree above 1; no other module refuses one."""

_OTHER_ROUTER = "Leave it out, or use a router that reads hidden states, such as --ampipe-router cosine."

TOKEN_ID_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--pipeline-model-parallel-size",
        "the ids of tokens are read for the first pipeline stage alone",
        "Use --pipeline-model-parallel-size 1, or a router that reads hidden states: --ampipe-router cosine.",
        lambda args: (args.pipeline_model_parallel_size or 1) > 1,
    ),
    Refusal(
        "--mtp-num-layers",
        "layers of multi-token prediction embed later tokens than those whose ids a router is told",
        _OTHER_ROUTER,
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "a model runs two micro-batches at once, and its routers are told the ids of one",
        "Leave it out; --ampipe-degree 4 overlaps the same exchanges within a micro-batch.",
    ),
    Refusal(
        "--cuda-graph-impl",
        "a captured graph would read the ids of the micro-batch with which it was captured",
        "Use --cuda-graph-impl none.",
        lambda args: args.cuda_graph_impl not in (None, "none"),
    ),
    Refusal(
        "--mlp-chunks-for-training",
        "Megatron routes parts of a sequence, and does not say which",
        _OTHER_ROUTER,
        lambda args: (args.mlp_chunks_for_training or 1) > 1,
    ),
)
"""What cannot be combined with a router that reads the ids of tokens, at any degree."""
