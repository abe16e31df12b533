"""Makes a pipeline from arguments and a cluster file, or from a plan file. Called by :mod:`.attach`.

In a run, only this module uses ``plan``: layers and runtime receive a ``schedule.Pipeline``.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ampipe.block.hybrid_pattern import HybridPattern
from megatron_ampipe.block.settings import settings_of
from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.auto import Planner
from megatron_ampipe.launch.refusals import exchanges_of, ranks_per_node, recomputes
from megatron_ampipe.launch.size_ranges import Shape
from megatron_ampipe.launch.trials import Choice
from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.model_file import SIZE_FLAGS, ModelFile
from megatron_ampipe.plan.model_workload import StageLayers, layers_of, workload_of
from megatron_ampipe.plan.plan_file import MadeFor, Plan, differences
from megatron_ampipe.plan.planner import make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import KEEP, BlockFeatures, Exchange, SequenceLayout
from megatron_ampipe.schedule.features import boundary, features_of_settings


def planner_of(
    args: argparse.Namespace,
    cluster_file: str,
    *,
    stack: int,
    memory: str = KEEP,
    exchanges: Sequence[Exchange] = (Exchange.ROWS,),
) -> Planner:
    """A planner for input shapes. Deterministic: ranks that read the same file make the same plan.

    Args:
        args: Megatron's validated arguments.
        cluster_file: The value of ``--ampipe-cluster``.
        stack: How many layers may share a schedule, see ``Pipeline.stack``.
        memory: What the experts keep, see ``Pipeline.memory``.
        exchanges: Those that are compared.

    Raises:
        BadInput: the file is wrong, or does not contain a figure that this model needs.
    """
    cluster = cluster_of_flag(cluster_file)
    workload, layers = workload_of_args(args, cluster), layers_of(_model_of_args(args))

    def plan(shape: Shape) -> Choice:
        rows, batch = shape
        length = rows * workload.tensor * workload.context
        of_shape = dataclasses.replace(workload, sequence_length=length, batch=batch)
        predictor = Predictor(
            of_shape, cluster, num_layers=layers.num_layers, dense=layers.dense, memory=memory
        )
        found = make_plan(predictor, stack=stack, exchanges=exchanges)
        reason = f"planned from {cluster_file}: {found.reason}"
        return Choice(found.pipeline(rows=rows), reason, found.stages_ms)

    return plan


def cluster_of_flag(cluster_file: str) -> Cluster:
    """The cluster file that ``--ampipe-cluster`` names.

    Raises:
        BadInput: there is none, or it is wrong.
    """
    try:
        path = find_cluster(cluster_file)
    except BadInput as error:
        raise BadInput("--ampipe-cluster", cluster_file, rule=error.rule, remedy=error.remedy) from None
    return read_cluster(path)


def choice_of_plan(args: argparse.Namespace, plan: Plan, plan_file: str) -> Choice:
    """The pipeline of a plan, with notes on differences between this run and what the plan was made for.

    Args:
        args: Megatron's validated arguments.
        plan: The plan.
        plan_file: Its file, as the user gave it.

    Raises:
        BadInput: the plan was made for other blocks, or its order or chunks do not fit this model's blocks.
    """
    notes = _compare(args, plan, plan_file)
    if plan.memory != KEEP and (module := recomputes(args, "moe")) is not None:
        raise BadInput(
            "--ampipe-plan",
            plan_file,
            rule=f"has memory {plan.memory}, and --recompute-modules {module} computes the experts again",
            remedy="Leave moe out of --recompute-modules.",
        )
    if plan.exchange not in exchanges_of(args):
        raise BadInput(
            "--ampipe-plan",
            plan_file,
            rule=f"is not for the blocks of this model: its exchange {plan.exchange} has nothing to save "
            "there",
            remedy=_REMEDY,
        )
    layout = layout_of_args(args)
    pipeline = plan.pipeline(rows=args.seq_length // (layout.tensor_ranks * layout.context_ranks))
    try:
        # If layers share the order, two show whether it can be repeated.
        shares = plan.stack != 1 and boundary(args, whole_attention=pipeline.whole_attention) is None
        features = pipeline.trained(features_of_args(args, shares_schedule=shares))
        pipeline.schedule_of([features] * (2 if shares else 1))
    except BadInput as error:
        raise BadInput(
            "--ampipe-plan",
            plan_file,
            rule=f"is not for the blocks of this model: {error.value} {error.rule}",
            remedy=_REMEDY,
        ) from error
    try:
        pipeline.chunks(args.seq_length, layout)
    except BadInput as error:
        if error.name == "--seq-length":
            raise
        raise BadInput(
            "--ampipe-plan",
            plan_file,
            rule=f"with its shares {error.value}, {error.rule}",
            remedy=f"Give every chunk at least one row, for example equal shares. {_REMEDY}",
        ) from error
    return Choice(pipeline, f"read from {plan_file}: {plan.reason}", plan.stages_ms, notes)


_REMEDY = "Make one with ampipe plan from a model file with this run's flags."


def _compare(args: argparse.Namespace, plan: Plan, plan_file: str) -> tuple[str, ...]:
    """Notes on the differences from a plan that can be used, one sentence each.

    Raises:
        BadInput: the plan was made for other blocks, or for other parallel sizes.
    """
    if plan.made_for is None:
        return (f"{plan_file} has no section made_for, so it was not compared with this run",)
    found = differences(plan.made_for, made_for_of_args(args))
    essential = [str(one) for one in found if one.essential]
    if essential:
        remedy = f"{_REMEDY} To use this one unchanged, remove its section made_for."
        if args.ampipe_save_plan is not None:
            remedy = "Remove the file, or give another name, to choose again."
        raise BadInput(
            "--ampipe-plan" if args.ampipe_plan is not None else "--ampipe-save-plan",
            plan_file,
            rule=f"is not for the blocks of this model: it was made for {', '.join(essential)}",
            remedy=remedy,
        )
    notes = [f"the plan was made on: {plan.made_for.cluster}"]
    if found:
        notes.append(f"the plan was made for {', '.join(map(str, found))}; its predictions may be wrong")
    return tuple(notes)


def made_for_of_args(args: argparse.Namespace) -> MadeFor:
    """The record of this run's block and machines, to compare with that of a plan."""
    return MadeFor.of(
        dataclasses.replace(workload_of_args(args, None), condense=args.ampipe_condense),
        cluster=f"the machines of a run with {args.world_size} ranks",
        ranks_per_node=ranks_per_node(args) or args.world_size,
    )


def layout_of_args(args: argparse.Namespace) -> SequenceLayout:
    """How the rows of a sequence are distributed over ranks."""
    return SequenceLayout(
        tensor_ranks=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        context_ranks=args.context_parallel_size,
    )


def stage_of_args(args: argparse.Namespace) -> StageLayers:
    """The layers of the (virtual) pipeline stage with most."""
    return layers_of(_model_of_args(args))


def features_of_args(args: argparse.Namespace, *, shares_schedule: bool = False) -> BlockFeatures:
    """The features of the blocks in training."""
    own = dataclasses.replace(settings_of(args), ranks_per_node=ranks_per_node(args))
    local = args.transformer_impl == "local"
    return features_of_settings(args, own, shares_schedule=shares_schedule, local=local)


def workload_of_args(args: argparse.Namespace, cluster: Cluster | None) -> Workload:
    """The workload of Megatron's arguments; the cluster does not change it."""
    workload, _ = workload_of(_model_of_args(args), cluster, ranks=args.world_size)
    # The layers go by the nodes of the run, whatever machines the figures are of.
    workload = dataclasses.replace(workload, ranks_per_node=ranks_per_node(args))
    if not args.bf16 and not args.fp16:
        # A model file has no key for fp32: without a precision, it means that of the cluster.
        workload = dataclasses.replace(workload, dtype="fp32")
    return workload


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
        # Set aside: the layers recompute in place of Megatron.
        values["recompute-granularity"] = "full"
    pattern = HybridPattern.of_arguments(args)
    if pattern is not None and not pattern.runs:
        # Nothing is pipelined.
        del values["hybrid-layer-pattern"]
    values["no-gradient-accumulation-fusion"] = not args.gradient_accumulation_fusion
    return ModelFile(Path("arguments"), values, {}, settings_of(args))
