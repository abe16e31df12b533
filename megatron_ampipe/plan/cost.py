"""How long each stage of each chunk takes alone, from workload, cluster and chunks. Pure arithmetic.

:class:`CostModel` asks :mod:`.stage_costs` about each stage of a schedule, adds its overhead, and remembers
the answer. Times are those of the rank with the most tokens, in microseconds. Not modelled: caches, clock
throttling, and the time that a rank waits for a slower one.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.operation_times import (
    ZERO,
    OperationTimes,
    Pair,
    Product,
    expert_products,
    is_one_product,
)
from megatron_ampipe.plan.stage_costs import COSTS, Work, exchange, facts_of
from megatron_ampipe.plan.workload import Rows, Workload, chunk_rows
from megatron_ampipe.schedule import (
    KEEP,
    WEIGHTS,
    BlockFeatures,
    Direction,
    Stage,
    StageKind,
    data_flow,
    is_whole,
    with_exchange,
    with_memory,
)


class CostModel:
    """Times of the stages of one block on one cluster.

    Args:
        workload: The block.
        cluster: The times of its operations.
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
        shares_schedule: bool = False,
        memory: str = KEEP,
    ) -> None:
        self.workload, self.cluster, self._shares_schedule = workload, cluster, shares_schedule
        # Where layers share a schedule, they recompute as a part of it.
        features = replace(
            workload.features_of(shares_schedule=shares_schedule),
            recomputed=shares_schedule and workload.recomputes,
        )
        self.features = with_memory(with_exchange(features, workload.exchange), memory)
        self.dense_features = self.features.without_experts
        (self._sequence,) = chunk_rows(workload, (workload.rows,))
        self._times = OperationTimes(workload, cluster, features=self.features)
        self._dense_times = OperationTimes(workload, cluster, features=self.dense_features)
        # A search comes back to the same lengths many times: what was computed is kept, by kind and rows.
        self._chunk_rows = functools.lru_cache(maxsize=4096)(
            functools.partial(chunk_rows, workload, shares_schedule=shares_schedule)
        )
        self._known: defaultdict[tuple[StageKind, bool, bool], dict[object, Pair]] = defaultdict(dict)

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
        starts = range(0, len(chunks), parts)
        groups = {index: chunks[start : start + parts] for index, start in enumerate(starts)}
        found: dict[Stage, Pair] = {}
        for kind in data_flow(features).kinds:
            whole = kind.of_parameters or is_whole(kind, whole_attention=whole_attention)
            chunked = not whole and len(chunks) > 1
            apart = WEIGHTS[kind] if WEIGHTS.get(kind) in weights else None
            for place, rows in ({None: (self._sequence,)} if whole else groups).items():
                found[Stage(kind, place)] = self._time(kind, rows, chunked=chunked, dense=features.dense)
                if apart is not None:
                    alone = sum(self._weights(kind, Work(one, chunked=chunked)) for one in rows)
                    found[Stage(kind, place)] += Pair(0.0, -alone)
                    if whole or apart not in joined:
                        found[Stage(apart, place)] = Pair(0.0, alone)
            if apart is not None and not whole and apart in joined:
                found[Stage(apart)] = Pair(0.0, self._joined_weights(kind, chunks))
        return found

    def _time(self, kind: StageKind, rows: Sequence[Rows], *, chunked: bool, dense: bool) -> Pair:
        """The time of one stage of some chunks."""
        known, by_position = self._known[kind, chunked, dense], facts_of(kind).by_position
        # Chunks are computed one by one; a single collective sends the rows of all of them.
        parts = rows if kind.lane.computes and len(rows) > 1 else (_joined(rows),)
        total: Pair | None = None
        for part in parts:
            key = part if by_position else part.hidden
            if key not in known:
                known[key] = self._stage(kind, Work(part, chunked=chunked), dense=dense)
            total = known[key] if total is None else total + known[key]
        assert total is not None
        return total

    def product_us(self, rows: int) -> float:
        """The mean time of the two products of the experts, forward, for so many rows of a rank."""
        products = expert_products(self.workload, rows)
        return self._times.all_products(products, chunked=False).forward / len(products)

    def _products(self, kind: StageKind, rows: Rows) -> Sequence[Product]:
        products = facts_of(kind).products
        assert products is not None, f"{kind} has no weights"
        return products(self.workload, rows.hidden)

    def _weights(self, kind: StageKind, work: Work) -> float:
        """The part of a stage's backward that computes gradients of weights."""
        factor = self.cluster.stage_overhead(kind.name).backward_factor
        return factor * sum(
            self._times.weight_product(*product, chunked=work.chunked)
            for product in self._products(kind, work.rows)
        )

    def _joined_weights(self, kind: StageKind, chunks: Sequence[Rows]) -> float:
        """The same of all chunks in one stage: one product where their rows are put together for it."""
        factor, element = self.cluster.stage_overhead(kind.name).backward_factor, self.workload.element_bytes
        of_chunks = [self._products(kind, rows) for rows in chunks]
        total = 0.0
        for whole, *parts in zip(self._products(kind, self._sequence), *of_chunks, strict=True):
            if is_one_product(whole, len(chunks), element_bytes=element):
                copied = whole.rows * (whole.k + whole.n)
                total += factor * self._times.weight_product(*whole, chunked=False)
                total += self._times.memory_us(2 * copied * element)
            else:
                chunked = len(parts) > 1
                total += factor * sum(self._times.weight_product(*part, chunked=chunked) for part in parts)
        return total

    def _stage(self, kind: StageKind, work: Work, *, dense: bool) -> Pair:
        """The time of one stage of one chunk, including its overhead."""
        pair = COSTS[kind.row](self._dense_times if dense else self._times, work)
        if not kind.is_differentiated:
            forward = Direction.FORWARD in kind.directions
            pair = Pair(pair.forward, 0.0) if forward else Pair(0.0, pair.forward)
        if not kind.lane.computes:
            return pair
        overhead = self.cluster.stage_overhead((facts_of(kind).measured_as or kind).name)
        return Pair(
            pair.forward * overhead.forward_factor + overhead.forward_us,
            pair.backward * overhead.backward_factor + overhead.backward_us,
        )

    def stock(self, *, dense: bool = False) -> Pair:
        """The time of Megatron's own layer: the same work without chunks and without overlap.

        Args:
            dense: Of a layer without experts.
        """
        work = Work(self._sequence, chunked=False)
        features = self._stock.features.without_experts if dense else self._stock.features
        stages = (kind.row for kind in data_flow(features).kinds if not kind.of_parameters)
        total = sum((COSTS[kind](self._stock, work) for kind in stages), ZERO)
        overhead = self.cluster.host.stock
        return total + Pair(overhead.forward_us, overhead.backward_us)

    def stock_exchanges(self) -> Pair:
        """The part of :meth:`stock` that its two all-to-alls take."""
        one = exchange(self._stock, Work(self._sequence, chunked=False))
        return one + one

    @functools.cached_property
    def _stock(self) -> OperationTimes:
        return OperationTimes(self.workload.stock, self.cluster, stock=True)

    def edges(self) -> float:
        """What layers that share a schedule do once before the first and after the last, in each direction.

        With tensor parallelism, rows move from Megatron's ranks to those of the chunks, and back.
        """
        work = self.workload
        if not self._shares_schedule or work.tensor == 1:
            return 0.0
        moved = work.rows * work.batch * work.hidden * work.element_bytes * (work.tensor - 1) / work.tensor
        figure = self._times.figure("all_to_all", work.tensor)
        return 2 * (figure.time_us(moved) + self._times.move(work.rows * work.batch).forward)

    def latency(self, kind: StageKind) -> float:
        """The part of a collective of this kind that does not depend on its size."""
        latency = facts_of(kind).latency
        return 0.0 if latency is None else latency(self._times)


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
