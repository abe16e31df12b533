"""Which row of a block takes what from which: the table of kinds, with what a block contains.

The checker, the issue order, the planner and the runtime all read it from here.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ampipe.schedule.block_rows import rows
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.kinds import HIDDEN_STATES
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
    takers: Mapping[Source, tuple[StageKind, ...]]
    output: Source
    taken: Mapping[StageKind, tuple[tuple[Value, Source], ...]]
    given: Mapping[StageKind, tuple[tuple[Value, Source], ...]]
    recalled: Mapping[StageKind, tuple[tuple[Value, Source], ...]]
    recallers: Mapping[Source, tuple[StageKind, ...]]
    once: frozenset[StageKind]

    def is_restored(self, kind: StageKind) -> bool:
        """Whether other rows give back what stages of this kind have not kept for their backward."""
        return any(row.restores == kind for row in self.kinds)


@functools.lru_cache(maxsize=512)
def data_flow(features: BlockFeatures) -> DataFlow:
    """The rows of a block with these features."""
    kinds = rows(features)
    latest: dict[str, Source] = {HIDDEN_STATES.name: Source(None, HIDDEN_STATES.name)}
    sources: dict[StageKind, tuple[Source | None, ...]] = {}
    takers: dict[Source, tuple[StageKind, ...]] = {}
    for kind in kinds:
        sources[kind] = tuple(latest.get(value.name) for value in kind.takes)
        for source in sources[kind]:
            if source is not None:
                takers[source] = (*takers.get(source, ()), kind)
        latest |= {value.name: Source(kind, value.name) for value in kind.gives}
    taken = {
        kind: tuple(
            (value, source)
            for value, source in zip(kind.takes, sources[kind], strict=True)
            if source is not None and value.layout is not Layout.STATE
        )
        for kind in kinds
    }
    given = {
        kind: tuple(
            (value, Source(kind, value.name)) for value in kind.gives if value.layout is not Layout.STATE
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
    output = latest[HIDDEN_STATES.name]
    once = _once(kinds, takers, given)
    return DataFlow(kinds, sources, takers, output, taken, given, recalled, recallers, once)


def _once(
    kinds: Sequence[StageKind],
    takers: Mapping[Source, Sequence[StageKind]],
    given: Mapping[StageKind, Sequence[tuple[Value, Source]]],
) -> frozenset[StageKind]:
    """:attr:`DataFlow.once`, from the last row to the first: what runs again takes what it took."""
    found: set[StageKind] = set()
    for kind in reversed(kinds):
        by_shape = all(
            value in taker.by_shape and taker.scope is Scope.CHUNK and (taker.lane.computes or taker in found)
            for value, source in given[kind]
            for taker in takers.get(source, ())
        )
        is_transfer = kind.scope is Scope.CHUNK and not kind.lane.computes
        if not kind.is_differentiated or (is_transfer and by_shape):
            found.add(kind)
    return frozenset(found)


def is_whole(kind: StageKind, *, whole_attention: bool) -> bool:
    """Whether a stage of this row of a block is of the whole sequence rather than of a chunk."""
    return whole_attention if kind.scope is Scope.EITHER else kind.scope is Scope.WHOLE
