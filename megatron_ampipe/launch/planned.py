"""From Megatron's arguments and a cluster file, or from a plan file, to a pipeline. Called by :mod:`.attach`.

The only place where a run meets ``plan``: layers and runtime get a ``schedule.Pipeline``.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import BadInput
from megatron_ampipe.launch.auto import Planner, Shape
from megatron_ampipe.launch.trials import Choice
from megatron_ampipe.plan.cluster import Cluster, find_cluster, read_cluster
from megatron_ampipe.plan.model import ModelFile, workload_of
from megatron_ampipe.plan.plan import Plan, make_plan
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.router_losses import router_has_losses
from megatron_ampipe.schedule import BlockFeatures

_FLAGS = (
    "hidden-size", "num-attention-heads", "kv-channels", "ffn-hidden-size", "num-experts", "seq-length",
    "micro-batch-size", "moe-router-topk", "moe-ffn-hidden-size", "swiglu",
    "moe-shared-expert-intermediate-size", "moe-expert-capacity-factor", "moe-pad-expert-input-to-capacity",
    "moe-grouped-gemm", "recompute-granularity", "group-query-attention", "num-query-groups",
    "multi-latent-attention", "kv-lora-rank", "q-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim",
    "v-head-dim", "tensor-model-parallel-size", "context-parallel-size", "pipeline-model-parallel-size",
    "expert-tensor-parallel-size", "expert-model-parallel-size", "moe-token-dispatcher-type",
    "moe-router-load-balancing-type", "moe-aux-loss-coeff", "moe-z-loss-coeff", "window-size", "bf16", "fp16",
)  # fmt: skip
"""Those that sizes depend on, under the names of a model file."""


def planner_of(args: argparse.Namespace, cluster_file: str) -> Planner:
    """Plans for a shape of input; deterministic, so that every rank that reads the same file plans alike.

    Args:
        args: Megatron's validated arguments.
        cluster_file: What stands behind ``--ampipe-cluster``.

    Raises:
        BadInput: the file is wrong, or lacks a figure that this model needs.
    """
    try:
        path = find_cluster(cluster_file)
    except BadInput as error:
        raise BadInput("--ampipe-cluster", cluster_file, rule=error.rule, remedy=error.remedy) from None
    cluster = read_cluster(path)
    workload = workload_of_args(args, cluster)

    def plan(shape: Shape) -> Choice:
        rows, batch = shape
        length = rows * workload.tensor * workload.context
        of_shape = dataclasses.replace(workload, sequence_length=length, batch=batch)
        found = make_plan(Predictor(of_shape, cluster))
        reason = f"planned from {cluster_file}: {found.reason}"
        return Choice(found.pipeline(rows=rows), reason, found.stages_ms)

    return plan


def read_pipeline(args: argparse.Namespace, plan_file: str) -> Choice:
    """What a plan file says.

    Raises:
        BadInput: the file is wrong, or its order is not one of this model's blocks.
    """
    plan = Plan.read(Path(plan_file))
    rows = args.seq_length // (args.tensor_model_parallel_size * args.context_parallel_size)
    pipeline = plan.pipeline(rows=rows)
    try:
        pipeline.schedule_of(features_of_args(args))
    except BadInput as error:
        raise BadInput(
            "--ampipe-plan",
            plan_file,
            rule=f"is not for the blocks of this model: {error.value} {error.rule}",
            remedy="Make one with ampipe plan from a model file with this run's flags.",
        ) from error
    return Choice(pipeline, f"read from {plan_file}: {plan.reason}", plan.stages_ms)


def features_of_args(args: argparse.Namespace) -> BlockFeatures:
    """What the blocks contain while training, as ``layers.block`` finds it out from the modules."""
    has_capacity = (args.moe_expert_capacity_factor or -1.0) >= 0
    return BlockFeatures(
        losses=router_has_losses(
            args.moe_router_load_balancing_type,
            coefficients=args.moe_aux_loss_coeff,
            z_loss_coefficient=args.moe_z_loss_coeff,
        ),
        shared=args.moe_shared_expert_intermediate_size is not None,
        ordered_routing=has_capacity and args.ampipe_capacity_scope != "chunk",
        chunked_qkv=args.tensor_model_parallel_size * args.context_parallel_size == 1
        and not args.multi_latent_attention,
    )


def workload_of_args(args: argparse.Namespace, cluster: Cluster) -> Workload:
    """The block that Megatron's arguments describe."""
    values: dict[str, Any] = {
        flag: value for flag in _FLAGS if (value := getattr(args, flag.replace("-", "_"), None)) is not None
    }
    values["no-gradient-accumulation-fusion"] = not args.gradient_accumulation_fusion
    workload, _ = workload_of(ModelFile(Path("arguments"), values, {}), cluster, ranks=args.world_size)
    if not args.bf16 and not args.fp16:
        # A model file cannot say so: without a precision, it means the cluster's.
        workload = dataclasses.replace(workload, dtype="fp32")
    return workload
