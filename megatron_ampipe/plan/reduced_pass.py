"""Simulates the backward pass of all layers of a pipeline stage with the reductions of its gradients.

Of the last micro-batch of an iteration: in all others nothing is reduced. Layers that share a schedule run as
one, blocks one after another. A reduction either has a place in the communication lane
(``--ampipe-grad-reduce placed``), or starts when gradients are complete and shares the network with the
transfers (Megatron's overlap). Called by :mod:`.gradient_plan`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_ampipe.plan.fsmoe_partition import StageGraph
from megatron_ampipe.plan.gradient_buckets import LayerReductions
from megatron_ampipe.plan.predict import Predictor
from megatron_ampipe.plan.simulate import Compiled, compile_program, contention, run
from megatron_ampipe.schedule import Direction, LaneOrder, Program, Schedule, Stage, needs_of
from megatron_ampipe.schedule.kinds import REDUCE, REDUCE_EXPERTS
from megatron_ampipe.schedule.placing import placed

OVERLAPPED = "gradients"
"""The lane of reductions that have no place in a schedule."""


class PassTimes(NamedTuple):
    """Microseconds from the beginning of a backward pass.

    Attributes:
        computed: Until all stages have ended but reductions, which may have delayed them.
        reduced: Until what was reduced during the pass has ended too.
    """

    computed: float
    reduced: float


class ReducedPass:
    """The backward pass of some layers, in which gradients are reduced.

    Lists of times have one number for each layer in the order of the pass, from the last layer to the first.

    Args:
        predictor: Of the layers that share the schedule, or of one.
        schedule: What they run.
        lengths: Rows of one rank in each chunk.
        num_layers: Of the pipeline stage, all with experts if they do not all share the schedule.

    Raises:
        BadInput: the cluster has no figure for a reduction.
    """

    def __init__(
        self, predictor: Predictor, schedule: Schedule, lengths: Sequence[int], *, num_layers: int
    ) -> None:
        self._predictor = predictor.with_reductions()
        self._times: dict[Stage, float] = {}
        self._issue: dict[Stage, float] = {}
        self._lanes: dict[str, list[Stage]] = {}
        self._needs: dict[Stage, tuple[Stage, ...]] = {}
        without_us, shared = 0.0, min(len(predictor.layers), num_layers)
        first = num_layers
        while first:
            # The last layers may be fewer. A single one has other stages, so it goes with those below it.
            count = first % shared or shared
            count += shared if count == 1 < shared else 0
            first -= count
            alone = predictor if count == len(predictor.layers) else predictor.of_layers(count)
            without_us += alone.pass_us(schedule, lengths).backward
            self._append(alone.with_reductions(), schedule, lengths, first=first)
        layers = range(num_layers)[::-1]
        self._above = [Stage(REDUCE, None, layer) for layer in layers]
        of_experts = [Stage(REDUCE_EXPERTS, None, layer) for layer in layers]
        self._last = [
            one if one in self._needs else above for one, above in zip(of_experts, self._above, strict=True)
        ]
        self._placed = self._compiled(self._lanes, self._needs)
        self._overlapped = self._with_overlap()
        # What is no stage: entering a block, what Megatron recomputes around one.
        self._others_us = 0.0
        self._others_us = without_us - self.placed([0.0] * num_layers).computed

    def _append(
        self, predictor: Predictor, schedule: Schedule, lengths: Sequence[int], *, first: int
    ) -> None:
        """Add layers that share a schedule, from the layer ``first`` on, after those that the pass has."""
        whole = placed(predictor.whole(schedule), predictor.layers)
        compiled, durations, issue = predictor.inputs(whole, lengths, Direction.BACKWARD)
        moved = {
            stage: dataclasses.replace(stage, layer=stage.layer + first) for stage in whole.backward.stages
        }
        needed = {one for stages in self._needs.values() for one in stages}
        before = tuple(stage for stage in self._needs if stage not in needed)
        for stage, stages in needs_of(whole, predictor.layers, Direction.BACKWARD).items():
            self._needs[moved[stage]] = tuple(moved[one] for one in stages) or before
        for number, stage in enumerate(compiled.stages):
            self._times[moved[stage]] = durations[number]
            if issue is not None:
                self._issue[moved[stage]] = issue[number]
        for lane in whole.backward.lanes:
            self._lanes.setdefault(lane.lane, []).extend(moved[stage] for stage in lane.stages)

    def _compiled(
        self, lanes: Mapping[str, Sequence[Stage]], needs: Mapping[Stage, tuple[Stage, ...]]
    ) -> Compiled:
        program = Program(tuple(LaneOrder(lane, tuple(stages)) for lane, stages in lanes.items() if stages))
        return compile_program(program, needs, on_host=self._on_host)

    def _with_overlap(self) -> Compiled:
        """The pass with reductions in a separate lane, for which nothing waits."""
        lanes = {
            lane: [stage for stage in stages if not stage.kind.of_parameters]
            for lane, stages in self._lanes.items()
        }
        needs = {
            stage: tuple(one for one in stages if not one.kind.of_parameters)
            for stage, stages in self._needs.items()
        }
        in_turns = dict.fromkeys(itertools.chain(*zip(self._above, self._last, strict=True)))
        found = self._compiled({**lanes, OVERLAPPED: [*in_turns]}, needs)
        if not self._shares_links:
            own = [(lane, stages) for lane, stages in found.lanes if lane != OVERLAPPED]
            contended = contention(own, found.stages, on_host=self._on_host)
            found = dataclasses.replace(found, contended=contended)
        return found

    @property
    def _on_host(self) -> bool:
        return self._predictor.cluster.trains_on_host

    @property
    def _shares_links(self) -> bool:
        """Whether reductions and all-to-alls both leave the node, or both stay in it."""
        work, near = self._predictor.workload, self._predictor.cluster.ranks_per_node
        return (work.expert * work.expert_tensor > near) == (work.replicas * work.tensor > near)

    @property
    def without_us(self) -> float:
        """The pass without reductions."""
        return self.placed([0.0] * len(self._last)).computed

    def placed(self, reductions: Sequence[float]) -> PassTimes:
        """With reductions of these times after the last transfer of each layer."""
        return self._simulated(self._placed, reductions)

    def placed_when_complete(self, gradients: Sequence[LayerReductions]) -> PassTimes:
        """With the reductions of each layer in the first stage after its gradients are complete."""
        return self._simulated(self._placed, *_of_stages(gradients))

    def overlapped(self, gradients: Sequence[LayerReductions]) -> PassTimes:
        """With reductions of each layer's gradients that start as soon as these are complete."""
        return self._simulated(self._overlapped, *_of_stages(gradients))

    def gaps(self) -> list[float]:
        """How long the stage of each layer can take before a stage waits for it that would not."""
        compiled = self._placed
        begin, end = self._run(compiled, [0.0] * len(self._last))
        next_in_lane = _next_in_lane(compiled)
        found = []
        for number in self._numbers(compiled):
            following = [*compiled.followers[number], *next_in_lane.get(number, ())]
            limit = min((begin[one] for one in following), default=max(end))
            found.append(max(0.0, limit - begin[number]))
        return found

    def graph(self) -> StageGraph:
        """The pass with stages for reductions, for :func:`.fsmoe_partition.second_step`."""
        compiled = self._placed
        issued, now = [0.0] * len(compiled.stages), 0.0
        for number in compiled.issued if self._issue else ():
            now += self._issue[compiled.stages[number]]
            issued[number] = now
        before: list[list[int]] = [[] for _ in compiled.stages]
        next_in_lane = _next_in_lane(compiled)
        for number in range(len(compiled.stages)):
            for one in {*compiled.followers[number], *next_in_lane.get(number, ())}:
                before[one].append(number)
        return StageGraph(
            before=before,
            times=[0.0 if stage.kind.of_parameters else self._times[stage] for stage in compiled.stages],
            issued=issued,
            reductions=self._numbers(compiled),
        )

    def _numbers(self, compiled: Compiled) -> list[int]:
        number = {stage: index for index, stage in enumerate(compiled.stages)}
        return [number[stage] for stage in self._last]

    def _simulated(
        self, compiled: Compiled, reductions: Sequence[float], above: Sequence[float] = ()
    ) -> PassTimes:
        _, end = self._run(compiled, reductions, above)
        computed = max(
            one for stage, one in zip(compiled.stages, end, strict=True) if not stage.kind.of_parameters
        )
        return PassTimes(computed + self._others_us, max(end) + self._others_us)

    def _run(
        self, compiled: Compiled, reductions: Sequence[float], above: Sequence[float] = ()
    ) -> tuple[list[float], list[float]]:
        times = {**self._times, **dict.fromkeys(self._above, 0.0), **dict.fromkeys(self._last, 0.0)}
        # One stage may do both.
        for stage, time in zip((*self._last, *self._above), (*reductions, *above), strict=False):
            times[stage] += time
        return run(
            compiled,
            [times[stage] for stage in compiled.stages],
            issue_us=[self._issue[stage] for stage in compiled.stages] if self._issue else None,
            latency_us=self._predictor.latency(compiled),
            **self._predictor.slowdowns,
        )


def _of_stages(gradients: Sequence[LayerReductions]) -> tuple[list[float], list[float]]:
    """What each layer reduces, of its gradients and of those of the layer above."""
    above = [one.others for one in gradients[:-1]]
    return [one.experts for one in gradients], [0.0, *above]


def _next_in_lane(compiled: Compiled) -> dict[int, tuple[int]]:
    """For each stage but the last of a lane the one after it."""
    return {one: (later,) for _, stages in compiled.lanes for one, later in itertools.pairwise(stages)}
