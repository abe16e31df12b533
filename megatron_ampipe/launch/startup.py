"""The table that rank 0 prints before training: how the run is pipelined, why, and which flags changed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table

from megatron_ampipe import compat
from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.errors import global_rank
from megatron_ampipe.launch import connections
from megatron_ampipe.launch.captured import CapturedStages
from megatron_ampipe.launch.run import Run
from megatron_ampipe.launch.trials import candidates
from megatron_ampipe.layers.context import WHOLE_PASSES
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.schedule import KEEP, Pipeline, stack_to_text

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
    if global_rank() != 0:
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


def print_graphs(graphs: CapturedStages) -> None:
    """Print on rank 0 which CUDA graphs take the place of those of whole passes, and why."""
    if graphs.no_passes is None or global_rank() != 0:
        return
    captured = f"CUDA graphs of the stages {graphs.stages}" if graphs.stages else "no CUDA graphs of stages"
    print(f"AMPipe: {captured}, not of whole passes: {graphs.no_passes}", flush=True)


def print_end(pipeline: Pipeline) -> None:
    """Print on rank 0, at the end of a run, how it was pipelined, and where the table says more."""
    if global_rank() == 0:
        print(f"AMPipe: {pipeline}. The reasons are in the table '{TITLE}' near the start of this output.")


def requested_rows(run: Run) -> list[Row]:
    """What flags and files decide of a run before it is resolved, and by what."""
    if not run.pipelined:
        return _stock_rows(run)
    pipeline, is_open = run.pipeline, run.settings.automatic and run.plan is None
    chooses_exchange = run.settings.chooses_exchange
    return [
        ("degree", AUTO if is_open else _degrees(pipeline), run.decided_by("degree")),
        ("schedule", pipeline.name, run.decided_by("schedule")),
        ("exchange", AUTO if chooses_exchange else pipeline.exchange.value, run.decided_by("exchange")),
        ("layers per schedule", stack_to_text(pipeline.stack), run.decided_by("stack")),
        ("memory", run.settings.memory if run.plan is None else pipeline.memory, run.decided_by("memory")),
        *_partner_rows(pipeline),
        *run.settings.startup_rows(stock=False),
    ]


def decided_rows(run: Run) -> list[Row]:
    """What is decided of a resolved run, and by what: a flag, a plan, a default, or later by trials."""
    if not run.pipelined:
        return _stock_rows(run)
    pipeline = run.first_pipeline
    return [
        *_choice_rows(run, pipeline),
        _stack_row(run, pipeline),
        *_memory_rows(run, pipeline),
        *_partner_rows(pipeline),
        *run.settings.startup_rows(stock=False),
        *_model_rows(run),
    ]


def _stock_rows(run: Run) -> list[Row]:
    return [
        ("degree", "1: Megatron's own layers", run.decided_by("degree")),
        *run.settings.startup_rows(stock=True),
        *_reason_rows(run.choice),
    ]


def machine_rows(run: Run) -> list[Row]:
    """What depends on this machine: the kernel of attention, and variables for CUDA and NCCL."""
    assert run.attention is not None
    rows: list[Row] = [("attention", *run.attention)]
    if run.resolved_environment.on_gpu:
        rows += connections.startup_rows(os.environ, torch.cuda.nccl.version(), compat.torch_release())
    return rows


def _choice_rows(run: Run, pipeline: Pipeline) -> list[Row]:
    """Degree, schedule and exchange, or the candidates that the first iterations try."""
    settings, environment = run.settings, run.resolved_environment
    schedule = ("schedule", pipeline.name, run.decided_by("schedule"))
    if settings.automatic and run.choice is None:
        tried = candidates(environment.rows, environment.rows_of_tile(environment.batch))
        exchanges = environment.exchanges if settings.chooses_exchange else (pipeline.exchange,)
        degrees = f"auto: the first iterations try {', '.join(map(str, tried))}, the fastest stays"
        return [
            ("degree", degrees),
            schedule,
            ("exchange", " or ".join(exchanges), run.decided_by("exchange")),
        ]
    chunks = pipeline.chunks(environment.sequence_length, environment.layout)
    ends = [chunk.hidden[-1].local_end for chunk in chunks]
    boundaries = f"{' '.join(map(str, [0, *ends]))} of the {ends[-1]} rows of a rank"
    return [
        ("degree", _degrees(pipeline), run.decided_by("degree")),
        schedule,
        ("exchange", pipeline.exchange.value, run.decided_by("exchange")),
        ("chunk boundaries", boundaries, run.decided_by("chunks")),
        *_reason_rows(run.choice),
    ]


def _degrees(pipeline: Pipeline) -> str:
    if pipeline.backward_degree == pipeline.degree:
        return str(pipeline.degree)
    return f"{pipeline.degree} forward, {pipeline.backward_degree} backward"


def _reason_rows(choice: Plan | None) -> list[Row]:
    """The reason and the notes of a plan, if there is one."""
    if choice is None:
        return []
    return [("why", choice.reason), *(("note", note) for note in choice.notes)]


def _stack_row(run: Run, pipeline: Pipeline) -> Row:
    stack = stack_to_text(pipeline.stack)
    limit = run.resolved_environment.boundary(pipeline)
    if pipeline.stack == 1 or limit is None:
        return ("layers per schedule", stack, run.decided_by("stack"))
    return ("layers per schedule", f"1, in place of {stack}", limit)


def _memory_rows(run: Run, pipeline: Pipeline) -> list[Row]:
    """What is recomputed or not saved."""
    rows: list[Row] = []
    if (count := run.recomputed_layers) > 0:
        layers = "every layer" if math.isinf(count) else f"first {count} of a stage"
        rows.append(("full recompute", layers, "inside the schedules"))
    if run.memory_reason is not None or pipeline.memory != KEEP:
        rows.append(("memory", pipeline.memory, run.memory_reason or run.decided_by("memory")))
    return rows


def _partner_rows(pipeline: Pipeline) -> list[Row]:
    if pipeline.partner is None:
        return []
    why = "a backward pass and the next micro-batch's forward pass run together; others as the degree says"
    return [("partner", str(pipeline.partner), why)]


def _model_rows(run: Run) -> list[Row]:
    """What the model, its data and its layout add."""
    environment = run.resolved_environment
    rows: list[Row] = []
    if environment.other_attention:
        why = "Megatron's own, before experts that are pipelined"
        rows.append(("other layers", environment.other_attention, why))
    if environment.ring_ranks > 1:
        rows.append(("context", f"ring of {environment.ring_ranks} ranks"))
    rows += _graph_rows(run.graphs)
    rows += fp8_row(environment.fp8_recipe)
    if environment.documents is not None:
        rows.append(("documents", environment.documents))
    if environment.expert_ranks == 1:
        rows.append(("note", _NOTHING_TO_HIDE))
    return rows


def _graph_rows(graphs: CapturedStages) -> list[Row]:
    """What is captured as CUDA graphs, and what runs without, each with the reason."""
    rows: list[Row] = []
    if graphs.modules == WHOLE_PASSES:
        why = "one graph for both directions each; steps without budgets and evaluation run without"
        rows.append(("CUDA graphs", "whole passes", why))
    elif graphs.modules:
        captured = " ".join(sorted(graphs.modules))
        rows.append(("CUDA graphs", captured, "of stages in schedules; other layers run without"))
    if graphs.keeps_mamba:
        rows.append(("CUDA graphs", "mamba", "Megatron's own"))
    return rows + [("without graphs", *note) for note in graphs.notes]


def fp8_row(recipe: str | None) -> list[Row]:
    """The row about FP8, with the effect of chunks on its recipe; none without FP8."""
    return [] if recipe is None else [("fp8", recipe, _FP8_MEANING[recipe])]
