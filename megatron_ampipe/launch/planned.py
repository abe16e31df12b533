"""What a plan file, a cluster file or a memory budget says of a run: it is compared, planned, or chosen.

Functions of a :class:`~megatron_ampipe.launch.run.Run`. Layers and runtime do not depend on ``plan``, but get
a ``schedule.Pipeline``. All is decided from sizes and files before any layer is built, and identically on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from megatron_ampipe.block.settings import SETTING, parse_size, size_to_text
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.refusals import setting_of_plan
from megatron_ampipe.launch.run import Run
from megatron_ampipe.launch.trials import Planner, Shape, candidates
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.kept import MemoryPrediction, by_work, fitting, simulated
from megatron_ampipe.plan.memory import stage_bytes
from megatron_ampipe.plan.model_block import StageLayers
from megatron_ampipe.plan.plan_file import MadeFor, Plan, differences, made_for
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.schedule import STRATEGIES, BlockFeatures, Pipeline, is_custom, period, to_text
from megatron_ampipe.schedule.chunks import require_whole_tiles

PeakOf = Callable[[str], float]
"""The predicted peak, in bytes, of a combination of memory strategies."""


def planner_of(run: Run, cluster: Cluster, layers: StageLayers, *, partnered_share: float) -> Planner:
    """A planner for input shapes. Deterministic: ranks that read the same file get the same plan.

    ``partnered_share`` is the share of a step's passes that can run together with another micro-batch's pass.

    Raises:
        BadInput: the cluster's file lacks a figure that this model needs.
    """
    block, given = run.resolved_block, run.pipeline
    exchanges = run.resolved_environment.exchanges if run.settings.chooses_exchange else (given.exchange,)

    def plan(shape: Shape) -> Plan:
        rows, batch = shape
        length = rows * block.tensor * block.context
        shaped = replace(block, sequence_length=length, batch=batch)
        predictor = Predictor(
            shaped, cluster, num_layers=layers.num_layers, dense=layers.dense, memory=given.memory
        )
        planned = make_plan(predictor, stack=given.stack, exchanges=exchanges, with_partner=partnered_share)
        reason = f"planned from {run.settings.cluster}: {planned.reason}"
        return replace(planned, pipeline=planned.pipeline_of(rows), reason=reason)

    return plan


def plan_of_run(run: Run) -> Plan:
    """The plan of a run's file for the rows of this run, with notes on differences from what it was made for.

    Raises:
        BadInput: the plan was made for other blocks, or its order or chunks do not fit this model's blocks.
    """
    plan, plan_file = run.plan, run.settings.plan
    assert plan is not None and plan_file is not None
    setting, remedy = setting_of_plan(saved="save_plan" in run.given)
    not_for = "is not for the blocks of this model"
    notes: tuple[str, ...] = (f"{plan_file} has no section made_for, so it was not compared with this run",)
    if plan.made_for is not None:
        other = differences(plan.made_for, made_for_of(run))
        if essential := [difference for difference, stops in other.items() if stops]:
            rule = f"{not_for}: it was made for {', '.join(essential)}"
            remedy += " To use this one unchanged, remove its section made_for."
            raise setting.refuse(plan_file, rule, remedy)
        notes = (f"the plan was made on: {plan.made_for.get('cluster')}",)
        if other:
            notes += (f"the plan was made for {', '.join(other)}; its predictions may be wrong",)
    pipeline = plan.pipeline_of(run.resolved_environment.rows)
    try:
        _check_fit(run, pipeline)
    except BadInput as error:
        if error.name == "--seq-length":
            raise
        raise setting.refuse(plan_file, f"{not_for}: {error.value} {error.rule}", remedy) from error
    return replace(plan, pipeline=pipeline, reason=f"read from {plan_file}: {plan.reason}", notes=notes)


def _check_fit(run: Run, pipeline: Pipeline) -> None:
    """Raise :class:`BadInput` if an order or chunks do not fit the blocks of a run."""
    environment = run.resolved_environment
    # If layers share the order, check it with two, which shows whether it can be repeated.
    num_layers = 2 if environment.shares_schedule(pipeline) else 1
    pipeline.schedule_of([features_of(run, pipeline)] * num_layers)
    chunks = pipeline.chunks(environment.sequence_length, environment.layout)
    require_whole_tiles(chunks, environment.rows_of_tile(environment.batch))


def custom_orders(run: Run) -> tuple[str, ...]:
    """The orders of a custom schedule in this run, as text: of every pass and every degree that it can have.

    Empty for a named schedule.

    Raises:
        BadInput: the function cannot be imported, fails, or returns a wrong order.
    """
    pipeline, environment = run.pipeline, run.resolved_environment
    if not is_custom(pipeline.schedule):
        return ()
    pipelines = [pipeline, pipeline.with_partners(forward=True, backward=True)]
    if run.settings.automatic:
        degrees = candidates(environment.rows, environment.rows_of_tile(environment.batch))
        pipelines = [replace(pipeline, degree=degree, backward_degree=degree) for degree in degrees]
    orders: list[str] = []
    for each in dict.fromkeys(pipelines):
        features = features_of(run, each)
        num_layers = 2 if environment.shares_schedule(each) else 1
        # An evaluation has no losses.
        passes = [[features] * num_layers, [replace(features, losses=False)] * num_layers]
        if environment.other_attention is not None:
            passes.append([features.without_attention])
        orders += [to_text(each.schedule_of(layers)) for layers in passes]
    return tuple(orders)


def saved_form(run: Run, choice: Plan) -> Plan:
    """The choice of ``--ampipe-degree auto`` for the flags' input shape, as ``--ampipe-plan`` reads it."""
    pipeline = choice.pipeline
    schedule = pipeline.order or pipeline.schedule_of([features_of(run, pipeline)])
    equal = (1 / pipeline.num_chunks,) * pipeline.num_chunks
    pipeline = replace(
        pipeline,
        order=period(schedule) if run.resolved_environment.shares_schedule(pipeline) else schedule,
        shares=pipeline.shares or equal,
    )
    return replace(choice, pipeline=pipeline, made_for=made_for_of(run))


def made_for_of(run: Run) -> MadeFor:
    """The record of this run's block and machines, to compare with the record of a plan."""
    num_ranks = run.resolved_environment.world_size
    return made_for(
        replace(run.resolved_block, condense=run.settings.condense),
        cluster=f"the machines of a run with {num_ranks} ranks",
        ranks_per_node=run.settings.ranks_per_node or num_ranks,
    )


def features_of(run: Run, pipeline: Pipeline) -> BlockFeatures:
    """The features of the blocks in a training pass with a pipeline."""
    assert run.features is not None
    alone, sharing = run.features
    return pipeline.trained(sharing if run.resolved_environment.shares_schedule(pipeline) else alone)


def _peak_of(block: Block, pipeline: Pipeline, layers: StageLayers, *, passes: int, ahead: bool) -> PeakOf:
    """A function that predicts the peak memory of a combination of strategies.

    The peak counts the activations of the layers of a pipeline stage, for all micro-batches that wait for
    their backward, and (``ahead``) a layer more. It does not count embedding, logits, weights, gradients and
    optimizer.
    """

    def peak(memory: str) -> float:
        return stage_bytes(
            block,
            replace(pipeline, memory=memory),
            num_layers=layers.num_layers,
            dense_layers=layers.dense,
            passes=passes,
            ahead=ahead,
            local=block.local,
        )

    return peak


def choose_memory(run: Run, layers: StageLayers, cluster: Cluster | None, *, passes: int) -> Plan:
    """The pipeline with the fastest combination of strategies whose predicted peak fits the run's budget.

    Without a cluster, the first that fits of combinations that repeat more and more work. ``passes`` is the
    number of micro-batches that wait for their backward.

    Raises:
        BadInput: no strategy fits, or the budget is not a size.
    """
    budget, automatic = run.settings.memory_budget, run.settings.automatic
    assert budget is not None
    limit = parse_size(budget)
    block = replace(run.resolved_block, exchange=run.pipeline.exchange)
    # If the degree is chosen later, two chunks with the same strategy are assumed.
    pipeline = replace(run.pipeline, degree=2, backward_degree=2) if automatic else run.pipeline
    # With a partner, the forward pass saves a layer before the backward pass has released one.
    ahead = pipeline.partner is not None or (automatic and run.settings.partner)
    peak = _peak_of(block, pipeline, layers, passes=passes, ahead=ahead)
    if cluster is None:
        compared = "the least work done again"
        combinations = [
            MemoryPrediction(memory, peak(memory)) for memory in by_work(pipeline.backward_degree)
        ]
    else:
        compared = f"the fastest by {run.settings.cluster}"
        shares = run.resolved_environment.boundary(pipeline) is None
        num_layers = pipeline.stack_of(layers.num_layers) if shares else 1
        combinations = simulated(Predictor(block, cluster, num_layers=num_layers), pipeline, peak)
    if automatic:
        combinations = [each for each in combinations if each.memory in STRATEGIES]
    chosen = fitting(combinations, limit)
    if chosen is None:
        raise _too_small(budget, combinations)
    return Plan(
        pipeline=replace(run.pipeline, memory=chosen.memory),
        reason=f"{compared} within {budget}: {_sizes(chosen, combinations)}",
    )


def _too_small(budget: str, combinations: list[MemoryPrediction]) -> BadInput:
    """The error for a budget that no combination fits."""
    least = min(combinations, key=lambda each: each.peak_bytes)
    needed = size_to_text(least.peak_bytes)
    setting = SETTING["memory_budget"]
    return setting.refuse(
        budget,
        f"is too small: the leanest strategy, {least.memory}, needs about {needed}",
        f"Use at least {setting.flag} {needed}, --recompute-granularity full, a shorter sequence, or "
        "more ranks.",
    )


def _sizes(chosen: MemoryPrediction, combinations: list[MemoryPrediction]) -> str:
    """The predicted peak of the chosen combination, next to those of the strategies for all chunks."""
    by_name = {each.memory: each for each in combinations}
    names = [name for name in STRATEGIES if name in by_name and name != chosen.memory]
    others = ", ".join(f"{name} {size_to_text(by_name[name].peak_bytes)}" for name in names)
    return f"predicted peak of the layers' activations {size_to_text(chosen.peak_bytes)} ({others})"
