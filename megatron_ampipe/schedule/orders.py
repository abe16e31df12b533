"""The named schedules.

``sequential`` is the oracle and hides nothing; ``moe-only`` is what Tutel and PipeMoE do (attention
whole, then the MoE layer in chunks); ``ampipe`` is the order of AMPipe, section 3.2 and figure 6; ``lancet``
adds to it what Lancet does in the backward pass, and is the one that also overlaps in one chunk; ``joined``
adds weight gradients of all chunks at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.dataflow import data_flow, dependencies
from megatron_ampipe.schedule.features import BlockFeatures, Restored
from megatron_ampipe.schedule.issue import completed
from megatron_ampipe.schedule.kinds import (
    ADD_NORM,
    ATTEND,
    ATTENTION,
    CHOOSE,
    COLLECT,
    COMBINE,
    COUNTS,
    DISPATCH,
    EXPERT,
    GATHER,
    GATHER_ROWS,
    INPUT_NORM,
    LOSSES,
    MERGE,
    QKV,
    REDISPATCH,
    REGATHER,
    REGATHER_ROWS,
    RERING,
    RESPREAD,
    RING,
    ROUTE,
    SCATTER,
    SCATTER_ROWS,
    SHARED,
    SPREAD,
    WEIGHTS,
    step_of,
)
from megatron_ampipe.schedule.passes import bound, placed
from megatron_ampipe.schedule.program import Program, Schedule, Stage
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE, Direction, StageKind


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
        return bound(placed(_BUILDERS[name](degree, features), [features]), [features])
    assert backward_degree is not None
    # What is restored is of the chunks of the backward pass.
    keeping = replace(features, restored=())
    schedule = placed(_BUILDERS[name](degree, keeping), [keeping])
    backward = placed(_BUILDERS[name](backward_degree, features), [features]).backward
    whole = placed(replace(schedule, backward=backward, backward_degree=backward_degree), [features])
    return bound(whole, [features])


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
    # What the router needs to choose for all chunks at once.
    before = rows[: rows.index(CHOOSE)] if features.chooses else ()
    by_chunk = sorted(
        needs, key=lambda stage: (stage.kind not in before, chunk_of(stage), rows.index(stage.kind))
    )
    forward = completed(by_chunk, needs)
    backward = [stage for stage in reversed(forward) if Direction.BACKWARD in stage.kind.directions]
    return Schedule("sequential", degree, _program(compute=forward), _program(compute=backward), degree)


def _ampipe(degree: int, features: BlockFeatures) -> Schedule:
    """Dispatch of a chunk travels during attention of the next, combine during experts of the next.

    Backward, unlike in the paper, a chunk's dispatch does not wait for the combines of all chunks: it
    follows ``lead`` chunks later. Where the network is slow, attention then begins while most tokens
    still have to travel, and not after half of the way.

    Where tensor-parallel ranks scatter the rows of a chunk, something of the next one is computed meanwhile
    (:func:`_attending`); backward, the experts of another one.
    """
    chunks = range(degree)
    routes, choice = [ROUTE], _choice(features)
    adds: list[StageKind] = [ADD_NORM] if features.scatters_rows else []
    norms = [INPUT_NORM] if features.gathers_rows else []
    whole = [Stage(kind) for kind in (*norms, QKV)]
    projects: list[StageKind] = []
    if features.chunked_qkv:
        projects, whole = [QKV], []
    else:
        norms = []
    steps = _attends(features)
    earlier, attends = steps[:-1], [*steps[-1:], ATTENTION]
    # Backward, each list after a transfer of the chunk, during which another chunk is computed.
    before = [[*attends[::-1], *projects], *([norms] if norms else [])]
    if choice:
        # All attention comes before the first dispatch.
        forward = _attending(degree, norms, projects, attends, adds)
        later = [routes]
        ended = _backward_order(degree, 1, adds, *before) if adds else _backward_order(degree, 0, *before)
    else:
        forward = _attending(degree, norms, projects, attends, [*adds, *routes])
        later = [[*routes, *adds], *before] if adds else [[*routes, *before[0]]]
        ended = []
    lead = max(1, degree // 4)

    return _overlapped(
        "ampipe",
        degree,
        features,
        first_half=[
            *whole,
            *(stage for kind in earlier for stage in _each(kind, chunks)),
            *forward,
            *choice,
            *(_each(ROUTE, chunks) if choice else ()),
        ],
        last_half=[
            *_backward_order(degree, lead, [EXPERT], *later),
            *choice,
            *ended,
            *(stage for kind in reversed(earlier) for stage in _each(kind, chunks[::-1])),
            *reversed(whole),
        ],
        backward_comm=_redispatched(_backward_order(degree, lead, [COMBINE], [DISPATCH]), features),
    )


def _lancet(degree: int, features: BlockFeatures) -> Schedule:
    """``ampipe`` with weight gradients under the all-to-alls of the backward pass (Lancet, figure 3).

    Those of a chunk's experts while its tokens travel back, those of shared experts during the first combine.
    Those of attention have no transfer of the same block left to cover; where layers share a schedule, they
    run during the first combine of the next one.
    """

    def with_weights(stages: Sequence[Stage]) -> Iterator[Stage]:
        last: dict[StageKind, list[Stage]] = {kind: [] for kind in (SHARED, ATTENTION, QKV)}
        for stage in stages:
            if stage.kind == EXPERT:
                yield from last.pop(SHARED, ())
            if stage.kind == ROUTE:
                yield Stage(WEIGHTS[EXPERT], stage.chunk)
            yield stage
            if stage.kind in last:
                last[stage.kind].append(Stage(WEIGHTS[stage.kind], stage.chunk))
        yield from (*last[ATTENTION], *last[QKV])

    schedule = _ampipe(degree, features)
    return replace(schedule, name="lancet", backward=schedule.backward.mapped(with_weights))


def _joined(degree: int, features: BlockFeatures) -> Schedule:
    """``ampipe`` with the weight gradients of all chunks in one stage of each kind.

    Those of the feed-forward half while the tokens of the last chunk travel back, those of attention last.
    """

    def with_weights(stages: Sequence[Stage]) -> Iterator[Stage]:
        in_chunks = {stage.kind for stage in stages if stage.chunk is not None}
        last_route = next((stage for stage in reversed(stages) if stage.kind == ROUTE), None)
        for stage in stages:
            if stage == last_route:
                yield from (Stage(WEIGHTS[kind]) for kind in (SHARED, EXPERT) if kind in in_chunks)
            yield stage
        yield from (Stage(WEIGHTS[kind]) for kind in (ATTENTION, QKV) if kind in in_chunks)

    schedule = _ampipe(degree, features)
    return replace(schedule, name="joined", backward=schedule.backward.mapped(with_weights))


def _moe_only(degree: int, features: BlockFeatures) -> Schedule:
    """Attention whole; only the MoE layer is pipelined."""
    chunks = range(degree)
    norms = [INPUT_NORM] if features.gathers_rows else []
    adds = [ADD_NORM] if features.scatters_rows else []
    attention = [
        *(Stage(kind) for kind in (*norms, QKV, *_attends(features), ATTENTION, *adds)),
        *_choice(features),
    ]
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
    counts = [] if features.flex else [COUNTS]
    forward = _program(
        compute=[
            *first_half,
            *losses,
            *shared,
            *_each(EXPERT, chunks),
            *_each(MERGE, chunks),
        ],
        comm=[
            *(Stage(step_of(RING, step)) for step in range(1, features.ring_ranks)),
            *_exchanges_of_rows(first_half, features, Direction.FORWARD),
            *(stage for chunk in chunks for stage in _of_chunk(chunk, *counts, DISPATCH)),
            *_each(COMBINE, chunks),
        ],
        features=features,
        direction=Direction.FORWARD,
    )
    backward = _program(
        compute=[*_each(MERGE, reversed(chunks)), *losses, *reversed(shared), *last_half],
        comm=[
            *_with_ring(backward_comm, features),
            *_exchanges_of_rows(last_half, features, Direction.BACKWARD),
        ],
        features=features,
        direction=Direction.BACKWARD,
    )
    return Schedule(name, degree, forward, backward, degree)


def _choice(features: BlockFeatures) -> list[Stage]:
    """The choice for all chunks at once, where there is one."""
    return [Stage(CHOOSE)] if features.chooses else []


def _redispatched(backward_comm: list[Stage], features: BlockFeatures) -> list[Stage]:
    """The collectives of a backward pass, with the tokens of a chunk sent again right before its combine."""
    found = []
    for stage in backward_comm:
        if (
            stage.kind == COMBINE
            and stage.chunk is not None
            and features.of_chunk(stage.chunk).restores(Restored.REDISPATCH)
        ):
            found.append(Stage(REDISPATCH, stage.chunk))
        found.append(stage)
    return found


def _attends(features: BlockFeatures) -> list[StageKind]:
    """Attention to the keys of one rank after another, step by step; none without a ring."""
    return [step_of(ATTEND, step) for step in range(features.ring_ranks)] if features.ring else []


def _with_ring(backward_comm: list[Stage], features: BlockFeatures) -> list[Stage]:
    """The collectives of a backward pass, with those of a ring.

    The first keys travel before the first tokens go back, and the next ones after the last; from then on keys
    of a step travel before the gradients of an earlier one, which have to wait for their computation.
    """
    if not features.ring:
        return backward_comm
    steps = [step_of(RERING, step) for step in reversed(range(1, features.ring_ranks))]
    found = list(backward_comm)
    first = next((place for place, stage in enumerate(found) if stage.kind == DISPATCH), len(found))
    found.insert(first, Stage(steps[0]))
    for step in reversed(range(1, features.ring_ranks)):
        if step > 1:
            found.append(Stage(step_of(RERING, step - 1)))
        found.append(Stage(step_of(RING, step)))
    return found


def _each(kind: StageKind, chunks: Iterable[int]) -> list[Stage]:
    return [Stage(kind, chunk) for chunk in chunks]


def _program(
    *,
    compute: list[Stage],
    comm: list[Stage] | None = None,
    features: BlockFeatures | None = None,
    direction: Direction = Direction.FORWARD,
) -> Program:
    """The lanes of a program.

    Args:
        compute: The stages of the compute lane.
        comm: The transfers to and from the ranks of other experts; None for a program of one lane.
        features: Of the block. What it hands on and gathers next to the experts follows such a transfer, or
            goes before it, in the order of the transfers and on its own lane.
        direction: Of the program.
    """
    lanes: dict[str, list[Stage]] = {COMPUTE: compute}
    if comm is not None:
        assert features is not None
        lanes[COMM] = []
        for stage in comm:
            for one in _with_near(stage, features, direction):
                lanes.setdefault(one.kind.lane.name, []).append(one)
    return Program.of(lanes)


def _with_near(stage: Stage, features: BlockFeatures, direction: Direction) -> list[Stage]:
    """A transfer with those that go with it next to the experts, in the order in which they run."""
    rows = {kind: kind for kind in data_flow(features).kinds}
    near = (Stage(rows[kind], stage.chunk) for kind in _NEAR.get(stage.kind, ()) if kind in rows)
    found = [stage, *near]
    to_experts = (stage.kind == COMBINE) == (direction is Direction.BACKWARD)
    return found if to_experts or stage.kind == REDISPATCH else found[::-1]


_NEAR = {
    DISPATCH: (SPREAD, GATHER),
    COMBINE: (COLLECT, SCATTER),
    REDISPATCH: (RESPREAD, REGATHER),
}
"""For each transfer to or from other experts those that go with it, away from it towards the experts."""


_BUILDERS: dict[str, Callable[[int, BlockFeatures], Schedule]] = {
    "ampipe": _ampipe,
    "moe-only": _moe_only,
    "lancet": _lancet,
    "joined": _joined,
    "sequential": _sequential,
}
SCHEDULE_NAMES = tuple(_BUILDERS)
"""The named orders of stages."""
IN_ONE_CHUNK = "lancet"
"""The one that overlaps without cutting the sequence."""


def _attending(
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
        return [stage for chunk in range(degree) for stage in _of_chunk(chunk, *projects, *attends, *then)]

    def of(chunk: int, kinds: list[StageKind]) -> list[Stage]:
        return _of_chunk(chunk, *kinds) if 0 <= chunk < degree else []

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


def _backward_order(degree: int, lead: int, kinds: list[StageKind], *later: list[StageKind]) -> list[Stage]:
    """``kinds`` of every chunk, last chunk first; the first of ``later`` of the chunk ``lead`` before it, and
    each other of the chunk before that."""
    stages = []
    for chunk in reversed(range(-lead - len(later), degree)):
        stages += _of_chunk(chunk, *kinds) if chunk >= 0 else []
        for place, some in enumerate(later):
            stages += _of_chunk(chunk + lead + place, *some) if 0 <= chunk + lead + place < degree else []
    return stages


def _exchanges_of_rows(stages: Iterable[Stage], features: BlockFeatures, direction: Direction) -> list[Stage]:
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


def _of_chunk(chunk: int, *kinds: StageKind) -> list[Stage]:
    """Stages of one chunk, in order."""
    return [Stage(kind, chunk) for kind in kinds]
