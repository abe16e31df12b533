"""Which stage waits for which: the rows of a block, connected by the values that they take.

The checker, the issue order, the planner and the runtime all read it from here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.kinds import (
    EXPERT,
    FEED_FORWARD,
    HIDDEN_STATES,
    LOAD,
    LOAD_TOKENS,
    REDUCE_EXPERTS,
    STORE,
    STORE_TOKENS,
    rows,
)
from megatron_ampipe.schedule.program import Schedule, Stage
from megatron_ampipe.schedule.stage_kind import Direction, Layout, Scope, StageKind, Value


class Source(NamedTuple):
    """Where a value that a stage takes comes from. A tuple, because every stage looks some up."""

    giver: StageKind | None
    """The kind that gives it; None for what the block itself is given."""
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
    once = _once(kinds, takers, taken, given)
    return DataFlow(kinds, sources, takers, output, taken, given, recalled, recallers, once)


def _once(
    kinds: Sequence[StageKind],
    takers: Mapping[Source, Sequence[StageKind]],
    taken: Mapping[StageKind, Sequence[tuple[Value, Source]]],
    given: Mapping[StageKind, Sequence[tuple[Value, Source]]],
) -> frozenset[StageKind]:
    """:attr:`DataFlow.once`, from the last row to the first: what runs again takes what it took."""
    found: set[StageKind] = set()
    for kind in reversed(kinds):
        by_shape = all(
            value.by_shape and taker.scope is Scope.CHUNK and (taker.lane.computes or taker in found)
            for _, given_source in given[kind]
            for taker in takers.get(given_source, ())
            for value, source in taken[taker]
            if source == given_source
        )
        is_transfer = kind.scope is Scope.CHUNK and not kind.lane.computes
        if not kind.is_differentiated or (is_transfer and by_shape):
            found.add(kind)
    return frozenset(found)


def is_whole(kind: StageKind, *, whole_attention: bool) -> bool:
    """Whether a stage of this row of a block is of the whole sequence rather than of a chunk."""
    return whole_attention if kind.scope is Scope.EITHER else kind.scope is Scope.WHOLE


def dependencies(
    layers: Sequence[BlockFeatures],
    *,
    degree: int,
    whole_attention: bool,
    direction: Direction,
    weights: Collection[StageKind] = (),
    joined: Collection[StageKind] = (),
) -> dict[Stage, tuple[Stage, ...]]:
    """Every stage of one direction with the stages that must have run before it.

    The backward graph is the forward graph with its edges reversed, without the kinds that run forward only.
    A recomputed block also runs its forward graph in it, without :attr:`DataFlow.once`. It begins when the
    second block above has ended, so that the tensors of two blocks at most are kept. Kinds that restore what
    another has not kept wait for one another as in a forward pass, and that kind's backward for them.
    Gradients of weights that are separate stages wait for the gradients of the inputs of the same stage, and
    nothing waits for them. Reductions of gradients wait for all of the block above, ``REDUCE_EXPERTS`` also
    for the feed-forward half of the same block. Copies to and from host memory keep pace with the stages
    whose tensors they copy.

    Args:
        layers: The features of consecutive blocks: each takes what the one before it returns.
        degree: Into how many parts the direction divides the sequence.
        whole_attention: Attention is of the whole sequence.
        direction: Of which pass.
        weights: Kinds of weight gradients that are separate stages (``kinds.WEIGHTS``).
        joined: Those of them, and other kinds, that are of the whole sequence.
    """
    forward: dict[Stage, tuple[Stage, ...]] = {}
    for layer in range(len(layers)):
        forward |= _forward(
            layers, degree=degree, whole_attention=whole_attention, direction=direction, layer=layer
        )
    if direction is Direction.FORWARD:
        return _with_copies_in_time(
            {
                stage: needed
                for stage, needed in forward.items()
                if direction in stage.kind.directions
                and not (layers[stage.layer].recomputed and _only_adds_gradients(stage.kind))
            },
            direction,
        )
    restoring = {
        stage: [one for one in needed if one.kind.restores is not None]
        for stage, needed in forward.items()
        if stage.kind.restores is not None
    }
    forward = {stage: needed for stage, needed in forward.items() if stage not in restoring}
    backward: dict[Stage, list[Stage]] = {
        stage: [] for stage in forward if direction in stage.kind.directions
    }
    for stage, needed in forward.items():
        for earlier in needed:
            # An order among stages of one kind (route after route) carries no data, so it has no reverse.
            if stage in backward and earlier in backward and earlier.kind != stage.kind:
                backward[earlier].append(stage)
    backward |= _weights(backward, {kind.weights_of: kind for kind in weights}, joined)
    found = backward | _again(forward, backward, layers)
    _add_needs_of_reductions(found)
    of_layer: dict[int, list[Stage]] = {}
    for stage in backward if restoring else ():
        of_layer.setdefault(stage.layer, []).append(stage)
    for stage, waits in restoring.items():
        restored = stage.kind.restores
        assert restored is not None
        for one in of_layer[stage.layer]:
            if one.kind == restored and stage.chunk in (None, one.chunk):
                found[one].append(stage)
            # What is restored of two steps is in memory at most.
            if one.kind.step_of == restored.step_of is not None and one.kind.step == restored.step + 2:
                waits.append(one)
    return _with_copies_in_time(
        {stage: tuple(needed) for stage, needed in (found | restoring).items()}, direction
    )


def _weights(
    backward: Iterable[Stage],
    kind_of: Mapping[StageKind | None, StageKind],
    joined: Collection[StageKind],
) -> dict[Stage, list[Stage]]:
    """The stages of weight gradients: each needs what differentiates the inputs of the same linear layers."""
    found: dict[Stage, list[Stage]] = {}
    for stage in backward:
        if stage.kind in kind_of:
            kind = kind_of[stage.kind]
            chunk = None if kind in joined else stage.chunk
            found.setdefault(Stage(kind, chunk, stage.layer), []).append(stage)
    return found


def _again(
    forward: Mapping[Stage, Sequence[Stage]],
    backward: Mapping[Stage, list[Stage]],
    layers: Sequence[BlockFeatures],
) -> dict[Stage, list[Stage]]:
    """The stages that run again with what they need; the backward stages get to need them."""
    again = {
        stage: Stage(stage.kind, stage.chunk, stage.layer, again=True)
        for stage in backward
        if stage in forward
        and layers[stage.layer].recomputed
        and stage.kind not in data_flow(layers[stage.layer]).once
    }
    last = _last_of_layers(backward) if again else {}
    found = {}
    for stage, repeated in again.items():
        needed = [again[one] for one in forward[stage] if one in again and one.layer == stage.layer]
        found[repeated] = needed or last.get(stage.layer + 2, [])
        backward[stage].append(repeated)
    return found


def _add_needs_of_reductions(backward: dict[Stage, list[Stage]]) -> None:
    """What is of parameters waits for the gradients of parameters that it reduces.

    Those of all of the block above; blocks end in the order of the pass. ``REDUCE_EXPERTS`` also for those of
    the feed-forward half of the same block.
    """
    waiting = [stage for stage in backward if stage.kind.of_parameters]
    last = _last_of_layers(backward) if waiting else {}
    halves: dict[int, list[Stage]] = {}
    for stage in backward if waiting else ():
        if is_of_feed_forward(stage):
            halves.setdefault(stage.layer, []).append(stage)
    for stage in waiting:
        backward[stage] += last.get(stage.layer + 1, [])
        if stage.kind == REDUCE_EXPERTS:
            backward[stage] += halves.get(stage.layer, [])


def is_of_feed_forward(stage: Stage) -> bool:
    """Whether a stage of a backward pass computes gradients of parameters of the feed-forward half."""
    return (stage.kind.weights_of or stage.kind) in FEED_FORWARD and not stage.again


def _only_adds_gradients(kind: StageKind) -> bool:
    """Whether the stage has no use in a pass that keeps nothing for the backward pass."""
    return bool(kind.gives) and all(value.layout is Layout.SCALAR for value in kind.gives)


def _last_of_layers(needs: Mapping[Stage, Sequence[Stage]]) -> dict[int, list[Stage]]:
    """For each block the stages that no other stage of the block waits for, without those of parameters."""
    awaited = {one for stage, needed in needs.items() for one in needed if one.layer == stage.layer}
    found: dict[int, list[Stage]] = {}
    for stage in needs:
        if stage not in awaited and not stage.kind.of_parameters:
            found.setdefault(stage.layer, []).append(stage)
    return found


def needs_of(
    schedule: Schedule, layers: Sequence[BlockFeatures], direction: Direction
) -> dict[Stage, tuple[Stage, ...]]:
    """:func:`dependencies` of one direction of a schedule."""
    return dependencies(
        layers,
        degree=schedule.degree_of(direction),
        whole_attention=schedule.whole_attention,
        direction=direction,
        weights=schedule.backward.weights,
        joined=schedule.backward.whole,
    )


def _forward(
    layers: Sequence[BlockFeatures],
    *,
    degree: int,
    whole_attention: bool,
    direction: Direction,
    layer: int,
) -> dict[Stage, tuple[Stage, ...]]:
    """One layer of the forward graph; for the backward pass with the stages that restore."""
    flow = data_flow(layers[layer])
    # Chunks differ in what is restored, and so in where that takes its values from.
    of_chunk = [data_flow(layers[layer].of_chunk(chunk, degree)) for chunk in range(degree)]

    def stages_of(kind: StageKind) -> list[int | None]:
        whole = is_whole(kind, whole_attention=whole_attention)
        return [None] if whole else list(range(degree))

    def givers(kind: StageKind, chunk: int | None) -> Iterable[Stage]:
        sources = (flow if chunk is None else of_chunk[chunk]).sources[kind]
        for value, source in zip(kind.takes, sources, strict=True):
            if source is None:
                continue
            giver, of_layer = (source.giver, layer)
            if giver is None:
                # The first layer takes what the schedule is given.
                if not layer:
                    continue
                giver, of_layer = data_flow(layers[layer - 1]).output.giver, layer - 1
            assert giver is not None
            for given in stages_of(giver):
                if given is None or chunk is None or given == chunk:
                    yield Stage(giver, given, of_layer)
                elif value.layout is Layout.KEYS and given < chunk:
                    # Attention is causal: a chunk sees the keys of earlier chunks and its own.
                    yield Stage(giver, given, of_layer)

    graph: dict[Stage, tuple[Stage, ...]] = {}
    for kind in flow.kinds:
        for chunk in stages_of(kind):
            if chunk is not None and kind not in of_chunk[chunk].sources:
                continue
            needed = dict.fromkeys(givers(kind, chunk))
            if chunk and kind.ordered:
                needed[Stage(kind, chunk - 1, layer)] = None
            graph[Stage(kind, chunk, layer)] = tuple(needed)
    return graph


AHEAD = 2
"""Of how many chunks tensors are loaded before the experts need them, or wait to be stored after that."""


def _with_copies_in_time(
    needs: Mapping[Stage, tuple[Stage, ...]], direction: Direction
) -> dict[Stage, tuple[Stage, ...]]:
    """The dependencies of a pass, with those that bound how much is held on the device.

    Data alone would allow all tensors to be loaded when the backward pass begins, and all to wait for their
    copy until the forward pass ends: nothing would be gained.

    Forward, the experts of a chunk wait until what was kept of the chunk :data:`AHEAD` before it is stored;
    backward, a load waits until the experts of the chunk that many before its own are differentiated.
    """
    found = dict(needs)
    if not any(stage.kind.copies for stage in needs):
        return found
    forward = direction is Direction.FORWARD
    experts = [stage for stage in needs if stage.kind == EXPERT and not stage.again]
    experts.sort(key=lambda stage: (stage.layer, stage.chunk), reverse=not forward)
    for before, after in zip(experts, experts[AHEAD:], strict=False):
        for kind in (STORE_TOKENS, STORE) if forward else (LOAD_TOKENS, LOAD):
            copy = replace(before if forward else after, kind=kind)
            if copy in found:
                waiting, awaited = (after, copy) if forward else (copy, before)
                found[waiting] = (*found[waiting], awaited)
    return found
