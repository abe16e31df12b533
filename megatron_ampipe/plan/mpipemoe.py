"""MPipeMoE's selector of a memory strategy: its table II and equation 10, to compare with a simulation.

It knows neither attention nor which stage waits for which: in each direction, the time of a chunk is that of
the stream that takes longest. So it says which of S1 to S4 the paper's library would use. Called by
``ampipe plan``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ampipe.plan.cost import CostModel
from megatron_ampipe.plan.memory import expert_bytes
from megatron_ampipe.schedule import COPYING, PAPER_NAMES, Stage, even_chunks, kinds

TABLE_II: Mapping[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "S1": ((2, 2, 5), (4, 2, 5)),
    "S2": ((2, 2, 4), (4, 3, 4)),
    "S3": ((2, 2, 1), (5, 2, 1)),
    "S4": ((2, 2, 0), (5, 3, 0)),
}
"""For each strategy, forward and backward: products, transfers, and copies of what arrived (Q_fw, Q_bw)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What equation 10 says.

    Attributes:
        strategy: The cheapest of S1 to S4.
        costs_us: Of each strategy that has one, forward and backward together, for a chunk.
    """

    strategy: str
    costs_us: Mapping[str, float]


def select(model: CostModel, *, degree: int) -> Selection:
    """The strategy with the lowest cost by equation 10.

    The slowdowns of table II are those of the cluster file: of a transfer next to computation (``mu``),
    whether or not copies run as well; copies are not slowed (``eta`` is 1). Strategies that copy are left
    out if the file has no figure for copies.

    Args:
        model: Of the block.
        degree: Number of chunks.
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
    costs = {
        name: sum(max(a * product, b * transfer, c * copy) for a, b, c in directions)
        for name, directions in TABLE_II.items()
        if copy_of is not None or PAPER_NAMES.get(name, name) not in COPYING
    }
    return Selection(min(costs, key=lambda name: costs[name]), costs)
