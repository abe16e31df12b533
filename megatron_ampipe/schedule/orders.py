"""The named schedules.

``sequential`` is the oracle and overlaps nothing. ``moe-only`` is the order of Tutel and PipeMoE: attention
of the whole sequence, then the MoE layer in chunks. ``ampipe`` is the order of AMPipe, section 3.2 and figure
6. ``lancet`` adds separate weight gradients in the backward pass as in Lancet; it is the only one that
overlaps even with one chunk. ``joined`` adds weight gradients of all chunks at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.dataflow import data_flow, needs_of
from megatron_ampipe.schedule.features import BlockFeatures, Restored
from megatron_ampipe.schedule.kinds import ATTENTION, COMBINE, DISPATCH, EXPERT, QKV, ROUTE, SHARED, WEIGHTS
from megatron_ampipe.schedule.passes import placed
from megatron_ampipe.schedule.program import Program, Schedule, Stage, completed
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE, Direction, StageKind


@functools.lru_cache(maxsize=512)
def build(name: str, *, degree: int, features: BlockFeatures, backward_degree: int | None = None) -> Schedule:
    """Build the named schedule. Cached, because a search requests few different ones again and again.

    Args:
        name: One of :data:`SCHEDULE_NAMES`.
        degree: Number of chunks of the forward pass.
        features: The features of the block.
        backward_degree: Number of chunks of the backward pass; as ``degree`` if None.

    Raises:
        BadInput: no schedule has that name.
    """
    if name not in _BUILDERS:
        rule = f"is not one of {', '.join(_BUILDERS)}"
        raise BadInput("--ampipe-schedule", name, rule=rule, remedy="Use --ampipe-schedule ampipe.")
    if backward_degree in (None, degree):
        schedule = _BUILDERS[name](degree, features)
    else:
        # ``restored`` is by chunk of the backward pass.
        schedule = _BUILDERS[name](degree, replace(features, restored=()))
        backward = _BUILDERS[name](backward_degree, features).backward
        schedule = replace(schedule, backward=backward, backward_degree=backward_degree)
    return placed(schedule, [features])


def _sequential(degree: int, features: BlockFeatures) -> Schedule:
    """One lane, chunk after chunk in the order of the table; each collective ends before the next stage."""
    empty = Schedule("sequential", degree, Program(()), Program(()), degree)
    needs = needs_of(empty, [features], Direction.FORWARD)
    awaited = {earlier for needed in needs.values() for earlier in needed}
    rows = data_flow(features).kinds
    # The rows that must run before the router chooses for all chunks at once.
    before = rows[: rows.index(kinds.CHOOSE)] if features.chooses else ()

    def place(stage: Stage) -> tuple[bool, int, int]:
        """Stages of the whole sequence come first if other stages need them, else last."""
        chunk = stage.chunk if stage.chunk is not None else -1 if stage in awaited else degree
        return stage.kind not in before, chunk, rows.index(stage.kind)

    forward = completed(sorted(needs, key=place), needs)
    backward = [stage for stage in reversed(forward) if Direction.BACKWARD in stage.kind.directions]
    return replace(empty, forward=Program.of({COMPUTE: forward}), backward=Program.of({COMPUTE: backward}))


def _ampipe(degree: int, features: BlockFeatures, *, whole_attention: bool = False) -> Schedule:
    """The dispatch of a chunk overlaps attention of the next chunk, its combine the experts of the next.

    With ``whole_attention``, attention runs before the first dispatch, for the whole sequence at once.
    """
    # Backward, unlike in the paper, a chunk's dispatch does not wait for the combines of all chunks: it
    # follows ``lead`` chunks later. On a slow network, attention then begins while most transfers are still
    # to come, instead of after half of them.
    chunks, lead = range(degree), max(1, degree // 4)
    norms = [kinds.INPUT_NORM] if features.gathers_rows else []
    adds = [kinds.ADD_NORM] if features.row_links or not features.attention else []
    projects, whole = [QKV], list[StageKind]()
    if not features.chunked_qkv:
        norms, projects, whole = [], [], [*norms, QKV]
    steps = _attends(features)
    earlier, attends = steps[:-1], [*steps[-1:], ATTENTION]
    if not features.attention:
        norms, projects, whole, attends = [], [], [], []
    elif whole_attention:
        # Nothing of attention is left to compute during a transfer.
        lead, whole = degree, [*norms, *whole, *projects, *earlier, *attends, *adds]
        norms, projects, earlier, attends, adds = [], [], [], [], []
    # Backward, each group follows a transfer of its chunk, during which another chunk is computed.
    before = [group for group in (adds, [*attends[::-1], *projects], norms) if group] or [[]]
    choice = [Stage(kinds.CHOOSE)] if features.chooses else []
    if choice:
        # All attention comes before the first dispatch.
        forward = [*_attending(degree, norms, projects, attends, adds), *choice, *_stages([ROUTE], chunks)]
        backward = [
            *_backward_order(degree, lead, [EXPERT], [ROUTE]),
            *choice,
            *_backward_order(degree, 1, *before),
        ]
    else:
        forward = _attending(degree, norms, projects, attends, [*adds, ROUTE])
        backward = _backward_order(degree, lead, [EXPERT], [ROUTE, *before[0]], *before[1:])
    return _overlapped(
        "ampipe",
        degree,
        features,
        first_half=[
            *map(Stage, whole),
            *(Stage(kind, chunk) for kind in earlier for chunk in chunks),
            *forward,
        ],
        last_half=[
            *backward,
            *(Stage(kind, chunk) for kind in reversed(earlier) for chunk in reversed(chunks)),
            *map(Stage, reversed(whole)),
        ],
        backward_comm=_backward_order(degree, lead, [COMBINE], [DISPATCH]),
    )


def _lancet(degree: int, features: BlockFeatures) -> Schedule:
    """``ampipe`` with weight gradients during the all-to-alls of the backward pass (Lancet, figure 3).

    The wgrad of a chunk's experts overlaps the backward dispatch of the chunk, that of shared experts the
    first combine. Attention's wgrad has no transfer of the same block left to overlap; if layers share a
    schedule, it overlaps the first combine of the next block.
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
    """``ampipe`` with the weight gradients of all chunks in one stage per kind.

    The wgrad of the feed-forward half overlaps the last backward dispatch; that of attention comes last.
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
    """Attention of the whole sequence at once; only the MoE layer is pipelined."""
    return replace(_ampipe(degree, features, whole_attention=True), name="moe-only")


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
"""The schedule that overlaps without cutting the sequence."""


def _overlapped(
    name: str,
    degree: int,
    features: BlockFeatures,
    *,
    first_half: list[Stage],
    last_half: list[Stage],
    backward_comm: list[Stage],
) -> Schedule:
    """The common part of the overlapping schedules; forward, all dispatches come before all combines."""
    # Stages that no collective waits for (losses, shared experts, merges) are placed where the compute lane
    # would otherwise wait for the network: between the last route and the experts; backward, before experts.
    chunks = range(degree)
    shared = _stages([SHARED], chunks) if features.shared else []
    losses = [Stage(kinds.LOSSES)] if features.losses else []
    merges = _stages([kinds.MERGE], chunks)
    forward = [*first_half, *losses, *shared, *_stages([EXPERT], chunks), *merges]
    forward_comm = [
        *(Stage(kinds.step_of(kinds.RING, step)) for step in range(1, features.ring_ranks)),
        *_exchanges_of_rows(first_half, features, Direction.FORWARD),
        *_stages([DISPATCH] if features.flex else [kinds.COUNTS, DISPATCH], chunks),
        *_stages([COMBINE], chunks),
    ]
    backward = [*reversed(merges), *losses, *reversed(shared), *last_half]
    comm = [
        *_with_ring(backward_comm, features),
        *_exchanges_of_rows(last_half, features, Direction.BACKWARD),
    ]
    return Schedule(
        name,
        degree,
        _program(forward, forward_comm, features, Direction.FORWARD),
        _program(backward, comm, features, Direction.BACKWARD),
        degree,
    )


def _attends(features: BlockFeatures) -> list[StageKind]:
    """The steps of ring attention; none without a ring."""
    return [kinds.step_of(kinds.ATTEND, step) for step in range(features.ring_ranks)] if features.ring else []


def _stages(stage_kinds: Iterable[StageKind], chunks: Iterable[int]) -> list[Stage]:
    """Stages of these kinds, chunk after chunk."""
    return [Stage(kind, chunk) for chunk in chunks for kind in stage_kinds]


def _with_ring(backward_comm: list[Stage], features: BlockFeatures) -> list[Stage]:
    """The collectives of a backward pass, with those of ring attention."""
    if not features.ring:
        return backward_comm
    # The first keys are sent before the first backward dispatch, the next keys after the last one. Then the
    # keys of a step come before the gradients of the step before, which are computed later.
    keys, gradients = (
        [Stage(kinds.step_of(kind, step)) for step in reversed(range(1, features.ring_ranks))]
        for kind in (kinds.RERING, kinds.RING)
    )
    first = next(place for place, stage in enumerate(backward_comm) if stage.kind == DISPATCH)
    after = [stage for pair in zip(keys[1:], gradients, strict=False) for stage in pair]
    return [*backward_comm[:first], keys[0], *backward_comm[first:], *after, gradients[-1]]


def _program(
    compute: list[Stage], comm: list[Stage], features: BlockFeatures, direction: Direction
) -> Program:
    """The lanes of a program; hops and gathers are added before or after the transfer that they belong to."""
    rows = {kind: kind for kind in data_flow(features).kinds}
    lanes: dict[str, list[Stage]] = {COMPUTE: compute, COMM: []}

    def add(stage: Stage) -> None:
        local_transfers = [
            Stage(rows[kind], stage.chunk) for kind in _NEAR.get(stage.kind, ()) if kind in rows
        ]
        to_experts = (stage.kind == COMBINE) is (direction is Direction.BACKWARD)
        transfers = [stage, *local_transfers]
        for transfer in transfers if to_experts or stage.kind == kinds.REDISPATCH else transfers[::-1]:
            lanes.setdefault(transfer.kind.lane.name, []).append(transfer)

    for stage in comm:
        sends_again = features.of_chunk(stage.chunk or 0).restores(Restored.REDISPATCH)
        if direction is Direction.BACKWARD and stage.kind == COMBINE and sends_again:
            add(Stage(kinds.REDISPATCH, stage.chunk))
        add(stage)
    return Program.of(lanes)


_NEAR = {
    DISPATCH: (kinds.SPREAD, kinds.GATHER),
    COMBINE: (kinds.COLLECT, kinds.SCATTER),
    kinds.REDISPATCH: (kinds.RESPREAD, kinds.REGATHER),
}
"""For each dispatch or combine, the transfers that belong to it, ordered from it towards the experts."""


def _attending(
    degree: int,
    norms: list[StageKind],
    projects: list[StageKind],
    attends: list[StageKind],
    then: list[StageKind],
) -> list[Stage]:
    """The forward stages up to the last route; other chunks compute while rows are gathered or scattered."""
    if kinds.ADD_NORM not in then:
        return _stages([*projects, *attends, *then], range(degree))

    def of(chunk: int, stage_kinds: list[StageKind]) -> list[Stage]:
        return _stages(stage_kinds, [chunk]) if 0 <= chunk < degree else []

    if projects:
        # The queries of the next chunk are projected while rows are scattered.
        stages = [*of(0, norms), *of(0, projects)]
        for chunk in range(degree):
            stages += of(chunk + 1, norms) + of(chunk, attends) + of(chunk + 1, projects) + of(chunk, then)
        return stages
    # Else attention of the next chunk, but not before the first dispatch, which with few chunks hides less.
    first = 0 if ROUTE in then else -1
    stages = []
    for chunk in range(degree + 1):
        stages += of(chunk, attends)
        stages += of(0, then) if chunk == first else []
        stages += of(chunk - 1, then) if chunk - 1 > first else []
    return stages


def _backward_order(degree: int, lead: int, *groups: list[StageKind]) -> list[Stage]:
    """Backward order of groups of kinds: the first group runs chunk by chunk from the last chunk, the second
    ``lead`` chunks later, and each further group one more chunk later."""
    delays = [0, *range(lead, lead + len(groups) - 1)]
    stages = []
    for chunk in reversed(range(-delays[-1], degree)):
        for delay, group in zip(delays, groups, strict=True):
            stages += _stages(group, [chunk + delay]) if 0 <= chunk + delay < degree else []
    return stages


def _exchanges_of_rows(stages: Iterable[Stage], features: BlockFeatures, direction: Direction) -> list[Stage]:
    """The transfers of rows between tensor-parallel ranks, in the order of the stages before them."""
    after: dict[StageKind, tuple[StageKind, ...]]
    if direction is Direction.FORWARD:
        after = {kinds.INPUT_NORM: (kinds.GATHER_ROWS,), ATTENTION: (kinds.SCATTER_ROWS,)}
    else:
        after = {kinds.ADD_NORM: (kinds.SCATTER_ROWS,), QKV: (kinds.REGATHER_ROWS, kinds.GATHER_ROWS)}
    rows = data_flow(features).kinds
    return [
        Stage(kind, stage.chunk) for stage in stages for kind in after.get(stage.kind, ()) if kind in rows
    ]
