"""The one order in which a host thread issues the stages of several lanes.

Derived from a schedule alone, so every rank issues the same collectives in the same order whatever
its data. Executors walk it; they decide nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

from megatron_ampipe.schedule.program import Program, Stage
from megatron_ampipe.schedule.stage_kind import COMPUTE


def issue_order(
    program: Program, needs: dict[Stage, tuple[Stage, ...]], *, host_waits: bool
) -> tuple[tuple[str, Stage], ...]:
    """Merge the lanes of a checked program into ``(lane, stage)`` pairs.

    A communication stage is issued as soon as everything it needs has been issued.

    Args:
        program: One direction of a schedule that :func:`~.text.check` accepted.
        needs: The dependencies of that direction.
        host_waits: Whether the host waits for a result that it must read (``counts``) when it issues what
            takes it (``dispatch``), as on CUDA. That stage is then issued after the next compute stage that
            is long enough to cover the wait, so that the device has work meanwhile. A backward pass has no
            ``counts`` and nothing is postponed.
    """
    order = merge_lanes(
        {order.lane: order.stages for order in program.lanes},
        needs,
        waits_before={stage for stage in needs if host_waits and read_by_host(stage, needs) is not None},
        covers={stage for stage in needs if stage.kind.covers_wait},
    )
    assert len(order) == len(program.stages), "the program was not checked"
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
    waits_before: Collection[S] = (),
    covers: Collection[S] = (),
) -> tuple[tuple[str, S], ...]:
    """What :func:`issue_order` does, on anything that stands for stages.

    If lanes wait for each other, it ends where all of them do. Before the stages ``waits_before`` the host
    waits; the compute stages ``covers`` keep the device busy meanwhile.
    """
    place = dict.fromkeys(lanes, 0)
    order: list[tuple[str, S]] = []
    issued: set[S] = set()
    postponed: set[S] = set()

    def ready(lane: str) -> bool:
        stages = lanes[lane]
        return place[lane] < len(stages) and issued.issuperset(needs[stages[place[lane]]])

    def issue(lane: str) -> S:
        stage = lanes[lane][place[lane]]
        place[lane] += 1
        issued.add(stage)
        order.append((lane, stage))
        return stage

    while ready_lanes := [lane for lane in lanes if ready(lane)]:
        others = [lane for lane in ready_lanes if lane != COMPUTE]
        for lane in others:
            head = lanes[lane][place[lane]]
            if head in waits_before and head not in postponed:
                postponed.add(head)
                while ready(COMPUTE) and issue(COMPUTE) not in covers:
                    pass
            issue(lane)
        if not others:
            issue(COMPUTE)
    return tuple(order)
