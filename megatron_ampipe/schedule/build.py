"""The named schedules.

``sequential`` is the oracle and hides nothing; ``moe-only`` is what Tutel and PipeMoE do (attention
whole, then the MoE layer in chunks); ``ampipe`` is the order of AMPipe, section 3.2 and figure 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron_ampipe.config import SCHEDULE_NAMES
from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.graph import BlockFeatures
from megatron_ampipe.schedule.types import COMM, COMPUTE, Kind, LaneOrder, Program, Schedule, Stage


def build(name: str, *, degree: int, features: BlockFeatures) -> Schedule:
    """The schedule of that name for that many chunks.

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
    return _BUILDERS[name](degree, features)


def _sequential(degree: int, features: BlockFeatures) -> Schedule:
    """One lane, chunk after chunk: every collective is waited for on the spot."""
    chunks = range(degree)
    forward = [] if features.chunked_qkv else [Stage(Kind.QKV)]
    own_qkv = [Kind.QKV] if features.chunked_qkv else []
    for chunk in chunks:
        forward += _of_chunk(chunk, *own_qkv, Kind.ATTENTION, Kind.ROUTE, Kind.COUNTS, Kind.DISPATCH)
        if features.shared:
            forward += _of_chunk(chunk, Kind.SHARED)
        forward += _of_chunk(chunk, Kind.EXPERT, Kind.COMBINE, Kind.MERGE)
    backward: list[Stage] = []
    if features.losses:
        forward.append(Stage(Kind.LOSSES))
        backward.append(Stage(Kind.LOSSES))
    for chunk in reversed(chunks):
        backward += _of_chunk(chunk, Kind.MERGE, Kind.COMBINE, Kind.EXPERT, Kind.DISPATCH)
        if features.shared:
            backward += _of_chunk(chunk, Kind.SHARED)
        backward += _of_chunk(chunk, Kind.ROUTE, Kind.ATTENTION, *own_qkv)
    if not features.chunked_qkv:
        backward.append(Stage(Kind.QKV))
    return Schedule("sequential", degree, _program(compute=forward), _program(compute=backward))


def _ampipe(degree: int, features: BlockFeatures) -> Schedule:
    """Dispatch of a chunk travels during attention of the next, combine during experts of the next."""
    chunks = range(degree)
    kinds = [Kind.ATTENTION, Kind.ROUTE]
    whole = [Stage(Kind.QKV)]
    if features.chunked_qkv:
        kinds, whole = [Kind.QKV, *kinds], []
    first_half = [stage for chunk in chunks for stage in _of_chunk(chunk, *kinds)]
    last_half = [stage for chunk in reversed(chunks) for stage in _of_chunk(chunk, *reversed(kinds))]
    return _overlapped(
        "ampipe", degree, features, first_half=[*whole, *first_half], last_half=[*last_half, *whole]
    )


def _moe_only(degree: int, features: BlockFeatures) -> Schedule:
    """Attention whole; only the MoE layer is pipelined."""
    chunks = range(degree)
    attention = [Stage(Kind.QKV), Stage(Kind.ATTENTION)]
    first_half = [*attention, *_each(Kind.ROUTE, chunks)]
    last_half = [*_each(Kind.ROUTE, reversed(chunks)), *reversed(attention)]
    return _overlapped("moe-only", degree, features, first_half=first_half, last_half=last_half)


def _overlapped(
    name: str, degree: int, features: BlockFeatures, *, first_half: list[Stage], last_half: list[Stage]
) -> Schedule:
    """What the overlapping schedules share: all dispatches before all combines, backward mirrored.

    Stages that no collective waits for (losses, shared experts, merges) stand where the compute lane
    would otherwise wait for the network.
    """
    chunks = range(degree)
    shared = _each(Kind.SHARED, chunks) if features.shared else []
    losses = [Stage(Kind.LOSSES)] if features.losses else []
    forward = _program(
        compute=[
            *first_half,
            *losses,
            *shared,
            *_each(Kind.EXPERT, chunks),
            *_each(Kind.MERGE, chunks),
        ],
        comm=[
            *(stage for chunk in chunks for stage in _of_chunk(chunk, Kind.COUNTS, Kind.DISPATCH)),
            *_each(Kind.COMBINE, chunks),
        ],
    )
    backward = _program(
        compute=[
            *_each(Kind.MERGE, reversed(chunks)),
            *losses,
            *reversed(shared),
            *_each(Kind.EXPERT, reversed(chunks)),
            *last_half,
        ],
        comm=[*_each(Kind.COMBINE, reversed(chunks)), *_each(Kind.DISPATCH, reversed(chunks))],
    )
    return Schedule(name, degree, forward, backward)


def _of_chunk(chunk: int, *kinds: Kind) -> list[Stage]:
    return [Stage(kind, chunk) for kind in kinds]


def _each(kind: Kind, chunks: Iterable[int]) -> list[Stage]:
    return [Stage(kind, chunk) for chunk in chunks]


def _program(*, compute: list[Stage], comm: list[Stage] | None = None) -> Program:
    lanes = [LaneOrder(COMPUTE, tuple(compute))]
    if comm is not None:
        lanes.append(LaneOrder(COMM, tuple(comm)))
    return Program(tuple(lanes))


_BUILDERS: dict[str, Callable[[int, BlockFeatures], Schedule]] = {
    "ampipe": _ampipe,
    "moe-only": _moe_only,
    "sequential": _sequential,
}
assert tuple(_BUILDERS) == SCHEDULE_NAMES
