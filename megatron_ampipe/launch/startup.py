"""The table that rank 0 prints before training: how a run is pipelined, why, and what was adjusted."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import choose_kernel, describe_kernel
from megatron_ampipe.block.hybrid_pattern import HybridPattern
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.adjustments import reads_masks
from megatron_ampipe.launch.host import Adjustment
from megatron_ampipe.launch.memory_budget import MemoryChoice
from megatron_ampipe.launch.planned import layout_of_args
from megatron_ampipe.launch.recording import has_expert_communication
from megatron_ampipe.launch.refusals import exchanges_of
from megatron_ampipe.launch.trials import Choice, candidates
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.recompute import FullRecompute
from megatron_ampipe.schedule import KEEP, STRATEGIES, Exchange, Pipeline, of_chunks, stack_to_text
from megatron_ampipe.schedule.features import boundary, uses_ring_attention

Row = tuple[str, ...]
"""Name and value of a setting, and the reason where there is one to give."""

_EXCHANGE = {
    Exchange.ROWS: "a row for each expert of a token, as Megatron sends them",
    Exchange.RANKS: "a row for each rank that has experts of a token",
    Exchange.NODES: "a row for each node that has experts of a token, handed on inside it",
    Exchange.TWO_DIMENSIONAL: "a row for each expert of a token, to its node and then inside it",
}
_RESTORED = {
    "redispatch": "tokens are sent once more in the backward pass",
    "rebuild": "the experts' first product and activation are computed once more in the backward pass",
    "offload_tokens": "tokens that have arrived are copied to host memory and back",
    "offload": "what the experts keep is copied to host memory and back",
}
"""What the table says of the parts of a memory strategy."""


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
    """All rows of a pipelined run.

    Args:
        args: Megatron's arguments, validated and adjusted.
        context: What the layers share.
        choice: Of a plan or a planner; None for that of the flags, or if the first iterations choose.
        memory: What a memory budget chose.
        on_gpu: Where the run is.
    """
    return [
        *_choice_rows(args, context, choice),
        *_hybrid_rows(args),
        stack_row(args, context.pipeline),
        *_recompute_rows(args, context.recompute),
        *_memory_rows(context.pipeline.memory, memory),
        *context.config.startup_rows(stock=False),
        _attention_row(args, on_gpu=on_gpu),
        *_context_rows(args),
        *_documents_rows(args),
        ("communication lane", "CUDA stream" if on_gpu else "thread (gloo)"),
        *connections_row(on_gpu=on_gpu),
        *(("note", note) for note in _notes(args)),
        *_random_routing(args),
    ]


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
        ("exchange", pipeline.exchange.value, _EXCHANGE[pipeline.exchange]),
        ("chunk boundaries", boundaries),
        *(reason_rows(choice) if choice is not None else []),
    ]


def stack_row(args: argparse.Namespace, pipeline: Pipeline) -> tuple[str, str, str]:
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


def _hybrid_rows(args: argparse.Namespace) -> list[Row]:
    """Which layers of a hybrid model are pipelined; no row for a GPT."""
    pattern = HybridPattern.of_arguments(args)
    if pattern is None:
        return []
    reason = "an attention layer and the MoE layer right after it; other layers run as Megatron's"
    if "/" in args.hybrid_layer_pattern:
        reason += ", those of multi-token prediction too"
    num_pairs = sum(run.count(True) for run in pattern.runs)
    return [("hybrid layers", f"{num_pairs} pairs of {sum(map(len, pattern.stages))} layers", reason)]


def _recompute_rows(args: argparse.Namespace, recompute: FullRecompute | None) -> list[Row]:
    """Which layers are recomputed inside the schedules; no row where nothing is, or Megatron does it."""
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


def _memory_rows(memory: str, chosen: MemoryChoice | None) -> list[Row]:
    """What the experts do not keep, and what a budget chose; no row where they keep everything."""
    if chosen is not None:
        return [("memory", memory, chosen.reason)]
    if memory == KEEP:
        return []
    names = of_chunks(memory)
    parts = {part for name in names for part in STRATEGIES[name]}
    reason = "; ".join(text for part, text in _RESTORED.items() if part in parts)
    if len(names) > 1:
        reason = f"of each chunk, from the first to the last; {reason}"
    return [("memory", memory, reason)]


def _notes(args: argparse.Namespace) -> list[str]:
    """What a user should know: nothing can be hidden, or losses are not those of a stock run."""
    notes = []
    if not has_expert_communication(args):
        notes.append(
            f"--expert-model-parallel-size {args.expert_model_parallel_size}: one rank has all experts, so "
            "no token is sent and nothing can be hidden. AMPipe will not help; add expert-parallel ranks, or "
            "use --ampipe-degree 1"
        )
    rates = {"attention": args.attention_dropout, "hidden": args.hidden_dropout}
    drawing = " ".join(f"--{name}-dropout {rate:g}" for name, rate in rates.items() if rate > 0)
    if drawing:
        notes.append(
            f"{drawing}: every degree draws other random numbers, so losses differ from those of a stock "
            "run but mean the same; to compare runs digit by digit use 0 for both"
        )
    return notes


def _random_routing(args: argparse.Namespace) -> list[Row]:
    """A warning about routing that is random by request; no row otherwise."""
    biased = getattr(args, "moe_router_force_biased", None) is not None
    if not (args.moe_router_force_load_balancing or biased):
        return []
    flag = "--moe-router-force-biased" if biased else "--moe-router-force-load-balancing"
    note = (
        f"{flag}: routing is random, which is for benchmarks. Each chunk draws its "
        "own numbers: the distribution is that of a stock run, the numbers are not"
    )
    return [("warning", note)]


def _attention_row(args: argparse.Namespace, *, on_gpu: bool) -> Row:
    """The kernel of the layers, and why a faster one is not used."""
    choice = choose_kernel(
        args,
        local=args.transformer_impl == "local",
        on_gpu=on_gpu,
        documents=_packs_documents(args) or masks_documents(args),
    )
    return "attention", describe_kernel(choice.name), choice.reason


def masks_documents(args: argparse.Namespace) -> bool:
    """Whether the data loader's masks separate documents; layers with a window do not read them."""
    return bool(args.create_attention_mask_in_dataloader) and reads_masks(args)


def _packs_documents(args: argparse.Namespace) -> bool:
    """Whether a micro-batch comes with the bounds of its documents."""
    return bool(args.sft or getattr(args, "dataloader_inter_document_masking", False))


def _context_rows(args: argparse.Namespace) -> list[Row]:
    """How context-parallel ranks attend to the keys of the others; no row where they gather them."""
    if not uses_ring_attention(args):
        return []
    ranks = args.context_parallel_size
    reason = f"keys and values of {ranks} ranks in {ranks} steps, each sent during the step before it"
    return [("context", "ring", reason)]


def _documents_rows(args: argparse.Namespace) -> list[Row]:
    """How documents that share a sequence are told apart; no row if rows attend to all earlier ones."""
    if _packs_documents(args):
        return [
            ("documents", "packed", "a token attends to its own document only; positions begin at 0 in each")
        ]
    if masks_documents(args):
        where = "a token attends to its own document only; bounds are read from the mask"
        if args.window_size is not None:
            where += ". Layers with a window do not read it, as in a stock run"
        if args.pipeline_model_parallel_size > 2:
            where += ". Megatron gives it to the first and the last pipeline stage only"
        return [("documents", "masked", where)]
    return []


def connections_row(*, on_gpu: bool) -> list[Row]:
    """How many hardware queues the streams of this run share."""
    if not on_gpu:
        return []
    value = os.environ.get(connections.VARIABLE)
    means, remedy = connections.meaning(value)
    shown = f"{connections.VARIABLE}={value}" if value is not None else f"{connections.VARIABLE} is not set"
    return [("warning" if remedy else "hardware queues", shown, f"{means}. {remedy}" if remedy else means)]
