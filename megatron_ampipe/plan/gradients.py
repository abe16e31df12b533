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
    work = predictor.block
    with_experts = tensors_of(work, dense=False)
    parameters = sum(map(sum, with_experts))
    if not parameters:
        return None
    dense = [False] * num_layers
    if len(predictor.layers) == num_layers:
        dense = [features.dense for features in reversed(predictor.layers)]
    tensors = [tensors_of(work, dense=is_dense) for is_dense in dense]
    times = predictor.times
    backward = ReducedPass(predictor, schedule, lengths, num_layers=num_layers)
    after_us = backward.without_us + sum(
        times.reduction_us(sum(itertools.chain(*buffers)), experts=experts)
        for experts, buffers in zip((True, False), zip(*tensors, strict=True), strict=True)
    )

    def way(name: str, size: int | None = None) -> Report:
        if name == AFTER:
            computed, total = backward.without_us, after_us
        else:
            # Megatron's default.
            limit = size or max(40_000_000, 1_000_000 * work.replicas)
            by_buffer = (
                [
                    sum(times.reduction_us(bucket, experts=experts) for bucket in buckets)
                    for buckets in completed(buffer, limit)
                ]
                for experts, buffer in zip((True, False), zip(*tensors, strict=True), strict=True)
            )
            reductions = list(zip(*by_buffer, strict=True))
            computed, reduced = backward.times(reductions, overlapped=name == STOCK)
            total = reduced + reductions[-1][1]
        return {
            "name": name,
            "bucket_size": size,
            "pass_ms": computed / 1e3,
            "left_ms": (total - computed) / 1e3,
            "saves": 1 - total / after_us,
        }

    # Megatron's default, and fractions of a layer's size in each of the two buffers, the largest first.
    buffers = {math.ceil(sum(buffer)) for layer in tensors for buffer in layer if buffer}
    parts = {math.ceil(size / count) for size in buffers for count in PARTS}
    sizes = (None, *sorted(parts, reverse=True)) if bucket_size is None else (bucket_size,)
    ways = [way(AFTER), *(_simplest([way(name, size) for size in sizes]) for name in (STOCK, PLACED))]
    alone = (times.reduction_us(sum(with_experts[not exp]), experts=exp) for exp in (True, False))
    return {
        "parameters": round(parameters),
        "reduction_ms": sum(alone) / 1e3,
        "without_ms": backward.without_us / 1e3,
        "ways": ways,
        "chosen": _simplest(ways)["name"],
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
        self._times: dict[Stage, float] = {}
        self._issue: dict[Stage, float] = {}
        lanes: dict[str, list[Stage]] = {}
        needs: dict[Stage, tuple[Stage, ...]] = {}
        self.without_us, shared = 0.0, min(len(predictor.layers), num_layers)
        first = num_layers
        while first:
            # Remaining layers share the schedule of the last layers.
            count = shared + (first % shared if first == num_layers else 0)
            first -= count
            part = predictor if count == len(predictor.layers) else predictor.of_layers(count)
            self.without_us += part.pass_us(schedule, lengths).backward
            part = part.changed(places_reductions=True)
            whole = placed(part.whole(schedule), part.layers)
            timed = part.timed(whole, lengths, Direction.BACKWARD)
            stages = timed.compiled.stages
            moved = {stage: dataclasses.replace(stage, layer=stage.layer + first) for stage in stages}
            needed = set(itertools.chain(*needs.values()))
            before = tuple(stage for stage in needs if stage not in needed)
            for stage, places in zip(stages, timed.compiled.needs, strict=True):
                needs[moved[stage]] = tuple(moved[stages[place]] for place in places) or before
            self._times |= zip(moved.values(), timed.durations, strict=True)
            self._issue |= zip(moved.values(), timed.issue_us or (), strict=False)
            for lane, order in whole.backward.lanes:
                lanes.setdefault(lane, []).extend(moved[stage] for stage in order)
        layers = range(num_layers)[::-1]
        self._above = [Stage(REDUCE, None, layer) for layer in layers]
        last = (Stage(REDUCE_EXPERTS, None, layer) for layer in layers)
        self._last = [
            stage if stage in needs else above for stage, above in zip(last, self._above, strict=True)
        ]
        self._placed = compile_program(Program.of(lanes), needs)
        self._overlapped = self._with_overlap(lanes, needs)
        # Time outside stages: entering a block, Megatron's recompute around a block.
        self._others_us = 0.0
        self._others_us = self.without_us - self.times([(0.0, 0.0)] * num_layers, overlapped=False)[0]

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
        own = [(lane, stages) for lane, stages in compiled.lanes if lane != OVERLAPPED]
        contended = contention(own, compiled.stages)
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
        issue = [self._issue[stage] for stage in compiled.stages] if self._issue else None
        durations = [times[stage] for stage in compiled.stages]
        _, end = run(TimedProgram(compiled, durations, issue, self._cluster.overlap))
        ends = zip(compiled.stages, end, strict=True)
        computed = max(time for stage, time in ends if not stage.kind.of_parameters)
        return computed + self._others_us, max(end) + self._others_us
