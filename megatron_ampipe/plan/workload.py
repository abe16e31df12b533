"""The sizes of one block on one rank: what :mod:`.cost` turns into times. :mod:`.model` makes one."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ampipe.block_features import block_features
from megatron_ampipe.plan.cluster import Dtype
from megatron_ampipe.schedule import BlockFeatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One transformer block with an MoE layer, and how it is spread over ranks.

    Attributes:
        sequence_length: Rows of the whole sequence.
        batch: Sequences of a micro-batch.
        hidden: Width of the residual stream.
        heads: Query heads, over all tensor-parallel ranks.
        head_size: Width of a query or key head.
        value_size: Width of a value head.
        projections: ``(k, n)`` of every matrix product that makes queries, keys and values, over all ranks.
        key_value_width: Width of a row of keys and values together, over all ranks.
        experts: Experts over all ranks.
        topk: Experts of a token.
        ffn: Width inside an expert.
        gated: Experts have a gate in addition to the up-projection (SwiGLU).
        shared_ffn: Width inside the shared experts together; None without.
        capacity: Capacity factor; None if no token is dropped.
        capacity_per_chunk: Every chunk has its own capacity (``--ampipe-capacity-scope chunk``).
        padded: Megatron's own layer pads every expert's input to its capacity.
        imbalance: Load of the busiest rank of a group over the mean.
        grouped: The local experts run as one grouped product.
        dispatcher: ``alltoall`` or ``allgather``.
        dtype: Of matrix products. Activations of ``fp8`` are 16 bit.
        losses: The router has auxiliary or z losses.
        window: Earlier keys that a query sees; None for all.
        latent: Multi-latent attention, whose projection is not cut into chunks.
        fused_gradients: Weight gradients are added to the main gradient by the product that makes them.
        tensor: Tensor-parallel ranks (with sequence parallelism).
        context: Context-parallel ranks.
        expert: Expert-parallel ranks.
        expert_tensor: Ranks that share one expert.
        recomputes: The forward pass runs again before the backward pass.
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

    @property
    def rows(self) -> int:
        """Rows of the residual stream that one rank holds; what is cut into chunks."""
        return self.sequence_length // (self.tensor * self.context)

    @property
    def element_bytes(self) -> int:
        """Size of one number of an activation."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.experts // self.expert

    @property
    def features(self) -> BlockFeatures:
        """What the block contains, for its schedule."""
        return block_features(
            losses=self.losses,
            shared_size=self.shared_ffn,
            capacity_factor=self.capacity,
            capacity_per_chunk=self.capacity_per_chunk,
            sequence_ranks=self.tensor * self.context,
            latent=self.latent,
        )
