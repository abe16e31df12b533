"""The sizes of one block on one rank, and the rows of its chunks. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_args

from megatron_ampipe.block.megatron_settings import Arguments
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
from megatron_ampipe.schedule.row_budget import largest_count, rows_of_budget
from megatron_ampipe.schedule.saved import RecomputeRequest, decide

PROBABILITY_BYTES = 4
FLEX_BACKENDS = get_args(FlexBackend)


def _recorded(
    flag: str, *, essential: bool = True, text: Callable[[Any], object] = lambda value: value, **default: Any
) -> Any:
    """A field that a plan file records, as ``text``. A plan cannot be used if an essential field differs."""
    return field(metadata={"flag": flag, "essential": essential, "text": text}, **default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One transformer block with an MoE layer, and how it is distributed over ranks.

    Fields with a flag have Megatron's meaning. Widths are over all tensor-parallel ranks.

    Attributes:
        value_size: Width of a value head.
        projections: ``(k, n)`` of every matrix product that computes queries, keys and values.
        key_value_width: Width of a row of keys and values together.
        ffn: Hidden size of an expert; ``shared_ffn`` of all shared experts, ``dense_ffn`` of an MLP.
        capacity: Capacity factor; None for dropless routing.
        chooses: The router chooses for all tokens at once (``schedule.features.chooses_at_once``).
        padded: Megatron's own layer pads every expert's input to its capacity.
        imbalance: Tokens of the busiest expert-parallel rank, divided by the mean.
        dispatcher: ``alltoall``, ``allgather``, or the backend of ``flex`` (:data:`FLEX_BACKENDS`).
        dtype: Dtype of matrix products. With ``fp8``, activations have 16 bits.
        fp8_tile: A chunk's tokens must be a multiple of it (``schedule.features.FP8_TILES``).
        window: Number of earlier keys that a query attends to; None for all.
        latent: Multi-latent attention, whose projection is not split into chunks.
        fused_gradients: Weight gradients are accumulated in the GEMM that computes them.
        tensor: Number of tensor-parallel ranks (with sequence parallelism).
        ring: Context-parallel ranks use ring attention instead of gathering keys and values.
        ranks_per_node: Number of all ranks on a node; None if unknown. It determines the links between ranks
            that share an expert, and between tensor-parallel ranks.
        recomputes: Full recompute: the forward pass runs again before the backward pass.
        recompute_modules: The modules of ``--recompute-granularity selective``.
        exchange: How the all-to-all groups copies of a token; Megatron's own layer has ``rows``.
        splits_weights: All weight gradients can be separate stages, including those of experts.
        rows_seen: Rows of a token by number of places, as a training recorded them, see :meth:`rows_to`; for
            other numbers of places, experts are assumed to be evenly used.
        condense: The threshold of ``--ampipe-condense``; None if every token is sent.
        replicas: Number of ranks over which gradients are reduced; ``expert_replicas`` for experts.
        shards_optimizer: A rank gets only a part of the reduced gradients.
        places_reductions: Gradient reductions are stages (``--ampipe-grad-reduce placed``).
        rows_margin: ``--ampipe-rows-margin`` with ``--ampipe-rows fixed``; None for exact rows, as in
            Megatron's layer.
        captures_passes: The pass of a stack is one CUDA graph (``--cuda-graph-impl`` with fixed rows).
    """

    sequence_length: int = _recorded("--seq-length")
    batch: int = _recorded("--micro-batch-size", essential=False)
    hidden: int = _recorded("--hidden-size")
    heads: int = _recorded("--num-attention-heads")
    head_size: int = _recorded("query head size")
    value_size: int = _recorded("value head size")
    projections: tuple[tuple[int, int], ...] = _recorded(
        "attention projections", text=lambda products: " ".join(f"{k}x{n}" for k, n in products)
    )
    key_value_width: int
    experts: int = _recorded("--num-experts")
    topk: int = _recorded("--moe-router-topk")
    ffn: int = _recorded("--moe-ffn-hidden-size")
    gated: bool = _recorded("--swiglu")
    shared_ffn: int | None = _recorded("--moe-shared-expert-intermediate-size", default=None)
    dense_ffn: int | None = None
    capacity: float | None = _recorded("--moe-expert-capacity-factor", essential=False, default=None)
    capacity_per_chunk: bool = False
    chooses: bool = False
    padded: bool = False
    imbalance: float = 1.0
    grouped: bool = _recorded("--moe-grouped-gemm", essential=False, default=False)
    dispatcher: str = _recorded("--moe-token-dispatcher-type", essential=False, default="alltoall")
    dtype: Dtype = _recorded("precision", essential=False)  # noqa: RUF009
    fp8_tile: int = 1
    losses: bool = False
    window: int | None = _recorded(
        "--window-size", text=lambda keys: None if keys is None else f"{keys},0", default=None
    )
    latent: bool = False
    fused_gradients: bool = _recorded("gradient accumulation fusion", essential=False, default=True)
    tensor: int = _recorded("--tensor-model-parallel-size", default=1)
    context: int = _recorded("--context-parallel-size", default=1)
    ring: bool = _recorded("--cp-comm-type", text=lambda ring: "p2p" if ring else None, default=False)
    expert: int = _recorded("--expert-model-parallel-size", default=1)
    expert_tensor: int = _recorded("--expert-tensor-parallel-size", default=1)
    ranks_per_node: int | None = None
    recomputes: bool = _recorded("full recompute", essential=False, default=False)
    recompute_modules: tuple[str, ...] = ()
    exchange: Exchange = Exchange.ROWS
    local: bool = False
    splits_weights: bool = False
    rows_seen: tuple[tuple[int, float], ...] = ()
    condense: float | None = _recorded("--ampipe-condense", default=None)
    replicas: int = 1
    expert_replicas: int = 1
    shards_optimizer: bool = False
    places_reductions: bool = False
    rows_margin: float | None = _recorded("--ampipe-rows-margin", essential=False, default=None)
    captures_passes: bool = _recorded(
        "CUDA graphs of whole passes", essential=False, text=lambda is_set: is_set or None, default=False
    )

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
        """Rows of the busiest rank, divided by the mean."""
        return self.imbalance if self.capacity is None else min(self.capacity, self.imbalance)

    def received(self, rows: float) -> float:
        """Rows that the local experts compute for ``rows`` rows of the residual stream.

        With fixed rows too: products have offsets on the device and skip padding. What else there is of these
        rows (transfers, copies, activations) has the size of :meth:`arriving`.
        """
        return rows * self.batch * self.topk * self.load * self.expert_tensor

    def arriving(self, rows: float) -> float:
        """Rows that the local experts get of a chunk with ``rows`` rows of the residual stream.

        With fixed rows these are budgets, padding included, which grow slower than the chunk.
        """
        if self.rows_margin is None:
            return self.received(rows)
        if self.flex:
            # One budget for the rows that a rank gets from all ranks.
            even = rows * self.batch * self.topk * self.load
            largest = largest_count(even, share=1 / self.expert)
            return rows_of_budget(largest, margin=self.rows_margin) * self.expert_tensor
        return self.expert * self._budget(rows, load=self.load) * self.expert_tensor

    def sent(self, rows: float) -> float:
        """Rows that a rank sends of such a chunk to all ranks, itself included; with padding."""
        if self.rows_margin is None:
            return rows * self.batch * self.rows_per_token
        return self.expert * self._budget(rows, load=1.0)

    def _budget(self, rows: float, *, load: float) -> int:
        """What a training learns as the budget of a chunk for one rank."""
        assert self.rows_margin is not None
        even = rows * self.batch * self.topk / self.expert
        limit = math.inf if self.capacity is None else even * self.capacity
        largest = largest_count(even * load, share=1 / self.expert)
        return rows_of_budget(min(largest, limit), margin=self.rows_margin)

    def row_bytes(self, probabilities: int) -> int:
        """Bytes of a row that is sent with so many probabilities."""
        return self.hidden * self.element_bytes + PROBABILITY_BYTES * probabilities

    @property
    def flex(self) -> bool:
        """Whether the dispatcher is Megatron's flex dispatcher, which sends a token once to each place."""
        return self.dispatcher in FLEX_BACKENDS

    @property
    def sends_every_copy(self) -> bool:
        """Whether there is a row for each expert of a token."""
        return self.exchange.sends_every_copy and not self.flex

    @property
    def arriving_probabilities(self) -> int:
        """Number of probabilities that a rank receives with a row: one for each possible expert."""
        return 1 if self.sends_every_copy else self.local_experts

    @property
    def rows_of_tile(self) -> int:
        """The number that a chunk's rows must be a multiple of."""
        return self.fp8_tile // math.gcd(self.fp8_tile, self.batch)

    def splits_into(self, degree: int) -> bool:
        """Whether the rows can be cut into ``degree`` equal chunks."""
        return degree <= self.rows and have_whole_tiles(even_chunks(self.rows, degree), self.rows_of_tile)

    @property
    def rows_per_token(self) -> float:
        """Number of rows that all expert ranks receive for a token, including its own rank."""
        return self.topk if self.sends_every_copy else self.rows_to(self.expert)

    def rows_to(self, places: int) -> float:
        """Number of rows of a token, if each place (rank or node) with an expert of the token gets one.

        As recorded, or else as if experts were evenly used.
        """
        return dict(self.rows_seen).get(places) or even_rows(self.experts, self.topk, places)

    def exchanges(self, ranks_per_node: int | None) -> tuple[Exchange, ...]:
        """The exchanges that the layers can choose from."""
        if self.rows_margin is not None:
            # Budgets are of pairs of ranks.
            return (Exchange.ROWS,)
        return useful_exchanges(self.settings, self.experts, ranks_per_node)

    @property
    def features(self) -> BlockFeatures:
        """The features of a block that has a separate schedule."""
        return self.features_of(shares_schedule=False)

    def features_of(self, *, shares_schedule: bool) -> BlockFeatures:
        """The features of the block, with a schedule that it shares with other layers or not."""
        own = Settings(
            capacity_scope="chunk" if self.capacity_per_chunk else "sequence",
            condense=self.condense,
            ranks_per_node=self.ranks_per_node,
        )
        return replace(
            features_of_settings(self.settings, own, shares_schedule=shares_schedule, local=self.local),
            # Layers that share a schedule recompute inside it.
            saved=decide(RecomputeRequest(full=shares_schedule and self.recomputes)),
            reduces=self.places_reductions,
            reduces_experts=self.places_reductions and self.expert_replicas > 1,
        )

    @property
    def settings(self) -> Arguments:
        """Settings of Megatron that describe this block."""
        return Arguments(
            tensor_model_parallel_size=self.tensor,
            sequence_parallel=True,
            context_parallel_size=self.context,
            cp_comm_type="p2p" if self.ring else "all_gather",
            # ``cp_comm_type`` already says whether there is a ring.
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
            # One balancing type that chooses for all tokens at once stands for all reasons.
            moe_token_drop_policy="position",
            moe_router_load_balancing_type=BALANCED[0] if self.chooses else "none",
            moe_aux_loss_coeff=0.0,
            moe_z_loss_coeff=0.0 if self.losses else None,
            recompute_granularity=None,
        )

    @property
    def stock(self) -> Block:
        """The same block in Megatron's own layer, where padding fills every expert's capacity."""
        plain = replace(self, exchange=Exchange.ROWS, ring=False, condense=None)
        plain = replace(plain, rows_margin=None, captures_passes=False)
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
    """Expected number of places (of ``places`` equal groups of experts) with an expert of a token.

    Every choice of ``topk`` experts is equally likely. A place does not get the token if all chosen experts
    are in other places.
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
        chunks: Number of adjacent chunks that these rows are of, if one transfer sends them together.
    """

    hidden: int
    pairs: int
    keys: int
    merged: int
    chunks: int = 1


def chunk_rows(block: Block, lengths: Sequence[int], *, shares_schedule: bool = False) -> tuple[Rows, ...]:
    """The rows of each chunk, and the sizes of its attention.

    Args:
        block: The block.
        lengths: Rows of the residual stream of one rank in each chunk.
        shares_schedule: Whether every tensor-parallel rank holds a part of every chunk.
    """
    assert sum(lengths) == block.rows and min(lengths) > 0, lengths
    by_rank = []
    # With zigzag slices, the first or the last context-parallel rank has the most pairs in a chunk.
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
