"""Which stage needs which: the data flow of a block, forward and backward.

The one place that states it; the checker, the issue order and the executors all read it from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_ampipe.schedule.types import Direction, LaneOrder, Program, Schedule, Stage, StageKind


@dataclass(frozen=True, slots=True)
class BlockFeatures:
    """What a block contains besides attention and routed experts.

    Attributes:
        losses: The router has auxiliary or z losses.
        shared: There are shared experts.
        ordered_routing: Chunks must be routed from first to last, because an expert's capacity that
            one chunk uses is gone for the next.
        chunked_qkv: A chunk's queries, keys and values need the chunk's own rows alone, so that they
            can be projected chunk by chunk. Attention as a whole still takes them as a whole.
    """

    losses: bool = False
    shared: bool = False
    ordered_routing: bool = False
    chunked_qkv: bool = False


def dependencies(
    features: BlockFeatures, *, degree: int, whole_attention: bool, direction: Direction
) -> dict[Stage, tuple[Stage, ...]]:
    """Every stage of one direction with the stages that must have run before it.

    The backward graph is the forward graph with its edges reversed and without ``counts``.
    """
    forward = _forward(features, degree=degree, whole_attention=whole_attention)
    if direction is Direction.FORWARD:
        return {stage: tuple(needed) for stage, needed in forward.items()}
    backward: dict[Stage, list[Stage]] = {
        stage: [] for stage in forward if stage.kind is not StageKind.COUNTS
    }
    for stage, needed in forward.items():
        for earlier in needed:
            # An order among equals (route after route) carries no data, so it has no reverse.
            if stage in backward and earlier in backward and earlier.kind is not stage.kind:
                backward[earlier].append(stage)
    return {stage: tuple(needed) for stage, needed in backward.items()}


def restrict(schedule: Schedule, features: BlockFeatures) -> Schedule:
    """A schedule without the stages that a block of these features does not have.

    A pass without gradients has no losses: the order that was found for training serves it as well.
    """

    def program(direction: Direction) -> Program:
        needs = dependencies(
            features,
            degree=schedule.degree_of(direction),
            whole_attention=schedule.whole_attention,
            direction=direction,
        )
        return Program(
            tuple(
                LaneOrder(order.lane, tuple(stage for stage in order.stages if stage in needs))
                for order in schedule.program(direction).lanes
            )
        )

    return replace(schedule, forward=program(Direction.FORWARD), backward=program(Direction.BACKWARD))


def _forward(features: BlockFeatures, *, degree: int, whole_attention: bool) -> dict[Stage, list[Stage]]:
    chunked_qkv = features.chunked_qkv and not whole_attention
    projections = (
        [Stage(StageKind.QKV, chunk) for chunk in range(degree)] if chunked_qkv else [Stage(StageKind.QKV)]
    )
    graph: dict[Stage, list[Stage]] = {stage: [] for stage in projections}
    routes = [Stage(StageKind.ROUTE, chunk) for chunk in range(degree)]
    for chunk, route in enumerate(routes):
        attention = Stage(StageKind.ATTENTION, None if whole_attention else chunk)
        counts, dispatch = Stage(StageKind.COUNTS, chunk), Stage(StageKind.DISPATCH, chunk)
        expert, combine = Stage(StageKind.EXPERT, chunk), Stage(StageKind.COMBINE, chunk)
        merge = Stage(StageKind.MERGE, chunk)
        # Attention is causal: a chunk sees the keys of earlier chunks and its own.
        graph[attention] = projections[: chunk + 1]
        graph[route] = [attention]
        if features.ordered_routing and chunk:
            graph[route].append(routes[chunk - 1])
        graph[counts] = [route]
        graph[dispatch] = [route, counts]
        graph[expert] = [dispatch]
        graph[combine] = [expert]
        graph[merge] = [combine, attention]
        if features.shared:
            shared = Stage(StageKind.SHARED, chunk)
            graph[shared] = [attention]
            graph[merge].append(shared)
    if features.losses:
        graph[Stage(StageKind.LOSSES)] = list(routes)
    return graph
