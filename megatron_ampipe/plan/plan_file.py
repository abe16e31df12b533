"""A plan: how to run the blocks of a model, and why; and its file, for ``--ampipe-plan``.

The file also says for which block and machines the plan was made: a run makes the same record from its flags
and compares the two. Reading checks the format; ``schedule.check`` checks whether the plan fits a block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.inputs import load, refuse
from megatron_ampipe.files.records import read_record, write_record
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import (
    KEEP,
    Exchange,
    Pipeline,
    Schedule,
    check_memory,
    even_chunks,
    from_text,
    to_text,
)

SHARE_TOLERANCE = 1e-3
"""Allowed deviation of the sum of a file's shares from 1."""


def _size(flag: str, of: str | Callable[[Workload], object], **default: Any) -> Any:
    """A size of the block or of its parallelism: a plan with another value cannot be used.

    Args:
        flag: Megatron's flag, or a description.
        of: The attribute of a workload, or a function of it.
        default: Of the field.
    """
    return field(metadata={"flag": flag, "of": of, "essential": True}, **default)


def _figure(flag: str, of: str, **default: Any) -> Any:
    """A setting that changes the time of stages, but not which stages there are or their inputs."""
    return field(metadata={"flag": flag, "of": of, "essential": False}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFor:
    """The block and the machines that a plan was made for. Sizes are those of Megatron's flags."""

    seq_length: int = _size("--seq-length", "sequence_length")
    hidden_size: int = _size("--hidden-size", "hidden")
    num_attention_heads: int = _size("--num-attention-heads", "heads")
    query_head_size: int = _size("--kv-channels (or --qk-head-dim + --qk-pos-emb-head-dim)", "head_size")
    value_head_size: int = _size("--v-head-dim", "value_size")
    attention_projections: str = _size(
        "query, key and value projections", lambda work: " ".join(f"{k}x{n}" for k, n in work.projections)
    )
    window_size: str | None = _size(
        "--window-size", lambda work: None if work.window is None else f"{work.window},0", default=None
    )
    num_experts: int = _size("--num-experts", "experts")
    moe_router_topk: int = _size("--moe-router-topk", "topk")
    moe_ffn_hidden_size: int = _size("--moe-ffn-hidden-size", "ffn")
    swiglu: bool = _size("--swiglu", "gated")
    moe_shared_expert_intermediate_size: int | None = _size(
        "--moe-shared-expert-intermediate-size", "shared_ffn", default=None
    )
    tensor_model_parallel_size: int = _size("--tensor-model-parallel-size", "tensor")
    context_parallel_size: int = _size("--context-parallel-size", "context")
    cp_comm_type: str | None = _size(
        "--cp-comm-type", lambda work: "p2p" if work.ring else None, default=None
    )
    expert_model_parallel_size: int = _size("--expert-model-parallel-size", "expert")
    expert_tensor_parallel_size: int = _size("--expert-tensor-parallel-size", "expert_tensor")
    micro_batch_size: int = _figure("--micro-batch-size", "batch")
    precision: str = _figure("precision", "dtype")
    moe_token_dispatcher_type: str = _figure("--moe-token-dispatcher-type", "dispatcher")
    moe_expert_capacity_factor: float | None = _figure(
        "--moe-expert-capacity-factor", "capacity", default=None
    )
    moe_grouped_gemm: bool = _figure("--moe-grouped-gemm", "grouped")
    condense: float | None = _size("--ampipe-condense", "condense", default=None)
    gradient_accumulation_fusion: bool = _figure("gradient accumulation fusion", "fused_gradients")
    full_recompute: bool = _figure("--recompute-granularity full", "recomputes")
    ranks_per_node: int = field(metadata={"flag": "ranks of a node", "essential": False})
    cluster: str = field(metadata={"flag": None})
    """A description; not compared, because a run has none."""

    @classmethod
    def of(cls, workload: Workload, *, cluster: str, ranks_per_node: int) -> MadeFor:
        """The record of a workload on these machines."""
        values = {
            one.name: getattr(workload, of) if isinstance(of, str) else of(workload)
            for one in dataclasses.fields(cls)
            if (of := one.metadata.get("of")) is not None
        }
        return cls(**values, cluster=cluster, ranks_per_node=ranks_per_node)


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting in which a run differs from what a plan was made for.

    Attributes:
        flag: Megatron's flag, or a description.
        planned: Its value in the plan.
        running: Its value in the run.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to run every block of a model.

    Predictions are None in a plan that a run found by measuring (``--ampipe-save-plan``). They are of all
    layers that share a schedule, of a block if none do.

    Attributes:
        schedule: Degrees of both directions and the order of the stages; it repeats if layers share it.
        shares: Share of the sequence in each chunk, with a sum of 1; the number of chunks is the larger
            degree.
        stack: How many consecutive layers share the schedule: 1 is block by block, 0 all of a pipeline stage.
        memory: What the experts keep for their backward, see ``Pipeline.memory``.
        exchange: How the all-to-all groups copies of a token.
        num_layers: Of how many layers the predictions are.
        stock_ms: Predicted time of Megatron's own layers, forward and backward.
        predicted_ms: Predicted time with this plan.
        stages_forward_ms: Predicted time of a forward pass from the start of its first stage to the end of
            its last one, which is what a run's recorder measures.
        stages_backward_ms: The same of a backward pass, without the forward pass of a recompute.
        hidden_share: Share of the communication that is hidden under computation, 0 to 1.
        memory_gib: Estimated peak of one block's activations.
        reason: Why this plan, in one sentence.
        made_for: The block and the machines; None if it was removed to run the plan for another block.
    """

    schedule: Schedule
    shares: tuple[float, ...]
    stack: int = 1
    memory: str = KEEP
    exchange: Exchange = Exchange.ROWS
    num_layers: int = 1
    stock_ms: float | None = None
    predicted_ms: float | None = None
    stages_forward_ms: float | None = None
    stages_backward_ms: float | None = None
    hidden_share: float | None = None
    memory_gib: float | None = None
    reason: str
    made_for: MadeFor | None = None

    @property
    def forward_degree(self) -> int:
        """Degree of the forward pass."""
        return self.schedule.degree

    @property
    def backward_degree(self) -> int:
        """Degree of the backward pass."""
        return self.schedule.backward_degree

    @property
    def predicted_speedup(self) -> float:
        """Speedup over Megatron's own layers; only for a plan with predictions."""
        assert self.stock_ms is not None and self.predicted_ms is not None
        return self.stock_ms / self.predicted_ms

    @property
    def helps(self) -> bool:
        """Whether the blocks run otherwise than Megatron's: in chunks, or with another exchange."""
        return not self.pipeline().is_stock

    @property
    def stages_ms(self) -> tuple[float, float] | None:
        """Predicted time from first to last stage, forward and backward; None without a prediction."""
        if self.stages_forward_ms is None or self.stages_backward_ms is None:
            return None
        return self.stages_forward_ms, self.stages_backward_ms

    def pipeline(self, *, rows: int | None = None) -> Pipeline:
        """The pipeline of the blocks.

        The order of the file is used even if its name is that of a named schedule: it may have been edited.

        Args:
            rows: Rows of the residual stream of one rank, to recognize equal chunks; None if not known.
        """
        equal = rows is not None and self._are_equal(rows)
        return Pipeline(
            degree=self.forward_degree,
            backward_degree=self.backward_degree,
            shares=None if equal else self.shares,
            order=self.schedule,
            stack=self.stack,
            memory=self.memory,
            exchange=self.exchange,
        )

    def _are_equal(self, rows: int) -> bool:
        """Whether the shares of this number of rows are the lengths of equal chunks."""
        even = even_chunks(rows, len(self.shares))
        return (max(self.shares) - min(self.shares)) * rows < 1 + 1e-6 or all(
            abs(share * rows - length) < 0.5 for share, length in zip(self.shares, even, strict=True)
        )

    def write(self, path: Path, *, head: str) -> None:
        """Write the file; it appears under its name only when it is whole.

        ``head`` is a comment for the first line, such as the command that made it.
        """
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        record = _PlanFile(
            **values | {"schedule": to_text(self.schedule), "exchange": self.exchange.value},
            format="ampipe-plan-1",
            forward_degree=self.forward_degree,
            backward_degree=self.backward_degree,
        )
        write_record(path, record, head=head)

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read a file of :meth:`write`, or one that was written by hand.

        Raises:
            BadInput: the file is wrong; the message names file, line and key.
        """
        top = load(path, what="plan", remedy="Give a file that ampipe plan --output wrote.")
        found, lines = read_record(path, _PlanFile, top)
        try:
            schedule = from_text(found.schedule)
        except BadInput as error:
            refuse(path, lines["schedule"], f"{error.name} {error.value}", error.rule, error.remedy)
        degrees = {"forward_degree": schedule.degree, "backward_degree": schedule.backward_degree}
        for key, inside in degrees.items():
            if getattr(found, key) != inside:
                shown = f"{key} {getattr(found, key)}"
                refuse(path, lines[key], shown, f"the schedule has {inside}", f"Write {inside}.")
        chunks = schedule.num_chunks
        if len(found.shares) != chunks:
            rule = f"has {len(found.shares)} shares for {chunks} chunks"
            refuse(path, lines["shares"], "shares", rule, "Give one share for each chunk.")
        if (found.hidden_share or 0.0) > 1:
            shown = f"hidden_share {found.hidden_share:g}"
            refuse(path, lines["hidden_share"], shown, "is a share, from 0 to 1", "Write for example 0.9.")
        try:
            check_memory(found.memory, backward_degree=schedule.backward_degree)
        except BadInput as error:
            refuse(path, lines["memory"], f"memory {error.value}", error.rule, f"Write {KEEP}.")
        total = sum(found.shares)
        if min(found.shares) <= 0 or abs(total - 1) > SHARE_TOLERANCE:
            rule = f"must be above 0 with a sum of 1; the sum is {total:g}"
            refuse(path, lines["shares"], "shares", rule, "Write for example [0.5, 0.5].")
        values = {one.name: getattr(found, one.name) for one in dataclasses.fields(cls)}
        values |= {"schedule": schedule, "exchange": Exchange(found.exchange)}
        return cls(**values | {"shares": tuple(share / total for share in found.shares)})


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlanFile:
    """The format of the file; see :class:`Plan`."""

    format: Literal["ampipe-plan-1"]
    forward_degree: int
    backward_degree: int
    shares: tuple[float, ...]
    stack: int = field(default=1, metadata={"minimum": 0})
    memory: str = KEEP
    exchange: Literal["rows", "ranks", "nodes", "2dh"] = "rows"
    made_for: MadeFor | None = None
    schedule: str
    num_layers: int = 1
    stock_ms: float | None = None
    predicted_ms: float | None = None
    stages_forward_ms: float | None = None
    stages_backward_ms: float | None = None
    hidden_share: float | None = None
    memory_gib: float | None = None
    reason: str
