"""How the gradients of a pipeline stage are best reduced: after the backward pass, or where in it.

Compares by simulation (:mod:`.reduced_pass`) what Megatron does, what ``--ampipe-grad-reduce placed`` does,
each with several sizes of buckets, and FSMoE's partitioning (:mod:`.fsmoe_partition`), which divides
gradients as it likes and is not built into the runtime. Of the last micro-batch of an iteration. Called by
``tools.plan_answer``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_ampipe.plan.fsmoe_partition import first_step, second_step
from megatron_ampipe.plan.gradient_buckets import LayerTensors, reductions_us, tensors_of
from megatron_ampipe.plan.operation_times import OperationTimes
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.reduced_pass import PassTimes, ReducedPass
from megatron_ampipe.plan.search import MINIMUM_SAVING
from megatron_ampipe.schedule import Schedule

AFTER, STOCK, PLACED = "after the pass", "stock", "placed"
FIRST_STEP, BOTH_STEPS = "FSMoE, first step", "FSMoE, both steps"
PARTS = (1, 2, 4, 8)
"""Numbers of buckets of a layer that are tried, for each of its two buffers."""


@dataclass(frozen=True, slots=True)
class Reducing:
    """One way to reduce the gradients of all layers.

    Attributes:
        name: Of the way.
        bucket_size: ``--ddp-bucket-size``; None if there are no buckets, or they have Megatron's default.
        pass_ms: The backward pass of all layers, with what reductions delay.
        left_ms: What is reduced when the pass has ended.
        saves: By how much the two together are less than with everything after the pass, as a share.
    """

    name: str
    bucket_size: int | None
    pass_ms: float
    left_ms: float
    saves: float


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """The gradients of one layer.

    Attributes:
        layer: From 1, of the layers of the pipeline stage.
        reduction_ms: What their reduction takes alone.
        gap_ms: How long the layer can reduce gradients of others after its last transfer, and delay nothing.
        first_step_ms: What it reduces there by FSMoE's first step.
        second_step_ms: What the second step adds.
    """

    layer: int
    reduction_ms: float
    gap_ms: float
    first_step_ms: float
    second_step_ms: float


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """What was compared.

    Attributes:
        parameters: Of one layer with experts on one rank, those whose gradients are reduced.
        without_ms: The backward pass of all layers without reductions.
        layers: In the order of the pass, the last layer first.
        ways: All that were compared.
        chosen: The name of one of the ways that can be run: the simplest unless another saves more than
            predictions are exact.
    """

    parameters: int
    without_ms: float
    layers: tuple[LayerGradients, ...]
    ways: tuple[Reducing, ...]
    chosen: str


def plan_gradients(
    predictor: Predictor,
    schedule: Schedule,
    lengths: Sequence[int],
    *,
    num_layers: int,
    bucket_size: int | None = None,
) -> GradientPlan | None:
    """Compare the ways to reduce the gradients of a plan's layers; None if nothing is reduced.

    Args:
        predictor: Of the layers that share the schedule, or of one.
        schedule: What they run.
        lengths: Rows of one rank in each chunk.
        num_layers: Of the pipeline stage, all with experts if they do not all share the schedule.
        bucket_size: ``--ddp-bucket-size``; the best of several if None.

    Raises:
        BadInput: the cluster has no figure for them.
    """
    work = predictor.workload
    with_experts = tensors_of(work, dense=False)
    if not with_experts.parameters:
        return None
    dense = [False] * num_layers
    if len(predictor.layers) == num_layers:
        dense = [features.dense for features in reversed(predictor.layers)]
    tensors = [tensors_of(work, dense=one) for one in dense]
    times = OperationTimes(work, predictor.cluster)
    run = ReducedPass(predictor, schedule, lengths, num_layers=num_layers)
    without_us, gaps = run.without_us, run.gaps()
    gradients = [one.total_us for one in reductions_us(times, tensors)]
    first = first_step(gradients, gaps)
    both = second_step(run.graph(), gradients, first)
    all_us = reductions_us(times, [_together(tensors)])[0].total_us
    # What is left by FSMoE's steps is reduced together; figures of a cluster can be 0.
    per_gradient = all_us / (sum(gradients) or 1.0)

    def way(name: str, found: PassTimes, left_us: float, size: int | None = None) -> Reducing:
        total = found.reduced + left_us
        return Reducing(
            name=name,
            bucket_size=size,
            pass_ms=found.computed / 1e3,
            left_ms=(total - found.computed) / 1e3,
            saves=1 - total / (without_us + all_us),
        )

    def with_buckets(name: str, size: int | None) -> Reducing:
        of_buckets = reductions_us(times, tensors, size or default_bucket_size(work.replicas))
        found = (run.overlapped if name == STOCK else run.placed_when_complete)(of_buckets)
        return way(name, found, of_buckets[-1].others, size)

    sizes = [bucket_size] if bucket_size is not None else _bucket_sizes(tensors)
    after = way(AFTER, PassTimes(without_us, without_us), all_us)
    stock, placed = (_simplest(with_buckets(name, size) for size in sizes) for name in (STOCK, PLACED))
    steps = (
        way(name, run.placed(found), per_gradient * (sum(gradients) - sum(found)))
        for name, found in ((FIRST_STEP, first), (BOTH_STEPS, both))
    )
    return GradientPlan(
        parameters=round(with_experts.parameters),
        without_ms=without_us / 1e3,
        layers=tuple(
            LayerGradients(
                num_layers - place,
                gradients[place] / 1e3,
                gaps[place] / 1e3,
                first[place] / 1e3,
                (both[place] - first[place]) / 1e3,
            )
            for place in range(num_layers)
        ),
        ways=(after, stock, *steps, placed),
        chosen=_simplest((after, stock, placed)).name,
    )


def default_bucket_size(replicas: int) -> int:
    """Megatron's, for that many data-parallel ranks."""
    return max(40_000_000, 1_000_000 * replicas)


def _together(layers: Sequence[LayerTensors]) -> LayerTensors:
    experts, others = (tuple(tensor for one in layers for tensor in one[buffer]) for buffer in (0, 1))
    return LayerTensors(experts, others)


def _bucket_sizes(layers: Sequence[LayerTensors]) -> list[int | None]:
    """Megatron's default, and parts of what a layer has in each of the two buffers, the largest first."""
    buffers = {math.ceil(sum(buffer)) for one in layers for buffer in one if buffer}
    sizes = {math.ceil(size / parts) for size in buffers for parts in PARTS}
    return [None, *sorted(sizes, reverse=True)]


def _simplest(ways: Iterable[Reducing]) -> Reducing:
    """The first one unless another saves more than predictions are exact."""
    total = {one: one.pass_ms + one.left_ms for one in ways}
    return next(one for one in total if total[one] * (1 - MINIMUM_SAVING) <= min(total.values()))
