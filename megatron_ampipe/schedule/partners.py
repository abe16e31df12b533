"""Partners: the backward pass of one micro-batch and the forward pass of the next one in one program.

Each lane runs the stages of both passes, each pass in its own order: while the tokens of one micro-batch
travel, the other one computes, also where neither is cut into chunks (DualPipe and Megatron's
``--overlap-moe-expert-parallel-comm`` do the same in one fixed order).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.choices import of_chunks
from megatron_ampipe.schedule.pipeline import Pipeline
from megatron_ampipe.schedule.program import Stage
from megatron_ampipe.schedule.stage_kind import Direction


class Task(NamedTuple):
    """A stage of one of two passes that share a program.

    Attributes:
        lane: Where it runs.
        needs: Numbers of the tasks that must have ended before.
        time: How long it takes alone, in any unit.
        ahead: It is of the forward pass.
    """

    lane: str
    needs: tuple[int, ...]
    time: float
    ahead: bool


def together(tasks: Sequence[Task]) -> dict[str, list[int]]:
    """For each lane the order of its tasks, by list scheduling.

    The tasks of each pass stay in their order in every lane. Of the two that may be next in a lane, the one
    that can begin earlier does; if both can, the one after which more has to follow.
    """
    queues: dict[tuple[str, bool], list[int]] = {}
    for number, task in enumerate(tasks):
        queues.setdefault((task.lane, task.ahead), []).append(number)
    follow = _longest_after(tasks, list(queues.values()))
    next_in = dict.fromkeys(queues, 0)
    ends: dict[int, float] = {}
    free = dict.fromkeys((task.lane for task in tasks), 0.0)
    order: dict[str, list[int]] = {lane: [] for lane in free}
    while len(ends) < len(tasks):
        best = None
        for key, queue in queues.items():
            if next_in[key] == len(queue):
                continue
            number = queue[next_in[key]]
            needs = tasks[number].needs
            if all(needed in ends for needed in needs):
                begin = max([free[key[0]], *(ends[needed] for needed in needs)])
                candidate = (begin, -follow[number], number, key)
                best = candidate if best is None else min(best, candidate)
        assert best is not None, "a pass waits for itself"
        begin, _, number, key = best
        next_in[key] += 1
        ends[number] = free[key[0]] = begin + tasks[number].time
        order[key[0]].append(number)
    return order


def _longest_after(tasks: Sequence[Task], queues: Sequence[Sequence[int]]) -> list[float]:
    """For each task the time of the longest chain that it begins."""
    followers: list[list[int]] = [[] for _ in tasks]
    for number, task in enumerate(tasks):
        for needed in task.needs:
            followers[needed].append(number)
    for queue in queues:
        for earlier, later in pairwise(queue):
            followers[earlier].append(later)
    follow = [0.0] * len(tasks)
    # What follows has a higher number: tasks are listed in the order in which each pass is issued.
    for number in reversed(range(len(tasks))):
        rest = max((follow[later] for later in followers[number]), default=0.0)
        follow[number] = tasks[number].time + rest
    return follow


_TRANSFER, _SMALL = 4.0, 0.2
_TIMES = {kinds.QKV: 1.0, kinds.ATTENTION: 2.0, kinds.EXPERT: 4.0, kinds.SHARED: 1.0, kinds.MLP: 3.0}


def usual_time(stage: Stage, direction: Direction, *, weights_apart: bool) -> float:
    """About how long a stage of the whole sequence takes, where nobody has measured it, in any unit.

    Chosen so that the transfers of a block take about as long as half of its computation.
    """
    if stage.is_communication:
        return _TRANSFER
    kind = stage.kind.weights_of or stage.kind
    time = _TIMES.get(kind, _SMALL)
    # Gradients of inputs and of weights take as long as the forward pass each.
    whole = direction is Direction.BACKWARD and not stage.computes_values and stage.kind.weights_of is None
    return time if not whole or weights_apart else 2 * time


def pipeline_of(
    pipeline: Pipeline, *, schedule: str, forward_partner: bool, backward_partner: bool
) -> Pipeline:
    """The pipeline of a micro-batch: its passes with a partner are not cut into chunks.

    Args:
        pipeline: How one without partners runs.
        schedule: Name of the order of the stages of one with a partner.
    """
    if not (forward_partner or backward_partner):
        return pipeline
    degree = 1 if forward_partner else pipeline.degree
    backward_degree = 1 if backward_partner else pipeline.backward_degree
    keeps_memory = backward_degree == pipeline.backward_degree
    keeps_chunks = max(degree, backward_degree) == pipeline.num_chunks
    return replace(
        pipeline,
        degree=degree,
        backward_degree=backward_degree,
        shares=pipeline.shares if keeps_chunks else None,
        schedule=schedule,
        order=None,
        memory=pipeline.memory if keeps_memory else of_chunks(pipeline.memory)[0],
    )
