"""The types that describe a kind of stage: its lane, its scope, the values that it takes and gives.

Also all lanes. The kinds themselves are in :mod:`.kinds`.
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
    """Runs stages one after another, concurrently with other lanes.

    Only the compute lane computes; the others transfer. Two lanes must not use the same process group: each
    lane issues its collectives from a separate thread, so ranks could disagree about their order.
    """

    name: str
    resource: str
    """The hardware that the lane occupies. Lanes with the same resource share it; others overlap."""

    @property
    def computes(self) -> bool:
        """Whether its stages are computed, rather than transfers."""
        return self.name == COMPUTE


COMPUTE_LANE = Lane(COMPUTE, "processor")
COMM_LANE = Lane(COMM, "network")
"""Transfers between ranks; only those between nodes where :data:`INTRA_LANE` is also used."""
INTRA_LANE = Lane(INTRA, "node")
"""Transfers between ranks of a node, over separate links (FSMoE, section 4.2)."""
TENSOR_LANE = Lane(TENSOR, COMM_LANE.resource)
"""Transfers between tensor-parallel ranks. A separate lane, so that they do not wait for queued tokens."""
TENSOR_INTRA_LANE = Lane(TENSOR, INTRA_LANE.resource)
"""The same, if tensor-parallel ranks are on one node and the ranks of the experts on several nodes."""
COPY_LANE = Lane(COPY, "bus")
"""Copies to host memory and back (MPipeMoE, section III-D). No other rank takes part in them."""


class Scope(Enum):
    """How much of the sequence a stage covers."""

    CHUNK = "chunk"
    WHOLE = "whole"
    EITHER = "either"
    """A chunk or the whole sequence, as the schedule says."""


class Layout(Enum):
    """How the part of a value that belongs to a chunk relates to the value of the whole sequence."""

    HIDDEN = "hidden"
    """The chunk's rows of the residual stream (``Chunk.hidden``)."""
    QUERIES = "queries"
    """The chunk's query rows (``Chunk.queries``)."""
    KEYS = "keys"
    """A chunk gives its own query rows, and takes all rows up to its last one (causal attention)."""
    CHUNK = "chunk"
    """A separate tensor per chunk; a stage of the whole sequence takes all of them, in order."""
    SCALAR = "scalar"
    """A number that no stage takes. Its gradient is zero; its backward adds other gradients."""
    BLOCK = "block"
    """Keys or values of one rank; the stages of every chunk take all of them."""
    STATE = "state"
    """Not a tensor, but state that the layer keeps from one stage to the next."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor or state that one stage gives and others take."""

    name: str
    """A stage that takes a value and gives one of the same name replaces it for all later rows."""
    layout: Layout
    """How chunks share the value."""
    by_shape: bool = False
    """Whether the backward of the stage that takes it only needs its shape, because the stage is linear in
    it. A transfer that gives nothing else does not run again in a recomputed block."""


@dataclass(frozen=True, slots=True, eq=False)
class StageKind:
    """What a stage does. Kinds with the same name are equal.

    :mod:`.kinds` defines one kind for each name. The rows of a block (``kinds.rows``) are these kinds with
    the lane, scope and values that they have in that block.

    Attributes:
        name: The name in schedules, traces and messages.
        lane: The lane that runs it by default. A stage of another lane can also be put into the compute lane;
            it then ends before the next stage begins.
        scope: Whether a stage covers a chunk, the whole sequence, or either.
        takes: The arguments of its function, in order; in the backward pass the gradients it returns.
            Values of ``Layout.STATE``, and values that no row of the block gives, are left out.
        gives: The results of its function likewise; in the backward pass the gradients it receives.
        directions: The passes in which it runs.
        ordered: Whether each chunk waits for the one before it.
        host_reads: Whether the host must read its result before it issues the stages that take it.
        covers_wait: Whether it is long enough to keep a device busy while the host waits for such a result.
        restores: For a kind that restores activations in the backward pass: the kind whose backward waits
            for it, because its forward stage has not saved them.
        weights_of: For a kind that computes weight gradients: the kind that has the weights. Without such a
            stage in the backward program of a schedule, the stage of that kind computes them itself.
        step_of: For one of several steps: the kind that is divided into steps, with one function for all.
        step: The index of the step.
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
        # Fast, as strings cache their hash: stages are keys of many tables.
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
        """Whether it has a backward stage that computes gradients of its inputs."""
        return self.directions == tuple(Direction)

    @property
    def of_parameters(self) -> bool:
        """Whether it is a reduction of parameter gradients, not a transfer of values of a block."""
        return not (self.lane.computes or self.copies or self.takes or self.gives or self.restores)

    @property
    def own_backward(self) -> bool:
        """Whether its backward is a function of the layer instead of autograd.

        That function also gets the stage's inputs of ``Layout.BLOCK``, saved or restored, and adds up their
        gradients itself.
        """
        return self.lane.computes and any(value.layout is Layout.BLOCK for value in self.takes)

    @property
    def row(self) -> StageKind:
        """The kind in the tables of functions and costs: for a step, the kind that is divided into steps."""
        return self if self.step_of is None else self.step_of
