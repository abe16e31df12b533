"""Sets up a run that is resolved: the state that layers share, and the hooks of its features."""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

from megatron.core.utils import unwrap_model

from megatron_ampipe import compat
from megatron_ampipe.block.settings import SETTING, TRACED_ITERATIONS
from megatron_ampipe.exchange.codecs import load_wire
from megatron_ampipe.exchange.fixed_rows import FixedRows
from megatron_ampipe.files import outputs
from megatron_ampipe.launch import startup
from megatron_ampipe.launch.auto import Agreement, AutoDegree, save_choice
from megatron_ampipe.launch.ending import warn_of_optimizer_state
from megatron_ampipe.launch.fixed_rows import FixedRowsSteps
from megatron_ampipe.launch.hooks import Hook, Hooks, PlacedReductions
from megatron_ampipe.launch.partners import PartneredSteps
from megatron_ampipe.launch.planned import exchanges_of, planner_of, rows_of_rank
from megatron_ampipe.launch.recording import Recording, RoutingRecording
from megatron_ampipe.launch.run import Run
from megatron_ampipe.layers.context import AMPipeContext, DocumentReader
from megatron_ampipe.layers.gates import TokenIdRouter, give_token_ids
from megatron_ampipe.plan.plan_file import Plan
from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule.features import expert_tensor_ranks, rows_of_tile


def attach(args: argparse.Namespace, run: Run, hooks: Hooks, *, on_gpu: bool) -> AMPipeContext | None:
    """Create the state that layers share, add the hooks of the run, and print the start-up table on rank 0.

    Returns the state; None if Megatron's own layers are built.
    """
    context, choice = None, run.choice
    if run.pipelined:
        context = make_context(args, run, on_gpu=on_gpu)
        if context.reductions is not None:
            hooks.add(PlacedReductions(context.reductions))
        if context.partners is not None:
            hooks.add(PartneredSteps(context, args))
        if context.fixed_rows is not None:
            hooks.add(FixedRowsSteps(context.fixed_rows, args, margin=run.settings.rows_margin))
        hooks.add(Recording(context, args))
    if choice is not None:
        # Another rank may have read another plan, or no file that --ampipe-save-plan names.
        hooks.add(Agreement(choice.pipeline))
    elif context is not None and run.settings.automatic:
        choice = _choose(args, run, context, hooks)
    if run.gate is not None and issubclass(run.gate, TokenIdRouter):
        hooks.add(TokenIdsOfModels())
    if run.settings.routing_dir is not None:
        _record_routing(args, run, context, hooks)
    rows = [("degree", "1: Megatron's own layers"), *run.settings.startup_rows(stock=True)]
    if context is not None:
        rows = startup.pipelined_rows(args, run, context.pipeline, choice, on_gpu=on_gpu)
    elif choice is not None:
        rows += startup.reason_rows(choice)
    if (warning := warn_of_optimizer_state(args)) is not None:
        rows.append(("warning", "checkpoints", warning))
    startup.print_startup_table([("Megatron", compat.describe_megatron()), *rows], run.adjustments)
    return context


def make_context(args: argparse.Namespace, run: Run, *, on_gpu: bool) -> AMPipeContext:
    """The state that the layers of a pipelined run share."""
    settings = run.settings
    context = AMPipeContext(
        settings,
        run.pipeline,
        # Without a trace, only the current iteration is recorded, for the log.
        recorder=Recorder(num_iterations=TRACED_ITERATIONS if settings.trace_dir else 1),
        recomputed_layers=run.recomputed_layers,
        documents=DocumentReader(masked=startup.masks_documents(args)),
        shares=not getattr(args, "use_megatron_fsdp", False),
        gate=run.gate,
        wire=None if settings.wire is None else load_wire(settings.wire),
        graph_warm_up=max(1, getattr(args, "cuda_graph_warmup_steps", 1)),
        graph_modules=run.graph_modules,
        fixed_rows=FixedRows() if settings.rows == "fixed" else None,
    )
    # Without training, models are not wrapped, and nothing is reduced.
    if settings.grad_reduce == "placed" and not args.skip_train:
        ranks_of_stage = args.world_size // args.pipeline_model_parallel_size
        ranks_of_experts = args.expert_model_parallel_size * expert_tensor_ranks(args)
        context.reductions = Reductions(on_cuda=on_gpu, with_experts=ranks_of_stage > ranks_of_experts)
    if settings.partner or run.pipeline.partner is not None:
        context.partners = Partners()
    if run.choice is not None:
        context.predicted_ms = run.choice.stages_ms
    return context


def _choose(args: argparse.Namespace, run: Run, context: AMPipeContext, hooks: Hooks) -> Plan | None:
    """Let the planner choose the pipeline; without a cluster file, the first iterations."""
    settings, given, planner = run.settings, run.pipeline, None
    exchanges = exchanges_of(args) if settings.chooses_exchange else (given.exchange,)
    if settings.save_plan is not None:
        outputs.check(Path(settings.save_plan), flag="--ampipe-save-plan")
    if settings.cluster is not None:
        planner = planner_of(
            args, settings.cluster, stack=given.stack, memory=given.memory, exchanges=exchanges
        )
    shape = (rows_of_rank(args), args.micro_batch_size)
    auto = AutoDegree(
        context,
        planner=planner,
        exchanges=exchanges,
        in_one_chunk=run.in_one_chunk,
        keep=functools.partial(save_choice, args, settings.save_plan, shape),
        rows_of_tile=functools.partial(rows_of_tile, args),
    )
    choice = auto.start(shape)
    hooks.add(Agreement(context.pipeline))
    hooks.add(auto)
    return choice


def _record_routing(args: argparse.Namespace, run: Run, context: AMPipeContext | None, hooks: Hooks) -> None:
    """Add the hook of ``--ampipe-routing-dir``; raises :class:`BadInput` if it cannot record anything."""
    setting, folder = SETTING["routing_dir"], run.settings.routing_dir
    assert folder is not None
    if args.skip_train or not args.num_experts:
        rule = f"has no effect {'with --skip-train' if args.skip_train else 'without --num-experts'}"
        raise setting.refuse(folder, rule, "Leave it out.")
    if int(os.environ.get("RANK", "0")) == 0:
        outputs.check_folder(Path(folder).absolute(), flag=setting.flag, value=Path(folder))
    hooks.add(RoutingRecording(args, run.settings, context))


class TokenIdsOfModels(Hook):
    """Passes the token ids of every model to its routers."""

    def models_built(self, models: list[Any]) -> None:
        for model in unwrap_model(models):
            give_token_ids(model).watch(model)
