"""Custom schedules: functions of users that ``--ampipe-schedule package.module:function`` names.

A function gets a degree and the features of a block, and returns the order of its stages, as text
(:mod:`.text`) or as a :class:`~.program.Schedule`. docs/schedules.md says what it may leave out. Nothing is
repaired: an order that lacks one of the stages of :data:`NAMED_BY_ALL`, or that could never finish, is
refused.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ampipe.block.settings import SCHEDULE_FLAG, SHIPPED_SCHEDULES, import_schedule
from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.dataflow import data_flow, needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.passes import placed
from megatron_ampipe.schedule.program import Program, Schedule, Stage
from megatron_ampipe.schedule.stage_kind import Direction
from megatron_ampipe.schedule.text import check, from_text, never_ready, to_text

NAMED_BY_ALL = frozenset(
    {
        *(kinds.QKV, kinds.ATTENTION, kinds.ROUTE, kinds.SHARED, kinds.COUNTS),
        *(kinds.DISPATCH, kinds.EXPERT, kinds.COMBINE, kinds.MERGE),
    }
)
"""The kinds that an order must list if its block has them; others are added where they are needed first."""


def is_custom(name: str) -> bool:
    """Whether a schedule is a function of the user."""
    return name not in SHIPPED_SCHEDULES


def custom_schedule(name: str, degree: int, features: BlockFeatures) -> Schedule:
    """Call the function ``name``, and check what it returns.

    Returns the complete schedule of one block, with the name of the function. Stages of kinds that the block
    does not have are left out.

    Raises:
        BadInput: the function cannot be imported, fails, or returns an order that is wrong.
    """
    function = import_schedule(name)
    try:
        returned = function(degree, features)
    except Exception as error:
        message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise _refusal(name, degree, f"fails: {message}") from error
    try:
        # The text form has only stages that exist at this degree.
        schedule = from_text(to_text(returned) if isinstance(returned, Schedule) else _text(returned))
        _require_degree(schedule, degree)
        schedule = replace(schedule, name=name)
        schedule = schedule.mapped(lambda program, _: _of_block(program, features))
        _require_named(schedule, features)
        schedule = placed(schedule, [features])
        check(schedule, [features])
    except BadInput as error:
        raise _refusal(name, degree, f"{error.value} {error.rule}") from error
    return schedule


def _refusal(name: str, degree: int, rule: str) -> BadInput:
    remedy = f"Change the function (docs/schedules.md), or use {SCHEDULE_FLAG} ampipe."
    return BadInput(SCHEDULE_FLAG, name, rule=f"for degree {degree}: {rule}", remedy=remedy)


def _wrong(value: object, rule: str) -> BadInput:
    return BadInput("schedule", value, rule=rule, remedy="Change the function.")


def _text(returned: object) -> str:
    if not isinstance(returned, str):
        raise _wrong(type(returned).__name__, "is neither the text of a schedule nor a Schedule")
    return returned


def _require_degree(schedule: Schedule, degree: int) -> None:
    """Refuse an order of another degree, or of several blocks: those share it without further notice."""
    if (schedule.degree, schedule.backward_degree) != (degree, degree):
        degrees = f"degree {schedule.degree} backward {schedule.backward_degree}"
        rule = f"is not 'degree {degree}'; the two passes of a run may ask for one degree each"
        raise _wrong(f"the line '{degrees}'", rule)
    if schedule.repeats:
        raise _wrong("the word 'repeats'", "is for plan files: layers that share a schedule repeat it")


def _of_block(program: Program, features: BlockFeatures) -> Program:
    """The program without stages of kinds that the block does not have."""
    known = {*data_flow(features).kinds, *kinds.WEIGHTS.values()}
    return program.mapped(lambda stages: (stage for stage in stages if stage.kind in known))


def _require_named(schedule: Schedule, features: BlockFeatures) -> None:
    """Refuse an order that lacks stages which only it can place, or whose stages wait for each other."""
    for direction in Direction:
        program = schedule.program(direction)
        needs = needs_of(schedule, [features], direction)
        where = f"the {direction} order"
        listed = set(program.stages)
        missing = [stage for stage in needs if stage.kind in NAMED_BY_ALL and stage not in listed]
        if missing:
            raise _wrong(where, f"lacks {' '.join(map(str, missing[:4]))}")
        unknown = [stage for stage in program.stages if stage not in needs]
        if unknown:
            raise _wrong(where, f"has a stage {unknown[0]}, which this block does not have in this pass")
        repeated = _repeated(program)
        if repeated is not None:
            raise _wrong(where, f"lists {repeated} twice")
        among = {stage: tuple(needed for needed in needs[stage] if needed in listed) for stage in listed}
        stuck = never_ready(program, among)
        if stuck:
            raise _wrong(where, f"can never finish: {'; '.join(stuck)}")


def _repeated(program: Program) -> Stage | None:
    seen: set[Stage] = set()
    for stage in program.stages:
        if stage in seen:
            return stage
        seen.add(stage)
    return None
