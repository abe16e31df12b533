"""Finds the best way to reduce the gradients of a pipeline stage: during or after the backward pass.

Compares by simulation Megatron's overlap with ``--ampipe-grad-reduce placed``, each with several bucket
sizes, for the last micro-batch of an iteration, the only one in which gradients are reduced.

Megatron has one buffer for the parameters of experts and one for all others, because different ranks reduce
them. Both are cut by the same rule (``--ddp-bucket-size``). Only weights of matrix products are counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from megatron_ampipe.files.outputs import Report
from megatron_ampipe.plan.operation_times import tensors_of
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.search import MINIMUM_SAVING
from megatron_ampipe.plan.simulate import Compiled, Needs, TimedProgram, compile_program, contention, run
from megatron_ampipe.schedule import Direction, Program, Schedule, Stage
from megatron_ampipe.schedule.kinds import REDUCE, REDUCE_EXPERTS
from megatron_ampipe.schedule.passes import placed

AFTER, STOCK, PLACED = "after the pass", "stock", "placed"
PARTS = (1, 2, 4, 8)
"""The numbers of buckets per layer that are tried, for each of its two buffers."""
OVERLAPPED = "gradients"
"""The lane of reductions that are not stages of a schedule."""


def plan_gradients(
    predictor: Predictor,
    schedule: Schedule,
    lengths: Sequence[int],
    *,
    num_layers: int,
    bucket_size: int | None = None,
) -> Report | None:
    """Compare the ways to reduce the gradients of a plan's layers; None if nothing is reduced.

    Args:
        predictor: The predictor of the layers that share the schedule, or of one layer.
        schedule: Their schedule.
        lengths: Rows of one rank in each chunk.
        num_layers: Layers of the pipeline stage; all have experts if they do not all share the schedule.
        bucket_size: ``--ddp-bucket-size``; the best of several if None.

    Returns:
        ``parameters``: number of parameters of a layer with experts, on one rank, whose gradients are
        reduced; ``reduction_ms``: time of their reduction alone; ``without_ms``: the backward pass of all
        layers without reductions; ``ways``: for each way, the pass with the delay by reductions
        (``pass_ms``), the reductions after it (``left_ms``), and the share that both save compared with all
        reductions after the pass (``saves``); ``chosen``: the simplest way unless another saves clearly more.

    Raises:
        BadInput: the cluster has no figure for the reductions.
    """
    expert_tensors, other_tensors = tensors_of(predictor.block, dense=False)
    parameters = sum(expert_tensors) + sum(other_tensors)
    if not parameters:
        return None
    comparison = _Comparison(predictor, schedule, lengths, num_layers=num_layers)
    sizes: Sequence[int | None] = (bucket_size,)
    if bucket_size is None:
        # Megatron's default, and fractions of a layer's size in each of the two buffers, the largest first.
        sizes = (None, *comparison.bucket_sizes())
    ways = [comparison.after_the_pass()]
    for name in (STOCK, PLACED):
        ways.append(_simplest([comparison.in_buckets(name, size) for size in sizes]))
    reductions_us = predictor.times.reduction_us(sum(other_tensors), experts=False)
    reductions_us += predictor.times.reduction_us(sum(expert_tensors), experts=True)
    return {
        "parameters": round(parameters),
        "reduction_ms": reductions_us / 1e3,
        "without_ms": comparison.without_us / 1e3,
        "ways": ways,
        "chosen": _simplest(ways)["name"],
    }


class _Comparison:
    """The ways to reduce the gradients of a pipeline stage; arguments as for :func:`plan_gradients`.

    Attributes:
        without_us: The backward pass of all layers without reductions.
    """

    def __init__(
        self, predictor: Predictor, schedule: Schedule, lengths: Sequence[int], *, num_layers: int
    ) -> None:
        is_dense = [False] * num_layers
        if len(predictor.layers) == num_layers:
            is_dense = [features.dense for features in reversed(predictor.layers)]
        tensors = [tensors_of(predictor.block, dense=dense) for dense in is_dense]
        # For each layer in the order of the backward pass, the sizes of tensors in each of the two buffers.
        self._expert_tensors = [experts for experts, _ in tensors]
        self._other_tensors = [others for _, others in tensors]
        self._times, self._replicas = predictor.times, predictor.block.replicas
        self._backward = ReducedPass(predictor, schedule, lengths, num_layers=num_layers)
        self.without_us = self._backward.without_us
        all_expert_tensors = sum(itertools.chain(*self._expert_tensors))
        all_other_tensors = sum(itertools.chain(*self._other_tensors))
        self._after_us = self.without_us + (
            self._times.reduction_us(all_expert_tensors, experts=True)
            + self._times.reduction_us(all_other_tensors, experts=False)
        )

    def bucket_sizes(self) -> list[int]:
        """Fractions of a layer's size in each of the two buffers, the largest first."""
        layer_sizes = {math.ceil(sum(tensors)) for tensors in self._expert_tensors if tensors}
        layer_sizes |= {math.ceil(sum(tensors)) for tensors in self._other_tensors if tensors}
        return sorted({math.ceil(size / count) for size in layer_sizes for count in PARTS}, reverse=True)

    def after_the_pass(self) -> Report:
        """All reductions after the backward pass."""
        return self._way(AFTER, None, computed_us=self.without_us, total_us=self._after_us)

    def in_buckets(self, name: str, size: int | None) -> Report:
        """One reduction for each bucket of this size (None: of Megatron's default), during the pass."""
        limit = size or max(40_000_000, 1_000_000 * self._replicas)
        of_experts_us = self._reductions_us(self._expert_tensors, limit, experts=True)
        of_others_us = self._reductions_us(self._other_tensors, limit, experts=False)
        by_layer = list(zip(of_experts_us, of_others_us, strict=True))
        computed_us, reduced_us = self._backward.times(by_layer, overlapped=name == STOCK)
        # No layer follows the last one, so its last buckets come after the pass.
        total_us = reduced_us + of_others_us[-1]
        return self._way(name, size, computed_us=computed_us, total_us=total_us)

    def _reductions_us(
        self, tensors: Sequence[Sequence[float]], limit: float, *, experts: bool
    ) -> list[float]:
        """For each layer, the time of the reductions of the buckets that it completes."""
        return [
            sum(self._times.reduction_us(bucket, experts=experts) for bucket in buckets)
            for buckets in completed(tensors, limit)
        ]

    def _way(self, name: str, size: int | None, *, computed_us: float, total_us: float) -> Report:
        return {
            "name": name,
            "bucket_size": size,
            "pass_ms": computed_us / 1e3,
            "left_ms": (total_us - computed_us) / 1e3,
            "saves": 1 - total_us / self._after_us,
        }


def _simplest(ways: Sequence[Report]) -> Report:
    """The first way, unless another saves more than the accuracy of predictions."""
    both = [way["pass_ms"] + way["left_ms"] for way in ways]
    return next(way for way, ms in zip(ways, both, strict=True) if ms * (1 - MINIMUM_SAVING) <= min(both))


def completed(layers: Sequence[Sequence[float]], bucket_size: float) -> list[list[float]]:
    """For each layer, the sizes of the buckets that it completes, in the order of the backward pass.

    A bucket ends with the tensor that brings it to ``bucket_size`` parameters, or with the last layer.
    """
    buckets: list[list[float]] = []
    filled = 0.0
    for tensors in layers:
        buckets.append([])
        for tensor in tensors:
            filled += tensor
            if filled >= bucket_size:
                buckets[-1].append(filled)
                filled = 0.0
    if filled:
        buckets[-1].append(filled)
    return buckets


class ReducedPass:
    """The simulated backward pass of all layers of a pipeline stage, with gradient reductions.

    Layers that share a schedule run as one, blocks one after another. A reduction is either a stage of the
    communication lane, or starts when gradients are complete and shares the network with transfers
    (Megatron's overlap). Arguments as for :func:`plan_gradients`.
    """

    def __init__(
        self, predictor: Predictor, schedule: Schedule, lengths: Sequence[int], *, num_layers: int
    ) -> None:
        self._block, self._cluster = predictor.block, predictor.cluster
        self._host_waits = predictor.host_waits
        self.without_us = 0.0
        self._times: dict[Stage, float] = {}
        self._issue: dict[Stage, float] = {}
        self._lanes: dict[str, list[Stage]] = {}
        self._needs: dict[Stage, tuple[Stage, ...]] = {}
        # The first part of the pass are the last layers, with what does not fill a part.
        num_shared = min(len(predictor.layers), num_layers)
        num_below = num_layers
        while num_below:
            count = num_shared
            if num_below == num_layers:
                count += num_below % num_shared
            num_below -= count
            part = predictor if count == len(predictor.layers) else predictor.of_layers(count)
            self._append(part, schedule, lengths, first_layer=num_below)
        layers = range(num_layers)[::-1]
        self._above = [Stage(REDUCE, None, layer) for layer in layers]
        self._last: list[Stage] = []
        for layer, above in zip(layers, self._above, strict=True):
            of_experts = Stage(REDUCE_EXPERTS, None, layer)
            self._last.append(of_experts if of_experts in self._needs else above)
        self._placed = compile_program(Program.of(self._lanes), self._needs)
        self._overlapped = self._with_overlap(self._lanes, self._needs)
        # Time outside stages: entering a block, Megatron's recompute around a block.
        self._others_us = 0.0
        self._others_us = self.without_us - self.times([(0.0, 0.0)] * num_layers, overlapped=False)[0]

    def _append(
        self, part: Predictor, schedule: Schedule, lengths: Sequence[int], *, first_layer: int
    ) -> None:
        """Add layers that share a schedule, after all that the pass has so far."""
        self.without_us += part.pass_us(schedule, lengths).backward
        part = part.changed(places_reductions=True)
        whole = placed(part.whole(schedule), part.layers)
        timed = part.timed(whole, lengths, Direction.BACKWARD)
        stages = timed.compiled.stages
        moved = {stage: dataclasses.replace(stage, layer=stage.layer + first_layer) for stage in stages}
        awaited = set(itertools.chain(*self._needs.values()))
        last_before = tuple(stage for stage in self._needs if stage not in awaited)
        for stage, needed_numbers in zip(stages, timed.compiled.needs, strict=True):
            needed = tuple(moved[stages[number]] for number in needed_numbers)
            self._needs[moved[stage]] = needed or last_before
        self._times |= zip(moved.values(), timed.durations, strict=True)
        self._issue |= zip(moved.values(), timed.issue_us or (), strict=False)
        for lane, order in whole.backward.lanes:
            self._lanes.setdefault(lane, []).extend(moved[stage] for stage in order)

    def _with_overlap(self, lanes: dict[str, list[Stage]], needs: Needs) -> Compiled:
        """The pass with reductions in a separate lane, for which nothing waits."""

        def others(stages: Sequence[Stage]) -> list[Stage]:
            return [stage for stage in stages if not stage.kind.of_parameters]

        in_turns = dict.fromkeys(itertools.chain(*zip(self._above, self._last, strict=True)))
        other_lanes = {lane: others(stages) for lane, stages in lanes.items()}
        compiled = compile_program(
            Program.of({**other_lanes, OVERLAPPED: in_turns}),
            {stage: tuple(others(stages)) for stage, stages in needs.items()},
        )
        # Reductions and all-to-alls share links if both leave the node, or both stay in it.
        work, ranks_per_node = self._block, self._cluster.ranks_per_node
        if (work.expert * work.expert_tensor > ranks_per_node) == (
            work.replicas * work.tensor > ranks_per_node
        ):
            return compiled
        other_compiled = [(lane, stages) for lane, stages in compiled.lanes if lane != OVERLAPPED]
        contended = contention(other_compiled, compiled.stages)
        return dataclasses.replace(compiled, contended=contended)

    def times(self, reductions: Sequence[tuple[float, float]], *, overlapped: bool) -> tuple[float, float]:
        """Microseconds until all other stages have ended, and until reductions have ended as well.

        Args:
            reductions: For each layer in the order of the pass, microseconds of two reductions: of expert
                gradients, which are complete when the pass reaches attention, and of all others, which are
                complete at the end of the layer.
            overlapped: Reductions start when gradients are complete; else they are stages of the schedule.
        """
        compiled = self._overlapped if overlapped else self._placed
        times = {**self._times, **dict.fromkeys((*self._above, *self._last), 0.0)}
        # A stage may have both reductions.
        for stage, (experts, _) in zip(self._last, reductions, strict=True):
            times[stage] += experts
        for stage, (_, others) in zip(self._above[1:], reductions, strict=False):
            times[stage] += others
        issue = tuple(self._issue[stage] for stage in compiled.stages) if self._issue else None
        durations = tuple(times[stage] for stage in compiled.stages)
        _, end = run(TimedProgram(compiled, durations, issue, self._cluster.overlap, self._host_waits))
        ends = zip(compiled.stages, end, strict=True)
        computed = max(time for stage, time in ends if not stage.kind.of_parameters)
        return computed + self._others_us, max(end) + self._others_us
