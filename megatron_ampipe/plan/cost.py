"""How long each stage of each chunk takes alone, from workload, cluster and chunks. Pure arithmetic.

One function for each kind of stage adds up what ``layers/megatron_stages.py`` computes and copies in it,
forward and backward. Times are those of the rank with the most tokens, in microseconds. Not modelled: caches,
clock throttling, and the time that a rank waits for a slower one.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ampipe.plan import linear_products
from megatron_ampipe.plan.chunk_rows import Rows, chunk_rows
from megatron_ampipe.plan.cluster import AttentionLine, Cluster, Operation, TransferCost
from megatron_ampipe.plan.linear_products import Product
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import (
    KEEP,
    MOE_BLOCK,
    WEIGHTS,
    BlockFeatures,
    Direction,
    Exchange,
    Stage,
    StageKind,
    data_flow,
    is_whole,
    kinds,
    with_memory,
)

COUNT_BYTES = 8
PROBABILITY_BYTES = 4


class Pair(NamedTuple):
    """Microseconds of one stage in each direction. A tuple, because a search creates thousands."""

    forward: float
    backward: float

    def __add__(self, other: Pair) -> Pair:  # type: ignore[override]
        return Pair(self.forward + other.forward, self.backward + other.backward)

    def of(self, direction: Direction) -> float:
        """The time in one direction."""
        return self.forward if direction is Direction.FORWARD else self.backward


ZERO = Pair(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """The input of one stage.

    Attributes:
        rows: Rows of the chunk, or of the whole sequence.
        chunked: Whether the sequence is split into several chunks.
    """

    rows: Rows
    chunked: bool = True


class CostModel:
    """Times of the stages of one block on one cluster.

    Args:
        workload: The block.
        cluster: The times of its operations.
        added: Cost functions of kinds of stages that are not in :data:`COSTS`.
        shares_schedule: The block shares its schedule with other layers.
        memory: What the experts keep for their backward, see ``Pipeline.memory``.

    Raises:
        BadInput: the cluster has no figure for something that the block does.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        added: Mapping[StageKind, CostFunction] | None = None,
        shares_schedule: bool = False,
        memory: str = KEEP,
    ) -> None:
        self.workload, self.cluster, self._shares_schedule = workload, cluster, shares_schedule
        self._costs = {**COSTS, **(added or {})}
        # Where layers share a schedule, they recompute as a part of it.
        self.features = with_memory(
            replace(
                workload.features_of(shares_schedule=shares_schedule),
                added=tuple(added or ()),
                recomputed=shares_schedule and workload.recomputes,
            ),
            memory,
        )
        self.dense_features = BlockFeatures(
            dense=True,
            chunked_qkv=self.features.chunked_qkv,
            added=self.features.added,
            recomputed=self.features.recomputed,
        )
        (self._sequence,) = chunk_rows(workload, (workload.rows,))
        self._gemm = cluster.gemm(workload.dtype)
        # Models in fp8 compute attention in bf16.
        self._attention = cluster.attention("bf16" if workload.dtype == "fp8" else workload.dtype)
        self._memory, self._permute = cluster.compute.memory, cluster.compute.permute
        # A search comes back to the same lengths many times: what was computed is kept, by kind and rows.
        self._chunk_rows = functools.lru_cache(maxsize=4096)(
            functools.partial(chunk_rows, workload, shares_schedule=shares_schedule)
        )
        self._known: defaultdict[tuple[StageKind, bool], dict[object, Pair]] = defaultdict(dict)

    def stages(
        self,
        lengths: Sequence[int],
        *,
        parts: int = 1,
        whole_attention: bool = False,
        features: BlockFeatures | None = None,
        weights: Collection[StageKind] = (),
        joined: Collection[StageKind] = (),
    ) -> dict[Stage, Pair]:
        """The time of every stage of the block with chunks of these lengths, including its overhead.

        Args:
            lengths: Rows of the residual stream of one rank in each chunk.
            parts: Number of adjacent chunks that form one stage, as in the direction with the smaller degree:
                they are computed one after the other and share a collective.
            whole_attention: Attention runs once for the whole sequence, as in the schedule ``moe-only``.
            features: What the block contains; experts if None.
            weights: Kinds of weight gradients that are separate stages (``Program.weights``).
            joined: Those of them that are of the whole sequence: one product for all chunks.
        """
        features = self.features if features is None else features
        chunks = self._chunk_rows(tuple(lengths))
        chunked = len(lengths) > 1
        found: dict[Stage, Pair] = {}
        for kind in data_flow(features).kinds:
            if is_whole(kind, features, whole_attention=whole_attention):
                found[Stage(kind)] = self._stage(kind, Work(self._sequence, chunked=False))
                continue
            known = self._known[kind, chunked]
            for index in range(len(chunks) // parts):
                group = chunks[index * parts : (index + 1) * parts]
                # Chunks are computed one by one; a single collective sends the rows of all of them.
                works = group if kind.lane.computes and parts > 1 else (_joined(group),)
                total: Pair | None = None
                for rows in works:
                    key = rows if kind in _DEPENDS_ON_POSITION else rows.hidden
                    if key not in known:
                        known[key] = self._stage(kind, Work(rows, chunked=chunked))
                    total = known[key] if total is None else total + known[key]
                assert total is not None
                found[Stage(kind, index)] = total
        for kind in weights:
            assert kind.weights_of is not None
            self._set_weights_apart(found, kind.weights_of, kind, chunks, parts=parts, joined=kind in joined)
        return found

    def _set_weights_apart(
        self,
        found: dict[Stage, Pair],
        kind: StageKind,
        weights: StageKind,
        chunks: Sequence[Rows],
        *,
        parts: int,
        joined: bool,
    ) -> None:
        """Give the weight gradients of a kind separate stages in the times that were found."""
        stages = [stage for stage in found if stage.kind is kind]
        for stage in stages:
            alone = 0.0
            if stage.chunk is None:
                alone = self._weights(kind, Work(self._sequence, chunked=False))
            else:
                for rows in chunks[stage.chunk * parts : (stage.chunk + 1) * parts]:
                    alone += self._weights(kind, Work(rows, chunked=len(chunks) > 1))
            found[stage] += Pair(0.0, -alone)
            if not joined or stage.chunk is None:
                found[Stage(weights, stage.chunk)] = Pair(0.0, alone)
        if stages and Stage(weights) not in found and joined:
            found[Stage(weights)] = Pair(0.0, self._joined_weights(kind, len(chunks)))

    def _weights(self, kind: StageKind, work: Work) -> float:
        """The part of a stage's backward that computes gradients of weights."""
        factor = self.cluster.stage_overhead(kind.name).backward_factor
        return factor * sum(
            self._weight_product(*product, chunked=work.chunked)
            for product in _PRODUCTS[kind](self, work.rows.hidden)
        )

    def _joined_weights(self, kind: StageKind, num_chunks: int) -> float:
        """The same of all chunks in one product, for which their rows are put together."""
        rows = self._sequence.hidden
        copied = sum(rows * (k + n) for rows, k, n, _ in _PRODUCTS[kind](self, rows)) if num_chunks > 1 else 0
        moved = self._memory.time_us(2 * copied * self.workload.element_bytes)
        return self._weights(kind, Work(self._sequence, chunked=False)) + moved

    def _stage(self, kind: StageKind, work: Work) -> Pair:
        """The time of one stage of one chunk, including its overhead."""
        pair = self._costs[kind](self, work)
        if not kind.lane.computes:
            return pair
        overhead = self.cluster.stage_overhead(kind.name)
        return Pair(
            pair.forward * overhead.forward_factor + overhead.forward_us,
            pair.backward * overhead.backward_factor + overhead.backward_us,
        )

    def stock(self, *, dense: bool = False) -> Pair:
        """The time of Megatron's own layer: the same work without chunks and without overlap.

        Args:
            dense: Of a layer without experts.
        """
        if self.workload.exchange is not Exchange.ROWS:
            return CostModel(replace(self.workload, exchange=Exchange.ROWS), self.cluster).stock(dense=dense)
        rows = chunk_rows(self.workload, (self.workload.rows,))[0]
        parts = [self.qkv(rows.hidden, chunked=False), self.attention(rows, chunked=False)]
        parts += [self.mlp(rows.hidden, chunked=False)] if dense else self._stock_experts(rows)
        total = functools.reduce(Pair.__add__, parts, ZERO)
        overhead = self.cluster.host.stock
        return total + Pair(overhead.forward_us, overhead.backward_us)

    def _stock_experts(self, rows: Rows) -> list[Pair]:
        load = self.load(padded=self.workload.padded)
        exchange = self.exchange(rows.hidden, stock=True)
        parts = [
            self.route(rows.hidden, load=load),
            self.counts(),
            exchange,
            self.expert(rows.hidden, load=load, chunked=False),
            exchange,
            self.merge(rows.hidden, load=load),
        ]
        if self.workload.losses:
            parts.append(self.losses())
        if self.workload.shared_ffn is not None:
            parts.append(self.shared(rows.hidden, chunked=False))
        return parts

    def stock_exchanges(self) -> Pair:
        """The part of :meth:`stock` that its two all-to-alls take."""
        workload = replace(self.workload, exchange=Exchange.ROWS)
        rows = chunk_rows(workload, (workload.rows,))[0]
        exchange = CostModel(workload, self.cluster).exchange(rows.hidden, stock=True)
        return exchange + exchange

    def edges(self) -> float:
        """What layers that share a schedule do once before the first and after the last, in each direction.

        With tensor parallelism, rows move from Megatron's ranks to those of the chunks, and back.
        """
        work = self.workload
        if not self._shares_schedule or work.tensor == 1:
            return 0.0
        moved = work.rows * work.batch * work.hidden * work.element_bytes * (work.tensor - 1) / work.tensor
        figure = self.cluster.collective("all_to_all", across_nodes=self._crosses(work.tensor))
        return 2 * (figure.time_us(moved) + self._move(work.rows * work.batch).forward)

    def latency(self, kind: StageKind) -> float:
        """The part of a collective of this kind that does not depend on its size."""
        work = self.workload
        if kind is kinds.COUNTS:
            return self._counts_figure().alpha_us if work.expert * work.expert_tensor > 1 else 0.0
        if kind not in (kinds.DISPATCH, kinds.COMBINE, kinds.REDISPATCH) or work.expert == 1:
            return 0.0
        if work.dispatcher == "allgather":
            return self._counts_figure().alpha_us
        return max(figure.alpha_us for figure, _ in self._links(stock=False))

    # Stages

    def qkv(self, rows: int, *, chunked: bool) -> Pair:
        work = self.workload
        tokens = rows * work.batch
        gathered = tokens * work.tensor
        width = sum(n for _, n in work.projections) // work.tensor
        total = self._pass_over(2 * tokens * work.hidden) + self._pass_over(2 * gathered * width)
        total += self._all_products(linear_products.qkv(work, rows), chunked=chunked)
        if chunked:
            # Queries, keys and values are copied into the buffers of the whole sequence.
            total += self._pass_over(2 * gathered * width)
        if work.context > 1:
            total += self._gather(tokens * work.key_value_width / work.tensor, work.context, wide=True)
        return total + self._gather(tokens * work.hidden, work.tensor)

    def attention(self, rows: Rows, *, chunked: bool) -> Pair:
        work = self.workload
        tokens = rows.hidden * work.batch
        pairs = rows.pairs * work.batch * work.heads / work.tensor
        merged = rows.merged * work.batch * work.heads * work.value_size / work.tensor if chunked else 0
        flops = 2e-9 * pairs * (work.head_size + work.value_size)
        total = Pair(
            self._attend(self._attention.forward, flops, merged),
            # Five matrix products instead of two.
            self._attend(self._attention.backward, 2.5 * flops, merged),
        )
        total += self._all_products(linear_products.attention(work, rows.hidden), chunked=chunked)
        # Residual and norm.
        total += self._pass_over(5 * tokens * work.hidden)
        if chunked:
            # The gradients of the keys and values that the chunk attended to are added to sums in fp32.
            seen = rows.keys * work.batch * work.key_value_width / work.tensor
            total += Pair(0.0, self._memory.time_us(seen * (8 + work.element_bytes)))
        return total + self._gather(tokens * work.hidden, work.tensor)

    def route(self, rows: int, *, load: float) -> Pair:
        work = self.workload
        tokens = rows * work.batch
        # Router scores are fp32 in any dtype.
        scores = self._pass_over(4 * tokens * work.experts * 4 / work.element_bytes)
        product = self._product(tokens, work.hidden, work.experts, chunked=False)
        return scores + product + self._move(self._sent(tokens) * load)

    def counts(self) -> Pair:
        work = self.workload
        ranks = work.expert * work.expert_tensor
        if ranks == 1:
            return ZERO
        return Pair(self._counts_figure().time_us(COUNT_BYTES * work.experts * (ranks - 1)), 0.0)

    def exchange(self, rows: int, *, stock: bool = False) -> Pair:
        """A dispatch or a combine; the forward and the backward pass send the same number of bytes."""
        work = self.workload
        if work.expert == 1:
            return ZERO
        tokens = rows * work.batch
        row_bytes = work.hidden * work.element_bytes + PROBABILITY_BYTES * work.row_probabilities
        if work.dispatcher == "allgather":
            time = self._gather(tokens * work.hidden, work.expert * work.expert_tensor).forward
            return Pair(time, time)
        sent = self._sent(tokens) * self.load(padded=stock and work.padded) * row_bytes
        # Links within a node and between nodes transfer at the same time.
        time = max(figure.time_us(sent * share) for figure, share in self._links(stock=stock))
        return Pair(time, time)

    def expert(self, rows: int, *, load: float, chunked: bool) -> Pair:
        """The local experts: what :meth:`rebuild` repeats, and the last product and the rows' way back."""
        work = self.workload
        total = self._until_activation(rows, load=load, chunked=chunked)
        _, down = linear_products.expert(work, self._received(rows, load))
        total += self._products(*down, chunked=chunked)
        return total + self._arranged(rows, load=load)

    def rebuild(self, rows: int, *, load: float) -> Pair:
        """First product and activation of the experts once more, in the backward pass."""
        return Pair(0.0, self._until_activation(rows, load=load, chunked=False).forward)

    def repermute(self, rows: int, *, load: float) -> Pair:
        """Permutation of the tokens once more, in the backward pass."""
        return Pair(0.0, self._move(self._sent(rows * self.workload.batch) * load).forward)

    def redispatch(self, rows: int) -> Pair:
        """A dispatch once more, in the backward pass."""
        return Pair(0.0, self.exchange(rows).forward)

    def _until_activation(self, rows: int, *, load: float, chunked: bool) -> Pair:
        work = self.workload
        received = self._received(rows, load)
        up, _ = linear_products.expert(work, received)
        total = self._products(*up, chunked=chunked)
        passed = received * (up.n + work.ffn / work.expert_tensor)
        return total + self._pass_over(passed) + self._arranged(rows, load=load)

    def _arranged(self, rows: int, *, load: float) -> Pair:
        """Rows sorted by expert, or copied for the experts, and gathered over the ranks that share one.

        Or the way back, where copies are added.
        """
        work, received, total = self.workload, self._received(rows, load), ZERO
        if work.dispatcher != "alltoall":
            return total
        if work.local_experts > 1:
            total += self._move(received)
        if work.expert_tensor > 1:
            total += self._gather(self._sent(rows * work.batch) * load * work.hidden, work.expert_tensor)
        return total

    def _received(self, rows: int, load: float) -> float:
        """Rows that the local experts compute."""
        return self._copies(rows * self.workload.batch) * load * self.workload.expert_tensor

    def expert_products(self, rows: int) -> list[Product]:
        """The products of the local experts."""
        return linear_products.expert(self.workload, self._received(rows, self.load()))

    def merge(self, rows: int, *, load: float) -> Pair:
        tokens = rows * self.workload.batch
        return self._move(self._sent(tokens) * load) + self._pass_over(3 * tokens * self.workload.hidden)

    def shared(self, rows: int, *, chunked: bool) -> Pair:
        work = self.workload
        assert work.shared_ffn is not None
        return self._gated(rows, work.shared_ffn, chunked=chunked)

    def _gated(self, rows: int, ffn: int, *, chunked: bool) -> Pair:
        """Two products with an activation between them, over tensor-parallel ranks."""
        work = self.workload
        gathered = rows * work.batch * work.tensor
        inner = ffn / work.tensor
        up = (2 if work.gated else 1) * inner
        total = self._all_products(linear_products.gated(work, rows, ffn), chunked=chunked)
        both = self._gather(rows * work.batch * work.hidden, work.tensor)
        return total + self._pass_over(gathered * (up + inner)) + both + both

    def mlp(self, rows: int, *, chunked: bool) -> Pair:
        work = self.workload
        assert work.dense_ffn is not None
        return self._gated(rows, work.dense_ffn, chunked=chunked) + self._pass_over(
            2 * rows * work.batch * work.hidden
        )

    def losses(self) -> Pair:
        tokens = self.workload.rows * self.workload.batch
        return self._pass_over(4 * tokens * self.workload.experts * 4 / self.workload.element_bytes)

    # Operations

    def _all_products(self, products: Iterable[Product], *, chunked: bool) -> Pair:
        found = [self._products(*product, chunked=chunked) for product in products]
        return functools.reduce(Pair.__add__, found, ZERO)

    def _weight_product(self, rows: float, k: float, n: float, calls: int, *, chunked: bool) -> float:
        """The part of :meth:`_products` that is of the gradient of the weights."""
        both = self._products(rows, k, n, calls, chunked=chunked)
        return both.backward - both.forward

    def _product(self, rows: float, k: float, n: float, *, chunked: bool) -> Pair:
        return self._products(rows, k, n, 1, chunked=chunked)

    def _products(self, rows: float, k: float, n: float, calls: int, *, chunked: bool) -> Pair:
        """``calls`` products with ``rows`` rows in total; two each in the backward pass (input, weight)."""
        time = self._gemm.time_us(rows, k, n, calls=calls)
        sums = 0.0
        if chunked and not self.workload.fused_gradients:
            # The weight gradients of the chunks are summed in fp32.
            sums = self._memory.time_us(calls * k * n * (8 + self.workload.element_bytes))
        return Pair(time, 2 * time + sums)

    def _attend(self, line: AttentionLine, gflops: float, merged: float) -> float:
        merge_mb = 1e-6 * merged * self.workload.element_bytes
        return line.alpha_us + gflops * line.beta_us_per_gflop + merge_mb * line.merge_us_per_mb

    def _pass_over(self, elements: float) -> Pair:
        """Elements are read and written; the backward pass reads the gradient in addition to the input."""
        time = self._memory.time_us(elements * self.workload.element_bytes)
        return Pair(time, 1.5 * time)

    def _move(self, rows: float) -> Pair:
        """Rows are permuted."""
        time = self._permute.time_us(2 * rows * self.workload.hidden * self.workload.element_bytes)
        return Pair(time, time)

    def _gather(self, elements: float, ranks: int, *, wide: bool = False) -> Pair:
        """An all-gather forward and a reduce-scatter backward, or the reverse, of one rank's part."""
        if ranks == 1:
            return ZERO
        size = elements * self.workload.element_bytes * (ranks - 1)
        across = self._crosses(ranks * (self.workload.tensor if wide else 1))
        gather_us = self.cluster.collective("all_gather", across_nodes=across).time_us(size)
        scatter_us = self.cluster.collective("reduce_scatter", across_nodes=across).time_us(size)
        return Pair(gather_us, scatter_us)

    def _counts_figure(self) -> TransferCost:
        ranks = self.workload.expert * self.workload.expert_tensor
        return self.cluster.collective("all_gather", across_nodes=self._crosses(ranks))

    def _links(self, *, stock: bool) -> list[tuple[TransferCost, float]]:
        """The links that an all-to-all uses, each with its share of the rows."""
        work = self.workload
        near = min(work.expert, max(1, self.cluster.ranks_per_node // work.expert_tensor))
        return [
            (
                self.cluster.collective(self._exchange(across, stock=stock), across_nodes=across),
                peers / work.expert,
            )
            for peers, across in ((near - 1, False), (work.expert - near, True))
            if peers
        ]

    def _crosses(self, ranks: int) -> bool:
        return ranks > self.cluster.ranks_per_node

    def _exchange(self, across: bool, *, stock: bool) -> Operation:
        figures = (self.cluster.inter if across else self.cluster.intra) or {}
        return "stock_all_to_all" if stock and "stock_all_to_all" in figures else "all_to_all"

    def _copies(self, tokens: float) -> float:
        """Rows that experts compute for this number of tokens, if experts are balanced."""
        return tokens * self.workload.topk

    def _sent(self, tokens: float) -> float:
        """Rows that are sent for this number of tokens, likewise."""
        return tokens * self.workload.rows_per_token

    def load(self, *, padded: bool = False) -> float:
        """Rows of the rank with the most, divided by the mean; padding fills every expert's capacity."""
        capacity = self.workload.capacity
        if capacity is None:
            return self.workload.imbalance
        return capacity if padded else min(capacity, self.workload.imbalance)


def _joined(chunks: Sequence[Rows]) -> Rows:
    """The rows of adjacent chunks."""
    if len(chunks) == 1:
        return chunks[0]
    return Rows(
        hidden=sum(chunk.hidden for chunk in chunks),
        pairs=sum(chunk.pairs for chunk in chunks),
        keys=chunks[-1].keys,
        merged=sum(chunk.merged for chunk in chunks),
    )


CostFunction = Callable[[CostModel, Work], Pair]
"""How long a stage takes alone, forward and backward."""

COSTS: Mapping[StageKind, CostFunction] = {
    kinds.QKV: lambda model, work: model.qkv(work.rows.hidden, chunked=work.chunked),
    kinds.ATTENTION: lambda model, work: model.attention(work.rows, chunked=work.chunked),
    kinds.ROUTE: lambda model, work: model.route(work.rows.hidden, load=model.load()),
    kinds.LOSSES: lambda model, work: model.losses(),
    kinds.SHARED: lambda model, work: model.shared(work.rows.hidden, chunked=work.chunked),
    kinds.COUNTS: lambda model, work: model.counts(),
    kinds.DISPATCH: lambda model, work: model.exchange(work.rows.hidden),
    kinds.EXPERT: lambda model, work: model.expert(work.rows.hidden, load=model.load(), chunked=work.chunked),
    kinds.COMBINE: lambda model, work: model.exchange(work.rows.hidden),
    kinds.MERGE: lambda model, work: model.merge(work.rows.hidden, load=model.load()),
    kinds.MLP: lambda model, work: model.mlp(work.rows.hidden, chunked=work.chunked),
    kinds.REPERMUTE: lambda model, work: model.repermute(work.rows.hidden, load=model.load()),
    kinds.REDISPATCH: lambda model, work: model.redispatch(work.rows.hidden),
    kinds.REBUILD: lambda model, work: model.rebuild(work.rows.hidden, load=model.load()),
}
"""The cost function of every kind of stage of the MoE block."""
_PRODUCTS: Mapping[StageKind, Callable[[CostModel, int], Sequence[Product]]] = {
    kinds.QKV: lambda model, rows: linear_products.qkv(model.workload, rows),
    kinds.ATTENTION: lambda model, rows: linear_products.attention(model.workload, rows),
    kinds.SHARED: lambda model, rows: linear_products.gated(model.workload, rows, model.workload.shared_ffn),
    kinds.EXPERT: lambda model, rows: model.expert_products(rows),
    kinds.MLP: lambda model, rows: linear_products.gated(model.workload, rows, model.workload.dense_ffn),
}
"""The products with weights of each kind whose weight gradients can be separate stages."""
_DEPENDS_ON_POSITION = frozenset({kinds.ATTENTION})
"""Kinds whose time depends on the position of the chunk, not only on its length."""
assert set(COSTS) == set(MOE_BLOCK) and set(_PRODUCTS) == set(WEIGHTS)
