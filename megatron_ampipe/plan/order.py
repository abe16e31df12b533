"""Searches the order of a direction's stages in their lanes.

List scheduling under several priorities gives orders that are good; the best is improved by moving single
stages; small graphs are searched exactly (:mod:`.exact`). Deterministic: every rank that starts from the
same figures finds the same order. Called by :mod:`.search`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_ampipe.plan.exact import best_order
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.problem import Lanes, OrderProblem, list_schedule
from megatron_ampipe.schedule import Direction, Program, Schedule

SHAKEN = 12
"""Orders from priorities with some noise on them."""
NOISE = 0.3
"""How much noise, as a share."""
MOVED_STAGES = 10_000
"""Moves that are tried on the best order, times the stages of the graph: a bound on the time of a search."""
REACH = 8
"""How far a stage is moved at most."""
EXACT_STAGES = 18
"""Graphs of at most so many stages are searched exactly: degree 2 of a plain block."""
EXACT_NODES = 20_000
"""Where an exact search gives up; what was found before stands."""


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
    found = [start, *(list_schedule(problem, priority) for priority in _priorities(problem, start))]
    best = _moved(problem, min(found, key=problem.time))
    if len(problem.stages) <= EXACT_STAGES and problem.issue_us is None:
        best = best_order(problem, best, max_nodes=EXACT_NODES)[0]
    # Written so that a tie leaves the start.
    return best if problem.time(best) < problem.time(start) * (1 - 1e-9) else start


def _priorities(problem: OrderProblem, start: Lanes) -> list[Sequence[float]]:
    """What goes first among stages that are ready: the larger number."""
    tails = problem.tails()
    place = [0.0] * len(tails)
    for lane in start:
        for position, stage in enumerate(lane):
            place[stage] = -float(position)
    # What a collective waits for goes before what none does.
    urgent = [
        tail + sum(problem.durations[later] for later in problem.followers[stage] if problem.travels[later])
        for stage, tail in enumerate(tails)
    ]
    by_chunk = [-float(stage.chunk or 0) for stage in problem.stages]
    backwards = [float(stage.chunk or 0) for stage in problem.stages]
    shaken = []
    # Not from the clock: every rank has to find the same order.
    noise = random.Random(0)
    for _ in range(SHAKEN):
        shaken.append([tail * noise.uniform(1 - NOISE, 1 + NOISE) for tail in tails])
    return [tails, place, urgent, by_chunk, backwards, *shaken]


def _moved(problem: OrderProblem, start: Lanes) -> Lanes:
    """Move single stages within their lane while that does no harm."""
    noise = random.Random(1)
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
        lanes = (best[0], tuple(order)) if lane else (tuple(order), best[1])
        if (found := problem.time(lanes)) <= time:
            best, time = lanes, found
    return best
