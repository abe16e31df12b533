"""How many calls the host makes to issue a stage to the device. A table of counts.

The host needs some time for every call, independent of the size of the tensors, so more chunks need more of
it: above some degree the device waits for the host. Where a cluster file has the measured time of a kind of
stage (``host.issue_of``), it counts. Otherwise this module distributes the mean time to issue one stage
(``host.issue``) over the kinds.

The calls were counted on real blocks (``tests/streams/census.py``; its test compares them with this table):
torch operations, collectives, and waits and records of events, with Megatron's local layers. Fused kernels
need fewer calls; it is assumed that they reduce all stages in the same proportion. Used by :mod:`.predict`.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron_ampipe.plan.cluster import Host, Overhead
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import Direction, StageKind, kinds

CALLS: dict[StageKind, tuple[float, float]] = {
    kinds.QKV: (10, 20),
    kinds.GATHER_ROWS: (3, 3),
    kinds.REGATHER_ROWS: (0, 3),
    kinds.INPUT_NORM: (6, 17),
    kinds.ATTENTION: (17, 29),
    kinds.SCATTER_ROWS: (3, 3),
    kinds.ADD_NORM: (7, 15),
    kinds.ROUTE: (17, 12),
    kinds.LOSSES: (16, 7),
    kinds.SHARED: (3, 7),
    kinds.COUNTS: (5, 0),
    kinds.DISPATCH: (4, 4),
    kinds.GATHER: (6, 10),
    kinds.EXPERT: (4, 10.75),
    kinds.SCATTER: (5, 3),
    kinds.COMBINE: (2, 2),
    kinds.MERGE: (4, 1),
}
"""Calls of a stage of one chunk but the first, forward and backward; of ``expert``, for each local expert
(once for a grouped GEMM)."""
PART_OF = {kinds.INPUT_NORM: kinds.QKV, kinds.ADD_NORM: kinds.ATTENTION}
"""Kinds that do a part of another one in blocks that have them."""
EXPERTS, SORTING = 1, 4
"""Further calls of ``expert``, in each direction; and those that sort the tokens by local expert, if there
are several."""
MEAN = {Direction.FORWARD: 8.0, Direction.BACKWARD: 11.4}
"""Calls of a stage on average, in a block with one local expert and without optional stages."""


def calls(
    kind: StageKind, direction: Direction, workload: Workload, *, block: Collection[StageKind] = ()
) -> float:
    """Number of calls that issue one stage of one chunk; ``block`` are the kinds of its block."""
    # An added kind counts as an average one.
    forward, backward = CALLS.get(kind, (MEAN[Direction.FORWARD], MEAN[Direction.BACKWARD]))
    for part in block:
        if PART_OF.get(part) == kind:
            forward, backward = forward - CALLS[part][0], backward - CALLS[part][1]
    once = forward if direction is Direction.FORWARD else backward
    if kind != kinds.EXPERT:
        return once
    if workload.local_experts == 1:
        return EXPERTS + once
    return EXPERTS + SORTING + once * (1 if workload.grouped else workload.local_experts)


def issued_parts(kind: StageKind, direction: Direction, workload: Workload) -> float:
    """How much longer a stage takes to issue than with one local expert."""
    if kind != kinds.EXPERT:
        return 1.0
    return calls(kind, direction, workload) / (EXPERTS + CALLS[kind][direction is Direction.BACKWARD])


def issue_us(
    kind: StageKind,
    direction: Direction,
    workload: Workload,
    host: Host,
    *,
    block: Collection[StageKind] = (),
) -> float:
    """The host's time to issue one stage of one chunk; ``block`` are the kinds of its block."""

    def of(figure: Overhead) -> float:
        return figure.forward_us if direction is Direction.FORWARD else figure.backward_us

    for name, figure in (host.issue_of or {}).items():
        if name == kind.name:
            return of(figure) * issued_parts(kind, direction, workload)
    return of(host.issue) * calls(kind, direction, workload, block=block) / MEAN[direction]
