"""What stages a block consists of, as a table: one row for each kind of stage.

A row says where a stage runs, whether once for the sequence or once per chunk, and which values it takes and
gives. All else follows from the rows: which stage waits for which (:mod:`.graph`), which tensors pass between
stages and when they are released (``runtime.values``). A new kind is one row here, one function in
``layers/megatron_stages.py`` and one cost in ``plan/stage_costs.py``; ``docs/design.md`` says what else it
may need.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum, StrEnum

from megatron_ampipe.timeline import COMPUTE as COMPUTE

COMM = "comm"
INTRA = "comm.intra"


class Direction(StrEnum):
    """One of the two passes through a block."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Lane:
    """Where stages run one after another. Lanes run concurrently.

    Attributes:
        name: As in schedules, traces and pictures.
        resource: What the lane occupies. Lanes of one resource share it; those of different ones overlap.

    The compute lane is the only one whose stages are computed. Two lanes must not use the same process group:
    a host issues each lane's collectives from a separate thread, so ranks could disagree about their order.
    """

    name: str
    resource: str

    @property
    def computes(self) -> bool:
        """Whether its stages are computed, rather than started and waited for."""
        return self.name == COMPUTE


COMPUTE_LANE = Lane(COMPUTE, "processor")
COMM_LANE = Lane(COMM, "network")
"""What ranks send one another; where :data:`INTRA_LANE` is used as well, what nodes send one another."""
INTRA_LANE = Lane(INTRA, "node")
"""What ranks of a node send one another, over separate links (FSMoE, section 4.2)."""


class Scope(Enum):
    """Of how much of the sequence one stage is."""

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
    STATE = "state"
    """No tensor: something that the layer keeps from one stage to the next."""


@dataclass(frozen=True, slots=True)
class Value:
    """What one stage gives and others take.

    Attributes:
        name: A stage that takes a value and gives one of the same name replaces it for all later rows.
        layout: How chunks share it.
    """

    name: str
    layout: Layout


@dataclass(frozen=True, slots=True, eq=False)
class StageKind:
    """What a stage does: one row of the table. There is one object for each row.

    Attributes:
        name: As in schedules, traces and messages.
        lane: Where it runs by default. A stage of another lane may also stand in the compute lane; it is then
            waited for on the spot.
        scope: Of a chunk, of the whole sequence, or either.
        takes: The arguments of its function, in order; in the backward pass the gradients it returns.
            Values of ``Layout.STATE``, and values that no row of the block gives, are left out.
        gives: The results of its function, in order, without ``Layout.STATE``; in the backward pass the
            gradients it receives.
        directions: In which passes it runs.
        by_shape: Of what it takes, values of which its gradients need no more than the shape: its function is
            linear in them. A transfer that gives nothing else does not run again in a recomputed block.
        by_shape_if: The field of :class:`~.graph.BlockFeatures` without which ``by_shape`` does not hold.
        feature: The field of :class:`~.graph.BlockFeatures` without which a block has no such stage.
        chunked_by: The field of ``BlockFeatures`` without which a kind of scope ``EITHER`` is of the whole
            sequence in every schedule.
        ordered_by: The field of ``BlockFeatures`` that makes each chunk wait for the one before it.
        host_reads: The host must know its result before it can issue the stages that take it.
        covers_wait: Long enough to keep a device busy while its host waits for such a result.
        after: For a kind that is added to a block (``BlockFeatures.added``): the row that it follows.
        restores: For a kind that runs in the backward pass only, and computes values there, as a forward
            stage does: the kind whose backward waits for it, because its forward stage has not kept them.
        weights_of: For the weight gradients of a kind: that kind. A block has such a stage if the backward
            program of its schedule does; without it, the stage of the kind itself computes them.
        of_parameters: It transfers no value of a block but gradients of parameters that are complete: those
            of all blocks that the pass has run before. It needs nothing of the block it is in.
    """

    name: str
    lane: Lane = field(default=COMPUTE_LANE, repr=False)
    scope: Scope = field(default=Scope.CHUNK, repr=False)
    takes: tuple[Value, ...] = field(default=(), repr=False)
    gives: tuple[Value, ...] = field(default=(), repr=False)
    directions: tuple[Direction, ...] = field(default=tuple(Direction), repr=False)
    by_shape: tuple[Value, ...] = field(default=(), repr=False)
    by_shape_if: str | None = field(default=None, repr=False)
    feature: str | None = field(default=None, repr=False)
    chunked_by: str | None = field(default=None, repr=False)
    ordered_by: str | None = field(default=None, repr=False)
    host_reads: bool = field(default=False, repr=False)
    covers_wait: bool = field(default=False, repr=False)
    after: StageKind | None = field(default=None, repr=False)
    restores: StageKind | None = field(default=None, repr=False)
    weights_of: StageKind | None = field(default=None, repr=False)
    of_parameters: bool = field(default=False, repr=False)

    @property
    def is_differentiated(self) -> bool:
        """Whether its backward stage computes gradients of what its forward stage takes."""
        return self.directions == tuple(Direction)

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        if self in ALL_KINDS:
            # A copy in another process must be the row there.
            return _row, (self.name,)
        return StageKind, tuple(getattr(self, one.name) for one in fields(self))


def _row(name: str) -> StageKind:
    return next(kind for kind in ALL_KINDS if kind.name == name)


HIDDEN_STATES = Value("hidden", Layout.HIDDEN)
"""The residual stream: what a block takes, and in its last version what it returns."""
_QUERY = Value("query", Layout.QUERIES)
_KEY, _VALUE = Value("key", Layout.KEYS), Value("value", Layout.KEYS)
_RESIDUAL, _NORMED = Value("residual", Layout.HIDDEN), Value("normed", Layout.HIDDEN)
_TOKENS, _PROBS = Value("tokens", Layout.CHUNK), Value("probs", Layout.CHUNK)
_OWN_PROBS = Value("own probs", Layout.CHUNK)
_LOGITS, _LOSS = Value("logits", Layout.CHUNK), Value("loss", Layout.SCALAR)
_ROUTING, _SPLITS = Value("routing", Layout.STATE), Value("splits", Layout.STATE)
_SHARED_OUTPUT = Value("shared output", Layout.CHUNK)
_EXPERT_OUTPUT = Value("expert output", Layout.CHUNK)

QKV = StageKind(
    "qkv", scope=Scope.EITHER, chunked_by="chunked_qkv", takes=(HIDDEN_STATES,), gives=(_QUERY, _KEY, _VALUE)
)
"""Input norm, query/key/value projection, rotary embedding."""
ATTENTION = StageKind(
    "attention",
    scope=Scope.EITHER,
    takes=(_QUERY, _KEY, _VALUE, HIDDEN_STATES),
    gives=(_RESIDUAL, _NORMED),
    covers_wait=True,
)
"""Core attention, output projection, residual, pre-MoE norm."""
ROUTE = StageKind(
    "route",
    takes=(_NORMED,),
    gives=(_TOKENS, _PROBS, _LOGITS, _ROUTING),
    feature="experts",
    ordered_by="ordered_routing",
)
"""Router and permutation of the tokens by expert."""
CONDENSE = StageKind(
    "condense",
    takes=(_TOKENS, _PROBS, _ROUTING),
    gives=(_TOKENS, _PROBS, _OWN_PROBS, _ROUTING),
    feature="condensed",
)
"""Of similar tokens, those that are sent; they go with probabilities of 1."""
LOSSES = StageKind("losses", scope=Scope.WHOLE, takes=(_LOGITS,), gives=(_LOSS,), feature="losses")
"""Auxiliary and z losses of the router, once for the whole block."""
SHARED = StageKind("shared", takes=(_NORMED,), gives=(_SHARED_OUTPUT,), feature="shared", covers_wait=True)
"""Shared experts."""
COUNTS = StageKind(
    "counts",
    lane=COMM_LANE,
    takes=(_ROUTING,),
    gives=(_SPLITS,),
    directions=(Direction.FORWARD,),
    feature="counts",
    host_reads=True,
)
"""Exchange of the number of tokens each rank sends to each expert."""
DISPATCH = StageKind(
    "dispatch",
    lane=COMM_LANE,
    takes=(_TOKENS, _PROBS, _SPLITS),
    gives=(_TOKENS, _PROBS),
    feature="experts",
)
"""All-to-all that brings the tokens to the ranks of their experts."""
SPREAD = StageKind(
    "spread", lane=INTRA_LANE, takes=(_TOKENS, _PROBS), gives=(_TOKENS, _PROBS), feature="nodes"
)
"""All-to-all within a node that hands tokens, which came to it once, on to the ranks of their experts."""
EXPERT = StageKind(
    "expert", takes=(_TOKENS, _PROBS), gives=(_EXPERT_OUTPUT,), feature="experts", covers_wait=True
)
"""The local experts."""
COLLECT = StageKind(
    "collect",
    lane=INTRA_LANE,
    takes=(_EXPERT_OUTPUT,),
    gives=(_EXPERT_OUTPUT,),
    by_shape=(_EXPERT_OUTPUT,),
    feature="nodes",
)
"""All-to-all within a node that brings expert outputs back to where ``spread`` began, and adds them there."""
COMBINE = StageKind(
    "combine",
    lane=COMM_LANE,
    takes=(_EXPERT_OUTPUT,),
    gives=(_EXPERT_OUTPUT,),
    by_shape=(_EXPERT_OUTPUT,),
    feature="experts",
)
"""All-to-all that brings the expert outputs back."""
EXPAND = StageKind("expand", takes=(_EXPERT_OUTPUT, _OWN_PROBS), gives=(_EXPERT_OUTPUT,), feature="condensed")
"""Expert outputs of the tokens that were sent, weighted for all tokens."""
MERGE = StageKind(
    "merge",
    takes=(_EXPERT_OUTPUT, _RESIDUAL, _SHARED_OUTPUT),
    gives=(HIDDEN_STATES,),
    by_shape=(_EXPERT_OUTPUT,),
    by_shape_if="merges_sums",
    feature="experts",
)
"""Unpermutation, projection of latent experts, shared expert output, residual."""
MLP = StageKind("mlp", takes=(_NORMED, _RESIDUAL), gives=(HIDDEN_STATES,), feature="dense", covers_wait=True)
"""Of a layer without experts: its MLP, residual."""

REPERMUTE = StageKind(
    "repermute",
    takes=(_NORMED,),
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    feature="redispatch",
    restores=EXPERT,
)
"""Permutation of the tokens by expert once more, for :data:`REDISPATCH`."""
REDISPATCH = StageKind(
    "redispatch",
    lane=COMM_LANE,
    takes=(_TOKENS,),
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    feature="redispatch",
    restores=EXPERT,
)
"""All-to-all that sends the tokens once more, because what arrived was not kept."""
RESPREAD = StageKind(
    "respread",
    lane=INTRA_LANE,
    takes=(_TOKENS,),
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    feature="respread",
    restores=EXPERT,
)
"""``spread`` once more, likewise."""
REBUILD = StageKind(
    "rebuild",
    takes=(_TOKENS, _PROBS),
    directions=(Direction.BACKWARD,),
    feature="rebuild",
    restores=EXPERT,
)
"""Sorting, first product and activation of the local experts once more, without the second product."""
REDUCE = StageKind(
    "reduce",
    lane=COMM_LANE,
    scope=Scope.WHOLE,
    directions=(Direction.BACKWARD,),
    feature="reduces",
    of_parameters=True,
)
"""Reduction of the gradients that were complete when the pass had ended the block above."""

MOE_BLOCK = (
    QKV, ATTENTION, ROUTE, CONDENSE, LOSSES, SHARED, COUNTS, DISPATCH, SPREAD, EXPERT, COLLECT, COMBINE,
    EXPAND, MERGE, MLP, REPERMUTE, REDISPATCH, RESPREAD, REBUILD, REDUCE,
)  # fmt: skip
"""The rows of a transformer block, with an MoE layer or a dense one. A row takes what rows above it give."""


def _weights(kind: StageKind) -> StageKind:
    return StageKind(
        f"{kind.name}-weights", scope=Scope.EITHER, directions=(Direction.BACKWARD,), weights_of=kind
    )


WEIGHTS = {kind: _weights(kind) for kind in (QKV, ATTENTION, SHARED, EXPERT, MLP)}
"""For each kind with linear layers, the gradients of their weights as a stage: of one chunk, or of the whole
sequence in one product of all chunks. Nothing waits for them."""
ALL_KINDS = (*MOE_BLOCK, *WEIGHTS.values())
"""All kinds that a schedule can name."""
