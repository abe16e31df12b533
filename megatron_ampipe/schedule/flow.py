"""Which row of a block takes what from which: the table of kinds, with what a block contains.

The checker, the issue order, the planner and the runtime all read it from here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ampipe.schedule.derived_kinds import ring_rows
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.kinds import ADD_NORM, ATTEND, ATTENTION, HIDDEN_STATES, MOE_BLOCK, STEPPED
from megatron_ampipe.schedule.stage_kind import Layout, Scope, StageKind, Value


class Source(NamedTuple):
    """Where a value that a stage takes comes from. A tuple, because every stage looks some up.

    Attributes:
        giver: The kind that gives it; None for what the block itself is given.
        name: Of the value.
    """

    giver: StageKind | None
    name: str


@dataclass(frozen=True, slots=True)
class DataFlow:
    """The rows of one block, each value that a row takes connected with the row that gives it.

    Attributes:
        kinds: The rows that the block has, in order.
        sources: For each row, where each value that it takes comes from; None for a value that no row of this
            block gives, and that is left out.
        takes: For each row what it takes in this block.
        takers: For each source the rows that take it, in order.
        output: What the block returns.
        taken: For each row the tensors that it takes, each with where it comes from.
        given: The same of the tensors that it gives.
        recalled: For each row with ``own_backward`` what its backward takes besides gradients.
        recallers: For each source the rows whose backward takes it so.
        once: Transfers that do not run again in a recomputed block: those that run forward only, whose result
            is kept, and those of whose result the rest needs the shape alone.
    """

    kinds: tuple[StageKind, ...]
    sources: Mapping[StageKind, tuple[Source | None, ...]]
    takes: Mapping[StageKind, tuple[Value, ...]]
    takers: Mapping[Source, tuple[StageKind, ...]]
    output: Source
    taken: Mapping[StageKind, tuple[tuple[Value, Source], ...]]
    given: Mapping[StageKind, tuple[tuple[Value, Source], ...]]
    recalled: Mapping[StageKind, tuple[tuple[Value, Source], ...]]
    recallers: Mapping[Source, tuple[StageKind, ...]]
    once: frozenset[StageKind]

    def is_restored(self, kind: StageKind) -> bool:
        """Whether other rows give back what stages of this kind have not kept for their backward."""
        return any(row.restores is kind for row in self.kinds)


@functools.lru_cache(maxsize=512)
def data_flow(features: BlockFeatures) -> DataFlow:
    """The rows of a block with these features."""
    rows = list(MOE_BLOCK)
    for kind in features.added:
        assert kind.after is not None, f"{kind} does not say which row it follows"
        place = rows.index(ADD_NORM if kind.after is ATTENTION else kind.after) + 1
        while place < len(rows) and rows[place].after is kind.after:
            place += 1
        rows.insert(place, kind)
    if features.ring:
        place = rows.index(ATTEND)
        rows[place : place + 1] = ring_rows(features.ring_ranks)
    kinds = tuple(kind for kind in rows if features.has(kind.feature) and kind not in STEPPED)

    def of_block(
        usual: tuple[Value, ...], instead: tuple[str, tuple[Value, ...]] | None
    ) -> tuple[Value, ...]:
        return usual if instead is None or not features.has(instead[0]) else instead[1]

    takes = {kind: of_block(kind.takes, kind.takes_with) for kind in kinds}
    gives = {kind: of_block(kind.gives, kind.gives_with) for kind in kinds}
    latest: dict[str, Source] = {HIDDEN_STATES.name: Source(None, HIDDEN_STATES.name)}
    sources: dict[StageKind, tuple[Source | None, ...]] = {}
    takers: dict[Source, tuple[StageKind, ...]] = {}
    for kind in kinds:
        sources[kind] = tuple(latest.get(value.name) for value in takes[kind])
        for source in sources[kind]:
            if source is not None:
                takers[source] = (*takers.get(source, ()), kind)
        latest |= {value.name: Source(kind, value.name) for value in gives[kind]}
    taken = {
        kind: tuple(
            (value, source)
            for value, source in zip(takes[kind], sources[kind], strict=True)
            if source is not None and value.layout is not Layout.STATE
        )
        for kind in kinds
    }
    given = {
        kind: tuple(
            (value, Source(kind, value.name)) for value in gives[kind] if value.layout is not Layout.STATE
        )
        for kind in kinds
    }
    restorers = {kind.restores: kind for kind in kinds if kind.restores is not None}
    recalled = {
        kind: given[restorers[kind]]
        if kind in restorers
        else tuple(one for one in taken[kind] if one[0].layout is Layout.BLOCK)
        for kind in kinds
        if kind.own_backward
    }
    recallers: dict[Source, tuple[StageKind, ...]] = {}
    for kind, values in recalled.items():
        for _, source in values:
            recallers[source] = (*recallers.get(source, ()), kind)
    once = frozenset(
        kind
        for kind in kinds
        if not kind.is_differentiated
        or (
            kind.scope is Scope.CHUNK
            and not kind.lane.computes
            and all(
                value in taker.by_shape and features.has(taker.by_shape_if) and taker.scope is Scope.CHUNK
                for value, source in given[kind]
                for taker in takers.get(source, ())
            )
        )
    )
    output = latest[HIDDEN_STATES.name]
    return DataFlow(kinds, sources, takes, takers, output, taken, given, recalled, recallers, once)


def is_whole(kind: StageKind, features: BlockFeatures, *, whole_attention: bool) -> bool:
    """Whether a stage of this kind is of the whole sequence rather than of a chunk."""
    if kind.scope is Scope.EITHER:
        return whole_attention or not features.has(kind.chunked_by)
    return kind.scope is Scope.WHOLE
