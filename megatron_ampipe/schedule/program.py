"""The records that a schedule is made of, and the order in which a host issues its stages.

Pure values: nothing here knows how a stage is computed (``layers``) or executed (``runtime``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_ampipe.files.timeline import AGAIN
from megatron_ampipe.schedule.kinds import ATTENTION, EXPERT, WEIGHTS
from megatron_ampipe.schedule.stage_kind import COMPUTE, Direction, StageKind

AHEAD = "next:"
"""Before the name of a stage of the next micro-batch."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One schedulable piece of work.

    Attributes:
        kind: What is done.
        chunk: Of which chunk, from 0; None when it is done once for the whole sequence.
        layer: Of which of the blocks that share a schedule, from 0. In a schedule that repeats
            (``Schedule.repeats``): how many blocks further, in the order of the pass; negative for a block
            that the pass has gone through before.
        again: It is the stage of the forward pass, run again in the backward pass
            (:attr:`~.features.BlockFeatures.recomputed`).
        ahead: It is a stage of the forward pass of the next micro-batch, in the program of a backward pass
            (:mod:`.partners`).
    """

    kind: StageKind
    chunk: int | None = None
    layer: int = 0
    again: bool = False
    ahead: bool = False

    @property
    def name(self) -> str:
        """What it is called within its layer: ``expert.2``, or ``again:expert.2``."""
        name = self.kind.name if self.chunk is None else f"{self.kind.name}.{self.chunk}"
        return AGAIN + name if self.again else name

    def __str__(self) -> str:
        name = f"{AHEAD}{self.name}" if self.ahead else self.name
        return f"{name}@{self.layer}" if self.layer else name

    @property
    def computes_values(self) -> bool:
        """Whether it computes values in the backward pass, as in a forward pass, and no gradients."""
        return self.again or self.kind.restores is not None

    @property
    def is_communication(self) -> bool:
        """Whether the stage is started and waited for, rather than computed."""
        return not self.kind.lane.computes


type LaneOrder = tuple[str, tuple[Stage, ...]]
"""A lane, and the stages that it runs, in order."""


@dataclass(frozen=True)
class Program:
    """One pass through the block: what each lane runs, in order.

    A communication stage that stands in the ``compute`` lane is waited for on the spot.
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
        """Kinds of its stages that compute gradients of weights alone (``StageKind.weights_of``)."""
        return frozenset(stage.kind for stage in self.stages if stage.kind.weights_of is not None)

    # A planner uses programs as keys many thousand times, and they have hundreds of stages.
    @cached_property
    def _hash(self) -> int:
        return hash(self.lanes)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        # Hashes differ from process to process.
        return Program, (self.lanes,)

    @classmethod
    def of(cls, lanes: Mapping[str, Iterable[Stage]]) -> Program:
        """A program of these lanes."""
        return cls(tuple((lane, tuple(stages)) for lane, stages in lanes.items()))

    def mapped(self, change: Callable[[Sequence[Stage]], Iterable[Stage]]) -> Program:
        """The program with the stages of each lane changed."""
        return Program.of({lane: change(stages) for lane, stages in self.lanes})


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of all stages of one block, or of several consecutive ones.

    Attributes:
        name: That of a named schedule (:mod:`.orders`), or what a planner calls its own.
        degree: Number of parts in which the forward pass goes over the sequence.
        forward: Order of the forward pass.
        backward: Order of the backward pass.
        backward_degree: Number of parts of the backward pass. One of the two degrees divides the other. The
            sequence is cut into as many chunks as the larger one says, and a stage of the other direction is
            of several adjacent chunks.
        repeats: It is one period of a schedule of any number of blocks, which ``passes.unrolled`` makes.
    """

    name: str
    degree: int
    forward: Program
    backward: Program
    backward_degree: int
    repeats: bool = False

    @property
    def num_chunks(self) -> int:
        """Into how many chunks the sequence is cut."""
        return max(self.degree, self.backward_degree)

    def degree_of(self, direction: Direction) -> int:
        """In how many parts a direction goes over the sequence."""
        return self.degree if direction is Direction.FORWARD else self.backward_degree

    def chunks_of(self, stage: Stage, direction: Direction) -> tuple[Stage, ...]:
        """A stage as the same stage of each of its chunks, in the order in which they are computed."""
        if stage.chunk is None:
            return (stage,)
        size = self.num_chunks // self.degree_of(direction)
        chunks = range(stage.chunk * size, (stage.chunk + 1) * size)
        ordered = chunks if direction is Direction.FORWARD or stage.again else reversed(chunks)
        return tuple(Stage(stage.kind, chunk, stage.layer, stage.again) for chunk in ordered)

    def program(self, direction: Direction) -> Program:
        """The program of one direction."""
        return self.forward if direction is Direction.FORWARD else self.backward

    def mapped(self, change: Callable[[Program, Direction], Program]) -> Schedule:
        """The schedule with both programs changed."""
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
        """Whether the gradients of the experts' weights of several chunks are one stage."""
        return self.num_chunks > 1 and WEIGHTS[EXPERT] in self.backward.whole


def issue_order(
    program: Program, needs: dict[Stage, tuple[Stage, ...]], *, host_waits: bool
) -> tuple[tuple[str, Stage], ...]:
    """The one order in which a host thread issues the stages of several lanes, as ``(lane, stage)`` pairs.

    Derived from a schedule alone, so every rank issues the same collectives in the same order whatever its
    data. A communication stage is issued as soon as everything it needs has been issued.

    Args:
        program: One direction of a schedule that :func:`~.text.check` accepted.
        needs: The dependencies of that direction.
        host_waits: Whether the host waits for a result that it must read (``counts``) when it issues what
            takes it (``dispatch``), as on CUDA. That stage is then issued after the next compute stage that
            is long enough to cover the wait, so that the device has work meanwhile. A backward pass has no
            ``counts`` and nothing is postponed.
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
    """The stage whose result the host must know before it can issue this one; None where it need not wait."""
    return next((needed for needed in needs[stage] if needed.kind.host_reads), None)


def completed(order: Iterable[Stage], needs: Mapping[Stage, Sequence[Stage]]) -> list[Stage]:
    """The stages in their order, but each after all that it needs, and at the end what the order lacks."""
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
    """The stream of a device on which a stage of a lane runs.

    Every lane is a stream, except that stages whose result the host reads have a separate one: queued after a
    ``dispatch``, the host would wait for a whole transfer before it knew a few numbers.
    """
    return f"{lane} {stage.kind}" if stage.kind.host_reads and lane != COMPUTE else lane


def merge_lanes[S: Hashable](
    lanes: Mapping[str, Sequence[S]],
    needs: Mapping[S, Sequence[S]],
    *,
    waits_before: Collection[S] = (),
    covers: Collection[S] = (),
) -> tuple[tuple[str, S], ...]:
    """What :func:`issue_order` does, on anything that stands for stages.

    If lanes wait for each other, it ends where all of them do. Before the stages ``waits_before`` the host
    waits; the compute stages ``covers`` keep the device busy meanwhile.
    """
    place = dict.fromkeys(lanes, 0)
    order: list[tuple[str, S]] = []
    issued: set[S] = set()
    postponed: set[S] = set()

    def ready(lane: str) -> bool:
        stages = lanes[lane]
        return place[lane] < len(stages) and issued.issuperset(needs[stages[place[lane]]])

    def issue(lane: str) -> S:
        stage = lanes[lane][place[lane]]
        place[lane] += 1
        issued.add(stage)
        order.append((lane, stage))
        return stage

    while ready_lanes := [lane for lane in lanes if ready(lane)]:
        others = [lane for lane in ready_lanes if lane != COMPUTE]
        for lane in others:
            head = lanes[lane][place[lane]]
            if head in waits_before and head not in postponed:
                postponed.add(head)
                while ready(COMPUTE) and issue(COMPUTE) not in covers:
                    pass
            issue(lane)
        if not others:
            issue(COMPUTE)
    return tuple(order)
