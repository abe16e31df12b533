"""A walk through time over the possible orders of stages, and a beam search along it.

Whenever a stage ends, every free lane may begin any stage that is ready, or stay idle until the next stage
ends. Some walk of that kind comes to the best order of all, also where lanes slow each other: in any fixed
order a stage begins when some stage ends. A host that runs ahead is not part of it. Used by :mod:`.order` and
:mod:`.exact`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ampipe.plan.problem import Lanes, OrderProblem

IDLE = -1
EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class State:
    """A moment when some stage has just ended.

    Attributes:
        waiting: For each stage how many it still waits for.
        ready: By lane, stages that could begin.
        begun: Stages that have begun, as bits.
        num_begun: How many those are.
        now: The time.
        running: The stage of each lane, or idle.
        left: How much is left of it.
        work: By lane, the durations of all that has not begun.
        orders: What each lane has begun, in order.
    """

    waiting: tuple[int, ...]
    ready: tuple[tuple[int, ...], ...]
    begun: int
    num_begun: int
    now: float
    running: tuple[int, ...]
    left: tuple[float, ...]
    work: tuple[float, ...]
    orders: Lanes


class Walk:
    """The states of one problem.

    Args:
        problem: What is ordered.
    """

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self._tails = problem.tails()
        self._by_tail = sorted(range(len(self._tails)), key=lambda stage: -self._tails[stage])
        self._rank = {stage: rank for rank, stage in enumerate(self._by_tail)}
        self._lanes = range(len(problem.lanes))

    def start(self) -> State:
        """Nothing has begun."""
        problem = self.problem
        waiting = tuple(map(len, problem.needs))
        free = [stage for stage, count in enumerate(waiting) if not count]
        work = [0.0 for _ in self._lanes]
        for stage, duration in enumerate(problem.durations):
            work[problem.lane_of[stage]] += duration
        return State(
            waiting=waiting,
            ready=tuple(
                tuple(stage for stage in free if problem.lane_of[stage] == lane) for lane in self._lanes
            ),
            begun=0,
            num_begun=0,
            now=0.0,
            running=tuple(IDLE for _ in self._lanes),
            left=tuple(0.0 for _ in self._lanes),
            work=tuple(work),
            orders=tuple(() for _ in self._lanes),
        )

    def is_last(self, state: State) -> bool:
        """Whether every stage has begun."""
        return state.num_begun == len(self.problem.stages)

    def bound(self, state: State) -> float:
        """No order that goes on from here is faster."""
        tails, durations, begun = self._tails, self.problem.durations, state.begun
        longest = 0.0
        for stage in self._by_tail:
            if not begun >> stage & 1:
                longest = tails[stage]
                break
        for lane in self._lanes:
            if (stage := state.running[lane]) != IDLE:
                longest = max(longest, state.left[lane] + tails[stage] - durations[stage])
            longest = max(longest, state.work[lane] + state.left[lane])
        return state.now + longest

    def following(self, state: State, *, branches: int | None = None) -> Iterator[State]:
        """The states that can come next, those with the longest way to the end first.

        Args:
            state: Where the walk is.
            branches: How many ready stages of a lane are looked at; all if None.
        """
        choices: list[list[int]] = []
        for lane in self._lanes:
            if state.running[lane] != IDLE:
                choices.append([state.running[lane]])
            else:
                ready = sorted(state.ready[lane], key=self._rank.__getitem__)
                choices.append([*ready[:branches], IDLE])
        for chosen in itertools.product(*choices):
            if any(stage != IDLE for stage in chosen):
                yield self._after(state, chosen)

    def _after(self, state: State, chosen: tuple[int, ...]) -> State:
        """The moment when the first of the chosen stages ends."""
        problem = self.problem
        begun, num_begun = state.begun, state.num_begun
        left, work, orders, ready = list(state.left), list(state.work), list(state.orders), list(state.ready)
        for lane, stage in enumerate(chosen):
            if stage != IDLE and state.running[lane] == IDLE:
                begun |= 1 << stage
                num_begun += 1
                left[lane] = problem.durations[stage]
                work[lane] -= left[lane]
                orders[lane] = (*orders[lane], stage)
                ready[lane] = tuple(other for other in ready[lane] if other != stage)
        slow = self._slowness(chosen)
        step = min(left[lane] * slow[lane] for lane in self._lanes if chosen[lane] != IDLE)
        running, waiting = list(chosen), list(state.waiting)
        for lane, stage in enumerate(chosen):
            if stage == IDLE:
                continue
            left[lane] -= step / slow[lane]
            if left[lane] <= EPSILON:
                running[lane], left[lane] = IDLE, 0.0
                for follower in problem.followers[stage]:
                    waiting[follower] -= 1
                    if not waiting[follower]:
                        ready[problem.lane_of[follower]] += (follower,)
        return State(
            waiting=tuple(waiting),
            ready=tuple(ready),
            begun=begun,
            num_begun=num_begun,
            now=state.now + step,
            running=tuple(running),
            left=tuple(left),
            work=tuple(work),
            orders=tuple(orders),
        )

    def _slowness(self, chosen: Sequence[int]) -> list[float]:
        """By lane the factor by which the others slow it, as in :func:`~.simulate.run`."""
        problem = self.problem
        computes = chosen[0] != IDLE
        communicates = any(stage != IDLE for stage in chosen[1:])
        slow = [problem.compute_slowdown if communicates else 1.0]
        for stage in chosen[1:]:
            group = problem.contended[stage] if stage != IDLE else -1
            users = sum(other != IDLE and problem.contended[other] == group for other in chosen)
            slow.append((problem.communication_slowdown if computes else 1.0) * (users if group >= 0 else 1))
        return slow


def beam(problem: OrderProblem, *, width: int, branches: int) -> Lanes | None:
    """A good order: of the states in which equally many stages have begun, only the best few are followed.

    Args:
        problem: What is ordered; its host is left out of account.
        width: How many.
        branches: How many ready stages of a lane are looked at.

    Returns:
        The best order that was come to; None if every state that was kept led nowhere.
    """
    walk = Walk(problem)
    by_count: list[dict[object, tuple[float, State]]] = [{} for _ in range(len(problem.stages) + 1)]
    by_count[0][0] = (0.0, walk.start())
    best: tuple[float, Lanes] | None = None
    for count in range(len(problem.stages)):
        # Staying idle leaves the count as it is; such states are looked at in the same round.
        fresh = list(by_count[count].values())
        for _ in range(2):
            kept = sorted(fresh, key=lambda found: found[0])[:width]
            fresh = []
            for _, state in kept:
                for following in walk.following(state, branches=branches):
                    found = (walk.bound(following), following)
                    if following.num_begun == count:
                        fresh.append(found)
                        continue
                    key = (following.begun, following.running)
                    known = by_count[following.num_begun].get(key)
                    if known is None or found[0] < known[0]:
                        by_count[following.num_begun][key] = found
        by_count[count] = {}
    for bound, state in by_count[-1].values():
        if best is None or bound < best[0]:
            best = (bound, state.orders)
    return None if best is None else best[1]
