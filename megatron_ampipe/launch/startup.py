"""The table that rank 0 prints before training: how the run is pipelined, why, and which flags changed."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import choose_kernel
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.planned import exchanges_of, layout_of_args, packs_documents, rows_of_rank
from megatron_ampipe.launch.recording import has_expert_communication
from megatron_ampipe.launch.run import Run
from megatron_ampipe.launch.trials import candidates
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import KEEP, Pipeline, stack_to_text
from megatron_ampipe.schedule.features import boundary, fp8_recipe, rows_of_tile, uses_ring_attention

TITLE = "AMPipe"
Row = tuple[str, ...]
"""Name and value of a setting, and a reason if there is one."""
_SAME_TILES = (
    "chunks end on whole tiles, so numbers are rounded as in Megatron's layers; the smallest are not in "
    "gradients of experts' weights, where other tokens share a scale"
)
_FP8_MEANING = {
    "blockwise": _SAME_TILES,
    "mxfp8": _SAME_TILES,
    "tensorwise": "a scale for each chunk, not for each sequence: losses differ from Megatron's in rounding",
}
"""The effect of chunks with each FP8 recipe."""
_NOTHING_TO_HIDE = (
    "--expert-model-parallel-size 1: one rank has all experts, so no token is sent and nothing can be "
    "hidden. AMPipe will not help; add expert-parallel ranks, or use --ampipe-degree 1"
)


def print_startup_table(rows: Sequence[Row], adjustments: Mapping[str, str]) -> None:
    """Print on rank 0 what this run does, and which flags were added or changed, with the reasons."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    table = Table(title=TITLE, title_justify="left", show_header=False)
    table.add_column("setting", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("why", overflow="fold")
    for row in rows:
        table.add_row(*row)
    for index, (flag, reason) in enumerate(adjustments.items()):
        table.add_row("adjusted" if index == 0 else "", flag, reason)
    # In a log file, use a fixed width.
    Console(width=None if Console().is_terminal else 140).print(table)


def print_end(pipeline: Pipeline) -> None:
    """Print on rank 0, at the end of a run, how it was pipelined, and where the table says more."""
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"AMPipe: {pipeline}. The reasons are in the table '{TITLE}' near the start of this output.")


def pipelined_rows(
    args: argparse.Namespace, run: Run, pipeline: Pipeline, choice: Plan | None, *, on_gpu: bool
) -> list[Row]:
    """All rows of a pipelined run, from Megatron's validated and adjusted arguments.

    ``pipeline`` is how the first iteration runs, ``choice`` why, if a plan or a planner has chosen it.
    """
    rows = _choice_rows(args, run, pipeline, choice)
    limit = boundary(args, whole_attention=pipeline.whole_attention)
    stack = stack_to_text(pipeline.stack)
    if pipeline.stack == 1 or limit is None:
        rows.append(("layers per schedule", stack))
    else:
        rows.append(("layers per schedule", f"1, in place of {stack}", limit))
    if (count := run.recomputed_layers) > 0:
        layers = "every layer" if math.isinf(count) else f"first {count} of a stage"
        rows.append(("full recompute", layers, "inside the schedules"))
    if run.memory_reason is not None or pipeline.memory != KEEP:
        rows.append(("memory", pipeline.memory, run.memory_reason or ""))
    if pipeline.partner is not None:
        why = (
            "a backward pass and the next micro-batch's forward pass run together; others as the degree says"
        )
        rows.append(("partner", str(pipeline.partner), why))
    rows += run.settings.startup_rows(stock=False)
    is_local, is_packed = args.transformer_impl == "local", packs_documents(args)
    documents = is_packed or masks_documents(args)
    kernel = choose_kernel(args, local=is_local, on_gpu=on_gpu, documents=documents)
    rows.append(("attention", kernel.name, kernel.reason))
    if variant := getattr(args, "experimental_attention_variant", None):
        rows.append(("other layers", variant, "Megatron's own, before experts that are pipelined"))
    if uses_ring_attention(args):
        rows.append(("context", f"ring of {args.context_parallel_size} ranks"))
    if run.graph_modules:
        captured = " ".join(sorted(run.graph_modules))
        rows.append(("CUDA graphs", captured, "of stages in schedules; other layers run without"))
    rows += fp8_row(args)
    if documents:
        rows.append(("documents", "packed" if is_packed else "masked"))
    if on_gpu:
        rows += connections.startup_rows(os.environ, torch.cuda.nccl.version(), compat.torch_release())
    if not has_expert_communication(args):
        rows.append(("note", _NOTHING_TO_HIDE))
    return rows


def reason_rows(choice: Plan) -> list[Row]:
    """The reason and the notes of a choice."""
    return [("why", choice.reason), *(("note", note) for note in choice.notes)]


def _choice_rows(args: argparse.Namespace, run: Run, pipeline: Pipeline, choice: Plan | None) -> list[Row]:
    """Degree, schedule and exchange, or the candidates that the first iterations try."""
    if run.settings.automatic and choice is None:
        tried = candidates(rows_of_rank(args), rows_of_tile(args, args.micro_batch_size))
        exchanges = exchanges_of(args) if run.settings.chooses_exchange else (pipeline.exchange,)
        return [
            ("degree", f"auto: the first iterations try {', '.join(map(str, tried))}, the fastest stays"),
            ("schedule", pipeline.schedule),
            ("exchange", " or ".join(exchanges)),
        ]
    degree = str(pipeline.degree)
    if pipeline.backward_degree != pipeline.degree:
        degree += f" forward, {pipeline.backward_degree} backward"
    ends = [chunk.hidden[-1].local_end for chunk in pipeline.chunks(args.seq_length, layout_of_args(args))]
    boundaries = f"{' '.join(map(str, [0, *ends]))} of the {ends[-1]} rows of a rank"
    return [
        ("degree", degree),
        ("schedule", pipeline.name),
        ("exchange", pipeline.exchange.value),
        ("chunk boundaries", boundaries),
        *(reason_rows(choice) if choice is not None else []),
    ]


def masks_documents(args: argparse.Namespace) -> bool:
    """Whether the data loader's masks separate documents."""
    return bool(args.create_attention_mask_in_dataloader) and reads_masks(args)


def reads_masks(args: argparse.Namespace) -> bool:
    """Whether any layer applies the masks of ``--reset-attention-mask``, by the rule of ``reads_mask``."""
    return bool(
        args.reset_attention_mask
        and args.transformer_impl == "local"
        and not args.multi_latent_attention
        and args.context_parallel_size == 1
        and (args.window_size is None or args.window_attn_skip_freq is not None)
    )


def fp8_row(args: argparse.Namespace) -> list[Row]:
    """The row about FP8, with the effect of chunks on its recipe; none without FP8."""
    recipe = fp8_recipe(args)
    return [] if recipe is None else [("fp8", recipe, _FP8_MEANING[recipe])]
