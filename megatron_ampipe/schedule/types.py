"""The records a schedule is made of.

Pure values: nothing here knows how a stage is computed (``layers``) or executed (``runtime``).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

COMPUTE = "compute"
COMM = "comm"


class Direction(StrEnum):
    """Which of the two passes through a block a program describes."""

    FORWARD = "forward"
    BACKWARD = "backward"


class StageKind(StrEnum):
    """What a stage does. The value is the stage's name in schedules, traces and messages."""

    QKV = "qkv"
    """Input norm, query/key/value projection, rotary embedding."""
    ATTENTION = "attention"
    """Core attention, output projection, residual, pre-MoE norm."""
    ROUTE = "route"
    """Router and permutation of the tokens by expert."""
    LOSSES = "losses"
    """Auxiliary and z losses of the router, once for the whole block."""
    SHARED = "shared"
    """Shared experts."""
    COUNTS = "counts"
    """Exchange of the number of tokens each rank sends to each expert. Forward only."""
    DISPATCH = "dispatch"
    """All-to-all that brings the tokens to their experts."""
    EXPERT = "expert"
    """The local experts."""
    COMBINE = "combine"
    """All-to-all that brings the expert outputs back."""
    MERGE = "merge"
    """Unpermutation, shared expert output, residual."""


COMMUNICATION = frozenset({StageKind.COUNTS, StageKind.DISPATCH, StageKind.COMBINE})
WHOLE_BLOCK = frozenset({StageKind.LOSSES})
"""Kinds that are always done once for the whole sequence."""
EITHER = frozenset({StageKind.QKV, StageKind.ATTENTION})
"""Kinds that are done once or chunk by chunk, as the schedule says."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One schedulable piece of work.

    Attributes:
        kind: What is done.
        chunk: Of which chunk, from 0; None when it is done once for the whole sequence.
    """

    kind: StageKind
    chunk: int | None = None

    def __str__(self) -> str:
        return self.kind.value if self.chunk is None else f"{self.kind.value}.{self.chunk}"

    @property
    def is_communication(self) -> bool:
        """Whether the stage is a collective rather than computation."""
        return self.kind in COMMUNICATION


@dataclass(frozen=True, slots=True)
class LaneOrder:
    """The stages of one lane, in the order in which the lane runs them."""

    lane: str
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """One pass through the block: what each lane runs, in order.

    A communication stage that stands in the ``compute`` lane is waited for on the spot.
    """

    lanes: tuple[LaneOrder, ...]

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages, lane by lane."""
        return tuple(stage for order in self.lanes for stage in order.stages)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The whole order of one block.

    Attributes:
        name: ``sequential``, ``moe-only``, ``ampipe``, or what a planner calls its own.
        degree: Number of parts in which the forward pass goes over the sequence.
        forward: Order of the forward pass.
        backward: Order of the backward pass.
        backward_degree: Number of parts of the backward pass. One of the two degrees divides the other. The
            sequence is cut into as many chunks as the larger one says, and a stage of the other direction is
            of several adjacent chunks.
    """

    name: str
    degree: int
    forward: Program
    backward: Program
    backward_degree: int

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
        ordered = chunks if direction is Direction.FORWARD else reversed(chunks)
        return tuple(Stage(stage.kind, chunk) for chunk in ordered)

    def program(self, direction: Direction) -> Program:
        """The program of one direction."""
        return self.forward if direction is Direction.FORWARD else self.backward

    @property
    def whole_attention(self) -> bool:
        """Whether attention runs once for the whole sequence instead of chunk by chunk."""
        return Stage(StageKind.ATTENTION) in self.forward.stages
