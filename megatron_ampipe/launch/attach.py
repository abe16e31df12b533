"""Sets up a run that is resolved: the state that layers share, and the hooks of its features."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from megatron.core.utils import unwrap_model

from megatron_ampipe import compat
from megatron_ampipe.block.settings import SETTING, TRACED_ITERATIONS, Settings, parse_iterations
from megatron_ampipe.errors import global_rank
from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.exchange.codecs import load_wire
from megatron_ampipe.files import outputs
from megatron_ampipe.launch import startup
from megatron_ampipe.launch.auto import Agreement, AutoDegree, save_choice
from megatron_ampipe.launch.environment import PARTNER_FLAG
from megatron_ampipe.launch.fixed_rows import FixedRowsSteps
from megatron_ampipe.launch.hooks import Hook, Hooks, PlacedReductions
from megatron_ampipe.launch.megatron_types import Model
from megatron_ampipe.launch.partners import PartneredSteps
from megatron_ampipe.launch.recording import Recording, RoutingRecording
from megatron_ampipe.launch.run import Run
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.documents import DocumentReader
from megatron_ampipe.layers.gates import TokenIdRouter, give_token_ids
from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.schedule.row_budget import WARM_UP


def attach(run: Run, hooks: Hooks, *, notes: Sequence[startup.Row] = ()) -> AMPipeContext | None:
    """Create the state that layers share, add the hooks of the run, and print the start-up table on rank 0.

    ``notes`` are further rows of the table. Returns the state; None if Megatron's own layers are built.
    """
    environment = run.resolved_environment
    context = make_context(run) if run.pipelined else None
    if context is not None:
        if context.reductions is not None:
            hooks.add(PlacedReductions(context.reductions))
        if context.partners is not None:
            flag = PARTNER_FLAG if "partner" in run.implied else SETTING["partner"].flag
            hooks.add(PartneredSteps(context, environment, flag=flag))
        if context.fixed_rows is not None:
            margin = run.settings.rows_margin
            hooks.add(
                FixedRowsSteps(
                    context.fixed_rows, environment, margin=margin, before_repeat=hooks.before_repeat
                )
            )
        hooks.add(Recording(context, environment))
        if run.settings.automatic:
            _choose_later(run, context, hooks)
    if run.choice is not None or run.settings.automatic or run.custom_orders:
        # Another rank may have read another plan or cluster, or no file that --ampipe-save-plan names, or its
        # function of a custom schedule may return another order.
        hooks.add(Agreement(run.first_pipeline, run.custom_orders))
    if run.gate is not None and issubclass(run.gate, TokenIdRouter):
        hooks.add(TokenIdsOfModels())
    if run.settings.routing_dir is not None:
        _record_routing(run, context, hooks)
    rows = [("Megatron", compat.describe_megatron()), *startup.decided_rows(run)]
    if run.pipelined:
        rows += startup.machine_rows(run)
    startup.print_startup_table([*rows, *notes], run.adjustments)
    startup.print_graphs(run.graphs)
    return context


def make_context(run: Run) -> AMPipeContext:
    """The state that the layers of a pipelined run share."""
    settings, environment = run.settings, run.resolved_environment
    context = AMPipeContext(
        settings,
        run.pipeline,
        recorder=Recorder(num_iterations=_recorded_iterations(settings)),
        recomputed_layers=run.recomputed_layers,
        documents=DocumentReader(
            masked=environment.documents == "masked", slices_sequence=environment.slices_sequence
        ),
        overlaps_reductions=environment.overlaps_reductions,
        shares=not environment.uses_fsdp,
        gate=run.gate,
        wire=None if settings.wire is None else load_wire(settings.wire),
        graph_warm_up=environment.graph_warm_up,
        graph_modules=run.graphs.modules,
        left_out_of_graphs=run.graphs.left_out,
        fixed_rows=FixedRows() if settings.rows == "fixed" else None,
    )
    # Without training, models are not wrapped, and nothing is reduced.
    if settings.grad_reduce == "placed" and environment.trains:
        context.reductions = Reductions(on_cuda=environment.on_gpu, with_experts=environment.expert_replicas)
    if settings.partner or run.pipeline.partner is not None:
        context.partners = Partners()
    if run.choice is not None:
        context.predicted_ms = run.choice.stages_ms
    return context


def _recorded_iterations(settings: Settings) -> int:
    """How many iterations are kept: without a trace only the current one, for the log."""
    if settings.trace_dir is None:
        return 1
    if settings.measure is None:
        return TRACED_ITERATIONS
    first, last = parse_iterations(settings.measure)
    return last - first + 1


def _choose_later(run: Run, context: AMPipeContext, hooks: Hooks) -> None:
    """Let a planner, or trials in the first iterations, choose the pipeline of each input shape."""
    settings, environment = run.settings, run.resolved_environment
    if settings.save_plan is not None:
        outputs.check(Path(settings.save_plan), flag="--ampipe-save-plan")
    auto = AutoDegree(
        context,
        planner=run.planner,
        exchanges=environment.exchanges if settings.chooses_exchange else (run.pipeline.exchange,),
        in_one_chunk=run.in_one_chunk,
        keep=functools.partial(save_choice, run),
        rows_of_tile=environment.rows_of_tile,
        # Each number of chunks learns its budgets first.
        warm_up=1 if context.fixed_rows is None else WARM_UP + 1,
    )
    if run.choice is not None:
        auto.start(environment.shape, run.choice)
    hooks.add(auto)


def _record_routing(run: Run, context: AMPipeContext | None, hooks: Hooks) -> None:
    """Add the hook of ``--ampipe-routing-dir``; raises :class:`BadInput` for a folder that it cannot use."""
    folder = run.settings.routing_dir
    assert folder is not None
    if global_rank() == 0:
        flag = SETTING["routing_dir"].flag
        outputs.check_folder(Path(folder).absolute(), flag=flag, value=Path(folder))
    hooks.add(RoutingRecording(run.resolved_environment, run.settings, context))


class TokenIdsOfModels(Hook):
    """Passes the token ids of every model to its routers."""

    def models_built(self, models: Sequence[Model]) -> None:
        for model in unwrap_model(models):
            give_token_ids(model).watch(model)
