"""The time that no order of blocks' stages can beat, from how long each stage takes alone. Pure arithmetic.

Computation has one lane; every other lane occupies a resource (``schedule.Lane``), such as the network.
Whatever the order,

* the compute lane needs the sum of all compute stages. Those that depend on a transfer (*fed*) cannot start
  before some transfer has arrived, and those that a transfer depends on (*feeding*) have ended before some
  last transfer travels: while too little else is left to compute, the lane stands still;
* a resource is not used before all that some first transfer over it depends on has run (the *head*), and
  after some last one all that depends on it still has to run (the *tail*). Between the two, it needs the sum
  of its transfers.

A direction takes at least the maximum of compute with its waits, of head + communication + tail of every
resource, and of the longest chain of stages that wait for one another. The blocks take the sum of both
directions, because the backward pass begins with the gradient of the whole output. Where several blocks share
a schedule, the sums are over all of them; head, tail and waits count once, and are the smallest possible: the
bound holds for every order.

Measured stage times must be those of stages that run alone (``tools.measuring.meters``): without the
wait for a peer, losses of an overlapped run, or what a GPU waits for its host. What runs outside stages is in
no bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter

from megatron_ampipe.schedule import Stage

Needs = Mapping[Stage, tuple[Stage, ...]]


@dataclass(frozen=True, slots=True)
class DirectionBound:
    """The parts of the bound of one direction, all in the unit of the stage times.

    Attributes:
        compute: Sum of the compute stages.
        compute_with_waits: The same with the waits for a first transfer, and before a last one.
        communication: Sum of the transfers over the resource for which the three together are largest.
        head: The least time before a transfer over it can start.
        tail: The least time after a transfer over it.
        chain: The longest chain of stages that wait for one another.
    """

    compute: float
    compute_with_waits: float
    communication: float
    head: float
    tail: float
    chain: float

    @property
    def time(self) -> float:
        """No order is faster."""
        return max(self.compute_with_waits, self.head + self.communication + self.tail, self.chain)


def direction_bound(times: Mapping[Stage, float], needs: Needs) -> DirectionBound:
    """The bound of one direction.

    Args:
        times: Every stage with the time it takes alone.
        needs: Every stage with the stages it waits for directly
            (:func:`megatron_ampipe.schedule.dependencies`).
    """
    assert times.keys() == needs.keys(), times.keys() ^ needs.keys()
    after: dict[Stage, list[Stage]] = {stage: [] for stage in needs}
    for stage, earlier in needs.items():
        for needed in earlier:
            after[needed].append(stage)
    transfers: dict[str, list[Stage]] = {}
    for stage in times:
        if stage.is_communication:
            transfers.setdefault(stage.kind.lane.resource, []).append(stage)

    def computing(stages: Iterable[Stage]) -> float:
        return sum(times[stage] for stage in stages if not stage.is_communication)

    def least(stages: Iterable[Stage], edges: Mapping[Stage, Iterable[Stage]]) -> float:
        """The least time that one of the stages must wait for all that ``edges`` leads to from it."""
        longest = before if edges is needs else behind
        return min(max(computing(_reachable(stage, edges)), longest[stage]) for stage in stages)

    before, behind = _longest_paths(needs, times), _longest_paths(after, times)
    fed = _with_transfer(needs)
    feeding = _with_transfer(after)
    first = min((before[stage] for stage in fed), default=0.0)
    last = min((behind[stage] for stage in feeding), default=0.0)
    both = fed & feeding
    parts = [
        (sum(times[stage] for stage in stages), least(stages, needs), least(stages, after))
        for stages in transfers.values()
    ]
    communication, head, tail = max(parts, key=sum, default=(0.0, 0.0, 0.0))
    return DirectionBound(
        compute=computing(times),
        compute_with_waits=max(
            computing(times),
            first + computing(fed),
            computing(feeding) + last,
            first + computing(both) + last if both else 0.0,
        ),
        communication=communication,
        head=head,
        tail=tail,
        chain=max(before[stage] + times[stage] for stage in times),
    )


def _in_order(edges: Mapping[Stage, Iterable[Stage]]) -> list[Stage]:
    """All stages, each after those that ``edges`` leads to from it."""
    return list(TopologicalSorter(edges).static_order())


def _with_transfer(edges: Mapping[Stage, Iterable[Stage]]) -> set[Stage]:
    """The compute stages from which ``edges`` leads to a transfer."""
    found: set[Stage] = set()
    for stage in _in_order(edges):
        if any(other.is_communication or other in found for other in edges[stage]):
            found.add(stage)
    return {stage for stage in found if not stage.is_communication}


def _longest_paths(
    edges: Mapping[Stage, Iterable[Stage]], times: Mapping[Stage, float]
) -> dict[Stage, float]:
    """The time of the longest chain of stages that leads to each stage, without itself."""
    longest: dict[Stage, float] = {}
    for stage in _in_order(edges):
        longest[stage] = max((times[before] + longest[before] for before in edges[stage]), default=0.0)
    return longest


def _reachable(stage: Stage, edges: Mapping[Stage, Iterable[Stage]]) -> set[Stage]:
    """Everything that ``stage`` leads to, without itself."""
    found: set[Stage] = set()
    waiting = list(edges[stage])
    while waiting:
        following = waiting.pop()
        if following not in found:
            found.add(following)
            waiting.extend(edges[following])
    return found
