"""Predicts one block, or several that share a schedule, on one cluster: the time of a schedule, its timeline.

Combines :mod:`.cost` and :mod:`.simulate`. Times are microseconds of one forward or backward pass of all of
these blocks and one micro-batch, on the rank with the most tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ampipe.files.timeline import COMPUTE, StageSpan, Timeline
from megatron_ampipe.plan.bound import direction_bound
from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.cost import CostModel
from megatron_ampipe.plan.memory import peak_bytes
from megatron_ampipe.plan.operation_times import ZERO, Pair
from megatron_ampipe.plan.simulate import Compiled, Pace, compile_named, run
from megatron_ampipe.plan.stage_costs import issue_us
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import (
    KEEP,
    WEIGHTS,
    BlockFeatures,
    Direction,
    Exchange,
    Pipeline,
    Schedule,
    Stage,
    data_flow,
    needs_of,
    period,
    unrolled,
)
from megatron_ampipe.schedule.kinds import REDUCE


class Predictor:
    """Predictions for one workload on one cluster.

    Args:
        workload: The block.
        cluster: The times of its operations.
        num_layers: How many such blocks share a schedule.
        dense: Which of them have no experts, counted from 0.
        memory: What the experts keep for their backward, see ``Pipeline.memory``.

    Raises:
        BadInput: the cluster has no figure for something that the block does.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        num_layers: int = 1,
        dense: Collection[int] = (),
        memory: str = KEEP,
    ) -> None:
        self.workload, self.cluster, self.memory = workload, cluster, memory
        self._model = CostModel(workload, cluster, shares_schedule=num_layers > 1, memory=memory)
        self.features = self._model.features
        """Of a block with experts."""
        self.layers: tuple[BlockFeatures, ...] = tuple(
            self._model.dense_features if layer in dense else self.features for layer in range(num_layers)
        )
        """Of each block that shares the schedule."""
        self._times: dict[object, float] = {}
        kinds_of_block = {kind for features in {*self.layers} for kind in data_flow(features).kinds}
        kinds_of_block |= {kind for kind in WEIGHTS.values() if kind.weights_of in kinds_of_block}
        self._costs = functools.lru_cache(maxsize=4096)(self._model.stages)
        self._issue_us = {
            direction: {
                kind: issue_us(kind, direction, workload, cluster.host, block=kinds_of_block)
                for kind in kinds_of_block
            }
            for direction in Direction
        }
        self._latency = {kind: self._model.latency(kind) for kind in kinds_of_block}

    def with_exchange(self, exchange: Exchange) -> Predictor:
        """A predictor of the same layers with another exchange."""
        return self._with(exchange=exchange)

    def with_reductions(self) -> Predictor:
        """A predictor of the same layers that reduce gradients in stages of their schedule."""
        return self._with(places_reductions=True)

    def _with(self, **changes: Any) -> Predictor:
        dense = [layer for layer, features in enumerate(self.layers) if features.dense]
        return self.of_layers(len(self.layers), dense=dense, **changes)

    def of_layers(
        self, num_layers: int, *, dense: Collection[int] = (), memory: str | None = None, **changes: Any
    ) -> Predictor:
        """A predictor of another number of the same blocks; ``changes`` are fields of the workload."""
        return Predictor(
            replace(self.workload, **changes),
            self.cluster,
            num_layers=num_layers,
            dense=dense,
            memory=self.memory if memory is None else memory,
        )

    def stock(self) -> Pair:
        """Time of Megatron's own layers."""
        total = sum((self._model.stock(dense=features.dense) for features in self.layers), ZERO)
        return self._recomputed(total)

    def peak_bytes(self, schedule: Schedule | None, *, memory: str | None = None) -> float:
        """Peak of the activations of a block with a schedule; None for Megatron's own layer."""
        pipeline = Pipeline.of(
            1 if schedule is None else schedule.degree,
            backward_degree=1 if schedule is None else schedule.backward_degree,
            order=schedule,
            memory=self.memory if memory is None else memory,
        )
        # Without a GPU there is no Transformer Engine.
        return peak_bytes(self.workload, pipeline, local=self.cluster.trains_on_host)

    def communication_us(self) -> float:
        """Total time of all collectives of a forward and a backward pass without chunks."""
        with_experts = sum(features.experts for features in self.layers)
        return with_experts * sum(
            cost.total
            for stage, cost in self._model.stages((self.workload.rows,)).items()
            if stage.is_communication and not stage.kind.copies
        )

    def whole(self, schedule: Schedule) -> Schedule:
        """The schedule of all of the layers, made from that of one block, from a period, or itself."""
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
        return self._in_pass(*(self.direction_us(schedule, lengths, direction) for direction in Direction))

    def bound_us(self, schedule: Schedule, lengths: Sequence[int]) -> Pair:
        """What no order of the stages of a schedule can beat; lanes do not slow each other in it.

        The arguments are those of :meth:`pass_us`.
        """
        schedule = self.whole(schedule)
        bounds = (self.direction_bound_us(schedule, lengths, direction) for direction in Direction)
        return self._in_pass(*bounds)

    def direction_bound_us(self, schedule: Schedule, lengths: Sequence[int], direction: Direction) -> float:
        """The bound of one direction of a schedule of all of the layers, without a recompute."""
        compiled, durations, _ = self.inputs(schedule, lengths, direction)
        times = dict(zip(compiled.stages, durations, strict=True))
        bound = direction_bound(times, needs_of(schedule, self.layers, direction))
        return bound.time + self._block(direction)

    def direction_us(self, schedule: Schedule, lengths: Sequence[int], direction: Direction) -> float:
        """Time of one direction of a schedule of all of the layers, without a recompute."""
        # Schedules of two degrees share a direction with those of one.
        program, degree = schedule.program(direction), schedule.degree_of(direction)
        key = (program, degree, schedule.whole_attention, tuple(lengths))
        if key not in self._times:
            compiled, durations, pace = self.inputs(schedule, lengths, direction)
            self._times[key] = max(run(compiled, durations, pace)[1]) + self._block(direction)
        return self._times[key]

    def inputs(
        self, schedule: Schedule, lengths: Sequence[int], direction: Direction
    ) -> tuple[Compiled, list[float], Pace]:
        """Inputs of :func:`~.simulate.run`: the program, the time of each stage alone, and its pace."""
        compiled = compile_named(schedule, self.layers, direction, on_host=self.cluster.trains_on_host)
        parts = len(lengths) // schedule.degree_of(direction)
        weights, whole = schedule.backward.weights, schedule.backward.whole
        if direction is Direction.FORWARD:
            # A forward stage takes the same time; a search then knows it already.
            weights = frozenset()
        costs = {
            features: self._costs(
                tuple(lengths),
                parts=parts,
                whole_attention=schedule.whole_attention,
                features=features,
                weights=weights,
                joined=weights & whole,
            )
            for features in {*self.layers}
        }
        durations = durations_of(compiled.stages, [costs[features] for features in self.layers], direction)
        issue = None
        if self.cluster.host.issue.of(direction):
            times = self._issue_us[direction]
            # A compute stage of several chunks is issued chunk by chunk, a collective once.
            issue = [
                times[stage.kind] * (1 if stage.is_communication or stage.chunk is None else parts)
                for stage in compiled.stages
            ]
        return compiled, durations, self.pace(compiled, issue)

    def pace(self, compiled: Compiled, issue_us: Sequence[float] | None) -> Pace:
        """What the simulation of a program depends on, with the host's times to issue its stages.

        On the CPU, a collective starts before the previous one has ended
        (``runtime.executors.ThreadExecutor``); on a stream of a GPU they run one after another.
        """
        latency = None
        if self.cluster.trains_on_host:
            in_comm = {stage for lane, stages in compiled.lanes if lane != COMPUTE for stage in stages}
            latency = [
                self._latency[stage.kind] if index in in_comm else 0.0
                for index, stage in enumerate(compiled.stages)
            ]
        overlap = self.cluster.overlap
        return Pace(
            issue_us=issue_us,
            latency_us=latency,
            compute_slowdown=overlap.compute_slowdown,
            communication_slowdown=overlap.communication_slowdown,
            busy_latency_us=overlap.latency_us,
        )

    def timeline(
        self, schedule: Schedule, lengths: Sequence[int], *, labels: Mapping[str, str] | None = None
    ) -> Timeline:
        """The start and end of every stage, forward and then backward, with labels for a drawing.

        The other arguments are those of :meth:`pass_us`.
        """
        schedule = self.whole(schedule)
        spans: list[StageSpan] = []
        offset = 0.0
        for direction in Direction:
            compiled, durations, pace = self.inputs(schedule, lengths, direction)
            begin, end = run(compiled, durations, pace)
            spans += [
                StageSpan(
                    lane=lane,
                    stage=compiled.stages[stage].name,
                    direction=direction.value,
                    layer=1 + compiled.stages[stage].layer,
                    iteration=0,
                    begin_us=offset + begin[stage],
                    end_us=offset + end[stage],
                )
                for lane, stages in compiled.lanes
                for stage in stages
            ]
            offset += max(end)
        ordered = tuple(sorted(spans, key=lambda span: span.begin_us))
        return Timeline(rank=0, spans=ordered, labels=dict(labels or {}))

    def _block(self, direction: Direction) -> float:
        # Every layer of a stack makes its own call, and its parameters their own gradients.
        return self.cluster.host.block.of(direction) * len(self.layers) + self._model.edges()

    def _in_pass(self, forward: float, backward: float) -> Pair:
        """With what Megatron recomputes around a layer; layers that share a schedule recompute in it."""
        pair = Pair(forward, backward)
        return pair if self.features.recomputed else self._recomputed(pair)

    def _recomputed(self, pair: Pair) -> Pair:
        if not self.workload.recomputes:
            return pair
        return Pair(pair.forward, pair.forward + pair.backward)


@functools.lru_cache(maxsize=256)
def _unrolled(schedule: Schedule, layers: tuple[BlockFeatures, ...]) -> Schedule:
    return unrolled(period(schedule), layers)


def durations_of(
    stages: Sequence[Stage], costs: Sequence[Mapping[Stage, Pair]], direction: Direction
) -> list[float]:
    """The time of each stage alone in one direction. ``costs`` are those of each layer.

    A layer reduces gradients of the one above it and its own; of several, the last one has none above. One
    layer alone stands for any of those that run one after another.
    """
    forward = direction is Direction.FORWARD
    durations = []
    for stage in stages:
        if stage.kind == REDUCE and len(costs) > 1:
            above = costs[stage.layer + 1 :][:1]
            durations += [costs_of[Stage(stage.kind)].backward for costs_of in above] or [0.0]
            continue
        alone = Stage(stage.kind, stage.chunk) if stage.layer or stage.again else stage
        pair = costs[stage.layer][alone]
        durations.append(pair.forward if forward or stage.again else pair.backward)
    return durations
