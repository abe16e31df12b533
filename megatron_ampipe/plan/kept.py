"""Chooses what the experts keep for their backward: the fastest of many combinations whose peak fits.

Fewer chunks that restore cost less time and hold more; what is computed while the compute lane waits for a
combine costs nothing. Also MPipeMoE's own choice, by its equation 10, for comparison.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.plan.memory import expert_bytes
from megatron_ampipe.plan.operation_times import expert_products
from megatron_ampipe.plan.predict import Predictor
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
"""Each keeps less and does more again than the one before."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A combination, as ``Pipeline.memory``; its peak; the time of a pass, None without a cluster."""

    memory: str
    peak_bytes: float
    time_us: float | None = None


def fitting(combinations: Iterable[Kept], limit: float) -> Kept | None:
    """The fastest that fits, of equals the first; the first that fits where no time is known."""
    fit = [kept for kept in combinations if kept.peak_bytes <= limit]
    return min(fit, key=lambda kept: kept.time_us or 0.0, default=None)


def by_work(chunks: int) -> list[str]:
    """Combinations of this number of chunks, each of which does more again than the one before.

    Chunks whose backward comes later restore first: the others are differentiated while most is held.
    """
    pairs = itertools.pairwise(_ON_DEVICE)
    return [KEEP, *(memory for pair in pairs for memory in _mixed(*pair, range(chunks)))]


def simulated(predictor: Predictor, pipeline: Pipeline, peak: Callable[[str], float]) -> list[Kept]:
    """Combinations for a pipeline of layers that share a schedule, with their simulated times.

    For every strategy, alone and next to each other one, chunks restore in the order of what that costs when
    one of them does. With copies to host memory if the cluster has a figure for them. ``peak`` predicts the
    peak of a combination.
    """
    names = _ON_DEVICE if predictor.cluster.compute.copy is None else tuple(STRATEGIES)
    layers, chunks = min(SHORT, len(predictor.layers)), pipeline.backward_degree
    lengths = [chunk.hidden[0].length for chunk in pipeline.chunks(predictor.block.rows)]

    @functools.cache
    def time_us(memory: str) -> float:
        of_memory = predictor.of_layers(layers, memory=memory)
        schedule = replace(pipeline, memory=memory).schedule_of(of_memory.layers)
        return of_memory.pass_us(schedule, lengths).total

    order = {
        name: sorted(range(chunks), key=lambda chunk: time_us(_with(KEEP, name, [chunk], chunks)))
        for name in names
        if name != KEEP
    }
    pairs = itertools.combinations(names, 2)
    memories = [KEEP, *(memory for pair in pairs for memory in _mixed(*pair, order[pair[1]]))]
    return [Kept(memory, peak(memory), time_us(memory)) for memory in dict.fromkeys(memories)]


def _mixed(before: str, after: str, order: Sequence[int]) -> list[str]:
    """One strategy replaced by another in one chunk, in two, and so on to all."""
    return [_with(before, after, order[: count + 1], len(order)) for count in range(len(order))]


def _with(most: str, other: str, those: Sequence[int], chunks: int) -> str:
    """A strategy in all chunks but those."""
    return memory_to_text([other if chunk in those else most for chunk in range(chunks)])


TABLE_II: Mapping[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "S1": ((2, 2, 5), (4, 2, 5)),
    "S2": ((2, 2, 4), (4, 3, 4)),
    "S3": ((2, 2, 1), (5, 2, 1)),
    "S4": ((2, 2, 0), (5, 3, 0)),
}
"""MPipeMoE's table II: for each strategy, forward and backward, the numbers of products, of transfers, and of
copies of what arrived (Q_fw, Q_bw)."""


def equation_10(*, product: float, transfer: float, copy: float | None) -> Mapping[str, float]:
    """What MPipeMoE selects a strategy by: the time of a chunk in both directions, by its equation 10.

    It knows neither attention nor which stage waits for which: in each direction, the time of a chunk is that
    of the stream that takes longest. Strategies that copy are left out if ``copy`` is None.
    """
    return {
        name: sum(max(a * product, b * transfer, c * (copy or 0.0)) for a, b, c in directions)
        for name, directions in TABLE_II.items()
        if copy is not None or PAPER_NAMES.get(name, name) not in COPYING
    }


def equation_10_us(predictor: Predictor, *, degree: int) -> Mapping[str, float]:
    """The same of one of so many chunks; copies are not slowed (``eta`` is 1), transfers by the cluster."""
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
