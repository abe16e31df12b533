"""The named schedules.

``sequential`` is the oracle and overlaps nothing. ``moe-only`` is the order of Tutel and PipeMoE: attention
of the whole sequence, then the MoE layer in chunks. ``ampipe`` is the order of AMPipe, section 3.2 and figure
6. ``lancet`` adds separate weight gradients in the backward pass as in Lancet; it is the only one that
overlaps even with one chunk. ``joined`` adds weight gradients of all chunks at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.custom import custom_schedule
from megatron_ampipe.schedule.dataflow import data_flow, needs_of
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.kinds import ATTENTION, COMBINE, DISPATCH, EXPERT, QKV, ROUTE, SHARED, WEIGHTS
from megatron_ampipe.schedule.passes import placed
from megatron_ampipe.schedule.program import Program, Schedule, Stage, completed
from megatron_ampipe.schedule.saved import Saved
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE, Direction, StageKind


@functools.lru_cache(maxsize=512)
def build(name: str, *, degree: int, features: BlockFeatures, backward_degree: int | None = None) -> Schedule:
    """Build the named schedule. Cached, because a search requests few different ones again and again.

    Args:
        name: One of :data:`SCHEDULE_NAMES`, or the function of a :mod:`custom schedule <.custom>`.
        degree: Number of chunks of the forward pass.
        features: The features of the block.
        backward_degree: Number of chunks of the backward pass; as ``degree`` if None.

    Raises:
        BadInput: no schedule has that name, or a custom schedule is wrong.
    """
    builder = _BUILDERS.get(name) or functools.partial(custom_schedule, name)
    if backward_degree in (None, degree):
        schedule = builder(degree, features)
    else:
        # The policy of the experts is by chunk of the backward pass.
        saves_all = replace(features, saved=features.saved._replace(experts=()))
        schedule = builder(degree, saves_all)
        backward = builder(backward_degree, features).backward
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
    chunks = range(degree)
    parts = _attention_parts(features)
    # Backward, unlike in the paper, a chunk's dispatch does not wait for the combines of all chunks: it
    # follows ``lead`` chunks later. On a slow network, attention then begins while most transfers are still
    # to come, instead of after half of them.
    lead = max(1, degree // 4)
    if features.attention and whole_attention:
        # Nothing of attention is left to compute during a transfer.
        lead = degree
        parts = parts.at_once
    if features.chooses:
        forward, backward = _choosing_between(parts, degree, lead)
    else:
        forward = _attending(parts, degree, then=[*parts.adds, ROUTE])
        first_group, *other_groups = parts.backward_groups
        backward = _backward_order(degree, lead, [EXPERT], [ROUTE, *first_group], *other_groups)
    whole = [Stage(kind) for kind in parts.whole]
    ring_steps = [Stage(kind, chunk) for kind in parts.ring_steps for chunk in chunks]
    return _overlapped(
        "ampipe",
        degree,
        features,
        first_half=[*whole, *ring_steps, *forward],
        last_half=[*backward, *reversed(ring_steps), *reversed(whole)],
        backward_comm=_backward_order(degree, lead, [COMBINE], [DISPATCH]),
    )


@dataclass(frozen=True, slots=True)
class _AttentionParts:
    """The kinds of stages up to the route, in groups that a schedule places one by one.

    Attributes:
        whole: Once for the whole sequence, first of all.
        ring_steps: By chunk, before ``attends`` of the first chunk: the steps of a ring but the last.
        norms: By chunk: the norm whose output is gathered over tensor-parallel ranks.
        projects: By chunk: queries, keys and values.
        attends: By chunk: core attention, and the last step of a ring before it.
        adds: By chunk: the norm before the router, where rows are scattered before it.
    """

    whole: list[StageKind]
    ring_steps: list[StageKind]
    norms: list[StageKind]
    projects: list[StageKind]
    attends: list[StageKind]
    adds: list[StageKind]

    @property
    def at_once(self) -> _AttentionParts:
        """The same with all of attention before the first route."""
        whole = [*self.norms, *self.whole, *self.projects, *self.ring_steps, *self.attends, *self.adds]
        return _AttentionParts(whole, [], [], [], [], [])

    @property
    def backward_groups(self) -> list[list[StageKind]]:
        """In the backward pass, each group follows a transfer of its chunk, while another chunk computes."""
        groups = [self.adds, [*reversed(self.attends), *self.projects], self.norms]
        return [group for group in groups if group] or [[]]


def _attention_parts(features: BlockFeatures) -> _AttentionParts:
    adds = [kinds.ADD_NORM] if features.row_links or not features.attention else []
    if not features.attention:
        return _AttentionParts([], [], [], [], [], adds)
    norms = [kinds.INPUT_NORM] if features.gathers_rows else []
    steps = _ring_steps(features)
    first_steps = steps[:-1]
    attends = [*steps[-1:], ATTENTION]
    if features.chunked_qkv:
        return _AttentionParts([], first_steps, norms, [QKV], attends, adds)
    return _AttentionParts([*norms, QKV], first_steps, [], [], attends, adds)


def _choosing_between(parts: _AttentionParts, degree: int, lead: int) -> tuple[list[Stage], list[Stage]]:
    """The forward order up to the last route, and the backward order from the experts on.

    The router chooses for all chunks at once, so all attention comes before the first dispatch.
    """
    choice = Stage(kinds.CHOOSE)
    routes = _stages([ROUTE], range(degree))
    forward = [*_attending(parts, degree, then=parts.adds), choice, *routes]
    to_routes = _backward_order(degree, lead, [EXPERT], [ROUTE])
    return forward, [*to_routes, choice, *_backward_order(degree, 1, *parts.backward_groups)]


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


def _ring_steps(features: BlockFeatures) -> list[StageKind]:
    """The steps of ring attention; none without a ring."""
    if not features.ring:
        return []
    return [kinds.step_of(kinds.ATTEND, step) for step in range(features.ring_ranks)]


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
        further_kinds = [kind for kind in _FURTHER.get(stage.kind, ()) if kind in rows]
        transfers = [stage, *(Stage(rows[kind], stage.chunk) for kind in further_kinds)]
        goes_to_experts = (stage.kind == COMBINE) is (direction is Direction.BACKWARD)
        if not goes_to_experts and stage.kind != kinds.REDISPATCH:
            transfers.reverse()
        for transfer in transfers:
            lanes.setdefault(transfer.kind.lane.name, []).append(transfer)

    for stage in comm:
        sends_again = features.of_chunk(stage.chunk or 0).saved.restores(tokens=Saved.RESEND)
        if direction is Direction.BACKWARD and stage.kind == COMBINE and sends_again:
            add(Stage(kinds.REDISPATCH, stage.chunk))
        add(stage)
    return Program.of(lanes)


_FURTHER = {
    DISPATCH: (kinds.SPREAD, kinds.GATHER),
    COMBINE: (kinds.COLLECT, kinds.SCATTER),
    kinds.REDISPATCH: (kinds.RESPREAD, kinds.REGATHER),
}
"""For each dispatch or combine, the transfers that belong to it, ordered from it towards the experts."""


def _attending(parts: _AttentionParts, degree: int, *, then: list[StageKind]) -> list[Stage]:
    """The forward stages up to the last route; other chunks compute while rows are gathered or scattered.

    ``then`` are the kinds that follow attention of a chunk.
    """
    if kinds.ADD_NORM not in then:
        return _stages([*parts.projects, *parts.attends, *then], range(degree))

    def stages_of(chunk: int, stage_kinds: list[StageKind]) -> list[Stage]:
        """None for a chunk that does not exist."""
        return _stages(stage_kinds, [chunk]) if 0 <= chunk < degree else []

    stages: list[Stage] = []
    if parts.projects:
        # The queries of the next chunk are projected while rows are scattered.
        stages += stages_of(0, parts.norms)
        stages += stages_of(0, parts.projects)
        for chunk in range(degree):
            stages += stages_of(chunk + 1, parts.norms)
            stages += stages_of(chunk, parts.attends)
            stages += stages_of(chunk + 1, parts.projects)
            stages += stages_of(chunk, then)
        return stages
    # Else attention of the next chunk, but not before the first dispatch, which with few chunks hides less.
    first_routes_at_once = ROUTE in then
    for chunk in range(degree + 1):
        stages += stages_of(chunk, parts.attends)
        if chunk == 0 and first_routes_at_once:
            stages += stages_of(0, then)
        previous = chunk - 1
        if previous > 0 or not first_routes_at_once:
            stages += stages_of(previous, then)
    return stages


def _backward_order(degree: int, lead: int, *groups: list[StageKind]) -> list[Stage]:
    """Backward order of groups of kinds: the first group runs chunk by chunk from the last chunk, the second
    ``lead`` chunks later, and each further group one more chunk later."""
    delays = [0, *range(lead, lead + len(groups) - 1)]
    stages = []
    for first_chunk in reversed(range(-delays[-1], degree)):
        for delay, group in zip(delays, groups, strict=True):
            chunk = first_chunk + delay
            if 0 <= chunk < degree:
                stages += _stages(group, [chunk])
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
