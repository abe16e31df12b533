"""What a block consists of for the runtime: what its stages compute, and in which order they run.

The layer implements :class:`BlockStages`; :class:`CompiledSchedule` is a schedule made ready for an executor.
Both are read by :mod:`.block_call`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.collectives import Transport
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    Direction,
    Schedule,
    Stage,
    StageKind,
    dependencies,
    issue_order,
)

# S sequence rows, B batch, D hidden size, T tokens in the order in which they travel, H heads.


class BlockStages(Protocol):
    """What one pass through a layer computes. The layer makes one for every forward call."""

    chunks: Sequence[Chunk]
    counts_group: dist.ProcessGroup
    """Ranks that exchange :meth:`counts`."""
    recomputed: Collection[StageKind]
    """Kinds of stages of which only the inputs are kept, and that run again in the backward pass."""

    def parameters(self, kind: StageKind) -> Sequence[Parameter]:
        """The trainable parameters that stages of this kind use."""

    def qkv(self, chunk: Chunk, hidden: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to queries, keys and values, each ``[rows, B, heads, head size]``."""

    def attention(
        self,
        chunk: Chunk,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        *,
        sums: KeyValueSums | None,
    ) -> tuple[Tensor, ...]:
        """Rows of one chunk to ``(residual, normed)``, both ``[rows, B, D]``.

        Its backward may add the gradients of ``key`` and ``value`` to ``sums``, and give none of its own.
        """

    def route(self, index: int, normed: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to ``(tokens [T, D], probs [T], logits [rows, B, E])``."""

    def counts(self, index: int) -> Tensor:
        """What the other ranks must know of the routing of chunk ``index`` before its tokens can travel."""

    def set_counts(self, index: int, gathered: Tensor) -> None:
        """Take :meth:`counts` of all ranks, one after another."""

    def transport(self, index: int) -> Transport:
        """How the tokens of chunk ``index`` travel; may wait for the counts to reach the host."""

    def losses(self, *logits: Tensor) -> tuple[Tensor, ...]:
        """All chunks' router logits to one fp32 number whose backward adds the gradient of the losses."""

    def shared(self, normed: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` through the shared experts."""

    def expert(self, index: int, tokens: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """Received tokens ``[T, D]`` through the local experts, to ``[T, D]``."""

    def merge(self, index: int, combined: Tensor, residual: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """``combined [T, D]`` back in place, plus shared and residual, to ``[rows, B, D]``."""


@dataclass(frozen=True, slots=True)
class CompiledSchedule:
    """A schedule made ready for one executor: what can be derived once, for both directions.

    Attributes:
        features: Of the block.
        needs: What each stage waits for.
        order: Lanes and stages in issue order.
        parts: Each stage as the same stage of each of its chunks: several where the other direction has the
            larger degree.
    """

    features: BlockFeatures
    needs: dict[Direction, dict[Stage, tuple[Stage, ...]]]
    order: dict[Direction, tuple[tuple[str, Stage], ...]]
    parts: dict[Direction, dict[Stage, tuple[Stage, ...]]]

    @classmethod
    def of(cls, schedule: Schedule, *, features: BlockFeatures, executor: Executor) -> CompiledSchedule:
        """Derive both directions from a schedule that was checked."""
        needs = {
            direction: dependencies(
                features,
                degree=schedule.degree_of(direction),
                whole_attention=schedule.whole_attention,
                direction=direction,
            )
            for direction in Direction
        }
        order = {
            direction: issue_order(
                schedule.program(direction), needs[direction], host_waits=executor.host_waits
            )
            for direction in Direction
        }
        parts = {
            direction: {stage: schedule.chunks_of(stage, direction) for stage in needs[direction]}
            for direction in Direction
        }
        return cls(features, needs, order, parts)
