"""Creates a pipeline from arguments and a cluster file, a plan file, or a memory budget; derives blocks and
their layout from Megatron's arguments.

Layers and runtime do not depend on ``plan``: they receive a ``schedule.Pipeline``. All is decided from sizes
and files before any layer is built, identically on all ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ampipe.block.hybrid_pattern import runs_of, stages_of
from megatron_ampipe.block.settings import SETTING, Setting, parse_size, settings_of, size_to_text
from megatron_ampipe.compat import delays_weight_gradients
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.trials import Planner, Shape
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.cluster import find_cluster, read_cluster
from megatron_ampipe.plan.kept import Kept, by_work, fitting, simulated
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.model_block import block_of, layers_of
from megatron_ampipe.plan.model_file import ModelFile
from megatron_ampipe.plan.model_flags import SIZE_FLAGS
from megatron_ampipe.plan.plan_file import MadeFor, Plan, differences, made_for
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.rank_memory import waiting_passes
from megatron_ampipe.schedule import (
    KEEP,
    STRATEGIES,
    BlockFeatures,
    Exchange,
    Pipeline,
    period,
    useful_exchanges,
)
from megatron_ampipe.schedule.chunks import SequenceLayout, require_whole_tiles
from megatron_ampipe.schedule.features import (
    boundary,
    features_of_settings,
    fp8_recipe,
    rows_of_tile,
    splits_weights,
)


def planner_of(
    args: argparse.Namespace,
    cluster_file: str,
    *,
    stack: int,
    memory: str = KEEP,
    exchanges: Sequence[Exchange] = (Exchange.ROWS,),
) -> Planner:
    """A planner for input shapes. Deterministic: ranks that read the same file get the same plan.

    ``stack`` and ``memory`` are as in ``Pipeline``; all ``exchanges`` are compared.

    Raises:
        BadInput: the file is wrong, or lacks a figure that this model needs.
    """
    cluster = read_cluster(find_cluster(cluster_file, flag="--ampipe-cluster"))
    block, layers = block_of_args(args), layers_of(_model_of_args(args))

    def plan(shape: Shape) -> Plan:
        rows, batch = shape
        length = rows * block.tensor * block.context
        shaped = replace(block, sequence_length=length, batch=batch)
        predictor = Predictor(
            shaped, cluster, num_layers=layers.num_layers, dense=layers.dense, memory=memory
        )
        planned = make_plan(predictor, stack=stack, exchanges=exchanges, with_partner=with_partner(args))
        reason = f"planned from {cluster_file}: {planned.reason}"
        return replace(planned, pipeline=planned.pipeline_of(rows), reason=reason)

    return plan


def waits_for_stage(arguments: Any) -> bool:
    """Whether passes have no partner: without virtual stages, a backward pass waits for the next stage."""
    stages = arguments.pipeline_model_parallel_size or 1
    return stages > 1 and arguments.virtual_pipeline_model_parallel_size is None


def with_partner(args: argparse.Namespace) -> float:
    """The share of a step's passes that Megatron's loops can run together with another micro-batch's pass."""
    if not args.ampipe_partner or waits_for_stage(args):
        return 0.0
    # With pipeline parallelism, the warm-up passes, and as many at the end, run alone.
    alone = 1 if args.pipeline_model_parallel_size == 1 else in_flight(args)
    return max(0.0, 1 - alone / _passes_of_step(args))


def plan_of_run(args: argparse.Namespace, plan: Plan, plan_file: str) -> Plan:
    """The plan of a file for the rows of this run, with notes on differences from the run it was made for.

    Raises:
        BadInput: the plan was made for other blocks, or its order or chunks do not fit this model's blocks.
    """
    setting, remedy = setting_of_plan(args)
    not_for = "is not for the blocks of this model"
    notes: tuple[str, ...] = (f"{plan_file} has no section made_for, so it was not compared with this run",)
    if plan.made_for is not None:
        other = differences(plan.made_for, made_for_of_args(args))
        if essential := [difference for difference, stops in other.items() if stops]:
            rule = f"{not_for}: it was made for {', '.join(essential)}"
            remedy += " To use this one unchanged, remove its section made_for."
            raise setting.refuse(plan_file, rule, remedy)
        notes = (f"the plan was made on: {plan.made_for.get('cluster')}",)
        if other:
            notes += (f"the plan was made for {', '.join(other)}; its predictions may be wrong",)
    pipeline = plan.pipeline_of(rows_of_rank(args))
    try:
        # If layers share the order, check it with two, which shows whether it can be repeated.
        features = [features_of_args(args, pipeline)] * (2 if _shares_schedule(args, pipeline) else 1)
        pipeline.schedule_of(features)
        chunks = pipeline.chunks(args.seq_length, layout_of_args(args))
        require_whole_tiles(chunks, rows_of_tile(args, args.micro_batch_size))
    except BadInput as error:
        if error.name == "--seq-length":
            raise
        raise setting.refuse(plan_file, f"{not_for}: {error.value} {error.rule}", remedy) from error
    return replace(plan, pipeline=pipeline, reason=f"read from {plan_file}: {plan.reason}", notes=notes)


def _shares_schedule(args: argparse.Namespace, pipeline: Pipeline) -> bool:
    """Whether consecutive layers share a schedule."""
    return pipeline.stack != 1 and boundary(args, whole_attention=pipeline.whole_attention) is None


def saved_form(args: argparse.Namespace, choice: Plan) -> Plan:
    """The choice of ``--ampipe-degree auto`` for the flags' input shape, as ``--ampipe-plan`` reads it."""
    pipeline = choice.pipeline
    schedule = pipeline.order or pipeline.schedule_of([features_of_args(args, pipeline)])
    pipeline = replace(
        pipeline,
        order=period(schedule) if _shares_schedule(args, pipeline) else schedule,
        shares=pipeline.shares or (1 / pipeline.num_chunks,) * pipeline.num_chunks,
    )
    return replace(choice, pipeline=pipeline, made_for=made_for_of_args(args))


def made_for_of_args(args: argparse.Namespace) -> MadeFor:
    """The record of this run's block and machines, to compare with the record of a plan."""
    return made_for(
        replace(block_of_args(args), condense=args.ampipe_condense),
        cluster=f"the machines of a run with {args.world_size} ranks",
        ranks_per_node=ranks_per_node(args) or args.world_size,
    )


def setting_of_plan(arguments: Any) -> tuple[Setting, str]:
    """The flag that names the plan of a run, and the remedy if the plan does not fit."""
    if arguments.ampipe_save_plan is not None:
        return SETTING["save_plan"], "Remove the file, or give another name, to choose again."
    return SETTING["plan"], "Make one with ampipe plan from a model file with this run's flags."


def layout_of_args(arguments: Any) -> SequenceLayout:
    """How the rows of a sequence are distributed over ranks."""
    return SequenceLayout(
        tensor_ranks=arguments.tensor_model_parallel_size if arguments.sequence_parallel else 1,
        context_ranks=arguments.context_parallel_size,
    )


def packs_documents(arguments: Any) -> bool:
    """Whether sequences are packed from documents that do not attend to each other."""
    return bool(arguments.sft or getattr(arguments, "dataloader_inter_document_masking", False))


def captured_modules(arguments: Any) -> tuple[str, ...]:
    """The modules that Megatron's flags ask to capture as CUDA graphs; empty without CUDA graphs."""
    if getattr(arguments, "cuda_graph_impl", None) not in ("local", "transformer_engine"):
        return ()
    flags = ("cuda_graph_modules", "cuda_graph_scope_deprecated", "cuda_graph_scope")
    given: Any = next((modules for flag in flags if (modules := getattr(arguments, flag, None))), "full")
    modules = given if isinstance(given, list) else [given]
    return tuple(str(getattr(module, "name", module)) for module in modules)


def rows_of_rank(args: argparse.Namespace) -> int:
    """Number of rows of the residual stream on a rank."""
    layout = layout_of_args(args)
    rows: int = args.seq_length // (layout.tensor_ranks * layout.context_ranks)
    return rows


def exchanges_of(arguments: Any) -> tuple[Exchange, ...]:
    """The exchanges that layers with Megatron's arguments can choose from."""
    num_experts = getattr(arguments, "num_experts", None) or 1
    return useful_exchanges(arguments, num_experts, ranks_per_node(arguments))


def ranks_per_node(arguments: Any) -> int | None:
    """Ranks per node, from the flag, else from the launcher, such as torchrun; None if unknown."""
    given: int | None = getattr(arguments, "ampipe_ranks_per_node", None)
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return given if given is not None or not local_ranks.isdecimal() else int(local_ranks)


def features_of_args(args: argparse.Namespace, pipeline: Pipeline) -> BlockFeatures:
    """The features of the blocks in a training pass."""
    own = replace(settings_of(args), ranks_per_node=ranks_per_node(args))
    shares, local = _shares_schedule(args, pipeline), args.transformer_impl == "local"
    return pipeline.trained(features_of_settings(args, own, shares_schedule=shares, local=local))


def layers_split_weights(args: argparse.Namespace) -> bool:
    """Whether the layers of a run can compute weight gradients separately, with the installed packages."""
    return splits_weights(args) and (args.transformer_impl == "local" or delays_weight_gradients())


def block_of_args(args: argparse.Namespace) -> Block:
    """The block that Megatron's arguments describe."""
    block, _ = block_of(_model_of_args(args), None, ranks=args.world_size)
    # Layers use the nodes of this run, even if the figures are of other machines.
    block = replace(
        block,
        ranks_per_node=ranks_per_node(args),
        splits_weights=block.splits_weights and layers_split_weights(args),
    )
    if not args.bf16 and not args.fp16:
        # A model file has no key for fp32: without a precision, it means the precision of the cluster.
        block = replace(block, dtype="fp32")
    return block


def _model_of_args(args: argparse.Namespace) -> ModelFile:
    """Megatron's arguments as a model file."""
    values: dict[str, Any] = {
        flag: value
        for flag in SIZE_FLAGS
        if (value := getattr(args, flag.replace("-", "_"), None)) is not None
    }
    if values.get("moe-expert-capacity-factor", 0.0) < 0:
        # Megatron treats a negative factor as none.
        del values["moe-expert-capacity-factor"]
    if getattr(args, "ampipe_recomputes", False):
        # ``take_over_recompute`` has removed it: the layers recompute in place of Megatron.
        values["recompute-granularity"] = "full"
    stages = stages_of(args)
    if stages is not None and not runs_of(stages):
        # Plans cover only pairs of attention and MoE layers.
        del values["hybrid-layer-pattern"]
    values |= {"fp8-format": getattr(args, "fp8", None), "fp8-recipe": fp8_recipe(args)}
    values["no-gradient-accumulation-fusion"] = not args.gradient_accumulation_fusion
    return ModelFile(Path("arguments"), values, {}, settings_of(args))


def choose_memory(
    args: argparse.Namespace,
    pipeline: Pipeline,
    budget: str,
    cluster_file: str | None = None,
    *,
    automatic: bool = False,
) -> Plan:
    """The pipeline with the fastest combination of strategies whose predicted peak memory fits.

    The peak counts the activations of the layers of a pipeline stage, for all micro-batches that wait for
    their backward. It does not count embedding, logits, weights, gradients and optimizer.

    ``automatic`` means that the degree is chosen later: two chunks with the same strategy are assumed.

    Raises:
        BadInput: no strategy fits, the budget is not a size, or the cluster file is wrong.
    """
    limit = parse_size(budget)
    block, layers = block_of_args(args), layers_of(_model_of_args(args))
    block = replace(block, exchange=pipeline.exchange)
    num_layers, passes, given = layers.num_layers, in_flight(args), pipeline
    # With a partner, the forward pass saves a layer before the backward pass has released one.
    ahead = pipeline.partner is not None or bool(automatic and args.ampipe_partner)
    if automatic:
        pipeline = replace(pipeline, degree=2, backward_degree=2)

    def peak(memory: str) -> float:
        return peak_bytes(
            block,
            replace(pipeline, memory=memory),
            num_layers=num_layers * passes + ahead,
            dense_layers={num_layers * index + layer for index in range(passes) for layer in layers.dense},
            local=args.transformer_impl == "local",
        )

    if cluster_file is None:
        compared = "the least work done again"
        kept = [Kept(memory, peak(memory)) for memory in by_work(pipeline.backward_degree)]
    else:
        shares = boundary(args, whole_attention=pipeline.whole_attention) is None
        cluster = read_cluster(find_cluster(cluster_file, flag="--ampipe-cluster"))
        predictor = Predictor(block, cluster, num_layers=pipeline.stack_of(num_layers) if shares else 1)
        compared = f"the fastest by {cluster_file}"
        kept = simulated(predictor, pipeline, peak)
    if automatic:
        kept = [choice for choice in kept if choice.memory in STRATEGIES]
    chosen = fitting(kept, limit)
    if chosen is None:
        least = min(kept, key=lambda choice: choice.peak_bytes)
        needed = size_to_text(least.peak_bytes)
        setting = SETTING["memory_budget"]
        raise setting.refuse(
            budget,
            f"is too small: the leanest strategy, {least.memory}, needs about {needed}",
            f"Use at least {setting.flag} {needed}, --recompute-granularity full, a shorter sequence, or "
            "more ranks.",
        )
    by_name = {choice.memory: choice for choice in kept}
    others = ", ".join(
        f"{name} {size_to_text(by_name[name].peak_bytes)}"
        for name in STRATEGIES
        if name in by_name and name != chosen.memory
    )
    return Plan(
        pipeline=replace(given, memory=chosen.memory),
        reason=f"{compared} within {budget}: predicted peak of the layers' activations "
        f"{size_to_text(chosen.peak_bytes)} ({others})",
    )


def in_flight(args: argparse.Namespace) -> int:
    """The largest number of forward passes of a (virtual) pipeline stage that wait for their backward."""
    stages = args.pipeline_model_parallel_size
    virtual = args.virtual_pipeline_model_parallel_size or 1
    waiting = waiting_passes(stages, virtual) + bool(virtual > 1 and args.ampipe_partner)
    return int(min(waiting, _passes_of_step(args)))


def _passes_of_step(args: argparse.Namespace) -> int:
    """Number of forward passes of a rank through its (virtual) pipeline stages in a training step."""
    microbatches: int = -(-args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    return microbatches * (args.virtual_pipeline_model_parallel_size or 1)
