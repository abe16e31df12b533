"""The text form of a schedule, for logs, files and orders written by hand; and the check of a schedule.

::

    schedule ampipe degree 2
    forward compute: qkv attention.0 route.0 attention.1 route.1 expert.0 expert.1 merge.0 merge.1
    forward comm: counts.0 dispatch.0 counts.1 dispatch.1 combine.0 combine.1
    backward compute: ...
    backward comm: ...

If the backward pass has another degree, the first line names it: ``schedule mine degree 4 backward 2``. If
several layers share the schedule, stages of all layers but the first end in the layer's index:
``expert.0@1``. A first line that ends in ``repeats`` makes it one period, which is run layer after layer;
``@-1`` then is the layer before this one in the order of the pass, ``@1`` the layer after it.

A stage of the forward pass that the backward pass runs again is ``again:expert.0``. Separate weight-gradient
stages are ``expert-weights.0``, or ``expert-weights`` for all chunks at once. In the order of two passes that
run together, stages of the next micro-batch's forward pass are ``next:expert``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from megatron_ampipe.errors import BadInput
from megatron_ampipe.files.timeline import AGAIN
from megatron_ampipe.schedule.dataflow import needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.kinds import ALL_KINDS, STEPPED, step_of
from megatron_ampipe.schedule.program import AHEAD, LaneOrder, Program, Schedule, Stage, merge_lanes
from megatron_ampipe.schedule.stage_kind import COMPUTE, Direction, Scope


def to_text(schedule: Schedule) -> str:
    """The text form, ending in a newline."""
    header = f"schedule {schedule.name} degree {schedule.degree}"
    if schedule.backward_degree != schedule.degree:
        header += f" backward {schedule.backward_degree}"
    lines = [f"{header} repeats" if schedule.repeats else header]
    for direction in Direction:
        lane_lines = program_to_text(schedule.program(direction)).splitlines()
        lines += [f"{direction} {line}" for line in lane_lines]
    return "\n".join(lines) + "\n"


def program_to_text(program: Program) -> str:
    """The lanes of one program, one per line."""
    return "".join(f"{lane}: {' '.join(map(str, stages))}".rstrip() + "\n" for lane, stages in program.lanes)


def program_from_text(text: str, *, degree: int) -> Program:
    """Parse the text of :func:`program_to_text`; :class:`BadInput` names the line that is wrong."""
    lines = enumerate(text.splitlines(), 1)
    return Program(tuple(_lane(line, number=number, degree=degree) for number, line in lines))


def _lane(line: str, *, number: int, degree: int) -> LaneOrder:
    lane, colon, tail = line.partition(":")
    if not colon or len(lane.split()) != 1:
        remedy = "Write for example 'compute: qkv attention.0'."
        raise BadInput(f"schedule line {number}", line, rule="is not 'LANE: stages'", remedy=remedy)
    stages = (_stage(word, number=number, degree=degree) for word in tail.split())
    return lane.strip(), tuple(stages)


def from_text(text: str) -> Schedule:
    """Parse the text of :func:`to_text`. The schedule is well-formed, but not yet checked against a block.

    Raises:
        BadInput: a line is wrong, which the error names.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    header = _HEADER.fullmatch(" ".join(lines[0][1].split())) if lines else None
    if header is None:
        text = lines[0][1] if lines else "(empty)"
        rule = "is not 'schedule NAME degree N', with or without 'backward M' and 'repeats' after it"
        remedy = "Write for example 'schedule mine degree 4'."
        raise BadInput("schedule line 1", text, rule=rule, remedy=remedy)
    degree = int(header["degree"])
    degrees = {Direction.FORWARD: degree, Direction.BACKWARD: int(header["backward"] or degree)}
    programs: dict[Direction, list[LaneOrder]] = {direction: [] for direction in Direction}
    for number, line in lines[1:]:
        word, _, lane_line = line.partition(" ")
        if word not in set(Direction):
            rule = "is not 'forward LANE: stages' or 'backward LANE: stages'"
            remedy = "Write for example 'forward compute: qkv attention.0'."
            raise BadInput(f"schedule line {number}", line, rule=rule, remedy=remedy)
        direction = Direction(word)
        programs[direction].append(_lane(lane_line, number=number, degree=degrees[direction]))
    forward, backward = (Program(tuple(lanes)) for lanes in programs.values())
    repeats = header["repeats"] is not None
    return Schedule(header["name"], degree, forward, backward, degrees[Direction.BACKWARD], repeats)


def stage_from_text(text: str) -> Stage:
    """Parse the name of a stage, as ``str`` writes it.

    Raises:
        ValueError: there is no such stage.
    """
    parts = _STAGE.fullmatch(text)
    kind = _KINDS.get(parts["kind"]) if parts is not None else None
    if (
        parts is None
        or kind is None
        or (parts["step"] is None) is (kind in STEPPED)
        or (kind.scope is not Scope.EITHER and (parts["chunk"] is None) is not (kind.scope is Scope.WHOLE))
    ):
        raise ValueError(f"{text!r} is not a stage")
    if parts["step"] is not None:
        kind = step_of(kind, int(parts["step"]))
    chunk = None if parts["chunk"] is None else int(parts["chunk"])
    layer, again, ahead = int(parts["layer"] or 0), parts["again"] is not None, parts["ahead"] is not None
    return Stage(kind, chunk, layer, again, ahead)


_KINDS = {kind.name: kind for kind in ALL_KINDS}
# Numbers have a limited length, because ``int`` fails for thousands of digits.
_HEADER = re.compile(
    r"schedule (?P<name>\S+) degree (?P<degree>0*[1-9][0-9]{0,8})"
    r"( backward (?P<backward>0*[1-9][0-9]{0,8}))?( (?P<repeats>repeats))?",
    re.ASCII,
)
_STAGE = re.compile(
    rf"(?P<ahead>{AHEAD})?(?P<again>{AGAIN})?(?P<kind>[a-z][a-z-]*)(?P<step>0|[1-9][0-9]{{0,3}})?(\.(?P<chunk>[0-9]{{1,9}}))?(@(?P<layer>-?[1-9][0-9]{{0,8}}))?",
    re.ASCII,
)


def _stage(word: str, *, number: int, degree: int) -> Stage:
    try:
        stage = stage_from_text(word)
    except ValueError:
        stage = None
    if stage is not None and (stage.chunk is None or stage.chunk < degree):
        return stage
    rule = f"is not a stage of a block of degree {degree}"
    remedy = f"Stages are {', '.join(map(str, ALL_KINDS))}, most of them followed by .0 to .{degree - 1}."
    raise BadInput(f"schedule line {number}", word, rule=rule, remedy=remedy)


def check(schedule: Schedule, layers: Sequence[BlockFeatures]) -> None:
    """Verify that a schedule runs every stage of its blocks exactly once and cannot deadlock.

    Args:
        schedule: The schedule; if it repeats, after :func:`~.passes.unrolled`.
        layers: The features of the blocks that share the schedule.

    Raises:
        BadInput: the schedule is wrong; the error names the direction and the first wrong stage.
    """

    def refuse(direction: Direction, rule: str) -> BadInput:
        remedy = "Use one of the named schedules, or fix the text form of this one."
        return BadInput("schedule", f"{schedule.name} ({direction})", rule=rule, remedy=remedy)

    degree, backward = schedule.degree, schedule.backward_degree
    if schedule.num_chunks % min(degree, backward):
        rule = (
            f"has degree {backward}, which neither divides the forward degree {degree} nor is divided by it"
        )
        raise refuse(Direction.BACKWARD, rule)
    for direction in Direction:
        program, needs = schedule.program(direction), needs_of(schedule, layers, direction)
        times = Counter(program.stages)
        for stage in needs:
            if times[stage] != 1:
                raise refuse(direction, f"runs {stage} {times[stage]} times instead of once")
        for lane, stages in program.lanes:
            for stage in stages:
                if stage not in needs:
                    raise refuse(direction, f"has a stage {stage} that this block does not have")
                if lane != COMPUTE and not stage.is_communication:
                    raise refuse(direction, f"computes {stage} in the communication lane {lane}")
        stuck = never_ready(program, needs)
        if stuck:
            raise refuse(direction, f"can never finish: {'; '.join(stuck)}")


def never_ready(program: Program, needs: Mapping[Stage, Sequence[Stage]]) -> list[str]:
    """For each lane that cannot finish, where it waits, and for which stage; empty if all can."""
    lanes = dict(program.lanes)
    done = {stage for _, stage in merge_lanes(lanes, needs)}
    heads = {lane: next((s for s in stages if s not in done), None) for lane, stages in lanes.items()}
    return [
        f"{lane} waits at {stage} for {next(needed for needed in needs[stage] if needed not in done)}"
        for lane, stage in heads.items()
        if stage is not None
    ]
