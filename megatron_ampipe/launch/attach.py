"""Decides how the blocks of a run are pipelined: rules, choice, start-up table. Called by :mod:`.session`."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.training import training

from megatron_ampipe import compat
from megatron_ampipe.block.settings import TRACED_ITERATIONS
from megatron_ampipe.exchange.codecs import load_wire
from megatron_ampipe.launch import host, startup_rows
from megatron_ampipe.launch.adjustments import adjust_arguments, take_over_recompute
from megatron_ampipe.launch.auto import AutoDegree, agreed_upon, print_on_first_rank
from megatron_ampipe.launch.degrees_file import DegreesFile
from megatron_ampipe.launch.flags import PlanReader
from megatron_ampipe.launch.grad_reduce import placing
from megatron_ampipe.launch.memory_budget import choose_memory
from megatron_ampipe.launch.planned import choice_of_plan, layout_of_args, planner_of
from megatron_ampipe.launch.refusals import exchanges_of, refuse_unsupported
from megatron_ampipe.launch.save_plan import iterations_left, keeper_of, prepare_plan_file
from megatron_ampipe.launch.startup import print_startup_table
from megatron_ampipe.launch.trace import prepare_trace_dir
from megatron_ampipe.launch.trials import candidates
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.document_reader import DocumentReader
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule import (
    IN_ONE_CHUNK,
    Exchange,
    SequenceLayout,
)
from megatron_ampipe.schedule.config import AMPipeConfig
from megatron_ampipe.schedule.features import expert_tensor_ranks


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
        rows = [
            megatron,
            ("degree", "1: Megatron's own layers"),
            *config.startup_rows(stock=True),
        ]
        if plan is not None:
            choice = choice_of_plan(args, plan, str(config.plan))
            rows += [("why", choice.reason), *startup_rows.notes(choice)]
            # Another rank may have read another plan, or found none where --ampipe-save-plan names it.
            training.train_step = agreed_upon(choice.pipeline, training.train_step)
        print_startup_table(rows, adjustments)
        return None
    refuse_unsupported(config, args)
    memory = None
    if config.memory_budget is not None:
        memory = choose_memory(
            args, config.pipeline, config.memory_budget, config.cluster, automatic=config.automatic
        )
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
        documents=DocumentReader(masked=startup_rows.masks_documents(args)),
        gate=gate,
        wire=None if config.wire is None else load_wire(config.wire),
    )
    layout = layout_of_args(args)
    if config.grad_reduce == "placed":
        ranks_of_stage = args.world_size // args.pipeline_model_parallel_size
        ranks_of_experts = args.expert_model_parallel_size * expert_tensor_ranks(args)
        context.reductions = Reductions(on_cuda=on_gpu, of_experts=ranks_of_stage > ranks_of_experts)
        training.train_step = placing(context.reductions, training.train_step)
    rows = [
        megatron,
        *_choose(args, context, layout, plan),
        *startup_rows.hybrid_row(args),
        startup_rows.stack_row(args, context.pipeline),
        *startup_rows.recompute_row(args, context.recompute),
        *startup_rows.memory_row(context.pipeline.memory, memory),
        *config.startup_rows(stock=False),
        startup_rows.attention_row(args, on_gpu=on_gpu),
        *startup_rows.context_row(args),
        *startup_rows.documents_row(args),
        ("communication lane", "CUDA stream" if on_gpu else "thread (gloo)"),
        *startup_rows.connections_row(on_gpu=on_gpu),
        *startup_rows.nothing_to_hide(args),
        *startup_rows.random_routing(args),
        *startup_rows.differing_numbers(args),
    ]
    print_startup_table(rows, adjustments)
    return context


@contextlib.contextmanager
def accumulating_on_training_stream() -> Iterator[None]:
    """Within it, gradients are accumulated on the stream that computes them.

    Megatron's ``DistributedDataParallel`` keeps the accumulation nodes of all parameters, which belong to the
    stream that is current when it is built, and Megatron builds it on a separate stream. A block asks for
    the gradients of every chunk at these nodes: each would cross to that stream by an event, a wait and
    ``record_stream``, and memory would be released at another stage in every pass (``runtime.streams``).
    Training runs on the default stream, because CUDA graphs are refused.
    """
    construct = DistributedDataParallel.__init__

    @functools.wraps(construct)
    def constructing(*args: Any, **kwargs: Any) -> None:
        with torch.cuda.stream(torch.cuda.default_stream()):
            construct(*args, **kwargs)

    DistributedDataParallel.__init__ = constructing
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = construct


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
            ]
    pipeline = context.pipeline
    degree = str(pipeline.degree)
    if pipeline.backward_degree != pipeline.degree:
        degree += f" forward, {pipeline.backward_degree} backward"
    return [
        ("degree", degree),
        ("schedule", pipeline.name),
        ("exchange", pipeline.exchange.value, startup_rows.EXCHANGE[pipeline.exchange]),
        ("chunk boundaries", startup_rows.boundaries(pipeline.chunks(args.seq_length, layout))),
        *([("why", choice.reason), *startup_rows.notes(choice)] if choice is not None else []),
    ]


def _exchanges(args: argparse.Namespace, config: AMPipeConfig) -> tuple[Exchange, ...]:
    """What the choice of a degree may choose from; the first is simpler."""
    if not config.chooses_exchange:
        return (config.pipeline.exchange,)
    return exchanges_of(args)


def _in_one_chunk(args: argparse.Namespace) -> str | None:
    """What the trials also try at degree 1: gradients of weights during transfers, where the user and the
    layers leave that open."""
    return IN_ONE_CHUNK if args.ampipe_schedule is None and args.transformer_impl == "local" else None
