"""Finds the optimal order of the stages by branch and bound. Fast enough for 2 chunks, and often for 3.

A state is pruned if no order that continues it can be faster than the best one known, or if it is no better
than an earlier state in which the same stages have begun. Used by :mod:`.order` for small graphs.
"""

from __future__ import annotations

from megatron_ampipe.plan.problem import Lanes, OrderProblem
from megatron_ampipe.plan.walk import EPSILON, State, Walk


def best_order(problem: OrderProblem, start: Lanes, *, max_nodes: int) -> tuple[Lanes, bool]:
    """Find the optimal order. The times to issue stages (``issue_us``) are ignored.

    Args:
        problem: The stages to order.
        start: A good order; the result is not slower.
        max_nodes: The search stops after this number of states.

    Returns:
        The best order found, and whether it is proven to be optimal.
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
        """Search depth first from this state."""
        self.nodes += 1
        if self.nodes > self._max_nodes or self._known(state):
            return
        if self.walk.is_last(state):
            # All stages have begun; the simulation gives the time at which the last one ends.
            if (time := self._problem.time(state.orders)) < self._time - EPSILON:
                self.best, self._time = state.orders, time
            return
        for successor in self.walk.successors(state):
            if self.walk.bound(successor) < self._time - EPSILON:
                self.explore(successor)

    def _known(self, state: State) -> bool:
        """Whether an earlier state with the same stages begun and running is at least as good."""
        # These two determine which stages still wait.
        figures = (state.now, *state.left)
        earlier = self._seen.setdefault((state.begun, state.running), [])
        if any(all(a <= b + EPSILON for a, b in zip(other, figures, strict=True)) for other in earlier):
            return True
        earlier.append(figures)
        return False
