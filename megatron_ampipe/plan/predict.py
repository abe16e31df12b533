"""Predicts one block on one cluster: the time of a schedule, and its timeline.

Combines :mod:`.cost` and :mod:`.simulate`. Times are microseconds of one forward or backward pass of one
block and one micro-batch, on the rank with the most tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from megatron_ampipe.plan.cluster import Cluster
from megatron_ampipe.plan.cost import CostFunction, CostModel, Pair
from megatron_ampipe.plan.host_time import issue_factor
from megatron_ampipe.plan.simulate import Compiled, compile_named, run
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import Direction, Schedule, Stage, StageKind, data_flow
from megatron_ampipe.timeline import COMPUTE, StageSpan, Timeline


class Predictor:
    """Predictions for one workload on one cluster.

    Args:
        workload: The block.
        cluster: The times of its operations.
        added: Cost functions of kinds of stages that are not in :data:`.cost.COSTS`.

    Raises:
        BadInput: the cluster has no figure for something that the block does.
    """

    def __init__(
        self,
        workload: Workload,
        cluster: Cluster,
        *,
        added: Mapping[StageKind, CostFunction] | None = None,
    ) -> None:
        self.workload, self.cluster = workload, cluster
        self._model = CostModel(workload, cluster, added=added)
        self.features = self._model.features
        self._times: dict[object, float] = {}
        kinds_of_block = data_flow(self.features).kinds
        self.costs = functools.lru_cache(maxsize=4096)(self._costs)
        self._issue_factors = {
            direction: {kind: issue_factor(kind, direction, workload) for kind in kinds_of_block}
            for direction in Direction
        }
        self._latency = {kind: self._model.latency(kind) for kind in kinds_of_block}
        self._slowdowns = {
            "compute_slowdown": cluster.overlap.compute_slowdown,
            "communication_slowdown": cluster.overlap.communication_slowdown,
            "busy_latency_us": cluster.overlap.latency_us,
        }

    def _costs(self, lengths: tuple[int, ...], parts: int, whole_attention: bool) -> dict[Stage, Pair]:
        return self._model.stages(lengths, parts=parts, whole_attention=whole_attention)

    def stock(self) -> Pair:
        """Time of Megatron's own layer."""
        return self._recomputed(self._model.stock())

    def communication_us(self) -> float:
        """Total time of all collectives of a forward and a backward pass without chunks."""
        whole = self.costs((self.workload.rows,), 1, False)
        return sum(cost.forward + cost.backward for stage, cost in whole.items() if stage.is_communication)

    def pass_us(self, schedule: Schedule, lengths: Sequence[int]) -> Pair:
        """Time of a forward and a backward pass with a schedule.

        Args:
            schedule: A checked schedule.
            lengths: Rows of one rank in each of the schedule's chunks.
        """
        forward, backward = (self.direction_us(schedule, lengths, direction) for direction in Direction)
        return self._recomputed(Pair(forward, backward))

    def direction_us(self, schedule: Schedule, lengths: Sequence[int], direction: Direction) -> float:
        """Time of one direction, without a recompute."""
        # Schedules of two degrees share a direction with those of one.
        program, degree = schedule.program(direction), schedule.degree_of(direction)
        key = (program, degree, schedule.whole_attention, tuple(lengths))
        if key not in self._times:
            compiled, durations, issue = self.inputs(schedule, lengths, direction)
            latency = self.latency(compiled)
            _, end = run(compiled, durations, issue_us=issue, latency_us=latency, **self._slowdowns)
            self._times[key] = max(end) + self._block(direction)
        return self._times[key]

    def inputs(
        self, schedule: Schedule, lengths: Sequence[int], direction: Direction
    ) -> tuple[Compiled, list[float], list[float] | None]:
        """Inputs of :func:`~.simulate.run`: the program, its durations, and the times to issue stages."""
        compiled = compile_named(schedule, (self.features,), direction)
        parts = len(lengths) // schedule.degree_of(direction)
        costs = self.costs(tuple(lengths), parts, schedule.whole_attention)
        return (
            compiled,
            durations_of(compiled.stages, costs, direction),
            self.issue(compiled, direction, parts),
        )

    def issue(self, compiled: Compiled, direction: Direction, parts: int) -> list[float] | None:
        """The host's time to issue each stage; None for training on the CPU."""
        figure = self.cluster.host.issue
        mean = figure.forward_us if direction is Direction.FORWARD else figure.backward_us
        if not mean:
            return None
        factors = self._issue_factors[direction]
        # A compute stage of several chunks is issued chunk by chunk, a collective once.
        return [
            mean * factors[stage.kind] * (1 if stage.is_communication or stage.chunk is None else parts)
            for stage in compiled.stages
        ]

    def latency(self, compiled: Compiled) -> list[float] | None:
        """The part of each collective that can overlap with the previous one; None for GPUs.

        On the CPU, a collective starts before the previous one has ended
        (``runtime.executors.ThreadExecutor``); on a stream of a GPU they run one after another.
        """
        if self.cluster.host.issue.forward_us:
            return None
        in_comm = {stage for lane, stages in compiled.lanes if lane != COMPUTE for stage in stages}
        return [
            self._latency[stage.kind] if index in in_comm else 0.0
            for index, stage in enumerate(compiled.stages)
        ]

    @property
    def slowdowns(self) -> Mapping[str, float]:
        """How much lanes slow each other down, as keyword arguments of :func:`~.simulate.run`."""
        return self._slowdowns

    def timeline(
        self, schedule: Schedule, lengths: Sequence[int], *, labels: Mapping[str, str] | None = None
    ) -> Timeline:
        """The start and end of every stage, forward and then backward.

        Args:
            schedule: A checked schedule.
            lengths: Rows of one rank in each of the schedule's chunks.
            labels: Text for a drawing.
        """
        spans: list[StageSpan] = []
        offset = 0.0
        for direction in Direction:
            compiled, durations, issue = self.inputs(schedule, lengths, direction)
            latency = self.latency(compiled)
            begin, end = run(compiled, durations, issue_us=issue, latency_us=latency, **self._slowdowns)
            for lane, stages in compiled.lanes:
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
                    for stage in stages
                ]
            offset += max(end)
        ordered = tuple(sorted(spans, key=lambda span: span.begin_us))
        return Timeline(rank=0, spans=ordered, labels=dict(labels or {}))

    def _block(self, direction: Direction) -> float:
        figure = self.cluster.host.block
        return figure.forward_us if direction is Direction.FORWARD else figure.backward_us

    def _recomputed(self, pair: Pair) -> Pair:
        if not self.workload.recomputes:
            return pair
        return Pair(pair.forward, pair.forward + pair.backward)


def durations_of(stages: Sequence[Stage], costs: Mapping[Stage, Pair], direction: Direction) -> list[float]:
    """The time of each stage alone in one direction. ``costs`` are those of one layer."""
    index = 0 if direction is Direction.FORWARD else 1
    return [
        costs[Stage(stage.kind, stage.chunk) if stage.layer or stage.again else stage][
            0 if stage.again else index
        ]
        for stage in stages
    ]
