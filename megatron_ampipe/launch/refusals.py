"""The table of all combinations of settings that AMPipe does not support. Imports neither torch nor Megatron.

A launch checks Megatron's arguments with it before any process group is created. docs/supported.md is
generated from it. Problems in files or modules are refused where these are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_ampipe.block.hybrid_pattern import runs_of, stages_of
from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import AUTO, SETTING, Setting, Settings, parse_iterations
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.environment import (
    PARTNER_FLAG,
    captured_modules,
    exchanges_of,
    layout_of_args,
    ranks_per_node,
    waits_for_stage,
)
from megatron_ampipe.schedule import KEEP, STRATEGIES, Exchange, Pipeline, Saved, chunk_strategies
from megatron_ampipe.schedule.chunks import require_whole_tiles
from megatron_ampipe.schedule.features import (
    OTHER_FP8_RECIPE,
    WEIGHTS_TOGETHER,
    balances,
    expert_tensor_ranks,
    fp8_recipe,
    has_capacity,
    has_other_fp8_recipe,
    rows_of_tile,
    splits_weights,
)
from megatron_ampipe.schedule.pipeline import builds_layers


@dataclass(frozen=True, slots=True)
class Refusal:
    """A combination of settings that AMPipe does not support; ``rule`` says why, in one clause."""

    setting: str
    """The flag, as users write it."""
    rule: str
    remedy: str
    when: Callable[[Arguments], object] | None = None
    """Called with the arguments if the flag has a value: returns whether they are refused, or the part of the
    value that is refused. None: refused whenever the flag is set."""
    required: bool = False
    """Whether it is refused only if the flag is not set."""
    also_with_plan: bool = False
    """Whether the remedy is right too if a plan has the value; else another plan has to be made."""

    def applies(self, args: Arguments) -> object:
        """Return the refused value; None if the combination is supported."""
        value = args.of(self.setting)
        if self.required:
            return None if value else "(not set)"
        if value is None or value is False:
            return None
        refused = bool(value) if self.when is None else self.when(args)
        if refused is None or refused is False:
            return None
        return value if refused is True else refused


def refuse_unsupported(settings: Settings, pipeline: Pipeline, arguments: object) -> None:
    """Raise the first of :func:`unsupported`."""
    for refusal in unsupported(settings, pipeline, arguments):
        raise refusal


def unsupported(settings: Settings, pipeline: Pipeline, arguments: object) -> Iterator[BadInput]:
    """A refusal for each row of :data:`REFUSALS` that applies, and for too many chunks.

    ``arguments`` are Megatron's, parsed; at degree 1 nothing is refused.
    """
    if not builds_layers(settings, pipeline):
        return
    has_plan = settings.plan is not None
    # What a plan says replaces the flags that it stands for.
    planned = {f"ampipe_{name}": getattr(pipeline, name) for name in _PLANNED} if has_plan else {}
    args = Arguments(arguments, **planned)
    try:
        pipeline.chunks(args.seq_length)
    except BadInput as refusal:
        yield refusal
        return
    if has_plan:
        flag = _setting_of_plan(args)[0].flag
        flags, off = f"{flag} {settings.plan}", f"no {flag}"
    elif pipeline.partner is not None and pipeline.degree == 1:
        flag = PARTNER_FLAG if PARTNER_FLAG in (args.ampipe_disabled_flags or ()) else "--ampipe-partner"
        flags, off = flag, f"no {flag}"
    elif pipeline.degree > 1 or settings.automatic:
        flags, off = f"--ampipe-degree {AUTO if settings.automatic else pipeline.degree}", "--ampipe-degree 1"
    else:
        # AMPipe's layers are used with one chunk because of the exchange.
        flags, off = f"--ampipe-exchange {pipeline.exchange}", "--ampipe-exchange rows"
    yield from _conflicts(REFUSALS, args, flags=flags, off=off, has_plan=has_plan)
    tile = rows_of_tile(args, args.micro_batch_size or 1)
    if tile > 1 and not has_plan:
        try:
            require_whole_tiles(pipeline.chunks(args.seq_length, layout_of_args(args)), tile)
        except BadInput as refusal:
            yield refusal


_PLANNED = ("memory", "exchange", "partner")
"""Flags of AMPipe that rows refuse and a plan sets."""


def setting_of_plan(*, saved: bool) -> tuple[Setting, str]:
    """The flag that names the plan of a run, and the remedy if the plan does not fit.

    ``saved``: it is the file of ``--ampipe-save-plan``, which an earlier run has written.
    """
    if saved:
        return SETTING["save_plan"], "Remove the file, or give another name, to choose again."
    return SETTING["plan"], "Make one with ampipe plan from a model file with this run's flags."


def _setting_of_plan(args: Arguments) -> tuple[Setting, str]:
    return setting_of_plan(saved=args.ampipe_save_plan is not None)


def refuse_with_token_ids(router: str, arguments: object) -> None:
    """As :func:`refuse_unsupported`, with :data:`TOKEN_ID_REFUSALS`, at any degree; ``router`` is a name."""
    flags, off = f"--ampipe-router {router}", "--ampipe-degree 1"
    for refusal in _conflicts(TOKEN_ID_REFUSALS, Arguments(arguments), flags=flags, off=off):
        raise refusal


def _conflicts(
    table: tuple[Refusal, ...], args: Arguments, *, flags: str, off: str, has_plan: bool = False
) -> Iterator[BadInput]:
    """A refusal for each row that applies.

    ``flags`` are what pipelines the run, ``off`` what to write to train without; with ``has_plan``, a plan
    sets the values of :data:`_PLANNED`.
    """
    for row in table:
        value = row.applies(args)
        if value is None:
            continue
        remedy = row.remedy.replace("--ampipe-degree 1", off)
        is_planned = has_plan and row.setting.removeprefix("--ampipe-") in _PLANNED
        if is_planned and not row.also_with_plan:
            _, remedy = _setting_of_plan(args)
        yield BadInput(row.setting, value, rule=f"with {flags}, {row.rule}", remedy=remedy)


_OFFLOADED = {"expert_fc1", "moe_act"}
"""The modules of ``--offload-modules`` whose activations ``--ampipe-memory offload`` copies to the host."""


def offloads_experts(arguments: object) -> bool:
    """Whether ``--ampipe-memory offload`` can replace Megatron's fine-grained offloading.

    It offloads all saved activations of experts, maybe more than ``--offload-modules``, with equal results.
    """
    args = Arguments(arguments)
    return bool(
        args.fine_grained_activation_offloading
        and args.offload_modules
        and {*args.offload_modules} <= _OFFLOADED
        and not (args.ampipe_memory or args.ampipe_memory_budget or args.ampipe_plan)
        and not (_recomputes_experts(args) or _keeps_other_tensors(args))
    )


def _with(args: Arguments, setting: str, *conflicts: str | None) -> str | None:
    """The value of a flag with the first of these that is in conflict with it; None if nothing is.

    A conflict is a flag, which is shown with its value, or None.
    """
    conflict = next((flag for flag in conflicts if flag is not None), None)
    if conflict is None:
        return None
    words = [args.of(setting), "with", conflict, args.of(conflict)]
    lists = (word if isinstance(word, list) else [word] for word in words if word is not True)
    return " ".join(str(word) for words in lists for word in words)


def _set(args: Arguments, *flags: str) -> str | None:
    """The first of these flags that is set; None if none is."""
    return next((flag for flag in flags if args.of(flag)), None)


def _has_no_experts(args: Arguments) -> bool:
    return "E" not in "".join(stages_of(args) or ())


def _has_no_pairs(args: Arguments) -> str | None:
    if runs_of(stages_of(args) or ()):
        return None
    return _with(args, "--hybrid-layer-pattern", _set(args, "--ampipe-cluster", "--ampipe-memory-budget"))


def _documents(args: Arguments) -> str | None:
    """The flag that packs documents."""
    return _set(args, "--sft", "--dataloader-inter-document-masking")


_DISPATCHER = "--moe-token-dispatcher-type"


def _splits_weights_elsewhere(args: Arguments) -> bool:
    return args.transformer_impl is not None and not splits_weights(args) and _names_weights(args)


def _names_weights(args: Arguments) -> bool:
    """Whether the named schedule computes weight gradients in separate stages."""
    return args.ampipe_schedule and Pipeline.of(1, schedule=args.ampipe_schedule).splits_weights


def _measures_without_training(args: Arguments) -> bool:
    chosen = args.ampipe_cluster or (args.ampipe_save_plan and os.path.isfile(args.ampipe_save_plan))
    return bool(args.ampipe_degree == AUTO and not chosen and args.skip_train)


def _measures_after_the_end(args: Arguments) -> bool:
    _, last = parse_iterations(args.ampipe_measure)
    return args.train_iters is not None and last > args.train_iters


def _overlaps_tensor_ranks(args: Arguments) -> bool:
    """Whether ``--tp-comm-overlap`` is given, which pipelined runs switch off."""
    return bool(args.tp_comm_overlap) or "--tp-comm-overlap" in (args.ampipe_disabled_flags or ())


def _resends(memory: str | None) -> bool:
    """Whether tokens of a chunk are (or may be) redispatched with this ``--ampipe-memory``."""
    return memory == AUTO or any(
        STRATEGIES[name].tokens is Saved.RESEND for name in chunk_strategies(memory or KEEP)
    )


def _sends_rows(args: Arguments) -> bool:
    """Whether the dispatcher is ``alltoall``, whose rows AMPipe sends in its own collectives."""
    return args.moe_token_dispatcher_type in (None, "alltoall")


def _keeps_no_scores(setting: str) -> Callable[[Arguments], str | None]:
    """A check that names the flag with which no attention keeps the largest scores."""

    def conflict(args: Arguments) -> str | None:
        is_local, is_ring = args.transformer_impl in (None, "local"), (args.context_parallel_size or 1) > 1
        local, ring = (
            "--transformer-impl" if is_local else None,
            "--context-parallel-size" if is_ring else None,
        )
        return _with(args, setting, local, ring, _documents(args))

    return conflict


def _is_not_in_nodes(args: Arguments) -> str | None:
    """The exchange over nodes, with the sizes of a layout that does not allow it."""
    per_node = ranks_per_node(args.ampipe_ranks_per_node)
    if not _has_two_hops(args) or per_node is None or args.ampipe_exchange in exchanges_of(args, per_node):
        return None
    return (
        f"{args.ampipe_exchange} with --expert-model-parallel-size {args.expert_model_parallel_size} and "
        f"{per_node} ranks per node"
    )


def _has_two_hops(args: Arguments) -> bool:
    return args.ampipe_exchange in (Exchange.NODES, Exchange.TWO_DIMENSIONAL)


def _joins_copies(args: Arguments) -> bool:
    return args.ampipe_exchange in (Exchange.RANKS, Exchange.NODES)


def _ranks(args: Arguments) -> int:
    """Number of ranks that share the experts of a layer."""
    return int((args.expert_model_parallel_size or 1) * (expert_tensor_ranks(args) or 1))


_OFFLOADING = "--fine-grained-activation-offloading"


def _offloads_other_modules(args: Arguments) -> str | None:
    """The modules that Megatron would offload and ``--ampipe-memory offload`` does not."""
    others = [module for module in args.offload_modules or () if module not in _OFFLOADED]
    return f"with --offload-modules {' '.join(others)}" if others else None


def _says_where_experts_keep(args: Arguments) -> str | None:
    """The flag of AMPipe that says what experts keep, with Megatron's offloading of them."""
    own = _set(args, "--ampipe-plan", "--ampipe-memory-budget", "--ampipe-memory")
    return None if offloads_experts(args) else _with(args, _OFFLOADING, own)


def _recomputes_experts(args: Arguments) -> str | None:
    """The flag with which Megatron recomputes experts."""
    if args.recompute_granularity == "full":
        return "--recompute-granularity"
    is_selective = args.recompute_granularity == "selective"
    return "--recompute-modules" if is_selective and "moe" in (args.recompute_modules or []) else None


def _keeps_other_tensors(args: Arguments) -> str | None:
    """The flag with which experts save other tensors for their backward pass than inputs of linear layers."""
    return _set(args, "--fp8-format", "--use-transformer-engine-op-fuser")


_CAPTURED = ("attn", "mlp", "moe_router", "moe_preprocess")


_NOT_WITH_GRAPHS = (
    "--ampipe-plan", "--ampipe-save-plan", "--ampipe-cluster", "--ampipe-partner", "--ampipe-memory",
    "--ampipe-memory-budget", "--fine-grained-activation-offloading", "--ampipe-exchange",
    "--ampipe-condense", "--ampipe-router", "--recompute-granularity", "--fp8-format",
    "--use-megatron-fsdp", "--attention-dropout", "--hidden-dropout", "--moe-input-jitter-eps",
    "--moe-router-force-load-balancing", "--moe-expert-rank-capacity-factor", "--moe-enable-routing-replay",
    "--reset-attention-mask", "--sft", "--dataloader-inter-document-masking",
)  # fmt: skip
"""Flags that forbid CUDA graphs, unless their value is one of ``_USUAL``."""
_USUAL = (None, False, 0, KEEP, Exchange.ROWS)


_NOT_WITH_WHOLE_PASSES = tuple(flag for flag in _NOT_WITH_GRAPHS if flag != "--recompute-granularity")
"""The same of graphs of whole passes."""


def _captures_passes(args: Arguments) -> bool:
    """Whether a CUDA graph is a whole pass: Megatron's graphs of whole layers, with rows of fixed number."""
    return _has_fixed_rows(args) and captured_modules(args) == ("full",)


def _captures_too_much(args: Arguments) -> str | None:
    if _captures_passes(args):
        return None
    return next((name for name in captured_modules(args) if name not in _CAPTURED), None)


def _cannot_capture_passes(args: Arguments) -> str | None:
    """The value of ``--cuda-graph-impl``, with the flag that forbids whole passes; None if there is none."""
    if not _captures_passes(args):
        return None
    forbidden = {
        **{flag: args.of(flag) not in _USUAL for flag in _NOT_WITH_WHOLE_PASSES},
        "--ampipe-degree auto": args.ampipe_degree == AUTO,
        "--ampipe-grad-reduce placed": args.ampipe_grad_reduce == "placed",
        # A replay runs no hook, with which the routing is recorded.
        "--ampipe-routing-dir": _set(args, "--ampipe-routing-dir") is not None,
        "--ampipe-wire": args.ampipe_wire not in (None, "bf16", "fp8"),
        "--moe-router-load-balancing-type": balances(args),
        "--moe-token-drop-policy": has_capacity(args) and args.moe_token_drop_policy != "position",
    }
    conflict = next((flag for flag, is_set in forbidden.items() if is_set), None)
    return None if conflict is None else f"{args.cuda_graph_impl} with {conflict}"


def _cannot_capture(args: Arguments) -> str | None:
    """The value of ``--cuda-graph-impl``, with the flag that forbids it; None if graphs can be captured."""
    implementation = args.cuda_graph_impl
    if _captures_passes(args):
        return None
    if not captured_modules(args):
        return None if implementation in (None, "none") else implementation
    forbidden = {
        **{flag: args.of(flag) not in _USUAL for flag in _NOT_WITH_GRAPHS},
        "--ampipe-degree auto": args.ampipe_degree == AUTO,
        "--ampipe-schedule": _names_weights(args),
        "--ampipe-grad-reduce placed": args.ampipe_grad_reduce == "placed",
        "--tensor-model-parallel-size": (args.tensor_model_parallel_size or 1) > 1,
        "--context-parallel-size": (args.context_parallel_size or 1) > 1,
        "--moe-router-load-balancing-type": balances(args),
        "--moe-expert-capacity-factor": has_capacity(args),
    }
    conflict = next((flag for flag, is_set in forbidden.items() if is_set), None)
    return None if conflict is None else f"{implementation} with {conflict}"


_NOT_WITH_FIXED_ROWS = (
    "--ampipe-condense",
    # Predictions of memory do not know the padding.
    "--ampipe-memory-budget",
    "--use-megatron-fsdp",
    # Zeroing gradients for the repeat would zero the parameters that a gather reads.
    "--reuse-grad-buf-for-mxfp8-param-ag",
    "--moe-enable-routing-replay",
    "--moe-routing-trace-path",
    "--qk-clip",
    "--log-max-attention-logit",
    "--skip-train",
)
"""Flags that are refused with ``--ampipe-rows fixed``, whatever their value."""


def _has_fixed_rows(args: Arguments) -> bool:
    return bool(args.ampipe_rows == "fixed")


def _other_exchange(args: Arguments) -> str | None:
    """The flag that asks for other transfers than the all-to-all of rows."""
    if not _sends_rows(args):
        return _DISPATCHER
    return None if args.ampipe_exchange in (None, Exchange.ROWS) else "--ampipe-exchange"


def _other_experts(args: Arguments) -> str | None:
    """The flag with which experts are not Megatron's local ones, or quantize their rows."""
    flag = _set(args, "--moe-grouped-gemm", "--fp8-format", "--fp4-format")
    return flag or (None if args.transformer_impl in (None, "local") else "--transformer-impl")


def _not_with_fixed_rows(args: Arguments) -> str | None:
    """The first flag that cannot be combined with ``--ampipe-rows fixed`` yet."""
    flag = _set(args, *_NOT_WITH_FIXED_ROWS)
    if flag is not None:
        return flag
    if args.cuda_graph_impl not in (None, "none") and not _captures_passes(args):
        return "--cuda-graph-impl"
    return None


_OFF = "Leave it out, or train with --ampipe-degree 1."
_OTHER_TENSORS = "experts then keep other tensors than the strategies of --ampipe-memory know"
_GATHERED = "a layer gathers its weights and reduces their gradients in every call, and chunks are more calls"
_HOOKED = "Megatron's hooks would save the rows of one chunk of every module, the last one that has run"
_SCORES = (
    "only Transformer Engine's attention keeps the largest scores, and not of context-parallel layers or "
    "packed documents",
    "Leave it out, or change the flag that is named with it.",
)


REFUSALS: tuple[Refusal, ...] = (
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
    Refusal(
        "--ampipe-partner",
        "a pipeline stage without virtual stages waits for the next stage before every backward pass, so "
        "that no other micro-batch can run next to it",
        "Add --num-layers-per-virtual-pipeline-stage 1, or leave it out.",
        waits_for_stage,
    ),
    Refusal(
        "--tensor-model-parallel-size",
        "Megatron supports MoE layers with tensor parallelism only together with sequence parallelism",
        "Add --sequence-parallel.",
        lambda args: args.tensor_model_parallel_size > 1 and not args.sequence_parallel,
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
    Refusal("--cpu-offloading-num-layers", "activation offloading is not supported yet", _OFF),
    Refusal(
        _OFFLOADING,
        "host copies exist of what experts keep, and not of what these modules keep: they are saved by the "
        "small autograd graphs of chunks",
        "Leave these modules out, and the flag if no other is left; or train with --ampipe-degree 1.",
        _offloads_other_modules,
    ),
    Refusal(
        _OFFLOADING,
        "recomputed experts keep nothing that could be put away",
        "Leave it out, or the flag that is named with it.",
        lambda args: _with(args, _OFFLOADING, _recomputes_experts(args)),
    ),
    Refusal(
        _OFFLOADING,
        _OTHER_TENSORS,
        "Leave it out, or the flag that is named with it.",
        lambda args: _with(args, _OFFLOADING, _keeps_other_tensors(args)),
    ),
    Refusal(
        _OFFLOADING,
        "the flag that is named with it says where activations of experts are kept",
        "Leave it out, or the flag that is named with it.",
        _says_where_experts_keep,
    ),
    Refusal("--hybrid-context-parallel", "hybrid context parallelism is not supported", _OFF),
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
        "--micro-batch-size",
        "with context parallelism, a rank may hold the rows of less than two packed sequences, which "
        "Megatron's MoE layers would take for the batch",
        "Use --micro-batch-size 1.",
        lambda args: (
            (args.context_parallel_size or 1) > 1
            and args.micro_batch_size >= 2 * args.context_parallel_size
            and _with(args, "--micro-batch-size", _documents(args))
        ),
    ),
    Refusal(
        "--moe-flex-dispatcher-backend",
        "its zero-copy mode has one buffer for all calls, which chunks in flight would overwrite; without "
        "that mode, this backend is not supported yet",
        "Use --moe-flex-dispatcher-backend hybridep or deepep, or --moe-token-dispatcher-type alltoall.",
        lambda args: (
            args.moe_token_dispatcher_type == "flex"
            and args.moe_flex_dispatcher_backend not in ("deepep", "hybridep")
        ),
    ),
    Refusal(
        "--moe-token-dispatcher-type",
        "this dispatcher cannot send the tokens of a chunk once more, for the backward pass",
        "Use --ampipe-memory rebuild, or --moe-token-dispatcher-type alltoall.",
        lambda args: (
            args.moe_token_dispatcher_type == "flex"
            and _resends(args.ampipe_memory)
            and _with(args, _DISPATCHER, "--ampipe-memory")
        ),
    ),
    Refusal(
        "--moe-token-dispatcher-type",
        "its buffers would be padded for chunks of equal sizes only",
        "Leave out --moe-hybridep-pad-uneven-dispatch-inputs, or use --moe-token-dispatcher-type alltoall.",
        lambda args: (
            args.moe_token_dispatcher_type == "flex"
            and _with(args, _DISPATCHER, _set(args, "--moe-hybridep-pad-uneven-dispatch-inputs"))
        ),
    ),
    Refusal(
        "--skip-train",
        "degrees are measured in training iterations, and there are none",
        "Use --ampipe-degree 2, or add --ampipe-cluster FILE, which plans without measuring.",
        _measures_without_training,
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
    Refusal(
        "--ampipe-exchange",
        "only the dispatcher alltoall sends rows that can be grouped",
        "Use --moe-token-dispatcher-type alltoall, or --ampipe-exchange rows.",
        lambda args: (
            args.ampipe_exchange not in (AUTO, Exchange.ROWS)
            and not _sends_rows(args)
            and _with(args, "--ampipe-exchange", _DISPATCHER)
        ),
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: a token has one copy, for one expert",
        "Use --ampipe-exchange rows.",
        lambda args: (
            _joins_copies(args)
            and args.moe_router_topk == 1
            and _with(args, "--ampipe-exchange", "--moe-router-topk")
        ),
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: one rank has all experts",
        "Add --expert-model-parallel-size 2 or more, or use --ampipe-exchange rows.",
        lambda args: args.ampipe_exchange == Exchange.RANKS and _ranks(args) == 1,
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: every rank has one expert, so it gets a token at most once",
        "Use fewer expert-parallel ranks than experts, or --ampipe-exchange rows.",
        lambda args: (
            args.ampipe_exchange == Exchange.RANKS
            and args.num_experts <= args.expert_model_parallel_size
            and _with(args, "--ampipe-exchange", "--expert-model-parallel-size")
        ),
    ),
    Refusal(
        "--ampipe-exchange",
        "it is not known how many ranks share a node",
        "Start the run with torchrun, which says so, or add --ampipe-ranks-per-node 8, or "
        "--ranks-per-node 8 to ampipe config.",
        lambda args: _has_two_hops(args) and ranks_per_node(args.ampipe_ranks_per_node) is None,
        also_with_plan=True,
    ),
    Refusal(
        "--ampipe-exchange",
        "has nothing to save: it needs expert-parallel ranks on several nodes, as many on each, and several",
        "Use --ampipe-exchange rows, or other numbers of ranks.",
        _is_not_in_nodes,
    ),
    Refusal(
        "--num-distributed-optimizer-instances",
        "several instances reduce gradients on a separate stream, which --ampipe-grad-reduce placed does not "
        "hold back",
        "Use --ampipe-grad-reduce stock.",
        lambda args: args.num_distributed_optimizer_instances > 1 and args.ampipe_grad_reduce == "placed",
    ),
    Refusal(
        "--cuda-graph-modules",
        "a graph has a fixed number of rows, and experts compute another one in every pass, so whole layers "
        "and moe cannot be captured with exact rows; mamba layers stay Megatron's",
        "Use --cuda-graph-modules attn moe_router moe_preprocess; or --ampipe-rows fixed without "
        "--cuda-graph-modules, for whole passes; or --cuda-graph-impl none.",
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
        "--cuda-graph-impl",
        "a graph of a whole pass holds what does not depend on data, on documents or on other micro-batches, "
        "draws no random numbers, and does not know which micro-batch reduces gradients",
        "Use local or transformer_engine without the flag that is named with it, or --cuda-graph-impl none.",
        _cannot_capture_passes,
    ),
    Refusal(
        "--mlp-chunks-for-training",
        "AMPipe already splits the MLP into chunks",
        "Leave it out.",
        lambda args: args.mlp_chunks_for_training > 1,
    ),
    Refusal(
        "--tp-comm-overlap-cfg",
        "the file may have reduce-scatters round to 8 bits, which they do not without the overlap",
        "Leave it out, or train with --ampipe-degree 1.",
        lambda args: (
            _overlaps_tensor_ranks(args) and _with(args, "--tp-comm-overlap-cfg", _set(args, "--fp8-format"))
        ),
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        _GATHERED,
        _OFF,
        lambda args: args.tensor_parallel_num_weight_shards > (args.tensor_model_parallel_size or 1),
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        _GATHERED,
        _OFF,
        lambda args: args.expert_tensor_parallel_num_weight_shards > (expert_tensor_ranks(args) or 1),
    ),
    Refusal(
        "--use-megatron-fsdp",
        "it gathers parameters for one pass at a time",
        "Leave out the flag that is named with it, or use --use-distributed-optimizer.",
        lambda args: _with(args, "--use-megatron-fsdp", _set(args, "--ampipe-partner")),
    ),
    Refusal(
        "--use-megatron-fsdp",
        "it reduces gradients itself",
        "Leave out --ampipe-grad-reduce, or use --use-distributed-optimizer.",
        lambda args: (
            args.ampipe_grad_reduce == "placed" and _with(args, "--use-megatron-fsdp", "--ampipe-grad-reduce")
        ),
    ),
    Refusal(
        "--use-torch-fsdp2",
        "Megatron combines it with no expert-parallel ranks",
        "Use --use-megatron-fsdp or --use-distributed-optimizer.",
    ),
    Refusal(
        "--ampipe-memory",
        "recomputing experts keeps less of them than this",
        "Leave it out, or recompute other modules: --recompute-granularity selective --recompute-modules "
        "core_attn.",
        lambda args: args.ampipe_memory != KEEP and _with(args, "--ampipe-memory", _recomputes_experts(args)),
    ),
    Refusal(
        "--ampipe-memory",
        _OTHER_TENSORS,
        "Leave it out, or the flag that is named with it.",
        lambda args: (
            args.ampipe_memory != KEEP and _with(args, "--ampipe-memory", _keeps_other_tensors(args))
        ),
    ),
    Refusal(
        "--ampipe-memory-budget",
        _OTHER_TENSORS,
        "Leave it out, or the flag that is named with it.",
        lambda args: _with(args, "--ampipe-memory-budget", _keeps_other_tensors(args)),
    ),
    Refusal("--save-activations-interval", _HOOKED, f"{_OFF} --save-wgrads-interval is supported."),
    Refusal("--save-dgrads-interval", _HOOKED, f"{_OFF} --save-wgrads-interval is supported."),
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
        "--ampipe-wire",
        "only the dispatcher alltoall sends rows as they are",
        "Use --moe-token-dispatcher-type alltoall, or leave it out.",
        lambda args: not _sends_rows(args) and _with(args, "--ampipe-wire", _DISPATCHER),
    ),
    Refusal(
        "--ampipe-wire",
        "it halves rows of 32 bit, and these have 16",
        "Use --ampipe-wire fp8, or leave it out.",
        lambda args: (
            args.ampipe_wire == "bf16" and _with(args, "--ampipe-wire", _set(args, "--bf16", "--fp16"))
        ),
    ),
    Refusal(
        "--ampipe-rows",
        "only the all-to-all of --ampipe-exchange rows is built with fixed rows",
        "Leave it out, or use --moe-token-dispatcher-type alltoall --ampipe-exchange rows.",
        lambda args: _has_fixed_rows(args) and _with(args, "--ampipe-rows", _other_exchange(args)),
    ),
    Refusal(
        "--ampipe-rows",
        "only the products of Megatron's local experts can take their numbers of rows from the device",
        "Leave it out, or use --transformer-impl local without the flag that is named with it.",
        lambda args: _has_fixed_rows(args) and _with(args, "--ampipe-rows", _other_experts(args)),
    ),
    Refusal(
        "--ampipe-rows",
        "is not built together with this flag yet",
        "Leave out --ampipe-rows, or the flag that is named with it.",
        lambda args: _has_fixed_rows(args) and _with(args, "--ampipe-rows", _not_with_fixed_rows(args)),
    ),
    Refusal(
        "--ampipe-rows-margin",
        "has no effect without --ampipe-rows fixed",
        "Add --ampipe-rows fixed, or leave it out.",
        lambda args: not _has_fixed_rows(args),
    ),
    Refusal(
        "--ampipe-condense",
        "only the dispatcher alltoall sends rows as they are",
        "Use --moe-token-dispatcher-type alltoall, or leave it out.",
        lambda args: not _sends_rows(args) and _with(args, "--ampipe-condense", _DISPATCHER),
    ),
    Refusal(
        "--ampipe-condense",
        "tokens of several documents would be joined, and so those of none may be",
        "Leave it out, or the flag that is named with it.",
        lambda args: _with(
            args, "--ampipe-condense", _documents(args) or _set(args, "--reset-attention-mask")
        ),
    ),
    Refusal(
        "--ampipe-condense",
        "experts would get inputs with the weight of another token, where their results should be weighted",
        "Leave out --moe-apply-probs-on-input, or --ampipe-condense.",
        lambda args: _with(args, "--ampipe-condense", _set(args, "--moe-apply-probs-on-input")),
    ),
    *(
        Refusal(
            flag,
            "has no effect with --skip-train: only training iterations are recorded",
            "Leave it out.",
            lambda args: bool(args.skip_train),
        )
        for flag in ("--ampipe-trace-dir", "--ampipe-measure")
    ),
    Refusal(
        "--ampipe-measure",
        "ends after --train-iters",
        "Use iterations of the run, such as its last ten.",
        _measures_after_the_end,
    ),
    Refusal(
        "--ampipe-measure",
        "with one expert-parallel rank there is no communication to measure",
        "Leave it out, or add --expert-model-parallel-size 2.",
        lambda args: _ranks(args) == 1,
    ),
    Refusal(
        "--ampipe-measure",
        "recorded iterations run without CUDA graphs, so others would be measured than are trained with",
        "Leave it out, or use --cuda-graph-impl none.",
        lambda args: bool(captured_modules(args)),
    ),
)
"""All combinations that this version refuses with a degree above 1; no other module refuses one."""

_OTHER_ROUTER = "Leave it out, or use a router that reads hidden states, such as --ampipe-router cosine."

TOKEN_ID_REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "--pipeline-model-parallel-size",
        "the ids of tokens are read for the first pipeline stage alone",
        "Use --pipeline-model-parallel-size 1, or a router that reads hidden states: --ampipe-router cosine.",
        lambda args: args.pipeline_model_parallel_size > 1,
    ),
    Refusal(
        "--mtp-num-layers",
        "layers of multi-token prediction embed later tokens than those whose ids a router is told",
        _OTHER_ROUTER,
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "a model runs two micro-batches at once, and its routers are told the ids of one",
        "Leave it out; --ampipe-degree 2 overlaps the same exchanges within a micro-batch.",
    ),
    Refusal(
        "--cuda-graph-impl",
        "a captured graph would read the ids of the micro-batch with which it was captured",
        "Use --cuda-graph-impl none.",
        lambda args: args.cuda_graph_impl != "none",
    ),
    Refusal(
        "--mlp-chunks-for-training",
        "Megatron routes parts of a sequence, and does not say which",
        _OTHER_ROUTER,
        lambda args: args.mlp_chunks_for_training > 1,
    ),
)
"""Combinations that are refused with a router that reads token ids, at any degree."""
