"""When the slots of a tape are freed: after the last step that uses them, on one thread or on several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from megatron_ampipe.runtime.steps import Step
from megatron_ampipe.runtime.tape import Call


def free_slots(calls: Sequence[Call], *, pinned: Collection[int], first_backward: int, threads: bool) -> None:
    """Say for each slot which step frees it: the last that uses it.

    Where lanes run on several threads, that is a step that runs after all others that use the slot, whichever
    thread is faster: of a call that needs them, or comes after such a call in its lane.
    """
    uses: dict[int, list[tuple[int, Step, bool]]] = defaultdict(list)
    for number, call in enumerate(calls):
        for step in call.steps:
            for slot in step.taken:
                uses[slot].append((number, step, True))
            for slot in step.given:
                uses[slot].append((number, step, False))
    before = _before(calls, first_backward) if threads else []
    frees: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    steps: dict[int, Step] = {}
    for slot, users in uses.items():
        if slot in pinned:
            continue
        number, step, early = users[-1]
        if threads:
            others = 0
            for user, *_ in users:
                others |= 1 << user
            late = next(
                (
                    place
                    for place in range(number, len(calls))
                    if not others & ~(before[place] | 1 << place) and calls[place].steps
                ),
                None,
            )
            if late is None:
                continue
            if late != number:
                step, early = calls[late].steps[0], True
        steps[id(step)] = step
        frees[id(step)][not early].append(slot)
    for key, (early_slots, late_slots) in frees.items():
        steps[key].frees, steps[key].drops = tuple(early_slots), tuple(late_slots)


def _before(calls: Sequence[Call], first_backward: int) -> list[int]:
    """For each call, as bits, the calls that have taken their arguments before it does."""
    found: list[int] = []
    latest: dict[str, int] = {}
    for number, call in enumerate(calls):
        bits = 0
        if number >= first_backward:
            # A pass begins when the one before has ended.
            bits = (1 << first_backward) - 1
        needed = [first_backward * (number >= first_backward) + position for position in call.needs]
        if call.lane in latest:
            needed.append(latest[call.lane])
        for one in needed:
            bits |= found[one] | 1 << one
        latest[call.lane] = number
        found.append(bits)
    return found
