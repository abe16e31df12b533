"""The sizes of one block on one rank, and the rows of its chunks. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any, get_args

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.plan.cluster import Dtype, FlexBackend
from megatron_ampipe.schedule import (
    BlockFeatures,
    Exchange,
    SequenceLayout,
    Span,
    even_chunks,
    useful_exchanges,
)
from megatron_ampipe.schedule.chunks import cut, have_whole_tiles
from megatron_ampipe.schedule.features import BALANCED, features_of_settings

PROBABILITY_BYTES = 4
FLEX_BACKENDS = get_args(FlexBackend)


def _of_plan(
    flag: str, *, essential: bool = True, text: Callable[[Any], object] = lambda value: value, **default: Any
) -> Any:
    """A field that a plan file records, as ``text``; another value of an essential one makes it useless."""
    return field(metadata={"flag": flag, "essential": essential, "text": text}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One transformer block with an MoE layer, and how it is distributed over ranks.

    Fields with a flag are as Megatron has it. Widths are over all tensor-parallel ranks.

    Attributes:
        value_size: Width of a value head.
        projections: ``(k, n)`` of every matrix product that computes queries, keys and values.
        key_value_width: Width of a row of keys and values together.
        ffn: Hidden size of an expert; likewise of the shared experts together, and of layers without experts.
        capacity: Capacity factor; None for dropless routing.
        chooses: The router chooses for all tokens at once (``schedule.features.chooses_at_once``).
        padded: Megatron's own layer pads every expert's input to its capacity.
        imbalance: Tokens of the expert-parallel rank with the most, divided by the mean.
        dispatcher: ``alltoall``, ``allgather``, or the backend of ``flex`` (:data:`FLEX_BACKENDS`).
        dtype: Of matrix products. With ``fp8``, activations have 16 bits.
        fp8_tile: Of how many tokens a chunk must have a multiple (``schedule.features.FP8_TILES``).
        window: Number of earlier keys that a query attends to; None for all.
        latent: Multi-latent attention, whose projection is not split into chunks.
        fused_gradients: Weight gradients are accumulated in the GEMM that computes them.
        tensor: Tensor-parallel ranks (with sequence parallelism).
        ring: Context-parallel ranks pass keys and values on to one another rather than gather them.
        ranks_per_node: Of all ranks, those of a node; None if that is not known. Says over which links ranks
            that share an expert gather, and tensor-parallel ranks scatter.
        recomputes: Full recompute: the forward pass runs again before the backward pass.
        recompute_modules: Of ``--recompute-granularity selective``.
        exchange: How the all-to-all groups copies of a token; Megatron's own layer has ``rows``.
        splits_weights: Gradients of all weights can be separate stages: those of the experts are, too.
        rows_seen: Rows of a token for numbers of places, see :meth:`rows_to`, as a training recorded them;
            for others, experts are evenly used.
        condense: The threshold of ``--ampipe-condense``; None if every token is sent.
        replicas: Ranks over which gradients of all parameters but those of experts are reduced.
        shards_optimizer: A rank gets a share of the reduced gradients.
        places_reductions: Gradients are reduced in stages (``--ampipe-grad-reduce placed``).
    """

    sequence_length: int = _of_plan("--seq-length")
    batch: int = _of_plan("--micro-batch-size", essential=False)
    hidden: int = _of_plan("--hidden-size")
    heads: int = _of_plan("--num-attention-heads")
    head_size: int = _of_plan("query head size")
    value_size: int = _of_plan("value head size")
    projections: tuple[tuple[int, int], ...] = _of_plan(
        "attention projections", text=lambda products: " ".join(f"{k}x{n}" for k, n in products)
    )
    key_value_width: int
    experts: int = _of_plan("--num-experts")
    topk: int = _of_plan("--moe-router-topk")
    ffn: int = _of_plan("--moe-ffn-hidden-size")
    gated: bool = _of_plan("--swiglu")
    shared_ffn: int | None = _of_plan("--moe-shared-expert-intermediate-size", default=None)
    dense_ffn: int | None = None
    capacity: float | None = _of_plan("--moe-expert-capacity-factor", essential=False, default=None)
    capacity_per_chunk: bool = False
    chooses: bool = False
    padded: bool = False
    imbalance: float = 1.0
    grouped: bool = _of_plan("--moe-grouped-gemm", essential=False, default=False)
    dispatcher: str = _of_plan("--moe-token-dispatcher-type", essential=False, default="alltoall")
    dtype: Dtype = _of_plan("precision", essential=False)  # noqa: RUF009
    fp8_tile: int = 1
    losses: bool = False
    window: int | None = _of_plan(
        "--window-size", text=lambda keys: None if keys is None else f"{keys},0", default=None
    )
    latent: bool = False
    fused_gradients: bool = _of_plan("gradient accumulation fusion", essential=False, default=True)
    tensor: int = _of_plan("--tensor-model-parallel-size", default=1)
    context: int = _of_plan("--context-parallel-size", default=1)
    ring: bool = _of_plan("--cp-comm-type", text=lambda ring: "p2p" if ring else None, default=False)
    expert: int = _of_plan("--expert-model-parallel-size", default=1)
    expert_tensor: int = _of_plan("--expert-tensor-parallel-size", default=1)
    ranks_per_node: int | None = None
    recomputes: bool = _of_plan("full recompute", essential=False, default=False)
    recompute_modules: tuple[str, ...] = ()
    exchange: Exchange = Exchange.ROWS
    local: bool = False
    splits_weights: bool = False
    rows_seen: tuple[tuple[int, float], ...] = ()
    condense: float | None = _of_plan("--ampipe-condense", default=None)
    replicas: int = 1
    expert_replicas: int = 1
    shards_optimizer: bool = False
    places_reductions: bool = False

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
    def load(self) -> float:
        """Rows of the rank with the most, divided by the mean."""
        return self.imbalance if self.capacity is None else min(self.capacity, self.imbalance)

    def received(self, rows: int) -> float:
        """Rows that the local experts compute for so many of the residual stream."""
        return rows * self.batch * self.topk * self.load * self.expert_tensor

    def row_bytes(self, probabilities: int) -> int:
        """Of a row that travels with so many probabilities."""
        return self.hidden * self.element_bytes + PROBABILITY_BYTES * probabilities

    @property
    def flex(self) -> bool:
        """Whether the dispatcher is Megatron's flex dispatcher, which sends a token once to each place."""
        return self.dispatcher in FLEX_BACKENDS

    @property
    def sends_every_copy(self) -> bool:
        """Whether a row is of one expert."""
        return self.exchange.sends_every_copy and not self.flex

    @property
    def arriving_probabilities(self) -> int:
        """Probabilities that arrive at a rank with a row: one for each expert that it may be for."""
        return 1 if self.sends_every_copy else self.local_experts

    @property
    def rows_of_tile(self) -> int:
        """Of how many rows a chunk must have a multiple."""
        return self.fp8_tile // math.gcd(self.fp8_tile, self.batch)

    def splits_into(self, degree: int) -> bool:
        """Whether the rows can be cut into so many equal chunks."""
        return degree <= self.rows and have_whole_tiles(even_chunks(self.rows, degree), self.rows_of_tile)

    @property
    def rows_per_token(self) -> float:
        """Rows that experts' ranks receive for a token, its own rank included."""
        return self.topk if self.sends_every_copy else self.rows_to(self.expert)

    def rows_to(self, places: int) -> float:
        """Rows of a token if each of so many ranks or nodes, between which the experts are divided, gets one.

        As recorded, or else as if experts were evenly used.
        """
        return dict(self.rows_seen).get(places) or even_rows(self.experts, self.topk, places)

    def exchanges(self, ranks_per_node: int | None) -> tuple[Exchange, ...]:
        """What the layers can choose from (``refusals.exchanges_of``)."""
        return useful_exchanges(self.settings, self.experts, ranks_per_node)

    @property
    def features(self) -> BlockFeatures:
        """What the block contains, for a schedule that it does not share."""
        return self.features_of(shares_schedule=False)

    def features_of(self, *, shares_schedule: bool) -> BlockFeatures:
        """What the block contains, for its schedule or for one that it shares with other layers."""
        own = Settings(
            capacity_scope="chunk" if self.capacity_per_chunk else "sequence",
            condense=self.condense,
            ranks_per_node=self.ranks_per_node,
        )
        return replace(
            features_of_settings(self.settings, own, shares_schedule=shares_schedule, local=self.local),
            # Layers that share a schedule recompute as a part of it.
            recomputed=shares_schedule and self.recomputes,
            reduces=self.places_reductions,
            reduces_experts=self.places_reductions and self.expert_replicas > 1,
        )

    @property
    def settings(self) -> SimpleNamespace:
        """Settings of Megatron from which a block like this follows."""
        return SimpleNamespace(
            tensor_model_parallel_size=self.tensor,
            sequence_parallel=True,
            context_parallel_size=self.context,
            cp_comm_type="p2p" if self.ring else "all_gather",
            # Whether they pass keys on is known.
            attention_dropout=0.0,
            window_size=None,
            multi_latent_attention=self.latent,
            expert_model_parallel_size=self.expert,
            expert_tensor_parallel_size=self.expert_tensor,
            moe_router_topk=self.topk,
            moe_token_dispatcher_type="flex" if self.flex else self.dispatcher,
            moe_flex_dispatcher_backend=self.dispatcher,
            moe_shared_expert_intermediate_size=self.shared_ffn,
            moe_expert_capacity_factor=self.capacity,
            # A kind of balancing that chooses at once stands for all that does.
            moe_token_drop_policy="position",
            moe_router_load_balancing_type=BALANCED[0] if self.chooses else "none",
            moe_aux_loss_coeff=0.0,
            moe_z_loss_coeff=0.0 if self.losses else None,
            recompute_granularity=None,
        )

    @property
    def stock(self) -> Block:
        """The same block as Megatron's own layer runs it: padding fills every expert's capacity."""
        plain = replace(self, exchange=Exchange.ROWS, ring=False, condense=None)
        if self.capacity is None or not self.padded:
            return plain
        return replace(plain, capacity=None, imbalance=self.capacity)


RECORDED = {
    row.metadata["flag"].removeprefix("--ampipe-").strip("-").replace("-", "_").replace(" ", "_"): row
    for row in fields(Block)
    if "flag" in row.metadata
}
"""The fields that a plan file records, by their keys there."""


def even_rows(experts: int, topk: int, places: int) -> float:
    """Rows of a token if each of so many places, between which the experts are divided, gets one.

    Every choice of ``topk`` experts is equally likely. A place gets the token unless all of its experts are
    among those of the other places.
    """
    others = experts - experts // places
    return places * (1 - math.comb(others, topk) / math.comb(experts, topk))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one chunk.

    Attributes:
        hidden: Rows of the residual stream of one rank.
        pairs: Unmasked query-key pairs of the chunk's query rows, on the rank with the most pairs.
        keys: Number of keys that at least one of these queries attends to.
        merged: Query rows that also attend to keys of earlier chunks.
    """

    hidden: int
    pairs: int
    keys: int
    merged: int


def chunk_rows(block: Block, lengths: Sequence[int], *, shares_schedule: bool = False) -> tuple[Rows, ...]:
    """The rows, and the sizes of the attention, of each chunk.

    Args:
        block: The block.
        lengths: Rows of the residual stream of one rank in each chunk.
        shares_schedule: Every tensor-parallel rank holds a part of every chunk.
    """
    assert sum(lengths) == block.rows and min(lengths) > 0, lengths
    by_rank = []
    # With zigzag slices, the first or the last context-parallel rank has the most pairs of a chunk.
    for rank in {0, block.context - 1}:
        layout = SequenceLayout(
            tensor_ranks=block.tensor,
            context_ranks=block.context,
            context_rank=rank,
            by_chunk=shares_schedule,
        )
        by_rank.append(cut(lengths, layout, sequence_length=block.sequence_length))
    rows = []
    for length, chunks in zip(lengths, zip(*by_rank, strict=True), strict=True):
        pairs = [sum(_pairs(span, block.window) for span in chunk.queries) for chunk in chunks]
        heaviest = chunks[pairs.index(max(pairs))]
        merged = sum(span.length for span in heaviest.queries if span.global_start)
        rows.append(Rows(length, max(pairs), heaviest.num_keys, merged))
    return tuple(rows)


def _pairs(span: Span, window: int | None) -> int:
    """Query-key pairs of a span: row ``i`` attends to itself and to the earlier keys within the window."""

    def up_to(end: int) -> int:
        """Over the rows ``[0, end)``."""
        if window is None or end <= window + 1:
            return end * (end + 1) // 2
        return (window + 1) * (window + 2) // 2 + (end - window - 1) * (window + 1)

    return up_to(span.global_end) - up_to(span.global_start)
