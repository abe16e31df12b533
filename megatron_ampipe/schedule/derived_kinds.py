"""Kinds that are made from rows of :mod:`.kinds`: steps of attention, and weight gradients of linear layers.

Also the list of all kinds.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ampipe.schedule.kinds import (
    ATTEND,
    ATTENTION,
    CONTEXT,
    EXPERT,
    MLP,
    MOE_BLOCK,
    QKV,
    QUERY,
    RERING,
    RING,
    RING_KEY,
    RING_VALUE,
    SHARED,
)
from megatron_ampipe.schedule.stage_kind import Direction, Layout, Scope, StageKind, Value


def step_of(kind: StageKind, step: int) -> StageKind:
    """One step of attention over context-parallel ranks: a kind with the name and number of the step.

    Step 0 attends to the keys of this rank. ``ring<t>`` brings the keys of the rank ``t`` places before, and
    ``attend<t>`` attends to them. It does not begin before the keys of step ``t - 2`` were used, so a rank
    has keys of two others at most. The backward pass goes from the last step to the first: ``rering<t>``
    brings the keys of step ``t`` from the next rank, and the backward of ``ring<t>`` takes their gradients,
    to which every rank adds its part, one place back.
    """

    def keys_of(number: int) -> tuple[Value, ...]:
        # In the backward pass, every step takes what the one before has brought, under the same name.
        suffix = f" {number}" if number else ""
        return tuple(Value(value.name + suffix, value.layout) for value in (RING_KEY, RING_VALUE))

    def used(number: int) -> Value:
        return Value(f"used {number}", Layout.STATE)

    found = replace(kind, name=f"{kind.name}{step}", step_of=kind, step=step)
    if kind == ATTEND:
        before = (CONTEXT,) if step else ()
        return replace(found, takes=(QUERY, *keys_of(step), *before), gives=(CONTEXT, used(step)))
    if kind == RING:
        turn = (used(step - 2),) if step > 1 else ()
        return replace(found, takes=(*keys_of(step - 1), *turn), gives=keys_of(step))
    assert kind == RERING, f"{kind} has no steps"
    attends, follows = step_of(ATTEND, step), step_of(ATTEND, step + 2)
    return replace(found, takes=keys_of(0), gives=keys_of(0), restores=attends, follows=follows)


def ring_rows(num_ranks: int) -> tuple[StageKind, ...]:
    """The rows of attention over context-parallel ranks, in place of :data:`~.kinds.STEPPED`."""
    steps = range(1, num_ranks)
    forward = (step_of(kind, step) for step in steps for kind in (RING, ATTEND))
    return (step_of(ATTEND, 0), *forward, *(step_of(RERING, step) for step in reversed(steps)))


def _weights(kind: StageKind) -> StageKind:
    return StageKind(
        f"{kind.name}-weights", scope=Scope.EITHER, directions=(Direction.BACKWARD,), weights_of=kind
    )


WEIGHTS = {kind: _weights(kind) for kind in (QKV, ATTENTION, SHARED, EXPERT, MLP)}
"""For each kind with linear layers, the gradients of their weights as a stage: of one chunk, or of the whole
sequence in one product of all chunks. Nothing waits for them."""
ALL_KINDS = (*MOE_BLOCK, *WEIGHTS.values())
"""All kinds that a schedule can name."""
