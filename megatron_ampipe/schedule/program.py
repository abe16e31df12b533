"""The records that a schedule consists of, and the order in which a host issues its stages.

These are plain values, independent of how a stage is computed (``layers``) or executed (``runtime``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_ampipe.files.timeline import AGAIN
from megatron_ampipe.schedule.kinds import ATTENTION, EXPERT, WEIGHTS
from megatron_ampipe.schedule.stage_kind import COMPUTE, Direction, StageKind

AHEAD = "next:"
"""Prefix of the name of a stage of the next micro-batch."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One schedulable piece of work.

    Attributes:
        kind: What the stage does.
        chunk: Index of the chunk, from 0; None if the stage covers the whole sequence.
        layer: Index of the block among those that share a schedule, from 0. In a schedule that repeats
            (``Schedule.repeats``), the offset of the block in the order of the pass; negative for a block
            that the pass has already gone through.
        is_recompute: A stage of the forward pass that runs again in the backward pass
            (:attr:`~.features.BlockFeatures.recomputed`).
        of_next_microbatch: A stage of the forward pass of the next micro-batch, in the program of a backward
            pass (:mod:`.partners`).
    """

    kind: StageKind
    chunk: int | None = None
    layer: int = 0
    is_recompute: bool = False
    of_next_microbatch: bool = False

    def __hash__(self) -> int:
        # As that of a dataclass, without a call for the kind: stages are keys of many tables.
        return hash((self.kind.name, self.chunk, self.layer, self.is_recompute, self.of_next_microbatch))

    @property
    def name(self) -> str:
        """The name within its layer: ``expert.2``, or ``again:expert.2``."""
        name = self.kind.name if self.chunk is None else f"{self.kind.name}.{self.chunk}"
        return AGAIN + name if self.is_recompute else name

    def __str__(self) -> str:
        name = f"{AHEAD}{self.name}" if self.of_next_microbatch else self.name
        return f"{name}@{self.layer}" if self.layer else name

    @property
    def computes_values(self) -> bool:
        """Whether it computes values, not gradients, even in the backward pass."""
        return self.is_recompute or self.kind.restores is not None

    @property
    def is_communication(self) -> bool:
        """Whether the stage is a transfer, which is started and waited for."""
        return not self.kind.lane.computes


type LaneOrder = tuple[str, tuple[Stage, ...]]
"""The name of a lane, and its stages in order."""


@dataclass(frozen=True)
class Program:
    """One pass through the block: the stages of each lane, in order.

    A communication stage in the ``compute`` lane ends before the next stage begins.
    """

    lanes: tuple[LaneOrder, ...]

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, lane by lane."""
        return tuple(stage for _, stages in self.lanes for stage in stages)

    @cached_property
    def whole(self) -> frozenset[StageKind]:
        """Kinds of stages that run once for the whole sequence."""
        return frozenset(stage.kind for stage in self.stages if stage.chunk is None)

    @cached_property
    def weights(self) -> frozenset[StageKind]:
        """Kinds of its stages that only compute weight gradients (``StageKind.weights_of``)."""
        return frozenset(stage.kind for stage in self.stages if stage.kind.weights_of is not None)

    # Cached: a planner uses programs as keys many thousand times, and they have hundreds of stages.
    @cached_property
    def _hash(self) -> int:
        return hash(self.lanes)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Without the hash, which differs from process to process.
        return Program, (self.lanes,)

    @classmethod
    def of(cls, lanes: Mapping[str, Iterable[Stage]]) -> Program:
        """Create a program of these lanes."""
        return cls(tuple((lane, tuple(stages)) for lane, stages in lanes.items()))

    def mapped(self, change: Callable[[Sequence[Stage]], Iterable[Stage]]) -> Program:
        """Apply a function to the stages of each lane."""
        return Program.of({lane: change(stages) for lane, stages in self.lanes})


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of all stages of one block, or of several consecutive ones.

    Attributes:
        name: A named schedule (:mod:`.orders`), or the name that a planner gives its own.
        degree: Number of parts into which the forward pass divides the sequence.
        forward: Order of the forward pass.
        backward: Order of the backward pass.
        backward_degree: Number of parts of the backward pass. One of the two degrees divides the other. The
            sequence is cut into as many chunks as the larger degree, and a stage of the other direction
            covers several adjacent chunks.
        repeats: Whether it is one period, which ``passes.unrolled`` repeats for any number of blocks.
    """

    name: str
    degree: int
    forward: Program
    backward: Program
    backward_degree: int
    repeats: bool = False

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the sequence."""
        return max(self.degree, self.backward_degree)

    def degree_of(self, direction: Direction) -> int:
        """Number of parts into which a direction divides the sequence."""
        return self.degree if direction is Direction.FORWARD else self.backward_degree

    def chunks_of(self, stage: Stage, direction: Direction) -> tuple[Stage, ...]:
        """Split a stage into one stage per chunk that it covers, in the order of computation."""
        if stage.chunk is None:
            return (stage,)
        size = self.num_chunks // self.degree_of(direction)
        chunks = range(stage.chunk * size, (stage.chunk + 1) * size)
        ordered = chunks if direction is Direction.FORWARD or stage.is_recompute else reversed(chunks)
        return tuple(Stage(stage.kind, chunk, stage.layer, stage.is_recompute) for chunk in ordered)

    def program(self, direction: Direction) -> Program:
        """The program of one direction."""
        return self.forward if direction is Direction.FORWARD else self.backward

    def mapped(self, change: Callable[[Program, Direction], Program]) -> Schedule:
        """Apply a function to both programs."""
        return replace(
            self,
            forward=change(self.forward, Direction.FORWARD),
            backward=change(self.backward, Direction.BACKWARD),
        )

    @property
    def whole_attention(self) -> bool:
        """Whether attention runs once for the whole sequence instead of chunk by chunk."""
        return ATTENTION in self.forward.whole

    @property
    def joins_weights(self) -> bool:
        """Whether one stage computes the experts' weight gradients of several chunks."""
        return self.num_chunks > 1 and WEIGHTS[EXPERT] in self.backward.whole


def issue_order(
    program: Program, needs: Mapping[Stage, tuple[Stage, ...]], *, host_waits: bool
) -> tuple[tuple[str, Stage], ...]:
    """The order in which a host thread issues the stages of all lanes, as ``(lane, stage)`` pairs.

    It depends on the schedule, not on the data, so every rank issues the same collectives in the same order.
    A communication stage is issued as soon as all stages that it needs have been issued.

    Args:
        program: One direction of a schedule that :func:`~.text.check` accepted.
        needs: The dependencies of that direction.
        host_waits: Whether the host waits for results that it must read (``counts``) before it issues the
            stage that takes them (``dispatch``), as on CUDA. That stage is then issued after the next compute
            stage that is long enough to cover the wait, so that the device has work meanwhile. A backward
            pass has no ``counts``, so nothing is postponed.
    """
    order = merge_lanes(
        dict(program.lanes),
        needs,
        waits_before={stage for stage in needs if host_waits and read_by_host(stage, needs) is not None},
        covers={stage for stage in needs if stage.kind.covers_wait},
    )
    assert len(order) == len(program.stages), "the program was not checked"
    return order


def read_by_host(stage: Stage, needs: Mapping[Stage, Sequence[Stage]]) -> Stage | None:
    """The stage whose result the host must read before it issues this stage; None if it need not wait."""
    return next((needed for needed in needs[stage] if needed.kind.host_reads), None)


def completed(order: Iterable[Stage], needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """Move each stage after all that it needs, and append the stages that the order lacks."""
    placed: dict[Stage, None] = {}

    def place(stage: Stage) -> None:
        if stage not in placed:
            for needed in needs[stage]:
                place(needed)
            placed[stage] = None

    for stage in (*order, *needs):
        place(stage)
    return list(placed)


def stream_of(lane: str, stage: Stage) -> str:
    """The name of the stream on which a stage of a lane runs.

    Every lane is a stream. Stages whose result the host reads have a separate stream: queued after a
    ``dispatch``, they would make the host wait for a whole transfer.
    """
    return f"{lane} {stage.kind}" if stage.kind.host_reads and lane != COMPUTE else lane


def merge_lanes[S: Hashable](
    lanes: Mapping[str, Sequence[S]],
    needs: Mapping[S, Sequence[S]],
    *,
    waits_before: Collection[S] = (),
    covers: Collection[S] = (),
) -> tuple[tuple[str, S], ...]:
    """:func:`issue_order` for any objects that stand for stages.

    If lanes wait for each other, the order ends there. The host waits before the stages in ``waits_before``;
    the compute stages in ``covers`` keep the device busy meanwhile.
    """
    names = list(lanes)
    number: dict[S, int] = {}
    for stages in lanes.values():
        for stage in stages:
            number.setdefault(stage, len(number))
    numbered_needs: list[list[int]] = []
    followers: list[list[int]] = [[] for _ in number]
    for stage, index in number.items():
        # A stage that no lane runs is never issued, so what needs it is not either.
        numbered_needs.append([number.get(needed, -1) for needed in needs[stage]])
        for needed in needs[stage]:
            if needed in number:
                followers[number[needed]].append(index)
    merged = merge_numbered(
        [[number[stage] for stage in stages] for stages in lanes.values()],
        compute_lane=names.index(COMPUTE) if COMPUTE in lanes else None,
        needs=numbered_needs,
        followers=followers,
        waits_before=[stage in waits_before for stage in number],
        covers=[stage in covers for stage in number],
    )
    of_number = list(number)
    return tuple((names[lane], of_number[index]) for lane, index in merged)


def merge_numbered(
    lanes: Sequence[Sequence[int]],
    *,
    compute_lane: int | None,
    needs: Sequence[Sequence[int]],
    followers: Sequence[Sequence[int]],
    waits_before: Sequence[bool],
    covers: Sequence[bool],
) -> list[tuple[int, int]]:
    """:func:`merge_lanes` of numbered stages, as pairs of lane and stage.

    One loop with few calls, because a search asks for thousands of orders. ``needs``, ``followers`` (the
    stages that need a stage), ``waits_before`` and ``covers`` have an entry for each stage.
    """
    num_missing = list(map(len, needs))
    places = [0] * len(lanes)
    lengths = list(map(len, lanes))
    order: list[tuple[int, int]] = []
    is_issued = [False] * len(needs)
    is_postponed = [False] * len(needs)

    def issue(lane: int) -> int:
        stage = lanes[lane][places[lane]]
        places[lane] += 1
        order.append((lane, stage))
        if not is_issued[stage]:
            is_issued[stage] = True
            for follower in followers[stage]:
                num_missing[follower] -= 1
        return stage

    while True:
        computes = False
        ready: list[int] = []
        for lane, place in enumerate(places):
            if place < lengths[lane] and not num_missing[lanes[lane][place]]:
                if lane == compute_lane:
                    computes = True
                else:
                    ready.append(lane)
        if not ready:
            if compute_lane is None or not computes:
                return order
            issue(compute_lane)
        for lane in ready:
            head = lanes[lane][places[lane]]
            if waits_before[head] and not is_postponed[head] and compute_lane is not None:
                is_postponed[head] = True
                # The next compute stage that is long enough keeps the device busy during the wait.
                while places[compute_lane] < lengths[compute_lane]:
                    next_computed = lanes[compute_lane][places[compute_lane]]
                    if num_missing[next_computed]:
                        break
                    issue(compute_lane)
                    if covers[next_computed]:
                        break
            issue(lane)
