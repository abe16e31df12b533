"""Checks of a tape that do not depend on how it was made; every tape that a test's ranks compile is checked.

:func:`check` looks at what a tape says: nothing is read after it was freed, whichever thread is faster, all
is freed once it is used, streams wait for what they need, and memory is kept as long as the rule of
``runtime.streams`` demands.
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from megatron_ampipe.layers import block_stack
from megatron_ampipe.runtime.compile import TapeOptions
from megatron_ampipe.runtime.compile import compiled as compile_tapes
from megatron_ampipe.runtime.graphs import runs_of
from megatron_ampipe.runtime.steps import NOTHING, ZERO, Step
from megatron_ampipe.runtime.streams import StreamPlan
from megatron_ampipe.runtime.tape import Tape, Tapes
from megatron_ampipe.schedule import Direction
from megatron_ampipe.schedule.stage_kind import COMPUTE


def check(tapes: Tapes, *, threads: bool) -> None:
    """Assert all of it."""
    for direction, tape in tapes.passes.items():
        check_streams(tape.streams, [call.needs for call in tape.calls], tape.stream_plan)
        check_runs(tape, direction)
    check_slots(tapes, threads=threads)


def check_runs(tape: Tape, direction: Direction) -> None:
    """Inside a run of calls that one CUDA graph holds, no stream waits, and nobody waits for it."""
    computed = [{call.stage.kind for call in tape.calls if call.lane == COMPUTE}] * len(tape.calls)
    seen: set[int] = set()
    for position, run in runs_of(tape, direction, computed).items():
        places = [call.position for call in run.calls]
        assert places == list(range(position, position + len(places)))
        assert not any(tape.stream_plan.waits[place] for place in places[1:])
        assert tape.stream_plan.records.isdisjoint(places[:-1])
        assert seen.isdisjoint(places)
        seen.update(places)
    assert seen == {call.position for call in tape.calls if call.lane == COMPUTE and call.steps}


def check_streams(streams: Sequence[str], needs: Sequence[Sequence[int]], plan: StreamPlan) -> None:
    """Whoever needs a call runs after it, and releases memory only when nobody can be before its use."""
    after = _after(streams, plan.waits)
    for number, needed in enumerate(needs):
        assert after[number] >= set(needed), f"call {number} does not wait for {set(needed) - after[number]}"
    for number, released in enumerate(plan.releases):
        for one in released:
            assert one < number
            # What each stream that still has calls runs next.
            nexts = {streams[later]: later for later in range(len(streams) - 1, number - 1, -1)}
            for stream, later in nexts.items():
                first_waits = after[later] if later == number else _before_next(later, streams, after)
                assert one in first_waits, f"memory of {one} is released before {stream} is after it"
    assert set(itertools.chain.from_iterable(plan.waits)) == plan.records


def _after(streams: Sequence[str], waits: Sequence[Sequence[int]]) -> list[set[int]]:
    """For each call those that the device has ended before it begins."""
    after: list[set[int]] = []
    latest: dict[str, int] = {}
    for number, (stream, waited) in enumerate(zip(streams, waits, strict=True)):
        found: set[int] = set()
        for one in (*waited, *([latest[stream]] if stream in latest else [])):
            found |= {one} | after[one]
        after.append(found)
        latest[stream] = number
    return after


def _before_next(later: int, streams: Sequence[str], after: Sequence[set[int]]) -> set[int]:
    """What a stream is after already, before it waits for its next call."""
    earlier = [number for number in range(later) if streams[number] == streams[later]]
    return {earlier[-1]} | after[earlier[-1]] if earlier else set()


def check_slots(tapes: Tapes, *, threads: bool) -> None:
    """Slots are read while they are full, and are empty in the end."""
    calls = [(direction, call) for direction in Direction for call in tapes.passes[direction].calls]
    first = len(tapes.passes[Direction.FORWARD].calls)
    before: list[set[int]] = []
    latest: dict[str, int] = {}
    for number, (direction, call) in enumerate(calls):
        begin = first if direction is Direction.BACKWARD else 0
        needed = {begin + one for one in call.needs} | set(range(begin))
        if not threads:
            needed |= set(range(number))
        elif call.lane in latest:
            needed.add(latest[call.lane])
        before.append(needed.union(*(before[one] for one in needed)))
        latest[call.lane] = number
    uses: dict[int, list[int]] = defaultdict(list)
    freed: dict[int, int] = {}
    for number, (_, call) in enumerate(calls):
        for step in call.steps:
            for slot in _touched(step):
                assert slot not in freed, f"{tapes.names[slot]} is used in {step.stage} after it was freed"
                uses[slot].append(number)
            for slot in (*step.frees, *step.drops):
                freed[slot] = number
    for slot, number in freed.items():
        unsafe = [user for user in uses[slot] if user != number and user not in before[number]]
        assert not unsafe, f"{tapes.names[slot]} is freed while another lane may still read it"
    kept = {NOTHING, ZERO, tapes.output, tapes.gradient}
    kept |= {slot for move in tapes.finish for slot in move.slots}
    if not threads:
        left = {tapes.names[slot] for slot in uses.keys() - freed.keys() - kept}
        assert not left, f"never freed: {sorted(left)}"


def _touched(step: Step) -> set[int]:
    return {*step.taken, *step.given}


def check_all() -> None:
    """From here on, check every tape that blocks of this process compile."""
    compiled = block_stack.compiled
    if compiled is not compile_tapes:
        return

    def checking(*args: Any, options: TapeOptions, **kwargs: Any) -> Tapes:
        tapes = compiled(*args, options=options, **kwargs)
        check(tapes, threads=options.threads)
        return tapes

    block_stack.compiled = checking
