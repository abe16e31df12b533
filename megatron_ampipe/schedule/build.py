"""The named schedules.

``sequential`` is the oracle and hides nothing; ``moe-only`` is what Tutel and PipeMoE do (attention
whole, then the MoE layer in chunks); ``ampipe`` is the order of AMPipe, section 3.2 and figure 6; ``lancet``
adds to it what Lancet does in the backward pass, and is the one that also overlaps in one chunk.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.graph import BlockFeatures, data_flow, dependencies, needs_of
from megatron_ampipe.schedule.issue import completed, issue_order
from megatron_ampipe.schedule.kinds import (
    ATTENTION,
    COLLECT,
    COMBINE,
    COMM,
    COMPUTE,
    COUNTS,
    DISPATCH,
    EXPERT,
    INTRA,
    LOSSES,
    MERGE,
    QKV,
    REDISPATCH,
    RESPREAD,
    ROUTE,
    SHARED,
    SPREAD,
    WEIGHTS,
    Direction,
    StageKind,
)
from megatron_ampipe.schedule.run_again import with_stages_again
from megatron_ampipe.schedule.types import LaneOrder, Program, Schedule, Stage


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
    if backward_degree in (None, degree):
        return placed(_BUILDERS[name](degree, features), [features])
    assert backward_degree is not None
    # What is restored is of the chunks of the backward pass.
    keeping = replace(features, restored=())
    schedule = placed(_BUILDERS[name](degree, keeping), [keeping])
    backward = placed(_BUILDERS[name](backward_degree, features), [features]).backward
    return replace(schedule, backward=backward, backward_degree=backward_degree)


def placed(schedule: Schedule, layers: Sequence[BlockFeatures]) -> Schedule:
    """The schedule with the stages of its blocks that it lacks.

    Each is put right before the first stage that needs it; all stages that run again, where :mod:`.run_again`
    says; a reduction of gradients right after the last transfer of its block.
    """

    def program(direction: Direction) -> Program:
        needs = needs_of(schedule, layers, direction)
        known = schedule.program(direction)
        if needs.keys() <= set(known.stages):
            return known
        lane_of = {stage: order.lane for order in known.lanes for stage in order.stages}
        lanes: dict[str, list[Stage]] = {order.lane: [] for order in known.lanes}
        # Lanes that are cut out of one order which respects all dependencies never wait for each other.
        before = {stage: tuple(one for one in needs[stage] if one in lane_of) for stage in lane_of}
        order = [stage for _, stage in issue_order(known, before, host_waits=False)]
        if not any(stage.again for stage in order):
            order = with_stages_again(order, needs)
        for stage in _with_reductions(completed(order, needs), needs, lane_of):
            own = COMPUTE if len(known.lanes) == 1 else stage.kind.lane.name
            lanes.setdefault(lane_of.get(stage, own), []).append(stage)
        return Program(tuple(LaneOrder(lane, tuple(stages)) for lane, stages in lanes.items()))

    return replace(schedule, forward=program(Direction.FORWARD), backward=program(Direction.BACKWARD))


def _with_reductions(
    order: Sequence[Stage], needs: Mapping[Stage, Sequence[Stage]], known: Collection[Stage]
) -> list[Stage]:
    """The order with what is of parameters after the last transfer of its block, unless its place is known.

    From there on, all that the block computes waits for none of its transfers.
    """
    missing = [stage for stage in needs if stage.kind.of_parameters and stage not in known]
    found = [stage for stage in order if stage not in missing]
    for stage in missing:
        place = 0
        for index, one in enumerate(found, 1):
            if one in needs[stage] or (one.layer == stage.layer and one.is_communication):
                place = index
        found.insert(place, stage)
    return found


def _sequential(degree: int, features: BlockFeatures) -> Schedule:
    """One lane, chunk after chunk in the order of the table: every collective is waited for on the spot."""
    needs = dependencies([features], degree=degree, whole_attention=False, direction=Direction.FORWARD)
    needed = {earlier for found in needs.values() for earlier in found}

    def chunk_of(stage: Stage) -> int:
        """Stages of the whole sequence come first where others need them, else last."""
        if stage.chunk is not None:
            return stage.chunk
        return -1 if stage in needed else degree

    rows = data_flow(features).kinds
    by_chunk = sorted(needs, key=lambda stage: (chunk_of(stage), rows.index(stage.kind)))
    forward = completed(by_chunk, needs)
    backward = [stage for stage in reversed(forward) if Direction.BACKWARD in stage.kind.directions]
    return Schedule("sequential", degree, _program(compute=forward), _program(compute=backward), degree)


def _ampipe(degree: int, features: BlockFeatures) -> Schedule:
    """Dispatch of a chunk travels during attention of the next, combine during experts of the next.

    Backward, unlike in the paper, a chunk's dispatch does not wait for the combines of all chunks: it
    follows ``lead`` chunks later. Where the network is slow, attention then begins while most tokens
    still have to travel, and not after half of the way.
    """
    chunks = range(degree)
    of_chunk = [ATTENTION, ROUTE]
    whole = [Stage(QKV)]
    if features.chunked_qkv:
        of_chunk, whole = [QKV, *of_chunk], []
    lead = max(1, degree // 4)

    def backward(kind: StageKind, *later: StageKind) -> list[Stage]:
        """``kind`` of every chunk, last chunk first, and ``later`` of the chunk ``lead`` before it."""
        stages = []
        for chunk in reversed(range(-lead, degree)):
            stages += _of_chunk(chunk, kind) if chunk >= 0 else []
            stages += _of_chunk(chunk + lead, *later) if chunk + lead < degree else []
        return stages

    return _overlapped(
        "ampipe",
        degree,
        features,
        first_half=[*whole, *(stage for chunk in chunks for stage in _of_chunk(chunk, *of_chunk))],
        last_half=[*backward(EXPERT, *reversed(of_chunk)), *whole],
        backward_comm=_redispatched(backward(COMBINE, DISPATCH), features),
    )


def _lancet(degree: int, features: BlockFeatures) -> Schedule:
    """``ampipe`` with weight gradients under the all-to-alls of the backward pass (Lancet, figure 3).

    Those of a chunk's experts while its tokens travel back, those of shared experts during the first combine.
    Those of attention have no transfer of the same block left to cover; where layers share a schedule, they
    run during the first combine of the next one.
    """
    schedule = _ampipe(degree, features)
    (compute, *others) = schedule.backward.lanes
    stages: list[Stage] = []
    last: dict[StageKind, list[Stage]] = {kind: [] for kind in (SHARED, ATTENTION, QKV)}
    for stage in compute.stages:
        if stage.kind is EXPERT:
            stages += last.pop(SHARED, ())
        if stage.kind is ROUTE:
            stages.append(Stage(WEIGHTS[EXPERT], stage.chunk))
        stages.append(stage)
        if stage.kind in last:
            last[stage.kind].append(Stage(WEIGHTS[stage.kind], stage.chunk))
    stages += [*last[ATTENTION], *last[QKV]]
    backward = Program((LaneOrder(COMPUTE, tuple(stages)), *others))
    return replace(schedule, name="lancet", backward=backward)


def _moe_only(degree: int, features: BlockFeatures) -> Schedule:
    """Attention whole; only the MoE layer is pipelined."""
    chunks = range(degree)
    attention = [Stage(QKV), Stage(ATTENTION)]
    last_first = chunks[::-1]
    return _overlapped(
        "moe-only",
        degree,
        features,
        first_half=[*attention, *_each(ROUTE, chunks)],
        last_half=[
            *_each(EXPERT, last_first),
            *_each(ROUTE, last_first),
            *reversed(attention),
        ],
        backward_comm=_redispatched([*_each(COMBINE, last_first), *_each(DISPATCH, last_first)], features),
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
    shared = _each(SHARED, chunks) if features.shared else []
    losses = [Stage(LOSSES)] if features.losses else []
    counts = [COUNTS] if features.counts else []
    forward = _program(
        compute=[
            *first_half,
            *losses,
            *shared,
            *_each(EXPERT, chunks),
            *_each(MERGE, chunks),
        ],
        comm=[
            *(stage for chunk in chunks for stage in _of_chunk(chunk, *counts, DISPATCH)),
            *_each(COMBINE, chunks),
        ],
        features=features,
    )
    backward = _program(
        compute=[*_each(MERGE, reversed(chunks)), *losses, *reversed(shared), *last_half],
        comm=backward_comm,
        features=features,
    )
    return Schedule(name, degree, forward, backward, degree)


def _redispatched(backward_comm: list[Stage], features: BlockFeatures) -> list[Stage]:
    """The collectives of a backward pass, with the tokens of a chunk sent again right before its combine."""
    found = []
    for stage in backward_comm:
        if stage.kind is COMBINE and stage.chunk is not None and features.of_chunk(stage.chunk).redispatch:
            found.append(Stage(REDISPATCH, stage.chunk))
        found.append(stage)
    return found


def _of_chunk(chunk: int, *kinds: StageKind) -> list[Stage]:
    return [Stage(kind, chunk) for kind in kinds]


def _each(kind: StageKind, chunks: Iterable[int]) -> list[Stage]:
    return [Stage(kind, chunk) for chunk in chunks]


def _program(
    *, compute: list[Stage], comm: list[Stage] | None = None, features: BlockFeatures | None = None
) -> Program:
    """The lanes of a program; what is handed on inside nodes, in the order in which it crosses them."""
    lanes = [LaneOrder(COMPUTE, tuple(compute))]
    if comm is not None:
        lanes.append(LaneOrder(COMM, tuple(comm)))
        if features is not None and features.nodes:
            intra = (Stage(_INSIDE[one.kind], one.chunk) for one in comm if one.kind in _INSIDE)
            lanes.append(LaneOrder(INTRA, tuple(intra)))
    return Program(tuple(lanes))


_INSIDE = {DISPATCH: SPREAD, COMBINE: COLLECT, REDISPATCH: RESPREAD}
"""For each transfer between nodes the one inside them that goes with it."""


_BUILDERS: dict[str, Callable[[int, BlockFeatures], Schedule]] = {
    "ampipe": _ampipe,
    "moe-only": _moe_only,
    "lancet": _lancet,
    "sequential": _sequential,
}
SCHEDULE_NAMES = tuple(_BUILDERS)
"""The named orders of stages."""
IN_ONE_CHUNK = "lancet"
"""The one that overlaps without cutting the sequence."""
