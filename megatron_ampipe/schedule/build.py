"""The named schedules.

``sequential`` is the oracle and hides nothing; ``moe-only`` is what Tutel and PipeMoE do (attention
whole, then the MoE layer in chunks); ``ampipe`` is the order of AMPipe, section 3.2 and figure 6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.graph import BlockFeatures
from megatron_ampipe.schedule.types import COMM, COMPUTE, LaneOrder, Program, Schedule, Stage, StageKind


@functools.lru_cache(maxsize=512)
def build(name: str, *, degree: int, features: BlockFeatures, backward_degree: int | None = None) -> Schedule:
    """The schedule of that name for that many chunks. Remembered, because a search comes back to few.

    Args:
        name: One of :data:`SCHEDULE_NAMES`.
        degree: Of the forward pass.
        features: What the block contains.
        backward_degree: Of the backward pass; as ``degree`` if None.

    Raises:
        BadInput: no schedule has that name.
    """
    if name not in _BUILDERS:
        raise BadInput(
            "--ampipe-schedule",
            name,
            rule=f"is not one of {', '.join(_BUILDERS)}",
            remedy="Use --ampipe-schedule ampipe.",
        )
    schedule = _BUILDERS[name](degree, features)
    if backward_degree in (None, degree):
        return schedule
    assert backward_degree is not None
    backward = _BUILDERS[name](backward_degree, features).backward
    return replace(schedule, backward=backward, backward_degree=backward_degree)


def _sequential(degree: int, features: BlockFeatures) -> Schedule:
    """One lane, chunk after chunk: every collective is waited for on the spot."""
    chunks = range(degree)
    forward = [] if features.chunked_qkv else [Stage(StageKind.QKV)]
    own_qkv = [StageKind.QKV] if features.chunked_qkv else []
    for chunk in chunks:
        forward += _of_chunk(
            chunk, *own_qkv, StageKind.ATTENTION, StageKind.ROUTE, StageKind.COUNTS, StageKind.DISPATCH
        )
        if features.shared:
            forward += _of_chunk(chunk, StageKind.SHARED)
        forward += _of_chunk(chunk, StageKind.EXPERT, StageKind.COMBINE, StageKind.MERGE)
    backward: list[Stage] = []
    if features.losses:
        forward.append(Stage(StageKind.LOSSES))
        backward.append(Stage(StageKind.LOSSES))
    for chunk in reversed(chunks):
        backward += _of_chunk(chunk, StageKind.MERGE, StageKind.COMBINE, StageKind.EXPERT, StageKind.DISPATCH)
        if features.shared:
            backward += _of_chunk(chunk, StageKind.SHARED)
        backward += _of_chunk(chunk, StageKind.ROUTE, StageKind.ATTENTION, *own_qkv)
    if not features.chunked_qkv:
        backward.append(Stage(StageKind.QKV))
    return Schedule("sequential", degree, _program(compute=forward), _program(compute=backward), degree)


def _ampipe(degree: int, features: BlockFeatures) -> Schedule:
    """Dispatch of a chunk travels during attention of the next, combine during experts of the next.

    Backward, unlike in the paper, a chunk's dispatch does not wait for the combines of all chunks: it
    follows ``lead`` chunks behind. Where the network is slow, attention then begins while most tokens
    still have to travel, and not after half of the way.
    """
    chunks = range(degree)
    kinds = [StageKind.ATTENTION, StageKind.ROUTE]
    whole = [Stage(StageKind.QKV)]
    if features.chunked_qkv:
        kinds, whole = [StageKind.QKV, *kinds], []
    lead = max(1, degree // 4)

    def backward(kind: StageKind, *behind: StageKind) -> list[Stage]:
        """``kind`` of every chunk, last chunk first, and ``behind`` of the chunk ``lead`` before it."""
        stages = []
        for chunk in reversed(range(-lead, degree)):
            stages += _of_chunk(chunk, kind) if chunk >= 0 else []
            stages += _of_chunk(chunk + lead, *behind) if chunk + lead < degree else []
        return stages

    return _overlapped(
        "ampipe",
        degree,
        features,
        first_half=[*whole, *(stage for chunk in chunks for stage in _of_chunk(chunk, *kinds))],
        last_half=[*backward(StageKind.EXPERT, *reversed(kinds)), *whole],
        backward_comm=backward(StageKind.COMBINE, StageKind.DISPATCH),
    )


def _moe_only(degree: int, features: BlockFeatures) -> Schedule:
    """Attention whole; only the MoE layer is pipelined."""
    chunks = range(degree)
    attention = [Stage(StageKind.QKV), Stage(StageKind.ATTENTION)]
    last_first = chunks[::-1]
    return _overlapped(
        "moe-only",
        degree,
        features,
        first_half=[*attention, *_each(StageKind.ROUTE, chunks)],
        last_half=[
            *_each(StageKind.EXPERT, last_first),
            *_each(StageKind.ROUTE, last_first),
            *reversed(attention),
        ],
        backward_comm=[*_each(StageKind.COMBINE, last_first), *_each(StageKind.DISPATCH, last_first)],
    )


def _overlapped(
    name: str,
    degree: int,
    features: BlockFeatures,
    *,
    first_half: list[Stage],
    last_half: list[Stage],
    backward_comm: list[Stage],
) -> Schedule:
    """What the overlapping schedules share: forward, all dispatches before all combines.

    Stages that no collective waits for (losses, shared experts, merges) stand where the compute lane
    would otherwise wait for the network.

    Args:
        name: Of the schedule.
        degree: Number of chunks.
        features: Of the block.
        first_half: Forward, the compute stages up to the last route.
        last_half: Backward, the compute stages from the first expert on.
        backward_comm: Backward, all collectives.
    """
    chunks = range(degree)
    shared = _each(StageKind.SHARED, chunks) if features.shared else []
    losses = [Stage(StageKind.LOSSES)] if features.losses else []
    forward = _program(
        compute=[
            *first_half,
            *losses,
            *shared,
            *_each(StageKind.EXPERT, chunks),
            *_each(StageKind.MERGE, chunks),
        ],
        comm=[
            *(stage for chunk in chunks for stage in _of_chunk(chunk, StageKind.COUNTS, StageKind.DISPATCH)),
            *_each(StageKind.COMBINE, chunks),
        ],
    )
    backward = _program(
        compute=[*_each(StageKind.MERGE, reversed(chunks)), *losses, *reversed(shared), *last_half],
        comm=backward_comm,
    )
    return Schedule(name, degree, forward, backward, degree)


def _of_chunk(chunk: int, *kinds: StageKind) -> list[Stage]:
    return [Stage(kind, chunk) for kind in kinds]


def _each(kind: StageKind, chunks: Iterable[int]) -> list[Stage]:
    return [Stage(kind, chunk) for chunk in chunks]


def _program(*, compute: list[Stage], comm: list[Stage] | None = None) -> Program:
    lanes = [LaneOrder(COMPUTE, tuple(compute))]
    if comm is not None:
        lanes.append(LaneOrder(COMM, tuple(comm)))
    return Program(tuple(lanes))


_BUILDERS: dict[str, Callable[[int, BlockFeatures], Schedule]] = {
    "ampipe": _ampipe,
    "moe-only": _moe_only,
    "sequential": _sequential,
}
SCHEDULE_NAMES = tuple(_BUILDERS)
"""The named orders of stages."""
