"""The best order of all, by branch and bound. Fast enough for two chunks, and for most blocks in three.

Cut off are states that cannot become better than the best order known, and those that are no better than a
state in which the same stages have begun. Used by :mod:`.order` for small graphs.
"""

from __future__ import annotations

from megatron_ampipe.plan.problem import Lanes, OrderProblem
from megatron_ampipe.plan.walk import EPSILON, State, Walk


def best_order(problem: OrderProblem, start: Lanes, *, max_nodes: int) -> tuple[Lanes, bool]:
    """The best order, a host that runs ahead left out of account.

    Args:
        problem: What is ordered.
        start: A good order; what is found is not worse.
        max_nodes: Where to give up.

    Returns:
        The best order found, and whether it is proven to be the best of all.
    """
    search = _Search(problem, start, max_nodes)
    search.explore(search.walk.start())
    return search.best, search.nodes <= max_nodes


class _Search:
    def __init__(self, problem: OrderProblem, start: Lanes, max_nodes: int) -> None:
        self.walk = Walk(problem)
        self._problem, self._max_nodes = problem, max_nodes
        self.best, self._time = start, problem.time(start)
        self._seen: dict[object, list[tuple[float, ...]]] = {}
        self.nodes = 0

    def explore(self, state: State) -> None:
        """Depth first."""
        self.nodes += 1
        if self.nodes > self._max_nodes or self._known(state):
            return
        if self.walk.is_last(state):
            # What runs runs to its end; the simulation says when that is.
            if (time := self._problem.time(state.orders)) < self._time - EPSILON:
                self.best, self._time = state.orders, time
            return
        for following in self.walk.following(state):
            if self.walk.bound(following) < self._time - EPSILON:
                self.explore(following)

    def _known(self, state: State) -> bool:
        """Whether a state with the same stages begun and running was no later with anything."""
        # Which stages wait follows from which have begun and which of them still run.
        figures = (state.now, *state.left)
        earlier = self._seen.setdefault((state.begun, state.running), [])
        if any(all(a <= b + EPSILON for a, b in zip(other, figures, strict=True)) for other in earlier):
            return True
        earlier.append(figures)
        return False
