"""Which stage waits for which: the data flow of a block, derived from the table of kinds.

The checker, the issue order, the planner and the runtime all read it from here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ampipe.schedule.copy_pace import with_copies_in_time
from megatron_ampipe.schedule.kinds import (
    ADD_NORM,
    ATTEND,
    ATTENTION,
    HIDDEN_STATES,
    INTRA,
    INTRA_LANE,
    MOE_BLOCK,
    STEPPED,
    Direction,
    Layout,
    Scope,
    StageKind,
    Value,
    ring_rows,
)
from megatron_ampipe.schedule.types import Schedule, Stage


@dataclass(frozen=True, slots=True)
class BlockFeatures:
    """What a block contains besides attention.

    Attributes:
        dense: An MLP in place of routed experts.
        losses: The router has auxiliary or z losses.
        shared: There are shared experts.
        ordered_routing: Chunks must be routed from first to last, because an expert's capacity that
            one chunk uses is gone for the next.
        chooses: The router chooses for all chunks at once.
        chunked_qkv: A chunk's queries, keys and values need the chunk's own rows alone, so that they
            can be projected chunk by chunk. Attention as a whole still takes them as a whole.
        recomputed: The forward pass keeps only what the block is given, and its stages run again in the
            backward pass (:attr:`Stage.again <.types.Stage.again>`).
        restored: What is not kept for the backward pass of the experts, and is restored in it, as names of
            :attr:`rebuild`, :attr:`redispatch`, :attr:`offload` and :attr:`offload_tokens`: of each chunk of
            the backward pass, or once for all.
        condensed: Similar tokens are sent once.
        flex: The dispatcher counts the tokens itself, in the same call that sends them.
        reduces: Its backward pass reduces gradients of parameters over data-parallel ranks, as a stage.
        nodes: Tokens are sent between nodes and then handed on inside one.
        gathers: The lane in which ranks that share an expert gather its tokens, and reduce and scatter what
            it gives; empty where experts are whole, or the dispatch gathers. With :attr:`nodes`, it is
            always that of the node.
        row_links: The resource (``Lane.resource``) over which tensor-parallel ranks add and scatter the rows
            that attention projects; empty where the projection does that itself.
        gathers_rows: With :attr:`row_links`, these ranks also gather what attention is given as a stage.
        ring_ranks: Context-parallel ranks that pass keys on to one another; 1 where none do.
        latent: ``merge`` projects what the experts return, so its backward needs their values.
        added: Kinds of stages beyond the table's; each names the row that it follows.
    """

    dense: bool = False
    losses: bool = False
    shared: bool = False
    ordered_routing: bool = False
    chooses: bool = False
    chunked_qkv: bool = False
    recomputed: bool = False
    restored: tuple[tuple[str, ...], ...] = ()
    condensed: bool = False
    flex: bool = False
    reduces: bool = False
    nodes: bool = False
    gathers: str = ""
    row_links: str = ""
    gathers_rows: bool = False
    ring_ranks: int = 1
    latent: bool = False
    added: tuple[StageKind, ...] = ()

    @property
    def experts(self) -> bool:
        """Whether tokens are routed to experts."""
        return not self.dense

    @property
    def counts(self) -> bool:
        """Whether ranks tell one another how many tokens they will send."""
        return self.experts and not self.flex

    @property
    def ring(self) -> bool:
        """Whether ranks pass keys on to one another."""
        return self.ring_ranks > 1

    @property
    def rebuild(self) -> bool:
        """Whether experts compute their inner tensors once more in the backward pass, of any chunk."""
        return any("rebuild" in names for names in self.restored)

    @property
    def redispatch(self) -> bool:
        """Whether tokens are sent once more in the backward pass, of any chunk."""
        return any("redispatch" in names for names in self.restored)

    @property
    def offload(self) -> bool:
        """Whether inner tensors of experts wait in host memory for the backward pass, of any chunk."""
        return any("offload" in names for names in self.restored)

    @property
    def offload_tokens(self) -> bool:
        """Whether what has arrived waits in host memory, of any chunk."""
        return any("offload_tokens" in names for names in self.restored)

    @property
    def resort(self) -> bool:
        """Whether inner tensors come from host memory, and what arrives from another rank, of any chunk."""
        return any({"offload", "redispatch"} <= set(names) for names in self.restored)

    def of_chunk(self, chunk: int, degree: int | None = None) -> BlockFeatures:
        """With what is restored of one chunk.

        Args:
            chunk: Its index.
            degree: Of the pass that it is a chunk of; of the backward pass if None. A chunk of a forward pass
                with fewer chunks has what is restored of any of its parts.
        """
        count = len(self.restored)
        if count <= 1:
            return self
        degree = count if degree is None else degree
        first, end = chunk * count // degree, -(-(chunk + 1) * count // degree)
        return replace(self, restored=self.restored[first:end])

    @property
    def respread(self) -> bool:
        """Whether tokens that are sent once more take two hops."""
        return self.nodes and self.redispatch

    @property
    def gathers_intra(self) -> bool:
        """Whether ranks that share an expert gather on the lane of their node, because tokens leave it."""
        return bool(self.gathers) and (self.nodes or self.gathers == INTRA)

    @property
    def gathers_comm(self) -> bool:
        """Whether they gather on the lane of the other transfers, which use the same links."""
        return bool(self.gathers) and not self.gathers_intra

    @property
    def regathers_intra(self) -> bool:
        """Whether they gather once more in the backward pass, on the lane of their node."""
        return self.gathers_intra and (self.redispatch or self.offload_tokens)

    @property
    def regathers_comm(self) -> bool:
        """Whether they do so on the lane of the other transfers."""
        return self.gathers_comm and (self.redispatch or self.offload_tokens)

    @property
    def scatters_rows(self) -> bool:
        """Whether tensor-parallel ranks add and scatter what attention projects, as a stage."""
        return bool(self.row_links)

    @property
    def scatters_rows_intra(self) -> bool:
        """Whether they do so over links that the transfers between nodes do not use."""
        return self.row_links == INTRA_LANE.resource

    @property
    def scatters_rows_comm(self) -> bool:
        """Whether they do so over the links of the other transfers."""
        return self.scatters_rows and not self.scatters_rows_intra

    @property
    def gathers_rows_intra(self) -> bool:
        """Whether they gather over such links."""
        return self.gathers_rows and self.scatters_rows_intra

    @property
    def gathers_rows_comm(self) -> bool:
        """Whether they gather over the links of the other transfers."""
        return self.gathers_rows and self.scatters_rows_comm

    @property
    def regathers_rows_intra(self) -> bool:
        """Whether they do so once more in the backward pass; a recomputed block gathers again anyway."""
        return self.gathers_rows_intra and not self.recomputed

    @property
    def regathers_rows_comm(self) -> bool:
        """The same over the links of the other transfers."""
        return self.gathers_rows_comm and not self.recomputed

    @property
    def merges_sums(self) -> bool:
        """Whether ``merge`` only adds what the experts return."""
        return not self.latent

    def has(self, field: str | None) -> bool:
        """Whether the field that a row names is set; True for a row that names none."""
        return field is None or bool(getattr(self, field))


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
    nothing waits for them. A reduction of gradients waits for all of the block above. Copies to and from host
    memory keep pace with the stages whose tensors they copy (:mod:`.copy_pace`).

    Args:
        layers: The features of consecutive blocks that share a schedule: each takes what the one before it
            returns.
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
        return with_copies_in_time(
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
    of_kind: dict[StageKind, list[Stage]] = {}
    for stage in backward if restoring else ():
        of_kind.setdefault(stage.kind, []).append(stage)
    for stage, waits in restoring.items():
        assert stage.kind.restores is not None
        for one in of_kind[stage.kind.restores]:
            if one.layer == stage.layer and stage.chunk in (None, one.chunk):
                found[one].append(stage)
        if stage.kind.follows is not None:
            waits += [one for one in of_kind.get(stage.kind.follows, ()) if one.layer == stage.layer]
    return with_copies_in_time(
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
    """What is of parameters waits for the end of the block above; blocks end in the order of the pass."""
    waiting = [stage for stage in backward if stage.kind.of_parameters]
    last = _last_of_layers(backward) if waiting else {}
    for stage in waiting:
        backward[stage] += last.get(stage.layer + 1, [])


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
    features = layers[layer]
    flow = data_flow(features)
    # Chunks differ in what is restored, and so in where that takes its values from.
    of_chunk = [data_flow(features.of_chunk(chunk, degree)) for chunk in range(degree)]

    def stages_of(kind: StageKind, of_layer: int = layer) -> list[int | None]:
        whole = is_whole(kind, layers[of_layer], whole_attention=whole_attention)
        return [None] if whole else list(range(degree))

    def givers(kind: StageKind, chunk: int | None) -> Iterable[Stage]:
        sources = (flow if chunk is None else of_chunk[chunk]).sources[kind]
        for value, source in zip(flow.takes[kind], sources, strict=True):
            if source is None:
                continue
            giver, of_layer = (source.giver, layer)
            if giver is None:
                # The first layer takes what the schedule is given.
                if not layer:
                    continue
                giver, of_layer = data_flow(layers[layer - 1]).output.giver, layer - 1
            assert giver is not None
            for given in stages_of(giver, of_layer):
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
            if chunk and kind.ordered_by is not None and features.has(kind.ordered_by):
                needed[Stage(kind, chunk - 1, layer)] = None
            graph[Stage(kind, chunk, layer)] = tuple(needed)
    return graph
