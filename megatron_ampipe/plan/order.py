"""Searches the order of a direction's stages in their lanes.

List scheduling and a beam give orders that are good; the best is improved by moving single stages; small
graphs are searched exactly (:mod:`.exact`). Deterministic: every rank that starts from the same figures finds
the same order. Called by :mod:`.search`.
"""

from __future__ import annotations

import random
from dataclasses import replace

from megatron_ampipe.plan.exact import best_order
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.problem import Lanes, OrderProblem, list_schedule
from megatron_ampipe.plan.walk import beam
from megatron_ampipe.schedule import Direction, Program, Schedule

BEAM_STAGES = 360
"""Width of the beam times the stages of the graph: a bound on the time of a search."""
BEAM_LIMIT = 80
"""Larger graphs, of more than about eight chunks, are left to the other rules."""
BRANCHES = 3
"""How many ready stages of a lane the beam looks at."""
MOVED_STAGES = 6000
"""Moves of single stages on the best order, times the stages of the graph."""
REACH = 8
"""How far a stage is moved at most."""
TIDIED_STAGES = 4000
"""Swaps that are tried to tidy an order, times the stages of the graph."""
UNTIDY = 1e-4
"""What a tidy order may cost, as a share of the time."""
EXACT_NODES = {19: 20_000, 27: 3_000}
"""Where an exact search gives up, by the largest number of stages: two chunks are searched to the end, three
often are. Larger graphs are not searched exactly."""


def improve_order(
    predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...], direction: Direction
) -> Program:
    """A program that is at least as fast as the schedule's own.

    Args:
        predictor: Of the workload on the cluster.
        schedule: Where to begin.
        lengths: Rows of one rank in each chunk.
        direction: Which of its programs.

    Returns:
        The schedule's own program where nothing faster was found.
    """
    own = schedule.program(direction)
    problem = OrderProblem.of(predictor, schedule, lengths, direction)
    start = problem.lanes_of(own)
    best = search(problem, start)
    return own if best == start else problem.program(best)


def search(problem: OrderProblem, start: Lanes) -> Lanes:
    """The best order that is found; ``start`` itself where none is faster."""
    found = [start, list_schedule(problem, problem.tails())]
    if len(problem.stages) <= BEAM_LIMIT:
        width = max(3, BEAM_STAGES // len(problem.stages))
        if (beamed := beam(problem, width=width, branches=BRANCHES)) is not None:
            found.append(beamed)
    best = _moved(problem, min(found, key=problem.time))
    limit = next((nodes for stages, nodes in EXACT_NODES.items() if len(problem.stages) <= stages), None)
    if limit is not None:
        device = replace(problem, issue_us=None)
        best = min(best, best_order(device, best, max_nodes=limit)[0], key=problem.time)
    # Written so that a tie leaves the start.
    if problem.time(best) >= problem.time(start) * (1 - 1e-9):
        return start
    # What an exact search has proven stays exact.
    return _tidied(problem, best, start, cost=UNTIDY if limit is None else 1e-12)


def _moved(problem: OrderProblem, start: Lanes) -> Lanes:
    """Move single stages within their lane while that does no harm."""
    # Not from the clock: every rank has to find the same order.
    noise = random.Random(0)
    best, time = start, problem.time(start)
    for _ in range(MOVED_STAGES // len(problem.stages)):
        lane = noise.randrange(len(best))
        order = list(best[lane])
        if len(order) < 2:
            continue
        source = noise.randrange(len(order))
        target = min(len(order) - 1, max(0, source + noise.choice((-1, 1)) * noise.randint(1, REACH)))
        stage = order.pop(source)
        order.insert(target, stage)
        if target == source or not problem.keeps_order(order, source, target):
            continue
        lanes = (*best[:lane], tuple(order), *best[lane + 1 :])
        if (found := problem.time(lanes)) <= time:
            best, time = lanes, found
    return best


def _tidied(problem: OrderProblem, found: Lanes, start: Lanes, *, cost: float) -> Lanes:
    """As fast up to ``cost``, a share, with fewer stages out of the order in which they stand in ``start``.

    Many orders take the same time in a prediction. The one that runs chunks in their order is the one that a
    reader can follow, and that suffers least where times are not as predicted.
    """
    limit = min(problem.time(found) * (1 + cost), problem.time(start))
    place = {stage: index for lane in start for index, stage in enumerate(lane)}
    best = found
    left = TIDIED_STAGES // len(problem.stages)
    swapped = True
    while swapped and left > 0:
        swapped = False
        for lane in range(len(best)):
            for index in range(len(best[lane]) - 1):
                order = list(best[lane])
                if place[order[index]] < place[order[index + 1]] or left <= 0:
                    continue
                order[index], order[index + 1] = order[index + 1], order[index]
                if not problem.keeps_order(order, index, index + 1):
                    continue
                left -= 1
                lanes = (*best[:lane], tuple(order), *best[lane + 1 :])
                if problem.time(lanes) <= limit:
                    best, swapped = lanes, True
    return best
