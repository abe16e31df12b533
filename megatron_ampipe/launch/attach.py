"""Decides how the blocks of a run are pipelined: rules, choice, start-up table. Called by :mod:`.session`."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megatron.training import training

from megatron_ampipe import compat
from megatron_ampipe.block_features import boundary
from megatron_ampipe.config import TRACED_ITERATIONS, AMPipeConfig
from megatron_ampipe.hybrid_pattern import HybridPattern
from megatron_ampipe.launch import host
from megatron_ampipe.launch.adjustments import adjust_arguments, take_over_recompute
from megatron_ampipe.launch.auto import AutoDegree, agreed_upon, print_on_first_rank
from megatron_ampipe.launch.degrees_file import DegreesFile
from megatron_ampipe.launch.gate import router_rows
from megatron_ampipe.launch.grad_reduce import placing
from megatron_ampipe.launch.memory_budget import MemoryChoice, choose_memory
from megatron_ampipe.launch.metrics import has_expert_communication
from megatron_ampipe.launch.planned import choice_of_plan, layout_of_args, planner_of
from megatron_ampipe.launch.resolve_flags import PlanReader
from megatron_ampipe.launch.save_plan import iterations_left, keeper_of, prepare_plan_file
from megatron_ampipe.launch.startup import print_startup_table
from megatron_ampipe.launch.trace import prepare_trace_dir
from megatron_ampipe.launch.trials import Choice, candidates
from megatron_ampipe.launch.wire_rows import wire_rows
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.document_reader import DocumentReader
from megatron_ampipe.layers.kernel_choice import choose_kernel, describe_kernel
from megatron_ampipe.layers.recompute import FullRecompute
from megatron_ampipe.layers.wires import load_wire
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.refusal_conditions import exchanges_of
from megatron_ampipe.refusals import refuse_unsupported
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule import (
    IN_ONE_CHUNK,
    KEEP,
    STRATEGIES,
    Chunk,
    Exchange,
    Pipeline,
    SequenceLayout,
    of_chunks,
    stack_to_text,
)


def make_context(
    args: argparse.Namespace,
    config: AMPipeConfig,
    *,
    gate: type | None,
    adjustments: Sequence[host.Adjustment],
    read_plan: PlanReader,
) -> AMPipeContext | None:
    """Check the arguments against all rules, and print the start-up table on rank 0.

    Args:
        args: Megatron's validated arguments.
        config: What AMPipe's flags resolve to.
        gate: The router class of ``--ampipe-router``.
        adjustments: What the host platform chose, for the table.
        read_plan: Reads a plan file.

    Returns:
        What the layers share, None at degree 1.

    Raises:
        BadInput: a flag is wrong or a combination is not supported.
    """
    megatron = ("Megatron", compat.describe_megatron())
    plan = None if config.plan is None else read_plan(Path(config.plan))
    if not config.pipelined:
        rows = [megatron, ("degree", "1: Megatron's own layers"), *router_rows(config, gate, args)]
        if plan is not None:
            choice = choice_of_plan(args, plan, str(config.plan))
            rows += [("why", choice.reason), *_notes(choice)]
            # Another rank may have read another plan, or found none where --ampipe-save-plan names it.
            training.train_step = agreed_upon(choice.pipeline, training.train_step)
        print_startup_table(rows, adjustments)
        return None
    refuse_unsupported(config, args)
    memory = None
    if config.memory_budget is not None:
        memory = choose_memory(args, config.pipeline, config.memory_budget, config.cluster)
        config = replace(config, pipeline=replace(config.pipeline, memory=memory.memory))
    if config.trace_dir is not None:
        prepare_trace_dir(Path(config.trace_dir))
    if config.save_plan is not None:
        prepare_plan_file(Path(config.save_plan))
    on_gpu = not host.installed()
    adjustments = [*adjustments, *adjust_arguments(args, on_gpu=on_gpu)]
    # Without a trace, only what the log says of an iteration is recorded.
    context = AMPipeContext(
        config,
        recorder=Recorder(num_iterations=TRACED_ITERATIONS if config.trace_dir else 1),
        recompute=take_over_recompute(args, config),
        documents=DocumentReader(masked=_masks_documents(args)),
        gate=gate,
        wire=None if config.wire is None else load_wire(config.wire),
    )
    layout = layout_of_args(args)
    if config.grad_reduce == "placed":
        context.reductions = Reductions(on_cuda=on_gpu)
        training.train_step = placing(context.reductions, training.train_step)
    rows = [
        megatron,
        *_choose(args, context, layout, plan),
        *_hybrid_row(args),
        _stack_row(args, context.pipeline),
        *_recompute_row(args, context.recompute),
        *_memory_row(context.pipeline.memory, memory),
        *_reduce_row(config),
        *router_rows(config, gate, args),
        *wire_rows(config),
        _attention_row(args, on_gpu=on_gpu),
        *_documents_row(args),
        ("communication lane", "CUDA stream" if on_gpu else "thread (gloo)"),
        ("trace", config.trace_dir or "off"),
        *_nothing_to_hide(args),
        *_random_routing(args),
        *_differing_numbers(args),
    ]
    print_startup_table(rows, adjustments)
    return context


def _choose(
    args: argparse.Namespace, context: AMPipeContext, layout: SequenceLayout, plan: Plan | None
) -> list[tuple[str, ...]]:
    """Decide how blocks are run, or have it decided later; the rows about it in the start-up table."""
    config, choice = context.config, None
    if plan is not None:
        choice = choice_of_plan(args, plan, str(config.plan))
        context.pipeline, context.predicted_ms = choice.pipeline, choice.predicted_ms
        training.train_step = agreed_upon(choice.pipeline, training.train_step)
    elif config.automatic:
        planner, exchanges = None, _exchanges(args, config)
        if config.cluster is not None:
            given = config.pipeline
            planner = planner_of(
                args, config.cluster, stack=given.stack, memory=given.memory, exchanges=exchanges
            )
        rows = args.seq_length // (layout.tensor_ranks * layout.context_ranks)
        shape = (rows, args.micro_batch_size)
        keep, tried = [keeper_of(args, config.save_plan, shape)], None
        if planner is None:
            tried = DegreesFile(args, config.pipeline, exchanges)
            keep.append(tried.keep)
        auto = AutoDegree(
            context,
            planner=planner,
            exchanges=exchanges,
            say=print_on_first_rank,
            keep=keep,
            earlier=tuple if tried is None else tried.read,
            in_one_chunk=_in_one_chunk(args),
            iterations_left=functools.partial(iterations_left, args),
        )
        choice = auto.start(shape)
        training.train_step = auto.around(training.train_step)
        if choice is None:
            tried = ", ".join(map(str, candidates(rows)))
            return [
                ("degree", f"auto: the first iterations try {tried}, the fastest stays"),
                ("schedule", config.pipeline.schedule),
                ("exchange", " or ".join(exchanges)),
                *_saved(config.save_plan),
            ]
    pipeline = context.pipeline
    degree = str(pipeline.degree)
    if pipeline.backward_degree != pipeline.degree:
        degree += f" forward, {pipeline.backward_degree} backward"
    return [
        ("degree", degree),
        ("schedule", pipeline.name),
        ("exchange", pipeline.exchange.value, _EXCHANGE[pipeline.exchange]),
        ("chunk boundaries", _boundaries(pipeline.chunks(args.seq_length, layout))),
        *([("why", choice.reason), *_notes(choice)] if choice is not None else []),
        *_saved(config.save_plan),
    ]


_EXCHANGE = {
    Exchange.ROWS: "a row for each expert of a token, as Megatron sends them",
    Exchange.RANKS: "a row for each rank that has experts of a token",
    Exchange.NODES: "a row for each node that has experts of a token, handed on inside it",
}


def _exchanges(args: argparse.Namespace, config: AMPipeConfig) -> tuple[Exchange, ...]:
    """What the choice of a degree may choose from; the first is simpler."""
    if not config.chooses_exchange:
        return (config.pipeline.exchange,)
    return exchanges_of(args)


def _in_one_chunk(args: argparse.Namespace) -> str | None:
    """What the trials try at degree 1: gradients of weights during transfers, where the user and the layers
    leave that open."""
    return IN_ONE_CHUNK if args.ampipe_schedule is None and args.transformer_impl == "local" else None


def _stack_row(args: argparse.Namespace, pipeline: Pipeline) -> tuple[str, str, str]:
    """How many layers share a schedule, and where the boundaries between schedules are."""
    name, reason = "layers per schedule", boundary(args, whole_attention=pipeline.whole_attention)
    if pipeline.stack == 1:
        return name, "1", "layer by layer; --ampipe-stack all lets consecutive layers share a schedule"
    if reason is not None:
        return (
            name,
            f"1, in place of {stack_to_text(pipeline.stack)}",
            f"a boundary after every layer: {reason}",
        )
    where = (
        "pipeline stages"
        if pipeline.stack == 0
        else f"pipeline stages, and after every {pipeline.stack} layers"
    )
    if args.hybrid_layer_pattern is not None:
        where += ", and at layers that are not in pairs"
    if args.virtual_pipeline_model_parallel_size is not None:
        where = where.replace("pipeline stages", "virtual pipeline stages")
    if args.mtp_num_layers:
        where += "; each MTP layer has its own schedule"
    return name, stack_to_text(pipeline.stack), f"boundaries between {where}"


def _hybrid_row(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Which layers of a hybrid model are pipelined; no row for a GPT."""
    pattern = HybridPattern.of_arguments(args)
    if pattern is None:
        return []
    reason = "an attention layer and the MoE layer right after it; other layers run as Megatron's"
    if "/" in args.hybrid_layer_pattern:
        reason += ", those of multi-token prediction too"
    return [("hybrid layers", f"{pattern.num_pairs} pairs of {pattern.num_layers} layers", reason)]


def _recompute_row(args: argparse.Namespace, recompute: FullRecompute | None) -> list[tuple[str, str, str]]:
    """Which layers are recomputed inside the schedules; no row where Megatron recomputes, or nobody."""
    if recompute is None:
        return []
    layers = "every layer"
    if recompute.method == "block":
        layers = f"first {recompute.num_layers} of a stage"
    reason = "inside the schedules, during the backward pass of the layer above; a layer keeps its input"
    if recompute.method == "uniform" and recompute.num_layers > 1:
        reason += f", not one in {recompute.num_layers} layers"
    if recompute.covers_mtp and args.mtp_num_layers:
        reason += "; of MTP the transformer layers, not their projections"
    return [("full recompute", layers, reason)]


def _memory_row(memory: str, chosen: MemoryChoice | None) -> list[tuple[str, str, str]]:
    """What the experts do not keep, and what a budget chose; no row where they simply keep everything."""
    if chosen is not None:
        return [("memory", memory, chosen.reason)]
    if memory == KEEP:
        return []
    names = of_chunks(memory)
    reason = "the experts' first product and activation are computed once more in the backward pass"
    if any("redispatch" in STRATEGIES[name] for name in names):
        reason = "tokens are sent once more in the backward pass, and " + reason
    if len(names) > 1:
        reason = f"of each chunk, from the first to the last; {reason}"
    return [("memory", memory, reason)]


def _reduce_row(config: AMPipeConfig) -> list[tuple[str, str, str]]:
    """When gradients are reduced; no row where Megatron decides it."""
    if config.grad_reduce == "stock":
        return []
    return [("gradient reduction", "placed", "after the last all-to-all of the next layer's backward pass")]


def _nothing_to_hide(args: argparse.Namespace) -> list[tuple[str, str]]:
    if has_expert_communication(args):
        return []
    note = (
        f"--expert-model-parallel-size {args.expert_model_parallel_size}: one rank has all experts, so no "
        "token travels and nothing can be hidden. AMPipe will not help; add expert-parallel ranks, or use "
        "--ampipe-degree 1"
    )
    return [("note", note)]


def _random_routing(args: argparse.Namespace) -> list[tuple[str, str]]:
    biased = getattr(args, "moe_router_force_biased", None) is not None
    if not (args.moe_router_force_load_balancing or biased):
        return []
    flag = "--moe-router-force-biased" if biased else "--moe-router-force-load-balancing"
    note = (
        f"{flag}: routing is random, which is for benchmarks. Each chunk draws its "
        "own numbers: the distribution is that of a stock run, the numbers are not"
    )
    return [("warning", note)]


def _notes(choice: Choice) -> list[tuple[str, str]]:
    return [("note", note) for note in choice.notes]


def _saved(file: str | None) -> list[tuple[str, str]]:
    return [] if file is None else [("plan", f"the choice is written to {file}; a restart reads it there")]


def _attention_row(args: argparse.Namespace, *, on_gpu: bool) -> tuple[str, str, str]:
    """The kernel of the layers, and why a faster one is not used."""
    choice = choose_kernel(
        local=args.transformer_impl == "local",
        on_gpu=on_gpu,
        dtype=args.params_dtype,
        head_size=args.kv_channels,
        context_parallel=args.context_parallel_size > 1,
        documents=_packs_documents(args) or _masks_documents(args),
        latent=args.multi_latent_attention,
        dropout=args.attention_dropout > 0,
        window=args.window_size is not None,
        sinks=getattr(args, "softmax_type", "vanilla") != "vanilla",
    )
    return "attention", describe_kernel(choice.name), choice.reason


def _masks_documents(args: argparse.Namespace) -> bool:
    """Whether the data loader's masks separate documents."""
    return bool(args.reset_attention_mask and args.create_attention_mask_in_dataloader)


def _packs_documents(args: argparse.Namespace) -> bool:
    """Whether a micro-batch comes with the bounds of its documents."""
    return bool(args.sft or getattr(args, "dataloader_inter_document_masking", False))


def _documents_row(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """How documents that share a sequence are told apart; no row if rows attend to all earlier ones."""
    if _packs_documents(args):
        return [
            ("documents", "packed", "a token attends to its own document only; positions begin at 0 in each")
        ]
    if _masks_documents(args):
        return [
            ("documents", "masked", "a token attends to its own document only; bounds are read from the mask")
        ]
    return []


def _differing_numbers(args: argparse.Namespace) -> list[tuple[str, str]]:
    """A row about losses that cannot be compared with those of another degree; none without dropout."""
    rates = {"attention": args.attention_dropout, "hidden": args.hidden_dropout}
    drawing = " ".join(f"--{name}-dropout {rate:g}" for name, rate in rates.items() if rate > 0)
    if not drawing:
        return []
    return [
        (
            "note",
            f"{drawing}: every degree draws other random numbers, so losses differ from those of a stock "
            "run but mean the same; to compare runs digit by digit use 0 for both",
        )
    ]


def _boundaries(chunks: Sequence[Chunk]) -> str:
    """Where the rows of the first rank are cut, as rows of its residual stream."""
    ends = [chunk.hidden[-1].local_end for chunk in chunks]
    return " ".join(map(str, [0, *ends])) + f" of the {ends[-1]} rows of a rank"
