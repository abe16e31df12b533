"""The time that no order of stages can beat, from how long each stage takes alone. Pure arithmetic.

The stages are those of one block, or of consecutive blocks that share a schedule. Blocks that do not share
one follow one another, and so do their bounds: what the edges of a block cost is then lost in every block.

Computation has one lane; every other lane occupies a resource (``schedule.Lane``), such as the network.
Whatever the order,

* the compute lane needs the sum of all compute stages. Those among them that depend on a transfer (the
  *fed* ones) cannot start before some transfer has arrived, and those that a transfer depends on (the
  *feeding* ones) have ended before some last transfer travels: while too little else is left to compute,
  the lane stands still;
* a resource is not used before some first transfer over it has what it needs: all compute stages that this
  transfer depends on run before it, one after another, and so does every chain of stages and transfers over
  other resources that leads to it (the *head*). After some last transfer all that depends on it still has
  to run (the *tail*). Between the two, the resource needs the sum of its transfers.

So a direction takes at least the maximum of compute with its waits, and of head + communication + tail of
every resource; and both directions their sum, because the backward pass begins with the gradient of the whole
output. Head, tail and waits are taken as the smallest possible: the bound holds for every order,
not only for the one that was run.

The stage times must be those of stages that run alone (:mod:`.stage_times`): a collective without the wait
for a peer that comes later, and no lane slowed by another. Times from an overlapped run would count
its losses as unavoidable; nor may they include what a GPU waits for its host, which other work can cover. A
shaped link that idles saves up, and lets that pass at once: collectives are timed without it, but for the
first of a direction, because an order saves up only while the link idles, which takes as long as is saved.
What runs outside stages (autograd's own work, Python between stages) is in no bound: it is part of what a
run loses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import NamedTuple

from megatron_ampipe.schedule import Stage

Needs = Mapping[Stage, tuple[Stage, ...]]


@dataclass(frozen=True, slots=True)
class DirectionBound:
    """The parts of the bound of one direction, all in the unit of the stage times.

    Attributes:
        compute: Sum of the compute stages.
        compute_with_waits: What the compute lane needs when it has to wait for a first transfer, and
            something follows after a last one.
        communication: Sum of the transfers over the resource for which the three together are largest.
        head: The least time before a transfer over it can start.
        tail: The least time after a transfer over it.
    """

    compute: float
    compute_with_waits: float
    communication: float
    head: float
    tail: float

    @property
    def time(self) -> float:
        """No order is faster."""
        return max(self.compute_with_waits, self.head + self.communication + self.tail)


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

    order = tuple(TopologicalSorter(needs).static_order())
    before, behind = _walk(order, needs, times), _walk(order[::-1], after, times)

    def least(stages: Iterable[Stage], found: Mapping[Stage, _Reached]) -> float:
        """The least time that all that was reached from one of the stages takes."""
        return min(max(computing(found[stage].stages), found[stage].longest) for stage in stages)

    def computes_with_transfer(found: Mapping[Stage, _Reached]) -> set[Stage]:
        return {
            stage
            for stage in times
            if not stage.is_communication and any(one.is_communication for one in found[stage].stages)
        }

    fed, feeding = computes_with_transfer(before), computes_with_transfer(behind)
    first = min((before[stage].longest for stage in fed), default=0.0)
    last = min((behind[stage].longest for stage in feeding), default=0.0)
    both = fed & feeding
    parts = [
        (sum(times[stage] for stage in stages), least(stages, before), least(stages, behind))
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
    )


class _Reached(NamedTuple):
    """What edges lead to from a stage, without itself.

    Attributes:
        stages: All of it.
        longest: The time of the longest chain.
    """

    stages: frozenset[Stage]
    longest: float


def _walk(
    order: Iterable[Stage], edges: Mapping[Stage, Iterable[Stage]], times: Mapping[Stage, float]
) -> dict[Stage, _Reached]:
    """What each stage reaches; ``order`` has the end of every edge before its start."""
    found: dict[Stage, _Reached] = {}
    for stage in order:
        to = edges[stage]
        found[stage] = _Reached(
            frozenset(to).union(*(found[one].stages for one in to)),
            max((times[one] + found[one].longest for one in to), default=0.0),
        )
    return found
