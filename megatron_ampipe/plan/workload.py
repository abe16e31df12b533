"""The sizes of one block on one rank, the input of :mod:`.cost`. Made by :mod:`.model`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron_ampipe.block_features import block_features
from megatron_ampipe.plan.cluster import Dtype
from megatron_ampipe.schedule import BlockFeatures, Exchange, useful_exchanges


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One transformer block with an MoE layer, and how it is distributed over ranks.

    Attributes:
        sequence_length: Rows of the whole sequence.
        batch: Sequences of a micro-batch.
        hidden: Width of the residual stream.
        heads: Query heads, over all tensor-parallel ranks.
        head_size: Width of a query or key head.
        value_size: Width of a value head.
        projections: ``(k, n)`` of every matrix product that computes queries, keys and values, over all
            tensor-parallel ranks.
        key_value_width: Width of a row of keys and values together, over all tensor-parallel ranks.
        experts: Number of experts, over all ranks.
        topk: Number of experts of a token.
        ffn: Hidden size of an expert.
        gated: Experts have a gate in addition to the up-projection (SwiGLU).
        shared_ffn: Total hidden size of the shared experts; None if there are none.
        dense_ffn: Hidden size of the MLP of layers without experts; None if all layers have experts.
        capacity: Capacity factor; None for dropless routing.
        capacity_per_chunk: Every chunk has its own capacity (``--ampipe-capacity-scope chunk``).
        padded: Megatron's own layer pads every expert's input to its capacity.
        imbalance: Tokens of the expert-parallel rank with the most, divided by the mean.
        grouped: The local experts run as one grouped GEMM.
        dispatcher: ``alltoall`` or ``allgather``.
        dtype: Dtype of matrix products. With ``fp8``, activations have 16 bits.
        losses: The router has auxiliary or z losses.
        window: Number of earlier keys that a query attends to; None for all.
        latent: Multi-latent attention, whose projection is not split into chunks.
        fused_gradients: Weight gradients are accumulated in the GEMM that computes them.
        tensor: Tensor-parallel ranks (with sequence parallelism).
        context: Context-parallel ranks.
        expert: Expert-parallel ranks.
        expert_tensor: Expert-tensor-parallel ranks, which share one expert.
        recomputes: Full recompute: the forward pass runs again before the backward pass.
        exchange: How often a token is sent (``--ampipe-exchange``); Megatron's own layer has ``rows``.
        splits_weights: Gradients of weights can be separate stages: linear layers are Megatron's local
            ones.
    """

    sequence_length: int
    batch: int
    hidden: int
    heads: int
    head_size: int
    value_size: int
    projections: tuple[tuple[int, int], ...]
    key_value_width: int
    experts: int
    topk: int
    ffn: int
    gated: bool
    shared_ffn: int | None = None
    dense_ffn: int | None = None
    capacity: float | None = None
    capacity_per_chunk: bool = False
    padded: bool = False
    imbalance: float = 1.0
    grouped: bool = False
    dispatcher: str = "alltoall"
    dtype: Dtype
    losses: bool = False
    window: int | None = None
    latent: bool = False
    fused_gradients: bool = True
    tensor: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    recomputes: bool = False
    exchange: Exchange = Exchange.ROWS
    splits_weights: bool = False

    @property
    def rows(self) -> int:
        """Rows of the residual stream on one rank, which are split into chunks."""
        return self.sequence_length // (self.tensor * self.context)

    @property
    def element_bytes(self) -> int:
        """Size of one element of an activation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def local_experts(self) -> int:
        """Number of experts on one rank."""
        return self.experts // self.expert

    @property
    def rows_per_token(self) -> float:
        """Rows that experts' ranks receive for a token, the token's own rank included, if experts are evenly
        used."""
        return self.topk if self.exchange is Exchange.ROWS else self.rows_to(self.expert)

    def rows_to(self, places: int) -> float:
        """Rows of a token if each of so many ranks or nodes, between which the experts are divided, gets one.

        A place gets the token unless all of its experts are among those of the other places.
        """
        others = self.experts - self.experts // places
        return places * (1 - math.comb(others, self.topk) / math.comb(self.experts, self.topk))

    def exchanges(self, ranks_per_node: int | None) -> tuple[Exchange, ...]:
        """What the layers can choose from (``refusal_conditions.exchanges_of``)."""
        return useful_exchanges(
            experts=self.experts,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            topk=self.topk,
            dispatcher=self.dispatcher,
            ranks_per_node=ranks_per_node,
        )

    @property
    def features(self) -> BlockFeatures:
        """What the block contains, for its schedule."""
        return self.features_of(shares_schedule=False)

    def features_of(self, *, shares_schedule: bool) -> BlockFeatures:
        """What the block contains, for its schedule or for one that it shares with other layers."""
        return block_features(
            losses=self.losses,
            shared_size=self.shared_ffn,
            capacity_factor=self.capacity,
            capacity_per_chunk=self.capacity_per_chunk,
            tensor_ranks=self.tensor,
            context_ranks=self.context,
            shares_schedule=shares_schedule,
        )
