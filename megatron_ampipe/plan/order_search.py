"""Searches a fast order of the stages of layers that share a schedule, or of one block.

Layers repeat, so one period is searched, in which each stage has a place in its lane and a relative layer
(``Schedule.repeats``); for one block it is the order itself. List schedules with different weights give the
first periods; the best ones are improved by moving single stages within their lane, even over the edge of the
period. After about half of the moves, another lane follows: its stages are put into the order in which the
moved lane needs them. Without that, most moves only make one lane wait for the other.

The number of evaluations is limited, not the time, and random seeds are fixed, so that ranks with the same
figures find the same order.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_ampipe.plan.simulate import NOT_YET, Lanes, TimedProgram, run
from megatron_ampipe.schedule import Direction, Program
from megatron_ampipe.schedule.passes import repeat_period

WEIGHTS = tuple(
    weights
    for weights in itertools.product((0.0, 0.5, 1.0, 2.0), (-0.5, 0.0, 0.5, 1.0, 2.0), (0.0, 1.0))
    if any(weights)
)
"""Weights of layer, chunk and critical path in the priority of a list schedule."""
LISTED_STAGES = 1500
"""Number of list schedules, times the number of stages of a layer."""
MOVED_STAGES = 24_000
"""Number of moves of single stages, times the number of stages of a layer."""
REACH = 8
"""The largest distance by which a stage is moved."""
STARTS = 2
"""How many of the first periods are improved by moves."""
WARMTH = 0.03
"""By about this share of the time, the first moves may make the period slower; the last ones may not."""

Entry = tuple[int, int]
"""The index of a stage of a layer, and its relative layer."""
Period = tuple[tuple[Entry, ...], ...]
"""The stages of one period in order, for each lane."""


class OrderProblem:
    """The search for the best period of one direction of equal layers."""

    def __init__(self, timed: TimedProgram, *, direction: Direction) -> None:
        self.compiled = compiled = timed.compiled
        self._timed, self._durations = timed, timed.durations
        number = {stage: index for index, stage in enumerate(compiled.stages)}
        self.num_layers = 1 + max(stage.layer for stage in compiled.stages)
        self._forward = direction is Direction.FORWARD
        upwards = range(self.num_layers)
        self.stages = tuple(stage for stage in compiled.stages if not stage.layer)
        """The stages of one layer; entries index this tuple."""
        self.numbers = [
            [
                number[replace(stage, layer=layer)]
                for layer in upwards[:: 1 if self._forward or stage.of_next_microbatch else -1]
            ]
            for stage in self.stages
        ]
        """For each stage of a layer, its number in each layer, in the order of the pass."""
        self._lane_of = {stage: lane for lane, (_, order) in enumerate(compiled.lanes) for stage in order}
        self._later = self._relations(compiled.followers, reversed(compiled.issued))
        self._earlier = self._relations(compiled.needs, compiled.issued)
        self._times: dict[Period, float] = {}
        """Of all periods that were tried, because moves come back to many; at most one for each move."""

    def _relations(self, neighbors: Sequence[Iterable[int]], order: Iterable[int]) -> list[list[list[Entry]]]:
        """For each stage of a layer, the nearest stages of every lane that need it, or that it needs.

        Args:
            neighbors: For each stage of the short stack, the stages that directly follow or precede it.
            order: All stages of the short stack, each after its neighbors.

        Returns:
            For each stage and lane, entries. Their relative layers count from the layer of the stage.
        """
        entry_of = {
            number: (stage, passed)
            for stage, numbers in enumerate(self.numbers)
            for passed, number in enumerate(numbers)
        }
        reached: list[set[int]] = [set() for _ in neighbors]
        for number in order:
            for neighbor in neighbors[number]:
                reached[number] |= reached[neighbor] | {neighbor}
        middle = self.num_layers // 2
        relations = []
        for numbers in self.numbers:
            by_lane: list[list[Entry]] = [[] for _ in self.compiled.lanes]
            related = reached[numbers[middle]]
            for lane, entries in enumerate(by_lane):
                of_lane = [number for number in related if self._lane_of[number] == lane]
                of_later = set().union(*(reached[number] for number in of_lane))
                for number in sorted(set(of_lane) - of_later):
                    stage, passed = entry_of[number]
                    entries.append((stage, passed - middle))
            relations.append(by_lane)
        return relations

    def following(self, period: Period, *, lane: int, leader: int) -> Period:
        """The period in which a lane runs its stages in the order in which the leading lane needs them.

        Stages that it needs at the same time, or not at all, are in the order in which it allows them.
        """
        length = len(period[leader])
        # Where the leader runs its stage of layer 0, in all its turns together.
        place_of = {
            stage: place - relative * length for place, (stage, relative) in enumerate(period[leader])
        }
        ordered = []
        for old_place, (stage, relative) in enumerate(period[lane]):
            allowed, needed = -relative * length, NOT_YET
            for earlier, distance in self._earlier[stage][leader]:
                allowed = max(allowed, place_of[earlier] + distance * length)
            for later, distance in self._later[stage][leader]:
                needed = min(needed, place_of[later] + distance * length)
            if needed == NOT_YET:
                needed = allowed
            turn = int(needed // length)
            ordered.append((needed - turn * length, allowed, old_place, (stage, -turn)))
        ordered.sort()
        followed = tuple([entry for *_, entry in ordered])
        return (*period[:lane], followed, *period[lane + 1 :])

    def repeated(self, period: Period) -> Lanes:
        """The order of all stages of the short stack."""
        lanes = []
        for entries in period:
            # For each entry, the numbers of its stage in all layers.
            numbers = [self.numbers[stage] for stage, _ in entries]
            order = repeat_period([layer for _, layer in entries], self.num_layers)
            lanes.append(tuple([numbers[index][passed] for index, passed in order]))
        return tuple(lanes)

    def time(self, period: Period) -> float:
        """The time of the short stack; infinite if its lanes deadlock, or if the period is not allowed."""
        time = self._times.get(period)
        if time is None:
            time = self._times[period] = self._time(period)
        return time

    def _time(self, period: Period) -> float:
        if not self._is_allowed(period) or not self._is_in_order(period):
            return NOT_YET
        return max(self._spans(self.repeated(period))[1])

    def _is_allowed(self, period: Period) -> bool:
        """Whether an order that could run is wanted."""
        return True

    def _is_in_order(self, period: Period) -> bool:
        """Whether no stage comes before one of its lane that it needs: most periods that deadlock fail here.

        It costs much less than to issue their stages until nothing can run.
        """
        for lane, entries in enumerate(period):
            length = len(entries)
            place_of = {stage: place - relative * length for place, (stage, relative) in enumerate(entries)}
            for stage, place in place_of.items():
                for earlier, distance in self._earlier[stage][lane]:
                    if place_of[earlier] + distance * length >= place:
                        return False
        return True

    def _spans(self, lanes: Lanes) -> tuple[list[float], list[float]]:
        """Start and end of every stage in an order; infinite if its lanes deadlock."""
        timed = self._timed.in_order(lanes)
        return ([NOT_YET], [NOT_YET]) if timed is None else run(timed)

    def period_of(self, program: Program) -> Period:
        """The period of a program of one block, or of a schedule that repeats."""
        number = {stage: index for index, stage in enumerate(self.stages)}
        return tuple(
            tuple((number[replace(stage, layer=0)], stage.layer) for stage in stages)
            for _, stages in program.lanes
        )

    def program(self, period: Period) -> Program:
        """Convert a period into a program."""
        lanes = {
            name: [replace(self.stages[stage], layer=layer) for stage, layer in entries]
            for (name, _), entries in zip(self.compiled.lanes, period, strict=True)
        }
        return Program.of(lanes)

    def listed(self) -> Iterator[Period]:
        """The periods of list schedules with different weights."""
        # For each stage, the length of the critical path from its start to the end of the pass.
        tails = [0.0] * len(self._durations)
        for stage in reversed(self.compiled.issued):
            later = (tails[follower] for follower in self.compiled.followers[stage])
            tails[stage] = self._durations[stage] + max(later, default=0.0)
        longest = max(tails) or 1.0
        num_chunks = len({stage.chunk for stage in self.stages if stage.chunk is not None})
        deepest = max(1, self.num_layers - 1)
        deep_and_at = [(0.0, 0.0)] * len(tails)
        for stage_of_layer, numbers in zip(self.stages, self.numbers, strict=True):
            at = 0.0 if stage_of_layer.chunk is None else stage_of_layer.chunk / num_chunks
            for passed, number in enumerate(numbers):
                deep_and_at[number] = passed / deepest, at
        sign = 1.0 if self._forward or self.num_layers == 1 else -1.0
        weights = [weight for weight in WEIGHTS if self.num_layers > 1 or not weight[0]]
        every = max(1, len(weights) * len(self.stages) // LISTED_STAGES)
        for layer, chunk, path in weights[::every]:
            priority = [
                path * tail / longest - layer * deep - sign * chunk * at
                for tail, (deep, at) in zip(tails, deep_and_at, strict=True)
            ]
            lanes = self._list_schedule(priority)
            if self.num_layers == 1:
                yield tuple(tuple((stage, 0) for stage in lane) for lane in lanes)
            else:
                begin, _ = self._spans(lanes)
                yield from self._periods(begin)

    def _list_schedule(self, priority: Sequence[float]) -> Lanes:
        """The order in which a free lane always runs the ready stage with the highest priority."""
        # Not as ``schedule.partners.merge_passes``, which chooses by rank among all stages that could begin
        # at the same time by rank: with stages that take no time, the orders found were slower.
        lane_of = self._lane_of
        num_awaited = [len(needed) for needed in self.compiled.needs]
        ready: list[list[int]] = [[] for _ in self.compiled.lanes]
        for stage, count in enumerate(num_awaited):
            if not count:
                ready[lane_of[stage]].append(stage)
        orders: list[list[int]] = [[] for _ in ready]
        free = [0.0 for _ in ready]
        running: list[tuple[float, int]] = []
        now = 0.0
        while True:
            for lane, stages in enumerate(ready):
                if stages and free[lane] <= now:
                    stage = max(stages, key=lambda stage: (priority[stage], -stage))
                    stages.remove(stage)
                    orders[lane].append(stage)
                    free[lane] = now + self._durations[stage]
                    running.append((free[lane], stage))
            if not running:
                return tuple(map(tuple, orders))
            running.sort()
            now, stage = running.pop(0)
            for follower in self.compiled.followers[stage]:
                num_awaited[follower] -= 1
                if not num_awaited[follower]:
                    ready[lane_of[follower]].append(follower)

    def _periods(self, begin: Sequence[float]) -> Iterator[Period]:
        """A period for each pair of adjacent layers, from the times at which their stages begin."""
        for layer in range(self.num_layers - 1):
            distances = sorted(begin[row[layer + 1]] - begin[row[layer]] for row in self.numbers)
            length = distances[len(distances) // 2]
            if length <= 0:
                continue
            origin = min(begin[numbers[layer]] for numbers in self.numbers)
            lanes: list[list[tuple[float, Entry]]] = [[] for _ in self.compiled.lanes]
            for stage, numbers in enumerate(self.numbers):
                late, phase = divmod(begin[numbers[layer]] - origin, length)
                lanes[self._lane_of[numbers[layer]]].append((phase, (stage, -int(late))))
            yield tuple(tuple(entry for _, entry in sorted(lane)) for lane in lanes)


def improve_order(problem: OrderProblem, start: Period) -> Period:
    """Find a period that makes the short stack faster; returns ``start`` if there is none."""
    times = {start: problem.time(start)}
    for listed in problem.listed():
        if listed not in times:
            times[listed] = problem.time(listed)
    best = sorted(times, key=times.__getitem__)[:STARTS]
    fastest = min((_moved(problem, first, times[first]) for first in best), key=problem.time)
    # A tie keeps the start.
    return fastest if problem.time(fastest) < times[start] * (1 - 1e-9) else start


def _moved(problem: OrderProblem, start: Period, time: float) -> Period:
    """Move single stages within their lane; other lanes may follow. Returns the fastest period that was seen.

    Simulated annealing: a move that makes the period slower is kept with a chance that falls to zero.
    """
    # A fixed seed: every rank has to find the same order.
    generator = random.Random(0)
    best, best_time = start, time
    current, current_time = start, time
    tries = MOVED_STAGES // len(problem.stages) // STARTS
    for tried in range(tries):
        moved = _with_one_move(problem, current, generator)
        if moved == current:
            continue
        moved_time = problem.time(moved)
        if moved_time >= NOT_YET:
            continue
        slower = moved_time - current_time
        allowed = WARMTH * time * (1 - tried / tries)
        if slower <= 0 or generator.random() < math.exp(-slower / allowed):
            current, current_time = moved, moved_time
        if moved_time < best_time:
            best, best_time = moved, moved_time
    return best


def _with_one_move(problem: OrderProblem, period: Period, generator: random.Random) -> Period:
    """Move one stage within its lane; in half of the cases, another lane follows."""
    lane = generator.randrange(len(period))
    order = list(period[lane])
    source = generator.randrange(len(order))
    # Short moves more often than long ones.
    step = generator.randint(1, generator.randint(1, REACH))
    target = source + generator.choice((-1, 1)) * step
    stage, layer = order.pop(source)
    # Over an edge of the period, it becomes the stage of the layer before or after; one block has none.
    turns, place = divmod(target, len(order) + 1)
    if turns and problem.num_layers == 1:
        return period
    order.insert(place, (stage, layer - turns))
    moved = (*period[:lane], tuple(order), *period[lane + 1 :])
    others = [other for other in range(len(period)) if other != lane]
    if others and generator.random() < 0.5:
        return problem.following(moved, lane=generator.choice(others), leader=lane)
    return moved
