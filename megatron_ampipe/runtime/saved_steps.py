"""Binds the steps of a tape to what the policy of their stage says (``schedule.saved``).

Called while a schedule is compiled. It puts the objects of :mod:`.saved_tensors` into slots, and gives them
to the stage functions that compute what is dropped, and to the steps that bring it back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from megatron_ampipe.runtime.saved_tensors import (
    ActivationTensors,
    DroppedOutput,
    InnerTensors,
    RecomputedTensors,
    ResentInput,
    dropping_inner,
    given_first,
    not_saving_first,
    resent,
    restoring_inner,
    rows_again,
)
from megatron_ampipe.runtime.slot_ops import SlotOp, make
from megatron_ampipe.runtime.slots import BlockLayout
from megatron_ampipe.runtime.steps import RunStage, Step
from megatron_ampipe.schedule import ExpertsSaved, Saved, Source, StageKind, kinds


def bind_forward(step: RunStage, block: BlockLayout) -> None:
    """Bind a stage that keeps a graph: what of it the graph does not save."""
    kind, chunk = step.stage.kind, step.stage.chunk
    policy = block.policy_of(chunk)
    step.recompute = kind.row.name in policy.stages
    if kind == kinds.EXPERT:
        _bind_experts(step, block)
    if kind == kinds.ATTENTION and policy.core_attention is Saved.RECOMPUTE:
        _give(step, "core", block.numbers.temporary(), RecomputedTensors)
    if kind == _input_norm_of(block) and policy.input_norm is Saved.RECOMPUTE:
        _give(step, "norm", block.numbers.temporary(), DroppedOutput)
    if policy.normed is Saved.RECOMPUTE and _gives_normed(step, block):
        _give(step, "norm", block.slot("dropped", kinds.NORMED.name, chunk), DroppedOutput)
    if policy.normed is Saved.RECOMPUTE and _takes_normed(step, block):
        _give_normed_again(step, block)
    elif kind == kinds.QKV and _resends_rows(block):
        _give(step, "first_again", block.slot("resent", chunk), ResentInput)
    if "first_again" in step.extras and not step.recompute:
        step.function = not_saving_first(step.function)


def bind_restoring(step: RunStage, block: BlockLayout) -> None:
    """Bind a stage of the backward pass that computes what the forward pass has not saved."""
    kind, chunk = step.stage.kind, step.stage.chunk
    if kind == kinds.REPERMUTE:
        if block.policy_of(chunk).normed is Saved.RECOMPUTE:
            step.others.append(_give_normed_again(step, block))
            step.function = given_first(step.function)
        return
    assert kind.restores is not None, f"{kind} restores nothing"
    inner, segment = block.slot("inner", chunk), block.slot("segment", kind.restores, chunk)
    step.extras["inner"] = inner
    step.restores = [segment]
    step.others += [inner, segment]
    step.function = restoring_inner(step.function)


def bind_backward(step: Step, block: BlockLayout) -> None:
    """Bind the backward of a stage: what has been sent again goes where its graph asks for it."""
    kind, chunk = step.stage.kind, step.stage.chunk
    if kind == kinds.QKV and _resends_rows(block):
        sent_again = Source(kinds.REGATHER_ROWS, kinds.GATHERED.name)
        sources = (block.slot("value", sent_again, chunk, False),)
        step.before.append(SlotOp(resent, block.slot("resent", chunk), sources))


def _bind_experts(step: RunStage, block: BlockLayout) -> None:
    kind, chunk = step.stage.kind, step.stage.chunk
    policy = block.policy_of(chunk)
    experts = policy.experts[0] if policy.experts else ExpertsSaved()
    kept = block.functions.stage_parameters.get(kind, ())
    if experts.inner is not Saved.KEEP:
        copied = experts.inner is Saved.HOST
        resorted = copied and experts.tokens is Saved.RESEND
        make_inner = functools.partial(InnerTensors, kept, copied=copied, resorted=resorted)
        _give(step, "inner", block.slot("inner", chunk), make_inner)
        step.function = dropping_inner(step.function)
    elif policy.activation is Saved.RECOMPUTE:
        _give(step, "inner", block.slot("inner", chunk), functools.partial(ActivationTensors, kept))


def _give(step: RunStage, name: str, slot: int, factory: Callable[[], object]) -> None:
    """Make an object before the step, and give it to the function by this keyword."""
    step.before.append(SlotOp(make, slot, fixed=(factory,)))
    step.extras[name] = slot


def _give_normed_again(step: RunStage, block: BlockLayout) -> int:
    """Give the function what returns its part of the output of the norm again. Returns the slot of that."""
    chunk, layout = step.stage.chunk, kinds.NORMED.layout
    giver = next(kind for kind in block.flow.kinds if kinds.NORMED in kind.gives)
    spans, parts = None, None
    givers: list[int | None] = [chunk]
    if block.is_kept_whole(Source(giver, kinds.NORMED.name)):
        givers = [None]
        if chunk is not None:
            spans = block.spans(layout, chunk)
    elif chunk is None:
        givers = [*block.indices]
        if len(givers) > 1:
            parts = [block.spans(layout, index) for index in givers], block.num_rows(layout)
    slots = [block.slot("dropped", kinds.NORMED.name, index) for index in givers]
    again = block.numbers.temporary()
    step.before.append(SlotOp(rows_again, again, slots, (spans, parts)))
    step.extras["first_again"] = again
    return again


def _gives_normed(step: RunStage, block: BlockLayout) -> bool:
    return any(value == kinds.NORMED for value, _ in block.flow.given[step.stage.kind])


def _takes_normed(step: RunStage, block: BlockLayout) -> bool:
    taken = block.flow.taken[step.stage.kind]
    return bool(taken) and taken[0][0] == kinds.NORMED


def _input_norm_of(block: BlockLayout) -> StageKind:
    """The kind that runs the norm before attention."""
    return kinds.INPUT_NORM if kinds.INPUT_NORM in block.flow.kinds else kinds.QKV


def _resends_rows(block: BlockLayout) -> bool:
    return kinds.REGATHER_ROWS in block.flow.kinds
