"""The one order in which a host thread issues the stages of several lanes, and the check that there is one.

Derived from a schedule alone, so every rank issues the same collectives in the same order whatever
its data. Executors walk it; they decide nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.dataflow import needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.program import Program, Schedule, Stage
from megatron_ampipe.schedule.stage_kind import COMPUTE, Direction


def issue_order(
    program: Program, needs: dict[Stage, tuple[Stage, ...]], *, host_waits: bool
) -> tuple[tuple[str, Stage], ...]:
    """Merge the lanes of a checked program into ``(lane, stage)`` pairs.

    A communication stage is issued as soon as everything it needs has been issued.

    Args:
        program: One direction of a schedule that :func:`check` accepted.
        needs: The dependencies of that direction.
        host_waits: Whether the host waits for a result that it must read (``counts``) when it issues what
            takes it (``dispatch``), as on CUDA. That stage is then issued after the next compute stage that
            is long enough to cover the wait, so that the device has work meanwhile. A backward pass has no
            ``counts`` and nothing is postponed.
    """
    lanes = {order.lane: order.stages for order in program.lanes}
    order = merge_lanes(
        lanes,
        needs,
        waits_before={stage for stage in needs if host_waits and read_by_host(stage, needs) is not None},
        covers={stage for stage in needs if stage.kind.covers_wait},
    )
    assert order is not None, "the program was not checked"
    return order


def read_by_host(stage: Stage, needs: Mapping[Stage, Sequence[Stage]]) -> Stage | None:
    """The stage whose result the host must know before it can issue this one; None where it need not wait."""
    return next((needed for needed in needs[stage] if needed.kind.host_reads), None)


def completed(order: Iterable[Stage], needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """The stages in their order, but each after all that it needs, and at the end what the order lacks."""
    placed: dict[Stage, None] = {}

    def place(stage: Stage) -> None:
        if stage not in placed:
            for needed in needs[stage]:
                place(needed)
            placed[stage] = None

    for stage in (*order, *needs):
        place(stage)
    return list(placed)


def stream_of(lane: str, stage: Stage) -> str:
    """The stream of a device on which a stage of a lane runs.

    Every lane is a stream, except that stages whose result the host reads have a separate one: queued after a
    ``dispatch``, the host would wait for a whole transfer before it knew a few numbers.
    """
    return f"{lane} {stage.kind}" if stage.kind.host_reads and lane != COMPUTE else lane


def merge_lanes[S: Hashable](
    lanes: Mapping[str, Sequence[S]],
    needs: Mapping[S, Sequence[S]],
    *,
    waits_before: Collection[S],
    covers: Collection[S],
) -> tuple[tuple[str, S], ...] | None:
    """What :func:`issue_order` does, on anything that stands for stages.

    Args:
        lanes: For each lane its stages, in order.
        needs: For each stage those that must have been issued before.
        waits_before: Stages before which the host waits.
        covers: Compute stages that keep the device busy meanwhile.

    Returns:
        ``(lane, stage)`` in issue order; None if the lanes wait for each other.
    """
    place = dict.fromkeys(lanes, 0)
    order: list[tuple[str, S]] = []
    issued: set[S] = set()
    postponed: set[S] = set()
    remaining = sum(map(len, lanes.values()))

    def ready(lane: str) -> bool:
        stages = lanes[lane]
        return place[lane] < len(stages) and issued.issuperset(needs[stages[place[lane]]])

    def issue(lane: str) -> S:
        stage = lanes[lane][place[lane]]
        place[lane] += 1
        issued.add(stage)
        order.append((lane, stage))
        return stage

    while len(order) < remaining:
        others = [lane for lane in lanes if lane != COMPUTE and ready(lane)]
        for lane in others:
            head = lanes[lane][place[lane]]
            if head in waits_before and head not in postponed:
                postponed.add(head)
                while ready(COMPUTE) and issue(COMPUTE) not in covers:
                    pass
            issue(lane)
        if not others:
            if not ready(COMPUTE):
                return None
            issue(COMPUTE)
    return tuple(order)


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
        program, needs = schedule.program(direction), needs_of(schedule, layers, direction)
        times = Counter(program.stages)
        for stage in needs:
            if times[stage] != 1:
                raise _refuse(schedule, direction, f"runs {stage} {times[stage]} times instead of once")
        for order in program.lanes:
            for stage in order.stages:
                if stage not in needs:
                    raise _refuse(schedule, direction, f"has a stage {stage} that this block does not have")
                if order.lane != COMPUTE and not stage.is_communication:
                    lane = f"the communication lane {order.lane}"
                    raise _refuse(schedule, direction, f"computes {stage} in {lane}")
        _check_feasible(schedule, direction, program, needs)


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
    remedy = "Use one of the named schedules, or fix the text form of this one."
    return BadInput("schedule", f"{schedule.name} ({direction})", rule=rule, remedy=remedy)
