"""The dependencies between stages: the rows of a block, connected by the values that they give and take.

The checker, the issue order, the planner and the runtime all use this one data flow.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.kinds import HIDDEN_STATES
from megatron_ampipe.schedule.program import Schedule, Stage
from megatron_ampipe.schedule.stage_kind import Direction, Layout, Scope, StageKind, Value


class Source(NamedTuple):
    """Where a value comes from. A tuple, because it is looked up for every stage."""

    giver: StageKind | None
    """The kind that gives the value; None for the input of the block."""
    name: str


type _Values = Mapping[StageKind, Sequence[tuple[Value, Source]]]
type _Needs = Mapping[Stage, Sequence[Stage]]


@dataclass(frozen=True, slots=True)
class DataFlow:
    """The rows of one block, with the source of each value that a row takes.

    Attributes:
        kinds: The rows that the block has, in order.
        sources: For each row, the values that it takes, each with its source.
        takers: For each source, the rows that take its value, in order.
        output: The source of the block's output.
        taken: For each row, the tensors that it takes, each with its source.
        given: For each row, the tensors that it gives, each with its source.
        recalled: For each row with ``own_backward``, the tensors that its backward takes with the gradients.
        not_recomputed: Kinds that do not run again in a recomputed block: those that run forward only, whose
            results are kept, and transfers of whose outputs later stages only need the shape.
    """

    kinds: tuple[StageKind, ...]
    sources: _Values
    takers: Mapping[Source, Sequence[StageKind]]
    output: Source
    taken: _Values
    given: _Values
    recalled: _Values
    not_recomputed: frozenset[StageKind]


@functools.lru_cache(maxsize=512)
def data_flow(features: BlockFeatures) -> DataFlow:
    """The rows of a block with these features."""
    rows = kinds.rows(features)
    latest = {HIDDEN_STATES.name: Source(None, HIDDEN_STATES.name)}
    sources, given = {}, {}
    takers: dict[Source, list[StageKind]] = {}
    for kind in rows:
        sources[kind] = [(value, latest[value.name]) for value in kind.takes if value.name in latest]
        for _, source in sources[kind]:
            takers.setdefault(source, []).append(kind)
        given[kind] = _tensors((value, Source(kind, value.name)) for value in kind.gives)
        latest |= {value.name: Source(kind, value.name) for value in kind.gives}
    taken = {kind: _tensors(values) for kind, values in sources.items()}
    recalled = _recalled(rows, taken, given)
    not_recomputed = _not_recomputed(rows, takers, taken, given)
    return DataFlow(rows, sources, takers, latest[HIDDEN_STATES.name], taken, given, recalled, not_recomputed)


def _tensors(values: Iterable[tuple[Value, Source]]) -> list[tuple[Value, Source]]:
    return [(value, source) for value, source in values if value.layout is not Layout.STATE]


def _recalled(rows: Sequence[StageKind], taken: _Values, given: _Values) -> _Values:
    """:attr:`DataFlow.recalled`: the tensors of a block that a row takes, or that another row restores."""
    restorers = {kind.restores: kind for kind in rows if kind.restores is not None}
    recalled: dict[StageKind, Sequence[tuple[Value, Source]]] = {}
    for kind in rows:
        if not kind.own_backward:
            continue
        if kind in restorers:
            recalled[kind] = given[restorers[kind]]
        else:
            recalled[kind] = [
                (value, source) for value, source in taken[kind] if value.layout is Layout.BLOCK
            ]
    return recalled


def _not_recomputed(
    rows: Sequence[StageKind], takers: Mapping[Source, Sequence[StageKind]], taken: _Values, given: _Values
) -> frozenset[StageKind]:
    """:attr:`DataFlow.not_recomputed`, found from the last row to the first."""
    not_recomputed: set[StageKind] = set()

    def needs_values(taker: StageKind, taken_source: Source) -> bool:
        """Whether the recompute of a later row needs more than the shape of what it takes from a source."""
        if taker.scope is not Scope.CHUNK:
            return True
        if not taker.lane.computes and taker not in not_recomputed:
            return True
        return any(source == taken_source and not value.by_shape for value, source in taken[taker])

    for kind in reversed(rows):
        is_transfer = kind.scope is Scope.CHUNK and not kind.lane.computes
        sources = [source for _, source in given[kind]]
        only_shapes_are_needed = not any(
            needs_values(taker, source) for source in sources for taker in takers.get(source, ())
        )
        if not kind.is_differentiated or (is_transfer and only_shapes_are_needed):
            not_recomputed.add(kind)
    return frozenset(not_recomputed)


def is_whole(kind: StageKind, *, whole_attention: bool) -> bool:
    """Whether a stage of this row covers the whole sequence rather than a chunk."""
    return whole_attention if kind.scope is Scope.EITHER else kind.scope is Scope.WHOLE


def needs_of(
    schedule: Schedule, layers: Sequence[BlockFeatures], direction: Direction
) -> Mapping[Stage, tuple[Stage, ...]]:
    """Every stage of one direction, with the stages that must have run before it.

    The backward graph is the forward graph with reversed edges, without the kinds that run forward only. A
    recomputed block also runs its forward graph in it, except :attr:`DataFlow.not_recomputed`. This recompute
    begins when the second block above has ended, so that tensors of at most two blocks are kept. Kinds that
    restore activations depend on each other as in a forward pass; the backward that uses the activations
    waits for them. A separate weight-gradient stage waits for the input gradient of its stage; nothing waits
    for it. Gradient reductions wait for all of the block above; ``REDUCE_EXPERTS`` also waits for the
    feed-forward half of the same block. Copies to and from host memory keep pace with the stages whose
    tensors they copy.

    Args:
        schedule: Only two things of it count: whether attention covers the whole sequence, and which weight
            gradients are stages, per chunk or for the whole sequence.
        layers: The features of consecutive blocks; each takes the output of the block before it.
        direction: The pass.
    """
    weights = schedule.backward.weights
    return _needs(
        tuple(layers),
        direction,
        schedule.degree_of(direction),
        whole_attention=schedule.whole_attention,
        weights=weights,
        joined=weights & schedule.backward.whole,
    )


@functools.lru_cache(maxsize=64)
def _needs(
    layers: tuple[BlockFeatures, ...],
    direction: Direction,
    degree: int,
    *,
    whole_attention: bool,
    weights: frozenset[StageKind],
    joined: frozenset[StageKind],
) -> Mapping[Stage, tuple[Stage, ...]]:
    """:func:`needs_of`. Cached, because making, checking and simulating a schedule all ask for it."""
    whole_graph: dict[Stage, tuple[Stage, ...]] = {}
    for layer in range(len(layers)):
        whole_graph |= _forward(layers, layer, degree=degree, whole_attention=whole_attention)
    if direction is Direction.FORWARD:
        return _with_copies_in_time(_of_forward_pass(whole_graph, layers), direction)
    restoring = {stage: needed for stage, needed in whole_graph.items() if stage.kind.restores is not None}
    forward = {stage: needed for stage, needed in whole_graph.items() if stage not in restoring}
    backward = _reversed(forward)
    _add_weight_gradients(backward, weights=weights, joined=joined)
    backward |= _again(forward, backward, layers)
    _add_needs_of_reductions(backward)
    backward |= _needs_of_restoring(restoring, backward)
    needs = {stage: tuple(needed) for stage, needed in backward.items()}
    return _with_copies_in_time(needs, direction)


def _of_forward_pass(
    whole_graph: Mapping[Stage, tuple[Stage, ...]], layers: Sequence[BlockFeatures]
) -> dict[Stage, tuple[Stage, ...]]:
    """The part of the forward graph that runs in a forward pass."""
    needs = {}
    for stage, needed in whole_graph.items():
        # The losses only add gradients, which the recompute does.
        waits_for_recompute = stage.kind == kinds.LOSSES and layers[stage.layer].recomputed
        if Direction.FORWARD in stage.kind.directions and not waits_for_recompute:
            needs[stage] = needed
    return needs


def _reversed(forward: _Needs) -> dict[Stage, list[Stage]]:
    """The backward graph of the stages that have a backward."""
    backward: dict[Stage, list[Stage]] = {}
    for stage in forward:
        if Direction.BACKWARD in stage.kind.directions:
            backward[stage] = []
    for stage, needed in forward.items():
        for earlier in needed:
            # An order among stages of one kind (route after route) carries no data, so it has no reverse.
            if stage in backward and earlier in backward and earlier.kind != stage.kind:
                backward[earlier].append(stage)
    return backward


def _add_weight_gradients(
    backward: dict[Stage, list[Stage]], *, weights: frozenset[StageKind], joined: frozenset[StageKind]
) -> None:
    """Add the stages of these kinds of weight gradients, each after the stages of its input gradients."""
    kind_of_weights = {kind.weights_of: kind for kind in weights}
    for stage in list(backward):
        kind = kind_of_weights.get(stage.kind)
        if kind is not None:
            chunk = None if kind in joined else stage.chunk
            backward.setdefault(Stage(kind, chunk, stage.layer), []).append(stage)


def _needs_of_restoring(restoring: _Needs, backward: dict[Stage, list[Stage]]) -> dict[Stage, list[Stage]]:
    """The needs of stages that restore activations; the stages of ``backward`` that use these wait for them.

    ``restoring`` are these stages, with their dependencies in the forward graph.
    """
    by_kind: dict[tuple[int, StageKind], list[Stage]] = defaultdict(list)
    for stage in backward:
        if not stage.is_recompute:
            by_kind[stage.layer, stage.kind].append(stage)
    needs: dict[Stage, list[Stage]] = {}
    for stage, needed in restoring.items():
        restored = stage.kind.restores
        assert restored is not None
        needs[stage] = [other for other in needed if other.kind.restores is not None]
        for user in by_kind[stage.layer, restored]:
            if stage.chunk in (None, user.chunk):
                backward[user].append(stage)
        if restored.step_of is not None:
            # At most two steps have rebuilt tensors in memory.
            second_step_before = kinds.step_of(restored.step_of, restored.step + 2)
            needs[stage] += by_kind[stage.layer, second_step_before]
    return needs


def _again(
    forward: _Needs, backward: Mapping[Stage, list[Stage]], layers: Sequence[BlockFeatures]
) -> dict[Stage, list[Stage]]:
    """The stages that run again, with their dependencies; ``backward`` stages now also wait for them."""
    again: dict[Stage, Stage] = {}
    for stage in backward:
        features = layers[stage.layer]
        is_recomputed = features.recomputed and stage.kind not in data_flow(features).not_recomputed
        if stage in forward and is_recomputed:
            again[stage] = replace(stage, is_recompute=True)
    last = _last_of_layers(backward) if again else {}

    def needed_by(stage: Stage) -> Iterator[Stage]:
        for other in forward[stage]:
            if other.layer != stage.layer:
                continue
            if other in again:
                yield again[other]
            else:
                # A transfer that does not run again: its own inputs set state that is used here.
                yield from needed_by(other)

    needs = {}
    for stage, repeated in again.items():
        needed = list(dict.fromkeys(needed_by(stage)))
        needs[repeated] = needed or last.get(stage.layer + 2, [])
        backward[stage].append(repeated)
    return needs


def _add_needs_of_reductions(backward: dict[Stage, list[Stage]]) -> None:
    """Let each reduction wait for the gradients that it reduces."""
    waiting = [stage for stage in backward if stage.kind.of_parameters]
    if not waiting:
        return
    last = _last_of_layers(backward)
    halves = [stage for stage in backward if is_of_feed_forward(stage)]
    for stage in waiting:
        backward[stage] += last.get(stage.layer + 1, [])
        if stage.kind == kinds.REDUCE_EXPERTS:
            backward[stage] += [other for other in halves if other.layer == stage.layer]


def is_of_feed_forward(stage: Stage) -> bool:
    """Whether a stage of a backward pass computes parameter gradients of the feed-forward half."""
    return (stage.kind.weights_of or stage.kind) in kinds.FEED_FORWARD and not stage.is_recompute


def _last_of_layers(needs: _Needs) -> dict[int, list[Stage]]:
    """For each block, the stages that no other stage of the block waits for; reductions do not count."""
    awaited = {other for stage, needed in needs.items() for other in needed if other.layer == stage.layer}
    last: dict[int, list[Stage]] = {}
    for stage in needs:
        if stage not in awaited and not stage.kind.of_parameters:
            last.setdefault(stage.layer, []).append(stage)
    return last


def _forward(
    layers: Sequence[BlockFeatures], layer: int, *, degree: int, whole_attention: bool
) -> dict[Stage, tuple[Stage, ...]]:
    """The forward graph of one layer, including stages that rebuild activations in the backward pass."""
    flow = data_flow(layers[layer])
    # Chunks can rebuild different activations, and so have other sources.
    chunk_flows = [data_flow(layers[layer].of_chunk(chunk, degree)) for chunk in range(degree)]

    def chunks_of(kind: StageKind) -> Sequence[int | None]:
        return [None] if is_whole(kind, whole_attention=whole_attention) else range(degree)

    def givers(value: Value, source: Source, chunk: int | None) -> Iterator[Stage]:
        """The stages that give a value to a stage of a chunk."""
        giver, giver_layer = source.giver, layer
        if giver is None and layer > 0:
            giver, giver_layer = data_flow(layers[layer - 1]).output.giver, layer - 1
        if giver is None:
            # The first layer takes the input of the schedule.
            return
        for given_chunk in chunks_of(giver):
            if _takes_from(value, chunk, given_chunk):
                yield Stage(giver, given_chunk, giver_layer)

    graph: dict[Stage, tuple[Stage, ...]] = {}
    for kind in flow.kinds:
        for chunk in chunks_of(kind):
            sources = flow.sources if chunk is None else chunk_flows[chunk].sources
            if kind not in sources:
                continue
            needed: dict[Stage, None] = {}
            for value, source in sources[kind]:
                needed |= dict.fromkeys(givers(value, source, chunk))
            if chunk and kind.ordered:
                needed[Stage(kind, chunk - 1, layer)] = None
            graph[Stage(kind, chunk, layer)] = tuple(needed)
    return graph


def _takes_from(value: Value, chunk: int | None, given_chunk: int | None) -> bool:
    """Whether a stage of ``chunk`` takes the value that a stage of ``given_chunk`` gives; None for all."""
    if chunk is None or given_chunk is None or chunk == given_chunk:
        return True
    # Attention is causal: a chunk sees its own keys and those of earlier chunks.
    return value.layout is Layout.KEYS and given_chunk < chunk


AHEAD = 2
"""How many chunks before its use a load may begin, and for how many chunks a store may be late."""


def _with_copies_in_time(
    needs: Mapping[Stage, tuple[Stage, ...]], direction: Direction
) -> dict[Stage, tuple[Stage, ...]]:
    """Add the dependencies that bound the memory of offloaded tensors on the device.

    Forward, the experts of a chunk wait for the store of the chunk that is :data:`AHEAD` chunks earlier.
    Backward, the load of a chunk waits for the experts' backward of the chunk that is as many chunks earlier.
    """
    bounded = dict(needs)
    if not any(stage.kind.copies for stage in needs):
        return bounded
    forward = direction is Direction.FORWARD
    experts = [stage for stage in needs if stage.kind == kinds.EXPERT and not stage.is_recompute]
    experts.sort(key=lambda stage: (stage.layer, stage.chunk), reverse=not forward)
    for earlier, later in zip(experts, experts[AHEAD:], strict=False):
        if forward:
            stores = [replace(earlier, kind=kind) for kind in (kinds.STORE_TOKENS, kinds.STORE)]
            bounded[later] += tuple(store for store in stores if store in bounded)
        else:
            for kind in (kinds.LOAD_TOKENS, kinds.LOAD):
                load = replace(later, kind=kind)
                if load in bounded:
                    bounded[load] += (earlier,)
    return bounded
