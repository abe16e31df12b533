"""The table that rank 0 prints before training: how a run is pipelined, why, and what was adjusted."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import choose_kernel
from megatron_ampipe.block.hybrid_pattern import HybridPattern
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.host import Adjustment
from megatron_ampipe.launch.planned import MemoryChoice, layout_of_args
from megatron_ampipe.launch.recording import has_expert_communication
from megatron_ampipe.launch.refusals import exchanges_of
from megatron_ampipe.launch.trials import Choice, candidates
from megatron_ampipe.layers.context import AMPipeContext, FullRecompute
from megatron_ampipe.schedule import KEEP, Pipeline, stack_to_text
from megatron_ampipe.schedule.features import boundary, uses_ring_attention

Row = tuple[str, ...]
"""Name and value of a setting, and the reason where there is one to give."""


def print_startup_table(rows: Sequence[Row], adjustments: Sequence[Adjustment]) -> None:
    """Print, on rank 0 only, what this run does and which flags were added or changed."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    table = Table(title="AMPipe", title_justify="left", show_header=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("why", overflow="fold")
    for row in rows:
        table.add_row(*row)
    for index, adjustment in enumerate(adjustments):
        table.add_row("adjusted" if index == 0 else "", " ".join(adjustment.arguments), adjustment.reason)
    for piece, reason in compat.missing_packages():
        table.add_row(piece.name, reason, piece.fallback)
    # A log file has any width; only a terminal is limited.
    Console(width=None if Console().is_terminal else 140).print(table)


def pipelined_rows(
    args: argparse.Namespace,
    context: AMPipeContext,
    choice: Choice | None,
    *,
    memory: MemoryChoice | None,
    on_gpu: bool,
) -> list[Row]:
    """All rows of a pipelined run, of Megatron's arguments as they are validated and adjusted.

    ``choice`` is that of a plan or a planner, ``memory`` that of a memory budget.
    """
    pipeline = context.pipeline
    rows = _choice_rows(args, context, choice)
    if (pattern := HybridPattern.of_arguments(args)) is not None:
        reason = "an attention layer and the MoE layer right after it; other layers run as Megatron's"
        rows.append(
            ("hybrid layers", f"{pattern.num_pairs} pairs of {sum(map(len, pattern.stages))} layers", reason)
        )
    rows.append(_stack_row(args, pipeline))
    if context.recompute is not None:
        rows.append(_recompute_row(context.recompute))
    if memory is not None or pipeline.memory != KEEP:
        rows.append(("memory", pipeline.memory, "" if memory is None else memory.reason))
    rows += context.config.startup_rows(stock=False)
    is_local, is_packed = args.transformer_impl == "local", packs_documents(args)
    documents = is_packed or masks_documents(args)
    kernel = choose_kernel(args, local=is_local, on_gpu=on_gpu, documents=documents)
    rows.append(("attention", kernel.name, kernel.reason))
    if uses_ring_attention(args):
        ranks = args.context_parallel_size
        reason = f"keys and values of {ranks} ranks in {ranks} steps, each sent during the step before it"
        rows.append(("context", "ring", reason))
    if documents:
        reason = "a token attends to its own document only"
        rows.append(("documents", "packed" if is_packed else "masked", reason))
    rows.append(("communication lane", "CUDA stream" if on_gpu else "thread (gloo)"))
    return rows + connections_row(on_gpu=on_gpu) + _notes(args)


def reason_rows(choice: Choice) -> list[Row]:
    """Why a plan or a planner chose this, and what else it says."""
    return [("why", choice.reason), *(("note", note) for note in choice.notes)]


def _choice_rows(args: argparse.Namespace, context: AMPipeContext, choice: Choice | None) -> list[Row]:
    """Degree, schedule and exchange, or what the first iterations choose from."""
    pipeline, config, layout = context.pipeline, context.config, layout_of_args(args)
    if config.automatic and choice is None:
        tried = candidates(args.seq_length // (layout.tensor_ranks * layout.context_ranks))
        return [
            ("degree", f"auto: the first iterations try {', '.join(map(str, tried))}, the fastest stays"),
            ("schedule", pipeline.schedule),
            ("exchange", " or ".join(exchanges_of(args) if config.chooses_exchange else [pipeline.exchange])),
        ]
    degree = str(pipeline.degree)
    if pipeline.backward_degree != pipeline.degree:
        degree += f" forward, {pipeline.backward_degree} backward"
    ends = [chunk.hidden[-1].local_end for chunk in pipeline.chunks(args.seq_length, layout)]
    boundaries = f"{' '.join(map(str, [0, *ends]))} of the {ends[-1]} rows of a rank"
    return [
        ("degree", degree),
        ("schedule", pipeline.name),
        ("exchange", pipeline.exchange.value),
        ("chunk boundaries", boundaries),
        *(reason_rows(choice) if choice is not None else []),
    ]


def _stack_row(args: argparse.Namespace, pipeline: Pipeline) -> Row:
    """How many layers share a schedule, and where the boundaries between schedules are."""
    name, reason = "layers per schedule", boundary(args, whole_attention=pipeline.whole_attention)
    if pipeline.stack == 1:
        return name, "1", "layer by layer; --ampipe-stack all lets consecutive layers share a schedule"
    if reason is not None:
        value = f"1, in place of {stack_to_text(pipeline.stack)}"
        return name, value, f"a boundary after every layer: {reason}"
    is_virtual = args.virtual_pipeline_model_parallel_size is not None
    where = "virtual pipeline stages" if is_virtual else "pipeline stages"
    if pipeline.stack != 0:
        where += f", and after every {pipeline.stack} layers"
    if args.hybrid_layer_pattern is not None:
        where += ", and at layers that are not in pairs"
    if args.mtp_num_layers:
        where += "; each MTP layer has its own schedule"
    return name, stack_to_text(pipeline.stack), f"boundaries between {where}"


def _recompute_row(recompute: FullRecompute) -> Row:
    """Which layers are recomputed inside the schedules."""
    layers = f"first {recompute.num_layers} of a stage" if recompute.method == "block" else "every layer"
    reason = "inside the schedules, during the backward pass of the layer above; a layer keeps its input"
    return "full recompute", layers, reason


def _notes(args: argparse.Namespace) -> list[Row]:
    """What a user should know: nothing can be hidden, or losses are not those of a stock run."""
    notes: list[Row] = []
    if not has_expert_communication(args):
        note = (
            f"--expert-model-parallel-size {args.expert_model_parallel_size}: one rank has all experts, so "
            "no token is sent and nothing can be hidden. AMPipe will not help; add expert-parallel ranks, or "
            "use --ampipe-degree 1"
        )
        notes.append(("note", note))
    rates = {"attention": args.attention_dropout, "hidden": args.hidden_dropout}
    drawing = " ".join(f"--{name}-dropout {rate:g}" for name, rate in rates.items() if rate > 0)
    if drawing:
        note = (
            f"{drawing}: every degree draws other random numbers, so losses differ from those of a stock "
            "run but mean the same; to compare runs digit by digit use 0 for both"
        )
        notes.append(("note", note))
    if args.moe_router_force_load_balancing or getattr(args, "moe_router_force_biased", None) is not None:
        note = "routing is random, which is for benchmarks. Each chunk draws its own numbers"
        notes.append(("warning", note))
    return notes


def masks_documents(args: argparse.Namespace) -> bool:
    """Whether the data loader's masks separate documents; layers with a window do not read them."""
    return bool(args.create_attention_mask_in_dataloader) and reads_masks(args)


def reads_masks(args: argparse.Namespace) -> bool:
    """Whether a layer applies the masks of ``--reset-attention-mask``, as ``layers`` decides it for each."""
    return bool(
        args.reset_attention_mask
        and args.transformer_impl == "local"
        and not args.multi_latent_attention
        and args.context_parallel_size == 1
        and (args.window_size is None or args.window_attn_skip_freq is not None)
    )


def packs_documents(args: argparse.Namespace) -> bool:
    """Whether a micro-batch comes with the bounds of its documents."""
    return bool(args.sft or getattr(args, "dataloader_inter_document_masking", False))


def connections_row(*, on_gpu: bool) -> list[Row]:
    """How many hardware queues the streams of this run share."""
    if not on_gpu:
        return []
    value = os.environ.get(connections.VARIABLE)
    means, remedy = connections.meaning(value)
    shown = f"{connections.VARIABLE}={value}" if value is not None else f"{connections.VARIABLE} is not set"
    return [("warning" if remedy else "hardware queues", shown, f"{means}. {remedy}" if remedy else means)]
