"""How long each stage of each chunk takes alone, from workload, cluster and chunks. Pure arithmetic.

:class:`CostModel` asks :mod:`.stage_costs`, through :mod:`.cost_table`, about each stage of a schedule, adds
its overhead, and remembers the answer. Times are those of the rank with the most tokens, in microseconds. Not
modelled: caches, clock throttling, and the time that a rank waits for a slower one.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from megatron_ampipe.plan import linear_products
from megatron_ampipe.plan.chunk_rows import Rows, chunk_rows
from megatron_ampipe.plan.cluster import Cluster, Operation
from megatron_ampipe.plan.cost_table import COSTS, PRODUCTS, CostFunction, Work
from megatron_ampipe.plan.gradient_buckets import LayerReductions, reductions_us, tensors_of
from megatron_ampipe.plan.operation_times import ZERO, OperationTimes, Pair
from megatron_ampipe.plan.stage_costs import StageCosts
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import (
    KEEP,
    BlockFeatures,
    Stage,
    StageKind,
    data_flow,
    is_whole,
    kinds,
    with_exchange,
    with_memory,
)
from megatron_ampipe.schedule.stage_kind import INTRA_LANE, TENSOR_INTRA_LANE, TENSOR_LANE

_MEASURED_AS = {kinds.ATTEND: kinds.ATTENTION, kinds.INPUT_NORM: kinds.MERGE, kinds.ADD_NORM: kinds.MERGE}
"""Kinds of which no profile has an overhead, and the kind whose overhead they have."""
_OVER_SHARES: Mapping[StageKind, Operation] = {
    **dict.fromkeys((kinds.GATHER, kinds.REGATHER), "all_gather"),
    kinds.SCATTER: "reduce_scatter",
}
"""Transfers over the ranks that share an expert, and what they do forward."""
_DEPENDS_ON_POSITION = frozenset({kinds.ATTENTION})
"""Kinds whose time depends on the position of the chunk, not only on its length."""


class CostModel:
    """Times of the stages of one block on one cluster.

    Args:
        workload: The block.
        cluster: The times of its operations.
        added: Cost functions of kinds of stages that are not in :data:`.cost_table.COSTS`.
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
        features = replace(
            workload.features_of(shares_schedule=shares_schedule),
            added=tuple(added or ()),
            recomputed=shares_schedule and workload.recomputes,
        )
        self.features = with_memory(with_exchange(features, workload.exchange), memory)
        self.dense_features = self.features.without_experts
        (self._sequence,) = chunk_rows(workload, (workload.rows,))
        self._times = OperationTimes(workload, cluster)
        self._of = StageCosts(self._times, self.features)
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
        found: dict[Stage, Pair] = {}
        for kind in data_flow(features).kinds:
            if kind.of_parameters:
                reductions = self.reductions_us(dense=features.dense)
                own = reductions.experts if kind == kinds.REDUCE_EXPERTS else reductions.others
                found[Stage(kind)] = Pair(0.0, own)
            elif is_whole(kind, whole_attention=whole_attention):
                found[Stage(kind)] = self._stage(kind, Work(self._sequence, chunked=False))
            else:
                self._set_chunks(found, kind, chunks, parts=parts)
        for kind in weights:
            assert kind.weights_of is not None
            self._set_weights_apart(found, kind.weights_of, kind, chunks, parts=parts, joined=kind in joined)
        return found

    def _set_chunks(
        self, found: dict[Stage, Pair], kind: StageKind, chunks: Sequence[Rows], *, parts: int
    ) -> None:
        """Set the times of the stages of a kind that are of a chunk."""
        chunked = len(chunks) > 1
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

    def reductions_us(self, *, dense: bool) -> LayerReductions:
        """The time to reduce all gradients of a layer, with experts or without."""
        (total,) = reductions_us(self._times, [tensors_of(self.workload, dense=dense)])
        return total

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
        stages = [stage for stage in found if stage.kind == kind]
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
            found[Stage(weights)] = Pair(0.0, self._joined_weights(kind, chunks))

    def product_us(self, rows: int) -> float:
        """The mean time of the two products of the experts, forward, for so many rows of a rank."""
        products = PRODUCTS[kinds.EXPERT](self._of, rows)
        return self._times.all_products(products, chunked=False).forward / len(products)

    def _weights(self, kind: StageKind, work: Work) -> float:
        """The part of a stage's backward that computes gradients of weights."""
        factor = self.cluster.stage_overhead(kind.name).backward_factor
        return factor * sum(
            self._times.weight_product(*product, chunked=work.chunked)
            for product in PRODUCTS[kind](self._of, work.rows.hidden)
        )

    def _joined_weights(self, kind: StageKind, chunks: Sequence[Rows]) -> float:
        """The same of all chunks in one stage: one product where their rows are put together for it."""
        factor, element = self.cluster.stage_overhead(kind.name).backward_factor, self.workload.element_bytes
        of_chunks = [PRODUCTS[kind](self._of, rows.hidden) for rows in chunks]
        total = 0.0
        for number, whole in enumerate(PRODUCTS[kind](self._of, self._sequence.hidden)):
            if linear_products.is_one_product(whole, len(chunks), element_bytes=element):
                copied = whole.rows * (whole.k + whole.n)
                total += factor * self._times.weight_product(*whole, chunked=False)
                total += self._times.memory_us(2 * copied * element)
            else:
                parts = [products[number] for products in of_chunks]
                chunked = len(parts) > 1
                total += factor * sum(self._times.weight_product(*one, chunked=chunked) for one in parts)
        return total

    def _stage(self, kind: StageKind, work: Work) -> Pair:
        """The time of one stage of one chunk, including its overhead."""
        pair = self._costs[kind.row](self._of, work)
        if not kind.lane.computes:
            return pair
        overhead = self.cluster.stage_overhead(_MEASURED_AS.get(kind.row, kind).name)
        return Pair(
            pair.forward * overhead.forward_factor + overhead.forward_us,
            pair.backward * overhead.backward_factor + overhead.backward_us,
        )

    def stock(self, *, dense: bool = False) -> Pair:
        """The time of Megatron's own layer: the same work without chunks and without overlap.

        Args:
            dense: Of a layer without experts.
        """
        if self.workload != self.workload.stock:
            return CostModel(self.workload.stock, self.cluster).stock(dense=dense)
        rows = chunk_rows(self.workload, (self.workload.rows,))[0]
        parts = [
            self._of.qkv(rows.hidden, chunked=False),
            self._of.gather_rows(rows.hidden),
            self._of.input_norm(rows.hidden),
            self._of.attention(rows, chunked=False),
            self._of.scatter_rows(rows.hidden),
            self._of.add_norm(rows.hidden),
        ]
        parts += [self._of.mlp(rows.hidden, chunked=False)] if dense else self._stock_experts(rows)
        total = functools.reduce(Pair.__add__, parts, ZERO)
        overhead = self.cluster.host.stock
        return total + Pair(overhead.forward_us, overhead.backward_us)

    def _stock_experts(self, rows: Rows) -> list[Pair]:
        load = self._of.load(padded=self.workload.padded)
        exchange = self._of.exchange(rows.hidden, stock=True)
        parts = [
            self._of.route(rows.hidden, load=load),
            self._of.counts(),
            exchange,
            self._of.expert(rows.hidden, load=load, chunked=False),
            exchange,
            self._of.merge(rows.hidden, load=load),
        ]
        if self.features.gathers:
            parts += [self._of.gather(rows.hidden), self._of.scatter(rows.hidden)]
        if self.workload.chooses:
            parts.append(self._of.choose(rows.hidden))
        if self.workload.losses:
            parts.append(self._of.losses())
        if self.workload.shared_ffn is not None:
            parts.append(self._of.shared(rows.hidden, chunked=False))
        return parts

    def stock_exchanges(self) -> Pair:
        """The part of :meth:`stock` that its two all-to-alls take."""
        workload = self.workload.stock
        rows = chunk_rows(workload, (workload.rows,))[0]
        of_stock = StageCosts(OperationTimes(workload, self.cluster), workload.features)
        exchange = of_stock.exchange(rows.hidden, stock=True)
        return exchange + exchange

    def edges(self) -> float:
        """What layers that share a schedule do once before the first and after the last, in each direction.

        With tensor parallelism, rows move from Megatron's ranks to those of the chunks, and back.
        """
        work = self.workload
        if not self._shares_schedule or work.tensor == 1:
            return 0.0
        moved = work.rows * work.batch * work.hidden * work.element_bytes * (work.tensor - 1) / work.tensor
        figure = self.cluster.collective("all_to_all", across_nodes=self._times.crosses(work.tensor))
        return 2 * (figure.time_us(moved) + self._times.move(work.rows * work.batch).forward)

    def latency(self, kind: StageKind) -> float:
        """The part of a collective of this kind that does not depend on its size."""
        work = self.workload
        if kind == kinds.COUNTS:
            return self._times.counts_figure().alpha_us if work.expert * work.expert_tensor > 1 else 0.0
        if kind.row in (kinds.RING, kinds.RERING):
            return self._times.ring_figure().alpha_us
        if kind.lane in (TENSOR_LANE, TENSOR_INTRA_LANE):
            scatters = kind == kinds.SCATTER_ROWS
            operation: Operation = "reduce_scatter" if scatters else "all_gather"
            return self.cluster.collective(operation, across_nodes=self._times.crosses(work.tensor)).alpha_us
        if kind in _OVER_SHARES:
            return self._times.share_figure(_OVER_SHARES[kind]).alpha_us
        if kind.lane is INTRA_LANE:
            return self._times.node_figure().alpha_us
        if kind not in (kinds.DISPATCH, kinds.COMBINE, kinds.REDISPATCH) or work.expert == 1:
            return 0.0
        if work.dispatcher == "allgather":
            return self._times.counts_figure().alpha_us
        return max(figure.alpha_us for figure, _ in self._times.links(stock=False))


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
