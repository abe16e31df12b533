"""A tape is a compiled schedule: a flat list of calls, whose steps are bound to numbered slots.

Print it to debug a schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ampipe.runtime.slot_ops import SlotOp
from megatron_ampipe.runtime.steps import Step
from megatron_ampipe.runtime.streams import StreamPlan, stream_plan
from megatron_ampipe.schedule import Direction, Stage, stream_of


@dataclass(frozen=True, slots=True)
class Call:
    """One stage of a tape.

    Attributes:
        position: Index of the call in the tape.
        lane: The lane that runs it.
        stage: The stage.
        needs: Positions of the calls that must have ended before.
        steps: One step per chunk; for a transfer, one step for all its chunks. Gradient reductions have no
            steps: :mod:`.stack_call` starts them.
        ends: Whether its block ends with it: the last computed stage, if all transfers have ended.
        ends_half: Whether it completes the gradients of the feed-forward half of its block.
    """

    position: int
    lane: str
    stage: Stage
    needs: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    ends: bool = False
    ends_half: bool = False


class Tape:
    """The calls of one pass, in the order in which a host issues them, which is the same on every rank."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)

    @classmethod
    def of(cls, order: Sequence[tuple[str, Stage]], needs: Mapping[Stage, Sequence[Stage]]) -> Tape:
        """Create a tape of stages in this order, each with the earlier calls that it needs; without steps."""
        positions = {stage: position for position, (_, stage) in enumerate(order)}
        return cls(
            [
                Call(position, lane, stage, tuple(positions[needed] for needed in needs[stage]))
                for position, (lane, stage) in enumerate(order)
            ]
        )

    @cached_property
    def ended(self) -> frozenset[int]:
        """The blocks whose last call is on the tape."""
        return frozenset(call.stage.layer for call in self.calls if call.ends)

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The name of the stream on which each call runs, on a device with streams."""
        return tuple(stream_of(call.lane, call.stage) for call in self.calls)

    @cached_property
    def stream_plan(self) -> StreamPlan:
        """What an executor does around each call on a device with streams."""
        return stream_plan(self.streams, [call.needs for call in self.calls])

    def text(self, names: Sequence[str]) -> str:
        """Call by call: its lane, the calls that it waits for, and its steps (:meth:`~.steps.Step.text`)."""
        lines = []
        for call in self.calls:
            waits = f", after {', '.join(map(str, call.needs))}" if call.needs else ""
            lines.append(f"{call.position} on {call.lane}{waits}")
            for text in [step.text(names) for step in call.steps] or [str(call.stage)]:
                lines += [f"    {line}" for line in text.splitlines()]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Tapes:
    """The tapes of both passes of blocks that share a schedule.

    Attributes:
        passes: The tape of each direction; the backward one has no calls if nothing is differentiated.
        num_slots: Number of slots that a micro-batch needs, forward and backward.
        hidden: Slot of the input of the first block.
        output: Slot of the output of the last block.
        above: Slot of the gradient of the output.
        gradient: Slot of the gradient of ``hidden``, after :attr:`finish`.
        finish: Slot operations after the backward pass.
        for_recompute: Blocks whose forward stages run again in the backward pass.
        names: Names of the slots, for printing.
    """

    passes: Mapping[Direction, Tape]
    num_slots: int
    hidden: int
    output: int
    above: int
    gradient: int
    finish: tuple[SlotOp, ...]
    for_recompute: frozenset[int]
    names: tuple[str, ...]

    def __str__(self) -> str:
        """The printed tapes of both passes."""
        return "\n".join(f"{direction}\n{tape.text(self.names)}" for direction, tape in self.passes.items())


def free_slots(calls: Sequence[Call], *, pinned: Collection[int], first_backward: int, threads: bool) -> None:
    """Decide for each slot which step frees it: the last one that uses it.

    With lanes on several threads, this is a step that always runs after all other users of the slot: its call
    needs theirs, or comes later in the lane than such a call.
    """
    users: dict[int, dict[int, Step]] = defaultdict(dict)
    for number, call in enumerate(calls):
        for step in call.steps:
            for slot in (*step.taken, *step.given):
                users[slot][number] = step
    before = _before(calls, first_backward) if threads else []
    for slot in sorted(users.keys() - pinned):
        last, step = max(users[slot].items())
        if threads:
            others = sum(1 << number for number in users[slot])
            after = (
                number
                for number in range(last, len(calls))
                if not others & ~(before[number] | 1 << number) and calls[number].steps
            )
            last_of_all = next(after, None)
            if last_of_all is None:
                continue
            step = step if last_of_all == last else calls[last_of_all].steps[0]
        (step.drops if slot in step.given else step.frees).append(slot)


def _before(calls: Sequence[Call], first_backward: int) -> list[int]:
    """For each call, a bit mask of the calls that have always taken their arguments before it."""
    before: list[int] = []
    latest: dict[str, int] = {}
    for number, call in enumerate(calls):
        begin = first_backward * (number >= first_backward)
        # The backward pass begins when the forward pass has ended.
        bits = (1 << begin) - 1
        needed = [begin + position for position in call.needs]
        if call.lane in latest:
            needed.append(latest[call.lane])
        for earlier in needed:
            bits |= before[earlier] | 1 << earlier
        latest[call.lane] = number
        before.append(bits)
    return before
