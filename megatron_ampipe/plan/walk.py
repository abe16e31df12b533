"""The states of a search over all orders of the stages, and a beam search.

Whenever a stage ends, every free lane begins one of its ready stages, or stays idle until the next stage
ends. One sequence of such decisions gives the optimal order, even if lanes slow each other down, because in
any order a stage begins when some stage ends. The times to issue stages (``issue_us``) are ignored. Used by
:mod:`.order` and :mod:`.exact`.
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
    """The state at the time at which some stage has ended.

    Attributes:
        waiting: For each stage the number of dependencies that have not ended.
        ready: By lane, the stages that can begin.
        begun: Stages that have begun, as a bit mask.
        num_begun: Number of stages that have begun.
        now: The time.
        running: By lane, the running stage, or :data:`IDLE`.
        left: By lane, the remaining time of that stage.
        work: By lane, the total duration of the stages that have not begun.
        orders: By lane, the stages that have begun, in order.
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
    """The states of one problem and their successors.

    Args:
        problem: The stages to order.
    """

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        self._tails = problem.tails()
        self._by_tail = sorted(range(len(self._tails)), key=lambda stage: -self._tails[stage])
        self._rank = {stage: rank for rank, stage in enumerate(self._by_tail)}
        self._lanes = range(len(problem.lanes))

    def start(self) -> State:
        """The state in which no stage has begun."""
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
        """A lower bound on the time of all orders that continue this state."""
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

    def successors(self, state: State, *, branches: int | None = None) -> Iterator[State]:
        """The states that can follow, those of stages with the longest critical path first.

        Args:
            state: The current state.
            branches: How many ready stages of a lane are considered; all if None.
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
                yield self._next(state, chosen)

    def _next(self, state: State, chosen: tuple[int, ...]) -> State:
        """The state when the first of the chosen stages ends."""
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
        """By lane the factor by which the other lanes slow it down, as in :func:`~.simulate.run`."""
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
    """Find a good order: of the states with the same number of begun stages, only the best few are kept.

    Args:
        problem: The stages to order; the times to issue them are ignored.
        width: The number of states to keep.
        branches: How many ready stages of a lane are considered.

    Returns:
        The best order that was found; None if no state with all stages was reached.
    """
    walk = Walk(problem)
    by_count: list[dict[object, tuple[float, State]]] = [{} for _ in range(len(problem.stages) + 1)]
    by_count[0][0] = (0.0, walk.start())
    best: tuple[float, Lanes] | None = None
    for count in range(len(problem.stages)):
        # A lane that stays idle does not change the count; such states are handled in the same round.
        fresh = list(by_count[count].values())
        for _ in range(2):
            kept = sorted(fresh, key=lambda found: found[0])[:width]
            fresh = []
            for _, state in kept:
                for successor in walk.successors(state, branches=branches):
                    found = (walk.bound(successor), successor)
                    if successor.num_begun == count:
                        fresh.append(found)
                        continue
                    key = (successor.begun, successor.running)
                    known = by_count[successor.num_begun].get(key)
                    if known is None or found[0] < known[0]:
                        by_count[successor.num_begun][key] = found
        by_count[count] = {}
    for bound, state in by_count[-1].values():
        if best is None or bound < best[0]:
            best = (bound, state.orders)
    return None if best is None else best[1]
