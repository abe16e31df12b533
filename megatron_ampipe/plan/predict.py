"""Predicts the time and the timeline of a schedule, for one block or several that share it, on a cluster.

Times are microseconds of one forward or backward pass of one micro-batch through all these blocks, on the
busiest rank. Not modelled: caches, clock throttling, and waiting for slower ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron_ampipe.files.timeline import StageSpan, Timeline
from megatron_ampipe.plan.block import Block, Rows, chunk_rows
from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.operation_times import ZERO, OperationTimes, Pair, Product
from megatron_ampipe.plan.simulate import (
    Compiled,
    TimedProgram,
    compile_named,
    least_time_us,
    resource_of,
    run,
)
from megatron_ampipe.plan.stage_costs import COSTS, Work, exchange, facts_of, issue_us
from megatron_ampipe.schedule import (
    KEEP,
    WEIGHTS,
    BlockFeatures,
    Direction,
    Pipeline,
    Schedule,
    Stage,
    StageKind,
    data_flow,
    is_whole,
    period,
    unrolled,
    with_exchange,
    with_memory,
)
from megatron_ampipe.schedule.kinds import LOSSES, REDUCE

GRAPH_LAUNCH_US = 10.0
"""The assumed time in which a host starts a CUDA graph."""
GRAPHED_SHARE = 0.35
"""The host's time in a pass that a graph holds, of that for Megatron's layers: about the share of Python
calls (``python -m tests.host_cost``), which is larger than that of operators."""


class Predictor:
    """Predictions for one block, or several that share a schedule, on one cluster.

    Args:
        block: The block.
        cluster: The times of its operations.
        num_layers: Number of such blocks that share a schedule.
        dense: Indices of those without experts, from 0.
        memory: What the experts save for their backward, see ``Pipeline.memory``.

    Raises:
        BadInput: the cluster lacks a figure that the block needs.
    """

    _is_bound = False
    """Whether times are lower bounds, see ``OperationTimes``."""

    def __init__(
        self,
        block: Block,
        cluster: Cluster,
        *,
        num_layers: int = 1,
        dense: Collection[int] = (),
        memory: str = KEEP,
    ) -> None:
        self.block, self.cluster, self.memory, self._dense = block, cluster, memory, dense
        self.host_waits = block.rows_margin is None
        """Whether the host waits for counts in a forward pass; those of fixed rows stay on the device."""
        features = block.features_of(shares_schedule=num_layers > 1)
        self.features = with_memory(with_exchange(features, block.exchange), memory)
        without_experts = self.features.without_experts
        self.layers: tuple[BlockFeatures, ...] = tuple(
            without_experts if layer in dense else self.features for layer in range(num_layers)
        )
        """The features of each block that shares the schedule."""
        self.times = OperationTimes(block, cluster, self.features, is_bound=self._is_bound)
        self._dense_times = OperationTimes(block, cluster, without_experts, is_bound=self._is_bound)
        (self._sequence,) = chunk_rows(block, (block.rows,))
        # Cached, because a search uses the same lengths many times.
        self._chunk_rows = functools.lru_cache(maxsize=4096)(self._rows_of)
        self._stage_times: dict[object, Pair] = {}
        self._costs = functools.lru_cache(maxsize=4096)(self.stages)
        self._direction_times: dict[object, float] = {}
        self._known_sums: dict[object, tuple[dict[str, float], float]] = {}
        kinds = {kind for features in {*self.layers} for kind in data_flow(features).kinds}
        kinds |= {kind for kind in WEIGHTS.values() if kind.weights_of in kinds}
        self._issue_us: dict[Direction, dict[StageKind, float]] = {}
        """The host's time to issue a stage of each kind; zero where a graph of the pass has been launched."""
        for way in Direction:
            self._issue_us[way] = dict.fromkeys(kinds, 0.0)
            if not block.captures_passes:
                self._issue_us[way] = {
                    kind: issue_us(kind, way, block, cluster.host, others=kinds) for kind in kinds
                }

    def _rows_of(self, lengths: tuple[int, ...]) -> tuple[Rows, ...]:
        return chunk_rows(self.block, lengths, shares_schedule=len(self.layers) > 1)

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
            parts: Number of adjacent chunks that form one stage in the direction with the smaller degree;
                they are computed one after the other and share a collective.
            whole_attention: Attention runs once for the whole sequence, as in the schedule ``moe-only``.
            features: The features of the block; if None, of a block with experts.
            weights: Kinds of weight gradients that are separate stages (``Program.weights``).
            joined: The kinds in ``weights`` that cover the whole sequence, with one product for all chunks.
        """
        features = self.features if features is None else features
        chunks = self._chunk_rows(tuple(lengths))
        groups = dict(enumerate(itertools.batched(chunks, parts)))
        times: dict[Stage, Pair] = {}
        for kind in data_flow(features).kinds:
            whole = kind.of_parameters or is_whole(kind, whole_attention=whole_attention)
            chunked = not whole and len(chunks) > 1
            apart = WEIGHTS[kind] if WEIGHTS.get(kind) in weights else None
            for place, rows in ({None: (self._sequence,)} if whole else groups).items():
                times[Stage(kind, place)] = self._time(kind, rows, chunked=chunked, dense=features.dense)
                if apart is not None:
                    alone = sum(self._weights(kind, Work(chunk, chunked=chunked)) for chunk in rows)
                    times[Stage(kind, place)] += Pair(0.0, -alone)
                    if whole or apart not in joined:
                        times[Stage(apart, place)] = Pair(0.0, alone)
            if apart is not None and not whole and apart in joined:
                # The rows of all chunks are concatenated for one product.
                times[Stage(apart)] = Pair(0.0, self._joined_weights(kind))
        return times

    def _joined_weights(self, kind: StageKind) -> float:
        """The time of the weight gradients of all chunks in one product."""
        copied = sum(2 * p.rows * (p.k + p.n) for p in self._products(kind, self._sequence))
        alone = self._weights(kind, Work(self._sequence, chunked=False))
        return alone + self.times.memory_us(copied * self.block.element_bytes)

    def _time(self, kind: StageKind, rows: Sequence[Rows], *, chunked: bool, dense: bool) -> Pair:
        """The time of one stage of some chunks."""
        # Chunks are computed one by one; a single collective sends the rows of all of them.
        parts = rows if kind.lane.computes else (_joined(rows),)
        by_position, times = facts_of(kind).by_position, []
        for part in parts:
            size: object = part if by_position else part.hidden
            if part.chunks > 1 and not self.host_waits:
                # The budgets of several chunks are larger than that of all their rows.
                size = part.hidden, part.chunks
            key = (kind, chunked, dense, size)
            if key not in self._stage_times:
                self._stage_times[key] = self._stage(kind, Work(part, chunked=chunked), dense=dense)
            times.append(self._stage_times[key])
        return times[0] if len(times) == 1 else sum(times, ZERO)

    def _products(self, kind: StageKind, rows: Rows) -> Sequence[Product]:
        products = facts_of(kind).products
        assert products is not None, f"{kind} has no weights"
        return products(self.block, rows.hidden)

    def _weights(self, kind: StageKind, work: Work) -> float:
        """The part of a stage's backward that computes weight gradients."""
        factor = self.cluster.stage_overhead(kind.name).backward_factor
        products = self._products(kind, work.rows)
        pairs = (self.times.products(product, chunked=work.chunked) for product in products)
        return factor * sum(pair.backward - pair.forward for pair in pairs)

    def _stage(self, kind: StageKind, work: Work, *, dense: bool) -> Pair:
        """The time of one stage of one chunk, including its overhead."""
        pair = COSTS[kind.row](self._dense_times if dense else self.times, work)
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

    def stock(self) -> Pair:
        """Time of Megatron's own layers: the same work without chunks and without overlap.

        It is at least the time that the host needs to issue it.
        """
        work, overhead = Work(self._sequence, chunked=False), self.cluster.host.stock
        total = ZERO
        for features in self.layers:
            total += sum((COSTS[kind](self._stock, work) for kind in self._stock_kinds(features)), ZERO)
            total += Pair(overhead.forward_us, overhead.backward_us)
        return self._recomputed(*map(max, total, self._stock_issued), stock=True)

    def _stock_kinds(self, features: BlockFeatures) -> list[StageKind]:
        """What Megatron's own layer computes and sends, in place of a layer with these features."""
        own = self._stock.features.without_experts if features.dense else self._stock.features
        return [kind.row for kind in data_flow(own).kinds if not kind.of_parameters]

    @functools.cached_property
    def _stock_issued(self) -> Pair:
        """The host's time to issue Megatron's own layers."""
        host, issued = self.cluster.host, ZERO
        for features in self.layers:
            kinds = self._stock_kinds(features)
            for kind in kinds:
                times = (
                    issue_us(kind, way, self._stock.block, host, others=kinds)
                    if way in kind.directions
                    else 0.0
                    for way in Direction
                )
                issued += Pair(*times)
        return issued

    def stock_exchanges(self) -> Pair:
        """The part of :meth:`stock` that the two all-to-alls of a block take."""
        all_to_all = exchange(self._stock, Work(self._sequence, chunked=False))
        return all_to_all + all_to_all

    @functools.cached_property
    def _stock(self) -> OperationTimes:
        stock = self.block.stock
        return OperationTimes(stock, self.cluster, stock.features, stock=True)

    def changed(self, **changes: Any) -> Predictor:
        """A predictor of the same layers with other fields of the block."""
        block = replace(self.block, **changes)
        return Predictor(
            block, self.cluster, num_layers=len(self.layers), dense=self._dense, memory=self.memory
        )

    def of_layers(
        self,
        num_layers: int,
        *,
        dense: Collection[int] = (),
        memory: str | None = None,
        recomputes: bool | None = None,
    ) -> Predictor:
        """A predictor of another number of the same blocks, maybe with other memory or recompute."""
        block = self.block if recomputes is None else replace(self.block, recomputes=recomputes)
        if memory is None:
            memory = self.memory
        return Predictor(block, self.cluster, num_layers=num_layers, dense=dense, memory=memory)

    def on(self, cluster: Cluster) -> Predictor:
        """A predictor of the same layers on another cluster."""
        return Predictor(
            self.block, cluster, num_layers=len(self.layers), dense=self._dense, memory=self.memory
        )

    def peak_bytes(self, pipeline: Pipeline) -> float:
        """Peak of the activations of a block."""
        # Without a GPU there is no Transformer Engine.
        return peak_bytes(self.block, pipeline, local=self.cluster.trains_on_host)

    def whole(self, schedule: Schedule) -> Schedule:
        """The schedule of all layers; ``schedule`` is of one block, a period, or already of all layers."""
        if not schedule.repeats and (
            len(self.layers) == 1 or any(stage.layer for stage in schedule.forward.stages)
        ):
            return schedule
        return _unrolled(schedule, self.layers)

    def pass_us(self, schedule: Schedule, lengths: Sequence[int]) -> Pair:
        """Time of a forward and a backward pass with a schedule.

        Args:
            schedule: A checked schedule of all of the layers; one of a block, or a period, is repeated.
            lengths: Rows of one rank in each of the schedule's chunks.
        """
        schedule = self.whole(schedule)
        return self._recomputed(*(self.direction_us(schedule, lengths, direction) for direction in Direction))

    def bound_us(self, schedule: Schedule, lengths: Sequence[int]) -> Pair:
        """A lower bound over all orders of the stages of a schedule, without slowdown between lanes."""
        schedule = self.whole(schedule)
        bounds = (self.timed(schedule, lengths, way).bound_us + self.calls_us(way) for way in Direction)
        return self._recomputed(*bounds)

    def least_us(self, schedule: Schedule, lengths: Sequence[int]) -> float:
        """A lower bound of :meth:`pass_us` over all orders of the schedule's stages."""
        return self._least_us({way: (schedule, lengths, schedule.degree_of(way)) for way in Direction})

    def _least_us(self, ways: Mapping[Direction, tuple[Schedule, Sequence[int], int]]) -> float:
        """The bound with a schedule, lengths of the chunks and a degree for each direction."""
        bounds = []
        for way, (schedule, lengths, degree) in ways.items():
            times, issue_us = self._sums(schedule, lengths, way, degree=degree)
            bounds.append(least_time_us(times, issue_us, self.cluster.overlap) + self.calls_us(way))
        return self._recomputed(*bounds).total

    def least_together_us(self, schedule: Schedule, lengths: Sequence[int]) -> float:
        """A lower bound of both passes of a schedule as one program (:mod:`.partners`), over all orders."""
        together: dict[str, float] = {}
        total_us = calls_us = 0.0
        for way in Direction:
            times, issue_us = self._sums(schedule, lengths, way, degree=schedule.degree_of(way))
            total_us += issue_us
            calls_us += self.calls_us(way)
            for resource, time_us in times.items():
                together[resource] = together.get(resource, 0.0) + time_us
        return least_time_us(together, total_us, self.cluster.overlap) + calls_us

    def _sums(
        self, schedule: Schedule, lengths: Sequence[int], direction: Direction, *, degree: int
    ) -> tuple[dict[str, float], float]:
        """The times of the stages of a direction by resource, and the host's time to issue them.

        They need no program of all layers. Left out are stages that not every layer or chunk has: reductions,
        copies, and what is restored or runs again.
        """
        parts = len(lengths) // degree
        on_device = bool(self.cluster.host.issue.of(direction))
        times: dict[str, float] = {}
        issue_us = 0.0
        for features, layers in Counter(self.layers).items():
            for stage, pair in self._stage_costs(schedule, lengths, direction, features).items():
                if self._is_summed(stage.kind, features, direction):
                    resource = resource_of(stage.kind, on_device=on_device)
                    times[resource] = times.get(resource, 0.0) + layers * pair.of(direction)
                    calls = 1 if stage.is_communication or stage.chunk is None else parts
                    issue_us += layers * calls * self._issue_us[direction][stage.kind]
        return times, issue_us if on_device else 0.0

    def _is_summed(self, kind: StageKind, features: BlockFeatures, direction: Direction) -> bool:
        """Whether every layer with these features has its stages for all chunks."""
        partial = kind.of_parameters or kind.copies or kind.restores is not None
        runs_again_only = kind == LOSSES and features.recomputed
        return direction in kind.directions and not partial and not runs_again_only

    @functools.cached_property
    def least(self) -> LeastPredictor:
        """Predicts times whose sums over chunks no lengths of the chunks can beat."""
        block, cluster = self.block, self.cluster.least
        return LeastPredictor(
            block, cluster, num_layers=len(self.layers), dense=self._dense, memory=self.memory
        )

    def direction_us(self, schedule: Schedule, lengths: Sequence[int], direction: Direction) -> float:
        """Time of one direction of a schedule of all of the layers, without a recompute."""
        # The key: schedules with two degrees share a direction with schedules with one degree.
        program, degree = schedule.program(direction), schedule.degree_of(direction)
        key = (program, degree, schedule.whole_attention, tuple(lengths))
        if key not in self._direction_times:
            end_us = self.timed(schedule, lengths, direction).end_us
            if self.block.captures_passes:
                end_us = max(end_us, self._during_graph_us(direction))
            self._direction_times[key] = end_us + self.calls_us(direction)
        return self._direction_times[key]

    def timed(self, schedule: Schedule, lengths: Sequence[int], direction: Direction) -> TimedProgram:
        """One direction of a schedule of all of the layers, with the times of its stages."""
        numbered = _numbered(schedule, self.layers, direction)
        costs = {
            features: self._stage_costs(schedule, lengths, direction, features) for features in {*self.layers}
        }
        times = [
            0.0 if one.features is None else costs[one.features][one.stage].of(one.counts_as)
            for one in numbered.entries
        ]
        issue = None
        if self.cluster.host.issue.of(direction):
            parts, issue_of = len(lengths) // schedule.degree_of(direction), self._issue_us[direction]
            # A compute stage of several chunks is issued chunk by chunk, a collective once.
            of_entries = [
                issue_of[one.stage.kind]
                * (1 if one.stage.is_communication or one.stage.chunk is None else parts)
                for one in numbered.entries
            ]
            issue = tuple([of_entries[number] for number in numbered.numbers])
        durations = tuple([times[number] for number in numbered.numbers])
        return TimedProgram(numbered.compiled, durations, issue, self.cluster.overlap, self.host_waits)

    def _stage_costs(
        self, schedule: Schedule, lengths: Sequence[int], direction: Direction, features: BlockFeatures
    ) -> dict[Stage, Pair]:
        """:meth:`stages` for one direction of a schedule, for the layers with these features."""
        weights, whole = schedule.backward.weights, schedule.backward.whole
        if direction is Direction.FORWARD:
            # They do not change forward stages, and so the costs are cached already.
            weights = frozenset()
        return self._costs(
            tuple(lengths),
            parts=len(lengths) // schedule.degree_of(direction),
            whole_attention=schedule.whole_attention,
            features=features,
            weights=weights,
            joined=weights & whole,
        )

    def timeline(
        self, schedule: Schedule, lengths: Sequence[int], *, labels: Mapping[str, str] | None = None
    ) -> Timeline:
        """The start and end of every stage, forward and then backward, with labels for a drawing."""
        schedule = self.whole(schedule)
        return timeline_of({way: self.timed(schedule, lengths, way) for way in Direction}, labels)

    def calls_us(self, direction: Direction) -> float:
        """The time outside stages: the calls of all layers in one direction, and the launch of a graph."""
        calls_us = self.cluster.host.block.of(direction) * len(self.layers)
        is_launched = self.block.captures_passes and self.cluster.host.issue.of(direction)
        return calls_us + GRAPH_LAUNCH_US if is_launched else calls_us

    def _during_graph_us(self, direction: Direction) -> float:
        """How long the host is busy after it has launched the graph of a pass."""
        of_layer = self.cluster.host.graph
        if of_layer is not None:
            return of_layer.of(direction) * len(self.layers)
        return GRAPHED_SHARE * self._stock_issued.of(direction)

    @property
    def recomputes_around(self) -> bool:
        """Whether Megatron recomputes a layer as a whole before its backward pass."""
        return self.block.recomputes and not self.features.recomputed

    def _recomputed(self, forward: float, backward: float, *, stock: bool = False) -> Pair:
        """Add Megatron's recompute around a layer; layers that share a schedule recompute inside it."""
        again = self.recomputes_around or (stock and self.block.recomputes)
        return Pair(forward, forward + backward if again else backward)


class LeastPredictor(Predictor):
    """Predicts the stages of a chunk as if it had an equal share of rows and pairs, and no earlier keys.

    With times that are linear in the size (``Cluster.least``), no lengths of chunks have a smaller sum. As
    all chunks take the same time, the sums need only one of them.
    """

    _is_bound = True

    def least_of_chunks_us(self, schedule: Schedule, lengths: Sequence[int]) -> float:
        """A lower bound over all degrees of both directions with the chunks of a schedule.

        Each computation is of one chunk, each transfer of all.
        """
        return self._least_us({way: (schedule, lengths, 1) for way in Direction})

    def _sums(
        self, schedule: Schedule, lengths: Sequence[int], direction: Direction, *, degree: int
    ) -> tuple[dict[str, float], float]:
        weights = schedule.backward.weights if direction is Direction.BACKWARD else frozenset()
        joined = weights & schedule.backward.whole
        count = len(lengths)
        key = (direction, count, degree, schedule.whole_attention, weights, joined)
        if key in self._known_sums:
            return self._known_sums[key]
        backward, on_device = direction is Direction.BACKWARD, bool(self.cluster.host.issue.of(direction))
        chunks = (Rows(self.block.rows // count, self._sequence.pairs // count, 0, 0),) * (count // degree)
        issue_of = self._issue_us[direction]
        times: dict[str, float] = {}
        issue_us = 0.0
        for features, layers in Counter(self.layers).items():
            for kind in data_flow(features).kinds:
                if not self._is_summed(kind, features, direction):
                    continue
                whole = is_whole(kind, whole_attention=schedule.whole_attention)
                rows, number = ((self._sequence,), 1) if whole else (chunks, degree)
                chunked = not whole and count > 1
                pair = self._time(kind, rows, chunked=chunked, dense=features.dense)
                calls = number * (len(rows) if kind.lane.computes else 1)
                time_us, issued_us = number * pair[backward], calls * issue_of[kind]
                if (apart := WEIGHTS.get(kind)) in weights:
                    assert apart is not None
                    if apart in joined and not whole:
                        alone = sum(self._weights(kind, Work(chunk, chunked=chunked)) for chunk in rows)
                        time_us += self._joined_weights(kind) - number * alone
                        calls = 1
                    issued_us += calls * issue_of[apart]
                resource = resource_of(kind, on_device=on_device)
                times[resource] = times.get(resource, 0.0) + layers * time_us
                issue_us += layers * issued_us
        self._known_sums[key] = times, issue_us if on_device else 0.0
        return self._known_sums[key]


def timeline_of(passes: Mapping[Direction, TimedProgram], labels: Mapping[str, str] | None) -> Timeline:
    """Start and end of every stage of passes that run one after another."""
    spans: list[StageSpan] = []
    offset = 0.0
    for direction, timed in passes.items():
        begin, end = run(timed)
        for lane, places in timed.compiled.lanes:
            for place in places:
                stage = timed.compiled.stages[place]
                span = StageSpan(
                    lane=lane,
                    stage=stage.name,
                    direction=Direction.FORWARD if stage.of_next_microbatch else direction,
                    layer=1 + stage.layer,
                    iteration=0,
                    begin_us=offset + begin[place],
                    end_us=offset + end[place],
                    of_next_microbatch=stage.of_next_microbatch,
                )
                spans.append(span)
        offset += max(end)
    ordered = tuple(sorted(spans, key=lambda span: span.begin_us))
    return Timeline(rank=0, spans=ordered, labels=dict(labels or {}))


class _Entry(NamedTuple):
    """What the time of a stage is: that of a stage of one layer, in one direction.

    ``features`` are those of the layer whose stage it is; None if the stage takes no time.
    """

    features: BlockFeatures | None
    stage: Stage
    counts_as: Direction


class _Numbered(NamedTuple):
    """A compiled program, and for each of its stages the number of its entry."""

    compiled: Compiled
    entries: tuple[_Entry, ...]
    numbers: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def _numbered(schedule: Schedule, layers: tuple[BlockFeatures, ...], direction: Direction) -> _Numbered:
    """Compile one direction. Cached, because a search uses the same schedules with many lengths."""
    compiled = compile_named(schedule, layers, direction)
    numbers: dict[_Entry, int] = {}
    of_stages = []
    for stage in compiled.stages:
        features: BlockFeatures | None = layers[stage.layer]
        alone = Stage(stage.kind, stage.chunk) if stage.layer or stage.is_recompute else stage
        if stage.kind == REDUCE and len(layers) > 1:
            # A layer reduces the gradients of the layer above it, which the last layer does not have. A
            # single layer stands for any of several that run one after another.
            is_last = stage.layer + 1 == len(layers)
            features, alone = None if is_last else layers[stage.layer + 1], Stage(REDUCE)
        counts_as = Direction.FORWARD if stage.is_recompute else direction
        entry = _Entry(features, alone, counts_as)
        of_stages.append(numbers.setdefault(entry, len(numbers)))
    return _Numbered(compiled, tuple(numbers), tuple(of_stages))


@functools.lru_cache(maxsize=256)
def _unrolled(schedule: Schedule, layers: tuple[BlockFeatures, ...]) -> Schedule:
    return unrolled(period(schedule), layers)


def _joined(chunks: Sequence[Rows]) -> Rows:
    """The rows of adjacent chunks, as one chunk."""
    if len(chunks) == 1:
        return chunks[0]
    return Rows(
        hidden=sum(chunk.hidden for chunk in chunks),
        pairs=sum(chunk.pairs for chunk in chunks),
        keys=chunks[-1].keys,
        merged=sum(chunk.merged for chunk in chunks),
        chunks=len(chunks),
    )
