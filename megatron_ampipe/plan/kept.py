"""Chooses what the experts save for their backward: the fastest combination of strategies whose peak fits.

Restoring in fewer chunks costs less time and needs more memory; a recompute while the compute lane waits for
a combine costs nothing. Also MPipeMoE's own choice, by its equation 10, for comparison.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.plan.operation_times import expert_products
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.saved import expert_bytes
from megatron_ampipe.plan.search import SHORT
from megatron_ampipe.schedule import (
    COPYING,
    KEEP,
    PAPER_NAMES,
    STRATEGIES,
    Pipeline,
    Stage,
    even_chunks,
    kinds,
    memory_to_text,
)

_ON_DEVICE = tuple(name for name in STRATEGIES if name not in COPYING)
"""Strategies without copies; each saves less and repeats more work than the one before."""


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """A combination (as ``Pipeline.memory``), its peak, and the time of a pass (None without a cluster)."""

    memory: str
    peak_bytes: float
    time_us: float | None = None


def fitting(combinations: Iterable[MemoryPrediction], limit: float) -> MemoryPrediction | None:
    """The fastest combination that fits, the first of equal ones; without times, the first that fits."""
    fit = [combination for combination in combinations if combination.peak_bytes <= limit]
    return min(fit, key=lambda combination: combination.time_us or 0.0, default=None)


def by_work(chunks: int) -> list[str]:
    """Combinations for this number of chunks; each repeats more work than the one before.

    Chunks whose backward comes last restore first: the others are differentiated while most memory is held.
    """
    pairs = itertools.pairwise(_ON_DEVICE)
    return [KEEP, *(memory for pair in pairs for memory in _mixed(*pair, range(chunks)))]


def simulated(
    predictor: Predictor, pipeline: Pipeline, peak: Callable[[str], float]
) -> list[MemoryPrediction]:
    """Combinations for a pipeline of layers that share a schedule, with their simulated times.

    Combines every two strategies. Chunks change to the second one in the order of the time that this costs
    for a single chunk. Strategies with copies are included if the cluster has a figure for copies. ``peak``
    predicts the peak memory of a combination.
    """
    names = _ON_DEVICE if predictor.cluster.compute.copy is None else tuple(STRATEGIES)
    layers, chunks = min(SHORT, len(predictor.layers)), pipeline.backward_degree
    lengths = [chunk.hidden[0].length for chunk in pipeline.chunks(predictor.block.rows)]

    @functools.cache
    def time_us(memory: str) -> float:
        short = predictor.of_layers(layers, memory=memory)
        schedule = replace(pipeline, memory=memory).schedule_of(short.layers)
        return short.pass_us(schedule, lengths).total

    order = {
        name: sorted(range(chunks), key=lambda chunk: time_us(_with(KEEP, name, [chunk], chunks)))
        for name in names
        if name != KEEP
    }
    pairs = itertools.combinations(names, 2)
    memories = [KEEP, *(memory for pair in pairs for memory in _mixed(*pair, order[pair[1]]))]
    return [MemoryPrediction(memory, peak(memory), time_us(memory)) for memory in dict.fromkeys(memories)]


def _mixed(before: str, after: str, order: Sequence[int]) -> list[str]:
    """Combinations of two strategies: the second one in one chunk, in two, and so on up to all chunks."""
    return [_with(before, after, order[: count + 1], len(order)) for count in range(len(order))]


def _with(most: str, other: str, changed: Sequence[int], chunks: int) -> str:
    """The combination with ``other`` in the ``changed`` chunks, and ``most`` in all others."""
    return memory_to_text([other if chunk in changed else most for chunk in range(chunks)])


TABLE_II: Mapping[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "S1": ((2, 2, 5), (4, 2, 5)),
    "S2": ((2, 2, 4), (4, 3, 4)),
    "S3": ((2, 2, 1), (5, 2, 1)),
    "S4": ((2, 2, 0), (5, 3, 0)),
}
"""MPipeMoE's table II: for each strategy, forward and backward, the numbers of products, of transfers, and of
copies of received tokens (Q_fw, Q_bw)."""


def equation_10(*, product: float, transfer: float, copy: float | None) -> Mapping[str, float]:
    """The time of a chunk in both directions by equation 10 of MPipeMoE, by which it selects a strategy.

    It ignores attention and dependencies: in each direction, the time of a chunk is the time of the slowest
    stream. Strategies that copy are left out if ``copy`` is None.
    """
    return {
        name: sum(max(a * product, b * transfer, c * (copy or 0.0)) for a, b, c in directions)
        for name, directions in TABLE_II.items()
        if copy is not None or PAPER_NAMES.get(name, name) not in COPYING
    }


def equation_10_us(predictor: Predictor, *, degree: int) -> Mapping[str, float]:
    """The same for one of ``degree`` chunks; copies have ``eta`` 1, transfers the cluster's slowdown."""
    work, cluster = predictor.block, predictor.cluster
    lengths, copies = even_chunks(work.rows, degree), cluster.compute.copy
    dispatch = predictor.stages(lengths)[Stage(kinds.DISPATCH, 0)]
    both = predictor.times.all_products(expert_products(work, lengths[0]), chunked=False)
    size = expert_bytes(work, lengths[0], local=cluster.trains_on_host, inner=False)
    return equation_10(
        product=both.forward / 2,
        transfer=dispatch.forward * cluster.overlap.communication_slowdown,
        copy=None if copies is None else copies.time_us(size),
    )
