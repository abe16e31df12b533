"""Searches the order of the stages of one direction in their lanes.

List scheduling and a beam search give good orders; the best one is improved by moving single stages; small
graphs are searched exactly (:mod:`.exact`). Deterministic: ranks with the same figures find the same order.
Called by :mod:`.search`.
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
"""Width of the beam times the number of stages: a bound on the time of a search."""
BEAM_LIMIT = 80
"""The beam search is skipped for graphs with more stages, which is about 8 chunks."""
BRANCHES = 3
"""How many ready stages of a lane the beam search considers."""
MOVED_STAGES = 6000
"""Number of moves of single stages, times the number of stages."""
REACH = 8
"""The largest distance by which a stage is moved."""
RESTORING_SWAPS = 4000
"""Swaps of :func:`_restored` that are tried, times the number of stages."""
RESTORED_TOLERANCE = 1e-4
"""Slowdown that is accepted for the restored order of neighbors, as a share of the time."""
EXACT_NODES = {19: 20_000, 27: 3_000}
"""The largest number of states of an exact search, by the largest number of stages: enough for two chunks and
often for three. Larger graphs are not searched exactly."""


def improve_order(
    predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...], direction: Direction
) -> Program:
    """Find a program that is at least as fast as that of the schedule.

    Args:
        predictor: Of the workload on the cluster.
        schedule: The order to start from.
        lengths: Rows of one rank in each chunk.
        direction: Which program of it to improve.

    Returns:
        The program; that of the schedule if no faster one was found.
    """
    named = schedule.program(direction)
    problem = OrderProblem.of(predictor, schedule, lengths, direction)
    start = problem.lanes_of(named)
    best = search(problem, start)
    return named if best == start else problem.program(best)


def search(problem: OrderProblem, start: Lanes) -> Lanes:
    """Find a fast order; returns ``start`` if none is faster."""
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
    # A tie keeps the start.
    if problem.time(best) >= problem.time(start) * (1 - 1e-9):
        return start
    # The result of an exact search must not become slower.
    return _restored(problem, best, start, tolerance=RESTORED_TOLERANCE if limit is None else 1e-12)


def _moved(problem: OrderProblem, start: Lanes) -> Lanes:
    """Move single stages within their lane as long as the time does not increase."""
    # A fixed seed: every rank has to find the same order.
    generator = random.Random(0)
    best, time = start, problem.time(start)
    for _ in range(MOVED_STAGES // len(problem.stages)):
        lane = generator.randrange(len(best))
        order = list(best[lane])
        if len(order) < 2:
            continue
        source = generator.randrange(len(order))
        step = generator.choice((-1, 1)) * generator.randint(1, REACH)
        target = min(len(order) - 1, max(0, source + step))
        stage = order.pop(source)
        order.insert(target, stage)
        if target == source or not problem.keeps_order(order, source, target):
            continue
        lanes = (*best[:lane], tuple(order), *best[lane + 1 :])
        if (found := problem.time(lanes)) <= time:
            best, time = lanes, found
    return best


def _restored(problem: OrderProblem, found: Lanes, start: Lanes, *, tolerance: float) -> Lanes:
    """Swap neighbors back into the order of ``start`` where the time grows by at most ``tolerance``, a share.

    Many orders have the same predicted time. One that runs the chunks in sequence is easier to read, and
    loses less where times differ from the prediction.
    """
    limit = min(problem.time(found) * (1 + tolerance), problem.time(start))
    position = {stage: index for lane in start for index, stage in enumerate(lane)}
    best = found
    left = RESTORING_SWAPS // len(problem.stages)
    swapped = True
    while swapped and left > 0:
        swapped = False
        for lane in range(len(best)):
            for index in range(len(best[lane]) - 1):
                order = list(best[lane])
                if position[order[index]] < position[order[index + 1]] or left <= 0:
                    continue
                order[index], order[index + 1] = order[index + 1], order[index]
                if not problem.keeps_order(order, index, index + 1):
                    continue
                left -= 1
                lanes = (*best[:lane], tuple(order), *best[lane + 1 :])
                if problem.time(lanes) <= limit:
                    best, swapped = lanes, True
    return best
