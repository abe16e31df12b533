"""The best order of all, by branch and bound. For small graphs: up to about three chunks.

Walks through time. Whenever a stage ends, every free lane may begin any stage that is ready, or stay idle
until the next stage ends; some order of that kind is the best of all, also where lanes slow each other,
because in any fixed order a stage begins when some stage ends. Cut off are states that cannot become better
than the best order known, and those that are no better than a state with the same stages done.

The oracle of the tests of :mod:`.order`, which also uses it where it is fast enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ampipe.plan.problem import Lanes, OrderProblem

_IDLE = -1
_EPSILON = 1e-9


def best_order(problem: OrderProblem, start: Lanes, *, max_nodes: int) -> tuple[Lanes, bool]:
    """The best order.

    Args:
        problem: What is ordered; its host must compute itself (no ``issue_us``).
        start: A good order; what is found is not worse.
        max_nodes: Where to give up.

    Returns:
        The best order found, and whether it is proven to be the best of all.
    """
    assert problem.issue_us is None, "an exact search knows no host that runs ahead"
    search = _Search(problem, start, max_nodes)
    search.explore(_State(waiting=tuple(map(len, problem.needs))))
    return search.best, search.nodes <= max_nodes


@dataclass(frozen=True, slots=True)
class _State:
    """A moment when some stage has just ended.

    Attributes:
        waiting: For each stage how many it still waits for.
        begun: Stages that have begun, as bits.
        now: The time.
        running: The stage of each lane, or idle.
        left: How much is left of it.
        orders: What each lane has begun, in order.
    """

    waiting: tuple[int, ...]
    begun: int = 0
    now: float = 0.0
    running: tuple[int, int] = (_IDLE, _IDLE)
    left: tuple[float, float] = (0.0, 0.0)
    orders: Lanes = field(default=((), ()))


class _Search:
    def __init__(self, problem: OrderProblem, start: Lanes, max_nodes: int) -> None:
        self._problem, self._max_nodes = problem, max_nodes
        self.best, self._time = start, problem.time(start)
        self._tails = problem.tails()
        self._seen: dict[tuple[int, tuple[int, int]], list[tuple[float, float, float]]] = {}
        self.nodes = 0

    def explore(self, state: _State) -> None:
        """Depth first, the stage with the longest way to the end first."""
        self.nodes += 1
        if self.nodes > self._max_nodes or self._bound(state) >= self._time - _EPSILON or self._known(state):
            return
        problem = self._problem
        if state.begun == (1 << len(problem.stages)) - 1:
            self._finish(state)
            return
        choices = []
        for lane in (0, 1):
            found = [state.running[lane]]
            if state.running[lane] == _IDLE:
                ready = [
                    stage
                    for stage, count in enumerate(state.waiting)
                    if not count and not state.begun >> stage & 1 and problem.travels[stage] == bool(lane)
                ]
                found = [*sorted(ready, key=lambda stage: -self._tails[stage]), _IDLE]
            choices.append(found)
        for compute in choices[0]:
            for comm in choices[1]:
                if (compute, comm) != (_IDLE, _IDLE):
                    self.explore(self._after(state, (compute, comm)))

    def _after(self, state: _State, chosen: tuple[int, int]) -> _State:
        """The moment when the first of the chosen stages ends."""
        problem = self._problem
        begun, left, orders = state.begun, list(state.left), list(state.orders)
        for lane, stage in enumerate(chosen):
            if stage != _IDLE and state.running[lane] == _IDLE:
                begun |= 1 << stage
                left[lane] = problem.durations[stage]
                orders[lane] = (*orders[lane], stage)
        slow = (1.0, 1.0)
        if _IDLE not in chosen:
            slow = (problem.compute_slowdown, problem.communication_slowdown)
        step = min(left[lane] * slow[lane] for lane in (0, 1) if chosen[lane] != _IDLE)
        running, waiting = list(chosen), list(state.waiting)
        for lane, stage in enumerate(chosen):
            if stage == _IDLE:
                continue
            left[lane] -= step / slow[lane]
            if left[lane] <= _EPSILON:
                running[lane], left[lane] = _IDLE, 0.0
                for follower in problem.followers[stage]:
                    waiting[follower] -= 1
        return _State(
            waiting=tuple(waiting),
            begun=begun,
            now=state.now + step,
            running=(running[0], running[1]),
            left=(left[0], left[1]),
            orders=(orders[0], orders[1]),
        )

    def _bound(self, state: _State) -> float:
        """No order that goes on from here is faster."""
        open_work = [state.left[0], state.left[1]]
        longest = 0.0
        for stage, duration in enumerate(self._problem.durations):
            if not state.begun >> stage & 1:
                open_work[self._problem.travels[stage]] += duration
                longest = max(longest, self._tails[stage])
        for lane, stage in enumerate(state.running):
            if stage != _IDLE:
                way = state.left[lane] + self._tails[stage] - self._problem.durations[stage]
                longest = max(longest, way)
        return state.now + max(*open_work, longest)

    def _known(self, state: _State) -> bool:
        """Whether a state with the same stages done and running was no later with anything."""
        # Which stages wait follows from which have begun and which of them still run.
        key = (state.begun, state.running)
        figures = (state.now, *state.left)
        earlier = self._seen.setdefault(key, [])
        if any(all(a <= b + _EPSILON for a, b in zip(other, figures, strict=True)) for other in earlier):
            return True
        earlier.append(figures)
        return False

    def _finish(self, state: _State) -> None:
        """All stages have begun: what runs runs to its end. The simulation says when that is."""
        time = self._problem.time(state.orders)
        if time < self._time:
            self.best, self._time = state.orders, time
