"""What a plan was made for, as stored in its file: sizes of the block, parallel sizes, machines.

A run makes the same record from its flags and compares the two. Pure. Called by :mod:`.planner` and
``launch``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.workload import Workload


def _size(flag: str, **default: Any) -> Any:
    """A size of the block or of its parallelism: a plan with another value cannot be used."""
    return field(metadata={"flag": flag, "essential": True}, **default)


def _figure(flag: str, **default: Any) -> Any:
    """A setting that changes the time of stages, but not which stages there are or their inputs."""
    return field(metadata={"flag": flag, "essential": False}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFor:
    """The block and the machines that a plan was made for. Sizes are those of Megatron's flags."""

    seq_length: int = _size("--seq-length")
    hidden_size: int = _size("--hidden-size")
    num_attention_heads: int = _size("--num-attention-heads")
    query_head_size: int = _size("--kv-channels (or --qk-head-dim + --qk-pos-emb-head-dim)")
    value_head_size: int = _size("--v-head-dim")
    attention_projections: str = _size("query, key and value projections")
    window_size: str | None = _size("--window-size", default=None)
    num_experts: int = _size("--num-experts")
    moe_router_topk: int = _size("--moe-router-topk")
    moe_ffn_hidden_size: int = _size("--moe-ffn-hidden-size")
    swiglu: bool = _size("--swiglu")
    moe_shared_expert_intermediate_size: int | None = _size(
        "--moe-shared-expert-intermediate-size", default=None
    )
    tensor_model_parallel_size: int = _size("--tensor-model-parallel-size")
    context_parallel_size: int = _size("--context-parallel-size")
    cp_comm_type: str | None = _size("--cp-comm-type", default=None)
    expert_model_parallel_size: int = _size("--expert-model-parallel-size")
    expert_tensor_parallel_size: int = _size("--expert-tensor-parallel-size")
    micro_batch_size: int = _figure("--micro-batch-size")
    precision: str = _figure("precision")
    moe_token_dispatcher_type: str = _figure("--moe-token-dispatcher-type")
    moe_expert_capacity_factor: float | None = _figure("--moe-expert-capacity-factor", default=None)
    moe_grouped_gemm: bool = _figure("--moe-grouped-gemm")
    condense: float | None = _size("--ampipe-condense", default=None)
    gradient_accumulation_fusion: bool = _figure("gradient accumulation fusion")
    full_recompute: bool = _figure("--recompute-granularity full")
    ranks_per_node: int = _figure("ranks of a node")
    cluster: str = field(metadata={"flag": None})
    """A description; not compared, because a run has none."""

    @classmethod
    def of(cls, workload: Workload, *, cluster: str, ranks_per_node: int) -> MadeFor:
        """The record of a workload on these machines."""
        return cls(
            seq_length=workload.sequence_length,
            hidden_size=workload.hidden,
            num_attention_heads=workload.heads,
            query_head_size=workload.head_size,
            value_head_size=workload.value_size,
            attention_projections=" ".join(f"{k}x{n}" for k, n in workload.projections),
            window_size=None if workload.window is None else f"{workload.window},0",
            num_experts=workload.experts,
            moe_router_topk=workload.topk,
            moe_ffn_hidden_size=workload.ffn,
            swiglu=workload.gated,
            moe_shared_expert_intermediate_size=workload.shared_ffn,
            tensor_model_parallel_size=workload.tensor,
            context_parallel_size=workload.context,
            cp_comm_type="p2p" if workload.ring else None,
            expert_model_parallel_size=workload.expert,
            expert_tensor_parallel_size=workload.expert_tensor,
            micro_batch_size=workload.batch,
            precision=workload.dtype,
            moe_token_dispatcher_type=workload.dispatcher,
            moe_expert_capacity_factor=workload.capacity,
            moe_grouped_gemm=workload.grouped,
            condense=workload.condense,
            gradient_accumulation_fusion=workload.fused_gradients,
            full_recompute=workload.recomputes,
            ranks_per_node=ranks_per_node,
            cluster=cluster,
        )

    @classmethod
    def on(cls, workload: Workload, cluster: Cluster) -> MadeFor:
        """The record of a workload on a cluster."""
        return cls.of(workload, cluster=cluster.description, ranks_per_node=cluster.ranks_per_node)


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting in which a run differs from what a plan was made for.

    Attributes:
        flag: Megatron's flag, or a description.
        planned: The value that the plan was made for.
        running: The value of the run.
        essential: Whether the plan cannot be used because of it.
    """

    flag: str
    planned: object
    running: object
    essential: bool

    def __str__(self) -> str:
        return f"{self.flag} {_shown(self.planned)} (this run: {_shown(self.running)})"


def differences(planned: MadeFor, running: MadeFor) -> tuple[Difference, ...]:
    """Every field in which the two records differ, in the order of the file."""
    return tuple(
        Difference(one.metadata["flag"], before, now, one.metadata["essential"])
        for one in dataclasses.fields(MadeFor)
        if one.metadata["flag"] is not None
        and (before := getattr(planned, one.name)) != (now := getattr(running, one.name))
    )


def _shown(value: object) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
