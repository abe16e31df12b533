"""The rows of the start-up table that say how a run is pipelined, and why. Called by :mod:`.attach`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron_ampipe.attention.kernels import choose_kernel, describe_kernel
from megatron_ampipe.block.hybrid_pattern import HybridPattern
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.adjustments import reads_masks
from megatron_ampipe.launch.memory_budget import MemoryChoice
from megatron_ampipe.launch.metrics import has_expert_communication
from megatron_ampipe.launch.trials import Choice
from megatron_ampipe.layers.recompute import FullRecompute
from megatron_ampipe.schedule import KEEP, STRATEGIES, Chunk, Exchange, Pipeline, of_chunks, stack_to_text
from megatron_ampipe.schedule.features import boundary, uses_ring_attention

EXCHANGE = {
    Exchange.ROWS: "a row for each expert of a token, as Megatron sends them",
    Exchange.RANKS: "a row for each rank that has experts of a token",
    Exchange.NODES: "a row for each node that has experts of a token, handed on inside it",
    Exchange.TWO_DIMENSIONAL: "a row for each expert of a token, to its node and then inside it",
}
"""What is sent, for the row of the exchange."""


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


def hybrid_row(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Which layers of a hybrid model are pipelined; no row for a GPT."""
    pattern = HybridPattern.of_arguments(args)
    if pattern is None:
        return []
    reason = "an attention layer and the MoE layer right after it; other layers run as Megatron's"
    if "/" in args.hybrid_layer_pattern:
        reason += ", those of multi-token prediction too"
    return [("hybrid layers", f"{pattern.num_pairs} pairs of {pattern.num_layers} layers", reason)]


def recompute_row(args: argparse.Namespace, recompute: FullRecompute | None) -> list[tuple[str, str, str]]:
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


_RESTORED = {
    "redispatch": "tokens are sent once more in the backward pass",
    "rebuild": "the experts' first product and activation are computed once more in the backward pass",
    "offload_tokens": "tokens that have arrived are copied to host memory and back",
    "offload": "what the experts keep is copied to host memory and back",
}
"""What the start-up table says of the parts of a strategy."""


def memory_row(memory: str, chosen: MemoryChoice | None) -> list[tuple[str, str, str]]:
    """What the experts do not keep, and what a budget chose; no row where they keep everything."""
    if chosen is not None:
        return [("memory", memory, chosen.reason)]
    if memory == KEEP:
        return []
    names = of_chunks(memory)
    restored = {one for name in names for one in STRATEGIES[name]}
    reason = "; ".join(text for one, text in _RESTORED.items() if one in restored)
    if len(names) > 1:
        reason = f"of each chunk, from the first to the last; {reason}"
    return [("memory", memory, reason)]


def nothing_to_hide(args: argparse.Namespace) -> list[tuple[str, str]]:
    """A note if one rank has all experts; no row otherwise."""
    if has_expert_communication(args):
        return []
    note = (
        f"--expert-model-parallel-size {args.expert_model_parallel_size}: one rank has all experts, so no "
        "token is sent and nothing can be hidden. AMPipe will not help; add expert-parallel ranks, or use "
        "--ampipe-degree 1"
    )
    return [("note", note)]


def random_routing(args: argparse.Namespace) -> list[tuple[str, str]]:
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


def notes(choice: Choice) -> list[tuple[str, str]]:
    """What else a plan or a planner says of its choice."""
    return [("note", note) for note in choice.notes]


def attention_row(args: argparse.Namespace, *, on_gpu: bool) -> tuple[str, str, str]:
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


def context_row(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """How context-parallel ranks attend to the keys of the others; no row where they gather them."""
    if not uses_ring_attention(args):
        return []
    ranks = args.context_parallel_size
    reason = f"keys and values of {ranks} ranks in {ranks} steps, each sent during the step before it"
    return [("context", "ring", reason)]


def documents_row(args: argparse.Namespace) -> list[tuple[str, str, str]]:
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


def differing_numbers(args: argparse.Namespace) -> list[tuple[str, str]]:
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


def boundaries(chunks: Sequence[Chunk]) -> str:
    """Where the rows of the first rank are cut, as rows of its residual stream."""
    ends = [chunk.hidden[-1].local_end for chunk in chunks]
    return " ".join(map(str, [0, *ends])) + f" of the {ends[-1]} rows of a rank"


def connections_row(*, on_gpu: bool) -> list[tuple[str, str, str]]:
    """How many hardware queues the streams of this run share."""
    if not on_gpu:
        return []
    value = os.environ.get(connections.VARIABLE)
    means, remedy = connections.meaning(value)
    shown = f"{connections.VARIABLE}={value}" if value is not None else f"{connections.VARIABLE} is not set"
    return [("warning" if remedy else "hardware queues", shown, f"{means}. {remedy}" if remedy else means)]
