"""Refuses a schedule that cannot be run, before anything runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.dataflow import needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.program import Program, Schedule, Stage
from megatron_ampipe.schedule.stage_kind import COMPUTE, Direction

_REMEDY = "Use one of the named schedules, or fix the text form of this one."


def check(schedule: Schedule, layers: Sequence[BlockFeatures]) -> None:
    """Verify that a schedule runs every stage of its blocks once and never waits for itself.

    Args:
        schedule: What :func:`~.passes.unrolled` returns, if it repeats.
        layers: The features of the blocks that share the schedule.

    Raises:
        BadInput: naming the direction and the first stage that is wrong.
    """
    if schedule.num_chunks % min(schedule.degree, schedule.backward_degree):
        raise _refuse(
            schedule,
            Direction.BACKWARD,
            f"has degree {schedule.backward_degree}, which neither divides the forward degree "
            f"{schedule.degree} nor is divided by it",
        )
    for direction in Direction:
        program = schedule.program(direction)
        needs = needs_of(schedule, layers, direction)
        _check_stages(schedule, direction, program, needs)
        _check_lanes(schedule, direction, program)
        _check_feasible(schedule, direction, program, needs)


def _check_stages(
    schedule: Schedule, direction: Direction, program: Program, needs: dict[Stage, tuple[Stage, ...]]
) -> None:
    times = Counter(program.stages)
    for stage in needs:
        if times[stage] != 1:
            raise _refuse(schedule, direction, f"runs {stage} {times[stage]} times instead of once")
    for stage in times:
        if stage not in needs:
            raise _refuse(schedule, direction, f"has a stage {stage} that this block does not have")


def _check_lanes(schedule: Schedule, direction: Direction, program: Program) -> None:
    for order in program.lanes:
        for stage in order.stages:
            if order.lane != COMPUTE and not stage.is_communication:
                raise _refuse(schedule, direction, f"computes {stage} in the communication lane {order.lane}")


def _check_feasible(
    schedule: Schedule, direction: Direction, program: Program, needs: dict[Stage, tuple[Stage, ...]]
) -> None:
    waiting = {order.lane: list(order.stages) for order in program.lanes}
    done: set[Stage] = set()
    while any(waiting.values()):
        ready = [lane for lane, stages in waiting.items() if stages and done.issuperset(needs[stages[0]])]
        if not ready:
            stuck = "; ".join(
                f"{lane} waits at {stages[0]} for {next(s for s in needs[stages[0]] if s not in done)}"
                for lane, stages in waiting.items()
                if stages
            )
            raise _refuse(schedule, direction, f"can never finish: {stuck}")
        for lane in ready:
            done.add(waiting[lane].pop(0))


def _refuse(schedule: Schedule, direction: Direction, rule: str) -> BadInput:
    return BadInput("schedule", f"{schedule.name} ({direction})", rule=rule, remedy=_REMEDY)
