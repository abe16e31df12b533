"""The text form of a schedule: what people read in a log, keep in a file, and write by hand.

::

    schedule ampipe degree 2
    forward compute: qkv attention.0 route.0 attention.1 route.1 expert.0 expert.1 merge.0 merge.1
    forward comm: counts.0 dispatch.0 counts.1 dispatch.1 combine.0 combine.1
    backward compute: ...
    backward comm: ...

Where the backward pass has another degree, the first line names it: ``schedule mine degree 4 backward 2``.
Where several layers share the schedule, stages of all but the first end in its number: ``expert.0@1``. A
first line that ends in ``repeats`` makes it one period, run layer after layer; ``@-1`` then is the layer that
the pass has gone through before this one, ``@1`` the one that follows.

A stage of the forward pass that the backward pass runs again is ``again:expert.0``. Weight gradients that are
separate stages are ``expert-weights.0``, or ``expert-weights`` of all chunks at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.timeline import AGAIN
from megatron_ampipe.schedule.kinds import (
    ALL_KINDS,
    GATHER,
    GATHER_ROWS,
    REGATHER,
    REGATHER_ROWS,
    SCATTER,
    SCATTER_ROWS,
    STEPPED,
    step_of,
)
from megatron_ampipe.schedule.program import LaneOrder, Program, Schedule, Stage
from megatron_ampipe.schedule.stage_kind import Direction, Scope, StageKind


def to_text(schedule: Schedule) -> str:
    """The text form, ending in a newline."""
    header = f"schedule {schedule.name} degree {schedule.degree}"
    if schedule.backward_degree != schedule.degree:
        header += f" backward {schedule.backward_degree}"
    if schedule.repeats:
        header += f" {_REPEATS}"
    lines = [header]
    for direction in Direction:
        for order in schedule.program(direction).lanes:
            lines.append(f"{direction} {order.lane}: {' '.join(map(str, order.stages))}".rstrip())
    return "\n".join(lines) + "\n"


def from_text(text: str, *, kinds: Sequence[StageKind] = ALL_KINDS) -> Schedule:
    """Read the text form. The result is well-formed, not yet checked against a block.

    Args:
        text: What :func:`to_text` returns.
        kinds: Which stages there are.

    Raises:
        BadInput: naming the line that is wrong.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    header = lines[0][1].split() if lines else []
    repeats = header[-1:] == [_REPEATS]
    header = header[: len(header) - repeats]
    words = ["schedule", "degree", "backward"][: len(header) // 2]
    if len(header) not in (4, 6) or header[0::2] != words or not all(map(_is_positive, header[3::2])):
        raise BadInput(
            "schedule line 1",
            lines[0][1] if lines else "(empty)",
            rule="is not 'schedule NAME degree N' or 'schedule NAME degree N backward M', both at least 1, "
            "with or without 'repeats' at the end",
            remedy="Write for example 'schedule mine degree 4'.",
        )
    degree = int(header[3])
    degrees = {Direction.FORWARD: degree, Direction.BACKWARD: int(header[-1])}
    programs: dict[Direction, list[LaneOrder]] = {direction: [] for direction in Direction}
    for number, line in lines[1:]:
        head, colon, tail = line.partition(":")
        words = head.split()
        if not colon or len(words) != 2 or words[0] not in set(Direction):
            raise BadInput(
                f"schedule line {number}",
                line,
                rule="is not 'forward LANE: stages' or 'backward LANE: stages'",
                remedy="Write for example 'forward compute: qkv attention.0'.",
            )
        direction = Direction(words[0])
        stages = tuple(
            _stage(word, number=number, degree=degrees[direction], kinds=kinds) for word in tail.split()
        )
        programs[direction].append(LaneOrder(words[1], stages))
    return Schedule(
        header[1],
        degree,
        Program(tuple(programs[Direction.FORWARD])),
        Program(tuple(programs[Direction.BACKWARD])),
        degrees[Direction.BACKWARD],
        repeats,
    )


def stage_from_text(text: str, *, kinds: Sequence[StageKind] = ALL_KINDS) -> Stage:
    """Read the name of a stage, as ``str`` writes it.

    Raises:
        ValueError: there is no such stage.
    """
    found = _STAGE.fullmatch(text)
    kind = None if found is None else _kind(found["kind"], found["step"], kinds)
    if found is None or kind is None or not _fits(kind.scope, found["chunk"]):
        raise ValueError(f"{text!r} is not a stage")
    chunk = None if found["chunk"] is None else int(found["chunk"])
    return Stage(kind, chunk, int(found["layer"] or 0), found["again"] is not None)


def _kind(name: str, step: str | None, kinds: Sequence[StageKind]) -> StageKind | None:
    name = _FORMER.get(name, name)
    kind = next((kind for kind in kinds if kind.name == name), None)
    if kind is None or (step is None) is (kind in STEPPED):
        return None
    return kind if step is None else step_of(kind, int(step))


def _fits(scope: Scope, chunk: str | None) -> bool:
    return scope is Scope.EITHER or (chunk is None) is (scope is Scope.WHOLE)


_FORMER = {
    f"{kind}-intra": kind.name
    for kind in (GATHER_ROWS, REGATHER_ROWS, SCATTER_ROWS, GATHER, REGATHER, SCATTER)
}
"""Names in plans that were made when a kind on the lane of a node had a separate name."""
_REPEATS = "repeats"
_STAGE = re.compile(
    rf"(?P<again>{AGAIN})?(?P<kind>[a-z][a-z-]*)(?P<step>0|[1-9][0-9]{{0,3}})?(\.(?P<chunk>[0-9]{{1,9}}))?(@(?P<layer>-?[1-9][0-9]{{0,8}}))?",
    re.ASCII,
)


def _stage(word: str, *, number: int, degree: int, kinds: Sequence[StageKind]) -> Stage:
    try:
        stage = stage_from_text(word, kinds=kinds)
    except ValueError:
        stage = None
    if stage is not None and (stage.chunk is None or stage.chunk < degree):
        return stage

    def names(*scopes: Scope) -> str:
        return ", ".join(sorted(kind.name for kind in kinds if kind.scope in scopes))

    raise BadInput(
        f"schedule line {number}",
        word,
        rule=f"is not a stage of a block of degree {degree}",
        remedy=f"Stages are {', '.join(map(str, kinds))}, followed by .0 to .{degree - 1} "
        f"except {names(Scope.WHOLE)}; {names(Scope.EITHER)} also without.",
    )


def _is_positive(word: str) -> bool:
    return _is_number(word) and int(word) > 0


def _is_number(word: str) -> bool:
    """Whether it is a whole number; Python does not read one of thousands of digits."""
    return word.isdecimal() and len(word) < 10
