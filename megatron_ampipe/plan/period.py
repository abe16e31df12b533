"""Searches the order of the stages of several layers that share a schedule: one period, repeated.

The layers repeat, so their order does too: what is searched is one period, in which each stage has a place in
its lane and a relative layer (``Schedule.repeats``). It is evaluated by simulating a short stack, so every
move changes all layers at once. List schedules of the short stack with different weights of layer, chunk and
critical path give the first periods; the best ones are improved by moving single stages within their lane,
over the edge of the period too. Deterministic, and limited by a number of evaluations. Called by
:mod:`.stacks`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.problem import Lanes, OrderProblem, list_schedule
from megatron_ampipe.plan.simulate import NOT_YET
from megatron_ampipe.schedule import Direction, LaneOrder, Program, Schedule, Stage

SHORT = 4
"""Layers of the stack that is simulated: the first and the last one, and two that have both neighbors."""
WEIGHTS = tuple(
    (layer, chunk, path)
    for layer, chunk, path in itertools.product((0.0, 0.5, 1.0, 2.0), (-0.5, 0.0, 0.5, 1.0, 2.0), (0.0, 1.0))
    if layer or chunk or path
)
"""Weights of layer, chunk and critical path in the priority of a list schedule."""
LISTED_STAGES = 6000
"""Number of list schedules, times the number of stages of the short stack."""
MOVED_STAGES = 60_000
"""Number of moves of single stages, times the number of stages of the short stack."""
REACH = 8
"""The largest distance by which a stage is moved."""
STARTS = 2
"""How many of the first periods are improved by moves."""

Entry = tuple[int, int]
"""A stage of a layer, as a number, and its relative layer."""
Period = tuple[tuple[Entry, ...], ...]
"""By lane the stages of one period, in order."""


@dataclass(frozen=True, slots=True)
class PeriodProblem:
    """The stages of one direction of a short stack of equal layers, whose period is to be ordered.

    Attributes:
        problem: The stages of all layers of the short stack.
        stages: Those of one layer; the first numbers of entries are positions in this tuple.
        numbers: For each stage of a layer its number in ``problem`` in each layer, in the order of the pass.
    """

    problem: OrderProblem
    stages: tuple[Stage, ...]
    numbers: tuple[tuple[int, ...], ...]

    @classmethod
    def of(
        cls, predictor: Predictor, schedule: Schedule, lengths: tuple[int, ...], direction: Direction
    ) -> PeriodProblem:
        """The problem of one direction of a schedule of one block, for the layers of a predictor."""
        problem = OrderProblem.of(predictor, predictor.whole(schedule), lengths, direction)
        count = len(predictor.layers)
        passed = range(count) if direction is Direction.FORWARD else range(count)[::-1]
        number = {stage: index for index, stage in enumerate(problem.stages)}
        stages = tuple(stage for stage in problem.stages if not stage.layer)
        return cls(
            problem,
            stages,
            tuple(tuple(number[replace(stage, layer=layer)] for layer in passed) for stage in stages),
        )

    @property
    def num_layers(self) -> int:
        """Layers of the short stack."""
        return len(self.numbers[0])

    def repeated(self, period: Period) -> Lanes:
        """The order of all stages of the short stack."""
        return tuple(tuple(self._repeated(entries)) for entries in period)

    def _repeated(self, entries: Sequence[Entry]) -> Iterator[int]:
        ahead = max(layer for _, layer in entries)
        behind = min(layer for _, layer in entries)
        for turn in range(-ahead, self.num_layers - behind):
            for stage, relative in entries:
                layer = turn + relative
                if 0 <= layer < self.num_layers:
                    yield self.numbers[stage][layer]

    def time(self, period: Period) -> float:
        """The time of the short stack; infinite if its lanes deadlock."""
        return self.problem.time(self.repeated(period))

    def period_of(self, program: Program) -> Period:
        """The period of the program of a schedule that repeats."""
        number = {stage: index for index, stage in enumerate(self.stages)}
        lanes: list[list[Entry]] = [[] for _ in self.problem.lanes]
        for stage in program.stages:
            lane = self.problem.lanes.index(stage.kind.lane.name)
            lanes[lane].append((number[replace(stage, layer=0)], stage.layer))
        return tuple(map(tuple, lanes))

    def program(self, period: Period) -> Program:
        """Convert a period into a program."""
        return Program(
            tuple(
                LaneOrder(
                    name,
                    tuple(replace(self.stages[stage], layer=layer) for stage, layer in entries),
                )
                for name, entries in zip(self.problem.lanes, period, strict=True)
            )
        )

    def listed(self) -> Iterator[Period]:
        """The periods of list schedules with different weights."""
        problem, last = self.problem, self.num_layers - 1
        tails = problem.tails()
        longest = max(tails) or 1.0
        depth, place = [0.0] * len(problem.stages), [0.0] * len(problem.stages)
        count = len({stage.chunk for stage in self.stages if stage.chunk is not None})
        for stage, numbers in zip(self.stages, self.numbers, strict=True):
            for passed, number in enumerate(numbers):
                depth[number] = passed / max(1, last)
                place[number] = 0.0 if stage.chunk is None else stage.chunk / count
        forward = problem.stages[self.numbers[0][0]].layer == 0
        sign = 1.0 if forward else -1.0
        every = max(1, len(WEIGHTS) * len(problem.stages) // LISTED_STAGES)
        for layer, chunk, path in WEIGHTS[::every]:
            priority = [
                path * tail / longest - layer * deep - sign * chunk * at
                for tail, deep, at in zip(tails, depth, place, strict=True)
            ]
            lanes = list_schedule(problem, priority)
            begin, _ = problem.spans(lanes)
            yield from self._middles(begin)

    def _middles(self, begin: Sequence[float]) -> Iterator[Period]:
        """A period for each pair of adjacent layers, from the times at which their stages begin."""
        for layer in range(self.num_layers - 1):
            distances = sorted(begin[numbers[layer + 1]] - begin[numbers[layer]] for numbers in self.numbers)
            length = distances[len(distances) // 2]
            if length <= 0:
                continue
            origin = min(begin[numbers[layer]] for numbers in self.numbers)
            lanes: list[list[tuple[float, Entry]]] = [[] for _ in self.problem.lanes]
            for stage, numbers in enumerate(self.numbers):
                late, phase = divmod(begin[numbers[layer]] - origin, length)
                lanes[self.problem.lane_of[numbers[layer]]].append((phase, (stage, -int(late))))
            yield tuple(tuple(entry for _, entry in sorted(lane)) for lane in lanes)


def improve_period(problem: PeriodProblem, start: Period) -> Period:
    """Find a period with which the short stack is at least as fast."""
    times: dict[Period, float] = {start: problem.time(start)}
    for found in problem.listed():
        if found not in times:
            times[found] = problem.time(found)
    best = sorted(times, key=times.__getitem__)[:STARTS]
    return min((_moved(problem, one, times[one]) for one in best), key=problem.time)


def _moved(problem: PeriodProblem, start: Period, time: float) -> Period:
    """Move single stages within their lane as long as the time does not increase."""
    # A fixed seed: every rank has to find the same order.
    generator = random.Random(0)
    best = start
    for _ in range(MOVED_STAGES // len(problem.problem.stages) // STARTS):
        lane = generator.randrange(len(best))
        order = list(best[lane])
        source = generator.randrange(len(order))
        # Short moves more often than long ones.
        step = generator.randint(1, generator.randint(1, REACH))
        target = source + generator.choice((-1, 1)) * step
        stage, layer = order.pop(source)
        # Over an edge of the period, it is the stage of the layer before or after.
        turns, place = divmod(target, len(order) + 1)
        order.insert(place, (stage, layer - turns))
        found = (*best[:lane], tuple(order), *best[lane + 1 :])
        if found == best:
            continue
        if (needed := problem.time(found)) <= time and needed < NOT_YET:
            best, time = found, needed
    return best
