"""The rows of a block: which kinds of stages it has, in order, and what of them depends on the block.

A row takes what rows above it give. Each is a kind of :mod:`.kinds`, on the lane and of the scope that it
has in this block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_ampipe.schedule import kinds
from megatron_ampipe.schedule.derived_kinds import ring_rows
from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.stage_kind import (
    COMM_LANE,
    INTRA,
    INTRA_LANE,
    TENSOR_INTRA_LANE,
    TENSOR_LANE,
    Scope,
    StageKind,
)


def rows(block: BlockFeatures) -> tuple[StageKind, ...]:
    """The rows of a block with these features."""
    found = [*_attention(block), *([kinds.MLP] if block.dense else _experts(block))]
    if block.reduces:
        found.append(kinds.REDUCE)
    if block.reduces_experts:
        found.append(kinds.REDUCE_EXPERTS)
    for kind in block.added:
        assert kind.after is not None, f"{kind} does not say which row it follows"
        follows = kinds.ADD_NORM if kind.after == kinds.ATTENTION and block.scatters_rows else kind.after
        if follows not in found:
            continue
        place = found.index(follows) + 1
        while place < len(found) and found[place].after == kind.after:
            place += 1
        found.insert(place, kind)
    return tuple(found)


def _attention(block: BlockFeatures) -> Iterator[StageKind]:
    """From the input norm to the norm before the router."""
    lane = TENSOR_INTRA_LANE if block.row_links == INTRA_LANE.resource else TENSOR_LANE
    scope = Scope.EITHER if block.chunked_qkv else Scope.WHOLE
    qkv = replace(kinds.QKV, scope=scope)
    if block.ring:
        qkv = replace(qkv, gives=(kinds.QUERY, kinds.RING_KEY, kinds.RING_VALUE))
    if block.gathers_rows:
        yield replace(kinds.INPUT_NORM, scope=scope)
        yield replace(kinds.GATHER_ROWS, scope=scope, lane=lane)
        qkv = replace(qkv, takes=(kinds.GATHERED,))
    yield qkv
    # A recomputed block gathers again anyway.
    if block.gathers_rows and not block.recomputed:
        yield replace(kinds.REGATHER_ROWS, scope=scope, lane=lane)
    if block.ring:
        yield from ring_rows(block.ring_ranks)
    if block.scatters_rows:
        takes = tuple(value for value in kinds.ATTENTION.takes if value != kinds.HIDDEN_STATES)
        yield replace(kinds.ATTENTION, takes=takes, gives=(kinds.PARTIAL,))
        yield kinds.SCATTER_ROWS.on(lane)
        yield kinds.ADD_NORM
    else:
        yield kinds.ATTENTION


def _experts(block: BlockFeatures) -> Iterator[StageKind]:
    """From the router to what the block returns, and what the backward pass restores."""
    # Ranks that share an expert use the links of their node, where tokens leave it.
    near = INTRA_LANE if block.nodes or block.gathers == INTRA else COMM_LANE
    if block.chooses:
        yield kinds.CHOOSE
    yield replace(kinds.ROUTE, ordered=block.ordered_routing)
    if block.condensed:
        yield kinds.CONDENSE
    if block.losses:
        yield kinds.LOSSES
    if block.shared:
        yield kinds.SHARED
    if not block.flex:
        yield kinds.COUNTS
    yield kinds.DISPATCH
    if block.nodes:
        yield kinds.SPREAD
    if block.offload_tokens:
        yield kinds.STORE_TOKENS
    if block.gathers:
        yield kinds.GATHER.on(near)
    yield kinds.EXPERT
    if block.offload:
        yield kinds.STORE
    if block.gathers:
        yield kinds.SCATTER.on(near)
    if block.nodes:
        yield kinds.COLLECT
    yield kinds.COMBINE
    if block.condensed:
        yield kinds.EXPAND
    # Latent experts are projected here, so the backward needs what they return.
    yield replace(kinds.MERGE, by_shape=()) if block.latent else kinds.MERGE
    if block.redispatch:
        yield kinds.REPERMUTE
        yield kinds.REDISPATCH
        if block.nodes:
            yield kinds.RESPREAD
    if block.offload_tokens:
        yield kinds.LOAD_TOKENS
    if block.gathers and (block.redispatch or block.offload_tokens):
        yield kinds.REGATHER.on(near)
    if block.rebuild:
        yield kinds.REBUILD
    if block.resort:
        yield kinds.RESORT
    if block.offload:
        yield kinds.LOAD
