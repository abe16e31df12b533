"""The order of attention of the chunks, and of the rows that tensor-parallel ranks exchange around it.

Parts of the named schedules. Called by :mod:`.build`.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.flow import data_flow
from megatron_ampipe.schedule.kinds import (
    ADD_NORM,
    ATTENTION,
    GATHER_ROWS,
    INPUT_NORM,
    QKV,
    REGATHER_ROWS,
    ROUTE,
    SCATTER_ROWS,
)
from megatron_ampipe.schedule.stage_kind import Direction, StageKind
from megatron_ampipe.schedule.types import Stage


def attending(
    degree: int,
    norms: list[StageKind],
    projects: list[StageKind],
    attends: list[StageKind],
    then: list[StageKind],
) -> list[Stage]:
    """Forward, the stages up to the last route.

    Where rows are scattered between ``attends`` and ``then``, the queries of the next chunk are projected
    meanwhile, if chunks do that. Else the next chunk attends, but not before the first dispatch: with few
    chunks, what that would hide is less than what is then sent later. What is gathered between ``norms`` and
    ``projects`` travels during attention of the chunk before.
    """
    if ADD_NORM not in then:
        return [stage for chunk in range(degree) for stage in of_chunk(chunk, *projects, *attends, *then)]

    def of(chunk: int, kinds: list[StageKind]) -> list[Stage]:
        return of_chunk(chunk, *kinds) if 0 <= chunk < degree else []

    if projects:
        stages = [*of(0, norms), *of(0, projects)]
        for chunk in range(degree):
            stages += of(chunk + 1, norms) + of(chunk, attends) + of(chunk + 1, projects) + of(chunk, then)
        return stages
    first = 0 if ROUTE in then else -1
    stages = []
    for chunk in range(degree + 1):
        stages += of(chunk, attends)
        stages += of(0, then) if chunk == first else []
        stages += of(chunk - 1, then) if chunk - 1 > first else []
    return stages


def backward_order(degree: int, lead: int, kinds: list[StageKind], *later: list[StageKind]) -> list[Stage]:
    """``kinds`` of every chunk, last chunk first; the first of ``later`` of the chunk ``lead`` before it, and
    each other of the chunk before that."""
    stages = []
    for chunk in reversed(range(-lead - len(later), degree)):
        stages += of_chunk(chunk, *kinds) if chunk >= 0 else []
        for place, some in enumerate(later):
            stages += of_chunk(chunk + lead + place, *some) if 0 <= chunk + lead + place < degree else []
    return stages


def exchanges_of_rows(stages: Iterable[Stage], features: BlockFeatures, direction: Direction) -> list[Stage]:
    """The transfers of rows between tensor-parallel ranks, in the order of the stages that they follow.

    Rows are gathered again right before they are needed, while that chunk's attention is differentiated.
    """
    after: dict[StageKind, tuple[StageKind, ...]]
    if direction is Direction.FORWARD:
        after = {INPUT_NORM: (GATHER_ROWS,), ATTENTION: (SCATTER_ROWS,)}
    else:
        after = {ADD_NORM: (SCATTER_ROWS,), QKV: (REGATHER_ROWS, GATHER_ROWS)}
    of_block = {kind: kind for kind in data_flow(features).kinds}
    return [
        Stage(of_block[kind], one.chunk)
        for one in stages
        for kind in after.get(one.kind, ())
        if kind in of_block
    ]


def of_chunk(chunk: int, *kinds: StageKind) -> list[Stage]:
    """Stages of one chunk, in order."""
    return [Stage(kind, chunk) for kind in kinds]
