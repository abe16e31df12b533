"""Chooses what the experts keep, chunk by chunk: the fastest of many combinations whose peak fits.

Fewer chunks that restore cost less time and hold more; what is computed while the compute lane waits for a
combine costs nothing. With the figures of a cluster, combinations are compared by simulated time, with copies
to host memory if there is a figure for them; else by how much they do again.

To compare with, :func:`equation_10_us` is what MPipeMoE selects by: its table II and equation 10. It knows
neither attention nor which stage waits for which: in each direction, the time of a chunk is that of the
stream that takes longest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.plan.cost import CostModel
from megatron_ampipe.plan.memory import expert_bytes
from megatron_ampipe.plan.order import SHORT
from megatron_ampipe.plan.predict import Predictor
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
    """One combination.

    Attributes:
        memory: As ``Pipeline.memory``.
        peak_bytes: Predicted peak of the activations.
        time_us: Simulated time of a pass of the layers that were simulated; None without a cluster.
    """

    memory: str
    peak_bytes: float
    time_us: float | None = None


def fitting(found: Iterable[Kept], limit: float) -> Kept | None:
    """The fastest that fits, of equals the first; the first that fits where no time is known."""
    fit = [one for one in found if one.peak_bytes <= limit]
    return min(fit, key=lambda one: one.time_us or 0.0, default=None)


def by_work(chunks: int) -> list[str]:
    """Combinations of this number of chunks, each of which does more again than the one before.

    Chunks whose backward comes later restore first: the others are differentiated while most is held.
    """
    found = [KEEP]
    for before, after in itertools.pairwise(_ON_DEVICE):
        found += _mixed(before, after, range(chunks))
    return found


def simulated(predictor: Predictor, pipeline: Pipeline, peak: Callable[[str], float]) -> list[Kept]:
    """Combinations for a pipeline of layers that share a schedule, with their simulated times.

    For every strategy, alone and next to each other one, chunks restore in the order of what that costs when
    one of them does. ``peak`` predicts the peak of a combination.
    """
    names = _ON_DEVICE if predictor.cluster.compute.copy is None else tuple(STRATEGIES)
    layers = min(SHORT, len(predictor.layers))
    lengths = [chunk.hidden[0].length for chunk in pipeline.chunks(predictor.workload.rows)]
    chunks = pipeline.backward_degree
    times: dict[str, float] = {}

    def time_us(memory: str) -> float:
        if memory not in times:
            of_memory = predictor.of_layers(layers, memory=memory)
            schedule = replace(pipeline, memory=memory).schedule_of(of_memory.layers)
            times[memory] = of_memory.pass_us(schedule, lengths).total
        return times[memory]

    order = {
        name: sorted(range(chunks), key=lambda chunk: time_us(_with(KEEP, name, [chunk], chunks)))
        for name in names
        if name != KEEP
    }
    found = [KEEP]
    for before, name in itertools.combinations(names, 2):
        found += _mixed(before, name, order[name])
    return [Kept(memory, peak(memory), time_us(memory)) for memory in dict.fromkeys(found)]


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
"""For each strategy, forward and backward: products, transfers, and copies of what arrived (Q_fw, Q_bw)."""


def equation_10_us(model: CostModel, *, degree: int) -> Mapping[str, float]:
    """The cost of each strategy for one of so many chunks, forward and backward together.

    The slowdowns of table II are those of the cluster file: of a transfer next to computation (``mu``),
    whether or not copies run as well; copies are not slowed (``eta`` is 1). Strategies that copy are left
    out if the file has no figure for copies.
    """
    work = model.workload
    lengths = even_chunks(work.rows, degree)
    rows, stages = lengths[0], model.stages(lengths)
    transfer = stages[Stage(kinds.DISPATCH, 0)].forward * model.cluster.overlap.communication_slowdown
    product = model.product_us(rows)
    copy_of = model.cluster.compute.copy
    local, copy = model.cluster.trains_on_host, 0.0
    if copy_of is not None:
        copy = copy_of.time_us(expert_bytes(work, rows, local=local, inner=False))
    return {
        name: sum(max(a * product, b * transfer, c * copy) for a, b, c in directions)
        for name, directions in TABLE_II.items()
        if copy_of is not None or PAPER_NAMES.get(name, name) not in COPYING
    }
