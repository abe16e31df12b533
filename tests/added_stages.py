"""Made-up kinds that tests add to a block without touching the package: a row, a function and a cost each.

All of them return what they take, so that a block with them must still equal Megatron's layer.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.layers.stage_functions import MOE, Tensors
from megatron_ampipe.plan.operation_times import Pair
from megatron_ampipe.plan.stage_costs import CostFunction
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.schedule import Direction, Lane, Layout, Scope, StageKind, Value, kinds

EXPERT_OUTPUT = kinds.EXPERT.gives[0]
NORMED = kinds.ATTENTION.gives[1]
DELAY_S = 0.002

DELAY = StageKind("delay", takes=(EXPERT_OUTPUT,), gives=(EXPERT_OUTPUT,), after=kinds.EXPERT)
"""Computed, between ``expert`` and ``combine``."""
COPY = StageKind(
    "copy",
    lane=Lane("copy", "copier"),
    takes=(EXPERT_OUTPUT,),
    gives=(EXPERT_OUTPUT,),
    after=DELAY,
)
"""Started and waited for, in a lane that the package does not know."""
AUDIT = StageKind("audit", scope=Scope.WHOLE, takes=(NORMED,), gives=(NORMED,), after=kinds.ATTENTION)
"""Once for the whole sequence, between stages of chunks."""
FORKED = Value("forked", Layout.HIDDEN)
FORK = StageKind("fork", lane=COPY.lane, takes=(NORMED,), gives=(FORKED,), after=kinds.ATTENTION)
"""A transfer of a value that a computation takes as well: its gradient is the sum of both."""
MEET = StageKind("meet", takes=(NORMED, FORKED), gives=(NORMED,), after=FORK)
"""Computed from what was transferred and what was not."""
MOVE = StageKind(
    "move", lane=COPY.lane, scope=Scope.WHOLE, takes=(NORMED,), gives=(NORMED,), after=kinds.ATTENTION
)
"""A transfer of the whole sequence, between stages of chunks."""
WATCH = StageKind(
    "watch", takes=(kinds.HIDDEN_STATES,), directions=(Direction.FORWARD,), after=kinds.ATTENTION
)
"""Takes something, forward only, and so has no gradient for it."""
ran: Counter[str] = Counter()
"""How often a function ran, by direction and kind."""


class _Delayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor) -> Tensor:
        ran["forward delay"] += 1
        time.sleep(DELAY_S)
        return tokens.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ran["backward delay"] += 1
        time.sleep(DELAY_S)
        return gradient.clone()


@MOE.runs(DELAY)
def delay(state: Any, chunk: int, tokens: Tensor) -> tuple[Tensor, ...]:
    """``[T, D]`` unchanged, some time later."""
    result: Tensor = _Delayed.apply(tokens)
    return (result,)


@MOE.runs(COPY)
def copy(state: Any, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
    """``[T, D]`` of each chunk into new memory, filled when it is waited for."""
    ran[f"{direction} copy"] += 1
    return _copied(tensors)


def _copied(tensors: Tensors) -> Transfer:
    sources = [tensor for (tensor,) in tensors]
    outputs = [torch.full_like(tensor, torch.nan) for tensor in sources]

    def fill() -> None:
        for source, output in zip(sources, outputs, strict=True):
            output.copy_(source)

    return Transfer(tuple(outputs), unpack=fill)


@MOE.runs(AUDIT)
def audit(state: Any, chunk: int | None, normed: Tensor) -> tuple[Tensor, ...]:
    """``[S, B, D]`` unchanged."""
    assert chunk is None
    ran["forward audit"] += 1
    return (normed.clone(),)


@MOE.runs(FORK, MOVE)
def fork(state: Any, chunks: Sequence[int | None], tensors: Tensors, direction: Direction) -> Transfer:
    """``[rows, B, D]`` of each chunk into new memory."""
    return _copied(tensors)


@MOE.runs(MEET)
def meet(state: Any, chunk: int, normed: Tensor, forked: Tensor) -> tuple[Tensor, ...]:
    """The mean of two equal tensors."""
    return (0.25 * normed + 0.75 * forked,)


@MOE.runs(WATCH)
def watch(state: Any, chunk: int, hidden: Tensor) -> tuple[Tensor, ...]:
    """Nothing of ``[rows, B, D]``."""
    return ()


COSTS: dict[StageKind, CostFunction] = {
    DELAY: lambda model, work: Pair(1e6 * DELAY_S, 1e6 * DELAY_S),
    COPY: lambda model, work: Pair(0.5 * work.rows.hidden, 0.25 * work.rows.hidden),
    AUDIT: lambda model, work: Pair(5.0, 7.0),
}
