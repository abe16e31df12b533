"""What a kind of stage is: its lane, its scope, the values that it takes and gives. Types, and all lanes.

The kinds themselves are in :mod:`.kinds`. Everything that handles stages of any kind imports these types.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

from megatron_ampipe.files.timeline import COMPUTE as COMPUTE
from megatron_ampipe.files.timeline import COPY as COPY

COMM = "comm"
INTRA = "comm.intra"
TENSOR = "comm.tensor"


class Direction(StrEnum):
    """One of the two passes through a block."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Lane:
    """Where stages run one after another. Lanes run concurrently.

    The compute lane is the only one whose stages are computed. Two lanes must not use the same process group:
    a host issues each lane's collectives from a separate thread, so ranks could disagree about their order.
    """

    name: str
    resource: str
    """What the lane occupies. Lanes of one resource share it; those of different ones overlap."""

    @property
    def computes(self) -> bool:
        """Whether its stages are computed, rather than started and waited for."""
        return self.name == COMPUTE


COMPUTE_LANE = Lane(COMPUTE, "processor")
COMM_LANE = Lane(COMM, "network")
"""What ranks send one another; where :data:`INTRA_LANE` is used as well, what nodes send one another."""
INTRA_LANE = Lane(INTRA, "node")
"""What ranks of a node send one another, over separate links (FSMoE, section 4.2)."""
TENSOR_LANE = Lane(TENSOR, COMM_LANE.resource)
"""What tensor-parallel ranks send one another: rows of a chunk must not wait for tokens of an earlier one."""
TENSOR_INTRA_LANE = Lane(TENSOR, INTRA_LANE.resource)
"""The same, where these ranks are on one node and the ranks of the experts on several."""
COPY_LANE = Lane(COPY, "bus")
"""Copies to host memory and back (MPipeMoE, section III-D). No other rank takes part in them."""


class Scope(Enum):
    """How much of the sequence a stage covers."""

    CHUNK = "chunk"
    WHOLE = "whole"
    EITHER = "either"
    """Of a chunk or of the whole sequence, as the schedule says."""


class Layout(Enum):
    """How the part of a value that belongs to a chunk relates to the value of the whole sequence."""

    HIDDEN = "hidden"
    """The chunk's rows of the residual stream (``Chunk.hidden``)."""
    QUERIES = "queries"
    """The chunk's query rows (``Chunk.queries``)."""
    KEYS = "keys"
    """A chunk gives its own query rows, and takes all rows up to its last one: attention is causal."""
    CHUNK = "chunk"
    """Every chunk has its own; a stage of the whole sequence takes all of them, in order."""
    SCALAR = "scalar"
    """One number that no stage takes. Its gradient is zero: its function adds other gradients."""
    BLOCK = "block"
    """Keys or values of one rank: every stage takes all of them, whichever its chunk."""
    STATE = "state"
    """No tensor: something that the layer keeps from one stage to the next."""


@dataclass(frozen=True, slots=True)
class Value:
    """What one stage gives and others take."""

    name: str
    """A stage that takes a value and gives one of the same name replaces it for all later rows."""
    layout: Layout
    """How chunks share it."""
    by_shape: bool = False
    """Of a value that a stage takes: its function is linear in it, so its gradients need the shape alone. A
    transfer that gives nothing else does not run again in a recomputed block."""


@dataclass(frozen=True, slots=True, eq=False)
class StageKind:
    """What a stage does. A kind is its name: kinds of one name are equal.

    The kinds of :mod:`.kinds` are what names stand for; the rows of a block (``kinds.rows``) are the same
    kinds with what depends on the block: the lane of a transfer, the scope, what is taken and given.

    Attributes:
        name: As in schedules, traces and messages.
        lane: Where it runs by default. A stage of another lane may also stand in the compute lane; it is then
            waited for on the spot.
        scope: Of a chunk, of the whole sequence, or either.
        takes: The arguments of its function, in order; in the backward pass the gradients it returns.
            Values of ``Layout.STATE``, and values that no row of the block gives, are left out.
        gives: The results of its function likewise; in the backward pass the gradients it receives.
        directions: In which passes it runs.
        ordered: Each chunk waits for the one before it.
        host_reads: The host must know its result before it can issue the stages that take it.
        covers_wait: Long enough to keep a device busy while its host waits for such a result.
        restores: For a kind that computes values in the backward pass, as a forward stage does: the kind
            whose backward waits for it, because its forward stage has not kept them.
        weights_of: For the weight gradients of a kind: that kind. Without such a stage in the backward
            program of a schedule, the stage of the kind itself computes them.
        step_of: The kind of which it is one of several steps; the layer has one function for all of them.
        step: Which.
    """

    name: str
    lane: Lane = COMPUTE_LANE
    scope: Scope = Scope.CHUNK
    takes: tuple[Value, ...] = ()
    gives: tuple[Value, ...] = ()
    directions: tuple[Direction, ...] = tuple(Direction)
    ordered: bool = False
    host_reads: bool = False
    covers_wait: bool = False
    restores: StageKind | None = None
    weights_of: StageKind | None = None
    step_of: StageKind | None = None
    step: int = 0

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StageKind) and self.name == other.name)

    def __hash__(self) -> int:
        # Of a string, Python keeps it: stages are keys of many tables.
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"StageKind({self.name!r})"

    @property
    def copies(self) -> bool:
        """Whether it copies to host memory or back. The runtime does that itself, for any layer."""
        return self.lane is COPY_LANE

    @property
    def is_differentiated(self) -> bool:
        """Whether its backward stage computes gradients of what its forward stage takes."""
        return self.directions == tuple(Direction)

    @property
    def of_parameters(self) -> bool:
        """Whether it transfers no value of a block but gradients of parameters that are complete."""
        return not (self.lane.computes or self.copies or self.takes or self.gives or self.restores)

    @property
    def own_backward(self) -> bool:
        """Whether its backward is a function of the layer, not of autograd.

        It is given what the stage took of ``Layout.BLOCK``, or what restored that, and adds its gradients up
        itself.
        """
        return self.lane.computes and any(value.layout is Layout.BLOCK for value in self.takes)

    @property
    def row(self) -> StageKind:
        """The kind that tables of functions and costs have."""
        return self if self.step_of is None else self.step_of
