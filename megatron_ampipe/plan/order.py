"""Searches the order of the stages of one block, or of several layers that share a schedule.

The layers repeat, so their order does too: what is searched is one period, in which each stage has a place in
its lane and a relative layer (``Schedule.repeats``); for one block it is the order itself. It is evaluated by
simulating a short stack, so every move changes all layers at once. List schedules with different weights
of layer, chunk and critical path give the first periods; the best ones are improved by moving single stages
within their lane, over the edge of the period too. Deterministic, and limited by a number of evaluations.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.simulate import NOT_YET, Compiled, Lanes, Pace, run
from megatron_ampipe.schedule import Direction, LaneOrder, Program, Schedule

SHORT = 4
"""Layers of the stack that is simulated: the first and the last one, and two that have both neighbors."""
WEIGHTS = tuple(
    weights
    for weights in itertools.product((0.0, 0.5, 1.0, 2.0), (-0.5, 0.0, 0.5, 1.0, 2.0), (0.0, 1.0))
    if any(weights)
)
"""Weights of layer, chunk and critical path in the priority of a list schedule."""
LISTED_STAGES = 1500
"""Number of list schedules, times the number of stages of a layer."""
MOVED_STAGES = 12_000
"""Number of moves of single stages, times the number of stages of a layer."""
REACH = 8
"""The largest distance by which a stage is moved."""
STARTS = 2
"""How many of the first periods are improved by moves."""

Entry = tuple[int, int]
"""A stage of a layer, as a number, and its relative layer."""
Period = tuple[tuple[Entry, ...], ...]
"""By lane the stages of one period, in order."""


class OrderProblem:
    """The stages of one direction of equal layers, whose period is to be ordered.

    Args:
        compiled: All layers in some order; those of a pass are numbered from 0.
        durations: How long each stage takes alone.
        pace: What the times of stages depend on besides.
        direction: Of the pass; backward, it begins with the last layer.
    """

    def __init__(
        self, compiled: Compiled, durations: Sequence[float], pace: Pace, *, direction: Direction
    ) -> None:
        self.compiled, self.durations, self._pace = compiled, durations, pace
        number = {stage: index for index, stage in enumerate(compiled.stages)}
        self.num_layers = 1 + max(stage.layer for stage in compiled.stages)
        passed = range(self.num_layers)[:: 1 if direction is Direction.FORWARD else -1]
        self.stages = tuple(stage for stage in compiled.stages if not stage.layer)
        """Those of one layer; the first numbers of entries are positions in this tuple."""
        self.numbers = [[number[replace(stage, layer=layer)] for layer in passed] for stage in self.stages]
        """For each stage of a layer its number in each layer, in the order of the pass."""

    @classmethod
    def of(
        cls, predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...], direction: Direction
    ) -> OrderProblem:
        """The problem of one direction of a schedule, for the layers of a predictor."""
        inputs = predictor.inputs(predictor.whole(schedule), lengths, direction)
        return cls(*inputs, direction=direction)

    def repeated(self, period: Period) -> Lanes:
        """The order of all stages of the short stack."""
        return tuple(tuple(self._repeated(entries)) for entries in period)

    def _repeated(self, entries: Sequence[Entry]) -> Iterator[int]:
        relatives = [layer for _, layer in entries]
        for turn in range(-max(relatives), self.num_layers - min(relatives)):
            for stage, relative in entries:
                if 0 <= turn + relative < self.num_layers:
                    yield self.numbers[stage][turn + relative]

    def time(self, period: Period) -> float:
        """The time of the short stack; infinite if its lanes deadlock."""
        return max(self._spans(self.repeated(period))[1])

    def _spans(self, lanes: Lanes) -> tuple[list[float], list[float]]:
        """Start and end of every stage in an order; infinite if its lanes deadlock."""
        compiled = self.compiled.in_order(lanes, issued=self._pace.issue_us is not None)
        return ([NOT_YET], [NOT_YET]) if compiled is None else run(compiled, self.durations, self._pace)

    def period_of(self, program: Program) -> Period:
        """The period of a program of one block, or of a schedule that repeats."""
        number = {stage: index for index, stage in enumerate(self.stages)}
        return tuple(
            tuple((number[replace(stage, layer=0)], stage.layer) for stage in lane.stages)
            for lane in program.lanes
        )

    def program(self, period: Period) -> Program:
        """Convert a period into a program."""
        lanes = (
            LaneOrder(name, tuple(replace(self.stages[stage], layer=layer) for stage, layer in entries))
            for (name, _), entries in zip(self.compiled.lanes, period, strict=True)
        )
        return Program(tuple(lanes))

    def listed(self) -> Iterator[Period]:
        """The periods of list schedules with different weights."""
        tails = self._tails()
        longest = max(tails) or 1.0
        depth, place = [0.0] * len(tails), [0.0] * len(tails)
        chunks = {stage.chunk for stage in self.stages if stage.chunk is not None}
        for stage, numbers in zip(self.stages, self.numbers, strict=True):
            for passed, number in enumerate(numbers):
                depth[number] = passed / max(1, self.num_layers - 1)
                place[number] = 0.0 if stage.chunk is None else stage.chunk / len(chunks)
        forward = self.compiled.stages[self.numbers[0][0]].layer == 0
        sign = 1.0 if forward else -1.0
        weights = [one for one in WEIGHTS if self.num_layers > 1 or not one[0]]
        every = max(1, len(weights) * len(self.stages) // LISTED_STAGES)
        for layer, chunk, path in weights[::every]:
            priority = [
                path * tail / longest - layer * deep - sign * chunk * at
                for tail, deep, at in zip(tails, depth, place, strict=True)
            ]
            begin, _ = self._spans(self._list_schedule(priority))
            yield from self._periods(begin)

    def _tails(self) -> list[float]:
        """For each stage the length of the critical path from its start to the end of the pass."""
        found = [0.0] * len(self.durations)
        for stage in reversed(self.compiled.issued):
            later = (found[follower] for follower in self.compiled.followers[stage])
            found[stage] = self.durations[stage] + max(later, default=0.0)
        return found

    def _list_schedule(self, priority: Sequence[float]) -> Lanes:
        """The order in which a free lane always runs the ready stage with the highest priority."""
        waiting = [len(needed) for needed in self.compiled.needs]
        lane_of = {stage: lane for lane, (_, order) in enumerate(self.compiled.lanes) for stage in order}
        ready: list[list[int]] = [[] for _ in self.compiled.lanes]
        for stage, count in enumerate(waiting):
            if not count:
                ready[lane_of[stage]].append(stage)
        orders: list[list[int]] = [[] for _ in ready]
        free = [0.0 for _ in ready]
        running: list[tuple[float, int]] = []
        now = 0.0
        while True:
            for lane, stages in enumerate(ready):
                if stages and free[lane] <= now:
                    stage = max(stages, key=lambda one: (priority[one], -one))
                    stages.remove(stage)
                    orders[lane].append(stage)
                    free[lane] = now + self.durations[stage]
                    running.append((free[lane], stage))
            if not running:
                return tuple(map(tuple, orders))
            running.sort()
            now, stage = running.pop(0)
            for follower in self.compiled.followers[stage]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    ready[lane_of[follower]].append(follower)

    def _periods(self, begin: Sequence[float]) -> Iterator[Period]:
        """A period for each pair of adjacent layers, from the times at which their stages begin."""
        lane_of = {stage: lane for lane, (_, order) in enumerate(self.compiled.lanes) for stage in order}
        for layer in range(max(1, self.num_layers - 1)):
            length = NOT_YET
            if self.num_layers > 1:
                distances = sorted(begin[of[layer + 1]] - begin[of[layer]] for of in self.numbers)
                length = distances[len(distances) // 2]
            if length <= 0:
                continue
            origin = min(begin[of[layer]] for of in self.numbers)
            lanes: list[list[tuple[float, Entry]]] = [[] for _ in self.compiled.lanes]
            for stage, of in enumerate(self.numbers):
                late, phase = divmod(begin[of[layer]] - origin, length)
                lanes[lane_of[of[layer]]].append((phase, (stage, -int(late))))
            yield tuple(tuple(entry for _, entry in sorted(lane)) for lane in lanes)


def improve_order(problem: OrderProblem, start: Period) -> Period:
    """Find a period with which the short stack is faster; ``start`` if there is none."""
    times = {start: problem.time(start)}
    for period in problem.listed():
        if period not in times:
            times[period] = problem.time(period)
    best = sorted(times, key=times.__getitem__)[:STARTS]
    found = min((_moved(problem, period, times[period]) for period in best), key=problem.time)
    # A tie keeps the start.
    return found if problem.time(found) < times[start] * (1 - 1e-9) else start


def _moved(problem: OrderProblem, start: Period, time: float) -> Period:
    """Move single stages within their lane as long as the time does not increase."""
    # A fixed seed: every rank has to find the same order.
    generator = random.Random(0)
    best = start
    for _ in range(MOVED_STAGES // len(problem.stages) // STARTS):
        lane = generator.randrange(len(best))
        order = list(best[lane])
        source = generator.randrange(len(order))
        # Short moves more often than long ones.
        step = generator.randint(1, generator.randint(1, REACH))
        target = source + generator.choice((-1, 1)) * step
        stage, layer = order.pop(source)
        # Over an edge of the period, it is the stage of the layer before or after; a block has none.
        turns, place = divmod(target, len(order) + 1)
        if turns and problem.num_layers == 1:
            continue
        order.insert(place, (stage, layer - turns))
        found = (*best[:lane], tuple(order), *best[lane + 1 :])
        if found != best and (needed := problem.time(found)) <= time and needed < NOT_YET:
            best, time = found, needed
    return best
