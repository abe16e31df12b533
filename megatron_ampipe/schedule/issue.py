"""The one order in which a host thread issues the stages of several lanes.

Derived from a schedule alone, so every rank issues the same collectives in the same order whatever
its data. Executors walk it; they decide nothing.
"""

from __future__ import annotations

from megatron_ampipe.schedule.types import COMPUTE, Kind, Program, Stage


def issue_order(
    program: Program, needs: dict[Stage, tuple[Stage, ...]], *, host_waits: bool
) -> tuple[tuple[str, Stage], ...]:
    """Merge the lanes of a checked program into ``(lane, stage)`` pairs.

    A communication stage is issued as soon as everything it needs has been issued.

    Args:
        program: One direction of a schedule that :func:`~megatron_ampipe.schedule.check.check` accepted.
        needs: The dependencies of that direction.
        host_waits: Whether issuing a ``dispatch`` makes the host wait for its ``counts`` (as on CUDA).
            It is then put behind the next compute stage, so that the device has work meanwhile.
    """
    waiting = {order.lane: list(order.stages) for order in program.lanes}
    order: list[tuple[str, Stage]] = []
    issued: set[Stage] = set()
    postponed: set[Stage] = set()

    def ready(lane: str) -> bool:
        return bool(waiting[lane]) and issued.issuperset(needs[waiting[lane][0]])

    def issue(lane: str) -> None:
        stage = waiting[lane].pop(0)
        issued.add(stage)
        order.append((lane, stage))

    while any(waiting.values()):
        lanes = [lane for lane in waiting if lane != COMPUTE and ready(lane)]
        for lane in lanes:
            head = waiting[lane][0]
            if host_waits and head.kind is Kind.DISPATCH and head not in postponed and ready(COMPUTE):
                postponed.add(head)
                issue(COMPUTE)
            issue(lane)
        if not lanes:
            assert ready(COMPUTE), "the program was not checked"
            issue(COMPUTE)
    return tuple(order)
