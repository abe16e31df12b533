"""How many calls of the device a host makes to issue a stage. Pure figures, from a census.

A host that runs ahead of its device needs its own time for every call, whatever the size of the tensors, so
more chunks mean more of it: at some degree the device waits for the host. A cluster file says how long a host
takes to issue one stage on average (``host.issue``); this module says how that spreads over the stages.

The figures are counted on real blocks (``tests/streams/census.py``, whose test compares them with this
table): operations of torch, collectives, and waits and records of events, with Megatron's local layers. Fused
kernels make fewer calls; that they do so in the same proportion in all stages is an assumption. Used by
:mod:`.predict`.
"""

from __future__ import annotations

from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import Direction, StageKind, kinds

CALLS: dict[StageKind, tuple[float, float]] = {
    kinds.QKV: (10, 20),
    kinds.ATTENTION: (15, 27),
    kinds.ROUTE: (16, 12),
    kinds.LOSSES: (16, 7),
    kinds.SHARED: (3, 7),
    kinds.COUNTS: (6, 0),
    kinds.DISPATCH: (6, 6),
    kinds.EXPERT: (4, 10),
    kinds.COMBINE: (3, 3),
    kinds.MERGE: (4, 1),
}
"""Calls of a stage of one chunk, forward and backward; of ``expert``, for one product of experts."""
SORTING = 4
"""Calls in which the tokens of several local experts are put in order, in each direction."""
MEAN = {Direction.FORWARD: 8.0, Direction.BACKWARD: 11.0}
"""Calls of a stage on average, in a block with one local expert and nothing optional."""


def calls(kind: StageKind, direction: Direction, workload: Workload) -> float:
    """Calls of the device that issue one stage of one chunk."""
    # A kind that was added to a block is taken for an average one.
    forward, backward = CALLS.get(kind, (MEAN[Direction.FORWARD], MEAN[Direction.BACKWARD]))
    once = forward if direction is Direction.FORWARD else backward
    if kind is not kinds.EXPERT or workload.local_experts == 1:
        return once
    return SORTING + once * (1 if workload.grouped else workload.local_experts)


def share(kind: StageKind, direction: Direction, workload: Workload) -> float:
    """The time to issue one stage of one chunk, over that of a stage on average."""
    return calls(kind, direction, workload) / MEAN[direction]
