"""What stages a block consists of, as a table: one row for each kind of stage.

A row says where a stage runs, whether once for the sequence or once per chunk, and which values it takes and
gives. All else follows from the rows: which stage waits for which (:mod:`.flow`, :mod:`.graph`), which
tensors pass between stages and when they are released (``runtime.values``). A new kind is one row here, one
function in ``layers/attention_stages.py`` or ``layers/moe_stages.py``, and one cost in
``plan/stage_costs.py``; ``docs/design.md`` says what else it may need.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields, replace
from enum import Enum, StrEnum

from megatron_ampipe.timeline import COMPUTE as COMPUTE
from megatron_ampipe.timeline import COPY as COPY

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
TENSOR_LANE = Lane(TENSOR, COMM_LANE.resource)
"""What tensor-parallel ranks send one another. A separate lane, because rows of a chunk must not wait for the
tokens of an earlier one; with a separate process group (``runtime.row_scatter``)."""
TENSOR_INTRA_LANE = Lane(TENSOR, INTRA_LANE.resource)
"""The same, where these ranks are on one node and the ranks of the experts on several."""
COPY_LANE = Lane(COPY, "bus")
"""Copies to host memory and back (MPipeMoE, section III-D). No other rank takes part in them."""


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
    BLOCK = "block"
    """Keys or values of one rank: every stage takes all of them, whichever its chunk."""
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
        by_shape_if: The field of :class:`~.features.BlockFeatures` without which ``by_shape`` does not hold.
        feature: The field of :class:`~.features.BlockFeatures` without which a block has no such stage.
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
        of_parameters: It transfers no value of a block but gradients of parameters that are complete.
        takes_with: A field of ``BlockFeatures``, and what it takes in place of ``takes`` in a block with it.
        gives_with: The same of what it gives.
        own_backward: Its backward is a function of the layer, not of autograd. It is given what the stage
            took of ``Layout.BLOCK``, or what restored that, and adds its gradients up itself.
        follows: For a kind that restores: it waits for the backward of this one, so that only a part of
            what is restored is in memory.
        step_of: The kind of which it is one of several steps; the layer has one function for all of them.
        step: Which.
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
    takes_with: tuple[str, tuple[Value, ...]] | None = field(default=None, repr=False)
    gives_with: tuple[str, tuple[Value, ...]] | None = field(default=None, repr=False)
    own_backward: bool = field(default=False, repr=False)
    follows: StageKind | None = field(default=None, repr=False)
    step_of: StageKind | None = field(default=None, repr=False)
    step: int = field(default=0, repr=False)

    @property
    def copies(self) -> bool:
        """Whether it copies to host memory or back. The runtime does that itself, for any layer."""
        return self.lane is COPY_LANE

    @property
    def is_differentiated(self) -> bool:
        """Whether its backward stage computes gradients of what its forward stage takes."""
        return self.directions == tuple(Direction)

    @property
    def row(self) -> StageKind:
        """The kind that tables of functions and costs have."""
        return self if self.step_of is None else self.step_of

    def __str__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[object, ...]:
        if self.step_of is not None:
            return step_of, (self.step_of, self.step)
        if self in ALL_KINDS:
            # A copy in another process must be the row there.
            return _row, (self.name,)
        return StageKind, tuple(getattr(self, one.name) for one in fields(self))


def _row(name: str) -> StageKind:
    return next(kind for kind in ALL_KINDS if kind.name == name)


HIDDEN_STATES = Value("hidden", Layout.HIDDEN)
"""The residual stream: what a block takes, and in its last version what it returns."""
_INPUT, _GATHERED = Value("attention input", Layout.HIDDEN), Value("gathered input", Layout.QUERIES)
_QUERY = Value("query", Layout.QUERIES)
_KEY, _VALUE = Value("key", Layout.KEYS), Value("value", Layout.KEYS)
_RING_KEY, _RING_VALUE = Value("ring key", Layout.BLOCK), Value("ring value", Layout.BLOCK)
_CONTEXT = Value("context", Layout.QUERIES)
_PARTIAL, _PROJECTED = Value("partial projection", Layout.QUERIES), Value("projection", Layout.HIDDEN)
_RESIDUAL, _NORMED = Value("residual", Layout.HIDDEN), Value("normed", Layout.HIDDEN)
_TOKENS, _PROBS = Value("tokens", Layout.CHUNK), Value("probs", Layout.CHUNK)
_OWN_PROBS = Value("own probs", Layout.CHUNK)
_LOGITS, _LOSS = Value("logits", Layout.CHUNK), Value("loss", Layout.SCALAR)
_CHOICE, _SCORES = Value("choice", Layout.HIDDEN), Value("scores", Layout.HIDDEN)
_ROUTING, _SPLITS = Value("routing", Layout.STATE), Value("splits", Layout.STATE)
_INNER = Value("inner tensors", Layout.STATE)
_SHARED_OUTPUT = Value("shared output", Layout.CHUNK)
_EXPERT_OUTPUT = Value("expert output", Layout.CHUNK)

INPUT_NORM = StageKind(
    "input-norm",
    scope=Scope.EITHER,
    chunked_by="chunked_qkv",
    takes=(HIDDEN_STATES,),
    gives=(_INPUT,),
    feature="gathers_rows",
)
"""Input norm of the rows that a tensor-parallel rank owns."""
GATHER_ROWS = StageKind(
    "gather-rows",
    lane=TENSOR_LANE,
    scope=Scope.EITHER,
    chunked_by="chunked_qkv",
    takes=(_INPUT,),
    gives=(_GATHERED,),
    feature="gathers_rows_comm",
)
"""All-gather of the rows of all tensor-parallel ranks; backward a reduce-scatter."""
QKV = StageKind(
    "qkv",
    scope=Scope.EITHER,
    chunked_by="chunked_qkv",
    takes=(HIDDEN_STATES,),
    takes_with=("gathers_rows", (_GATHERED,)),
    gives=(_QUERY, _KEY, _VALUE),
    gives_with=("ring", (_QUERY, _RING_KEY, _RING_VALUE)),
)
"""Input norm, unless :data:`INPUT_NORM` does it, query/key/value projection, rotary embedding."""
REGATHER_ROWS = StageKind(
    "regather-rows",
    lane=TENSOR_LANE,
    scope=Scope.EITHER,
    chunked_by="chunked_qkv",
    directions=(Direction.BACKWARD,),
    feature="regathers_rows_comm",
    restores=QKV,
)
"""The all-gather once more: a rank keeps the rows that it owns."""
ATTEND = StageKind("attend", scope=Scope.EITHER, feature="ring", covers_wait=True, own_backward=True)
"""Core attention to the keys of one context-parallel rank, in steps (:func:`step_of`)."""
RING = StageKind("ring", lane=COMM_LANE, scope=Scope.WHOLE, feature="ring")
"""Keys and values to the next context-parallel rank; backward, their gradients to the one before."""
RERING = StageKind(
    "rering", lane=COMM_LANE, scope=Scope.WHOLE, directions=(Direction.BACKWARD,), feature="ring"
)
"""In the backward pass, keys and values to the context-parallel rank before: they were not kept."""
ATTENTION = StageKind(
    "attention",
    scope=Scope.EITHER,
    takes=(_QUERY, _KEY, _VALUE, _CONTEXT, HIDDEN_STATES),
    gives=(_RESIDUAL, _NORMED),
    takes_with=("scatters_rows", (_QUERY, _KEY, _VALUE, _CONTEXT)),
    gives_with=("scatters_rows", (_PARTIAL,)),
    covers_wait=True,
)
"""Core attention and output projection; and residual and pre-MoE norm, unless :data:`ADD_NORM` does these."""
SCATTER_ROWS = StageKind(
    "scatter-rows",
    lane=TENSOR_LANE,
    scope=Scope.EITHER,
    takes=(_PARTIAL,),
    gives=(_PROJECTED,),
    feature="scatters_rows_comm",
)
"""Reduce-scatter of the output projection over tensor-parallel ranks; backward an all-gather."""
GATHER_ROWS_INTRA, REGATHER_ROWS_INTRA, SCATTER_ROWS_INTRA = (
    replace(
        kind,
        name=f"{kind.name}-intra",
        lane=TENSOR_INTRA_LANE,
        feature=f"{str(kind.feature).removesuffix('_comm')}_intra",
    )
    for kind in (GATHER_ROWS, REGATHER_ROWS, SCATTER_ROWS)
)
ADD_NORM = StageKind(
    "add-norm",
    scope=Scope.EITHER,
    takes=(_PROJECTED, HIDDEN_STATES),
    gives=(_RESIDUAL, _NORMED),
    feature="scatters_rows",
)
"""Bias, dropout, residual, pre-MoE norm, of the rows that a tensor-parallel rank owns."""
CHOOSE = StageKind("choose", scope=Scope.WHOLE, takes=(_NORMED,), gives=(_CHOICE, _SCORES), feature="chooses")
"""Router, where its choice for a token depends on tokens of other chunks."""
ROUTE = StageKind(
    "route",
    takes=(_NORMED, _CHOICE, _SCORES),
    gives=(_TOKENS, _PROBS, _LOGITS, _ROUTING),
    feature="experts",
    ordered_by="ordered_routing",
)
"""Router, unless there is a :data:`CHOOSE`, and permutation of the tokens by expert."""
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
"""All-to-all within a node that hands tokens, which came to it, on to the ranks of their experts."""
STORE_TOKENS = StageKind(
    "store-tokens",
    lane=COPY_LANE,
    takes=(_TOKENS,),
    directions=(Direction.FORWARD,),
    feature="offload_tokens",
)
"""What has arrived, to host memory."""
GATHER = StageKind(
    "gather", lane=COMM_LANE, takes=(_TOKENS, _PROBS), gives=(_TOKENS, _PROBS), feature="gathers_comm"
)
"""All-gather over the ranks that share an expert of what has arrived at each; backward a reduce-scatter."""
EXPERT = StageKind(
    "expert", takes=(_TOKENS, _PROBS), gives=(_EXPERT_OUTPUT, _INNER), feature="experts", covers_wait=True
)
"""The local experts."""
STORE = StageKind(
    "store", lane=COPY_LANE, takes=(_INNER,), directions=(Direction.FORWARD,), feature="offload"
)
"""What the experts have kept for their backward, to host memory."""
SCATTER = StageKind(
    "scatter",
    lane=COMM_LANE,
    takes=(_EXPERT_OUTPUT,),
    gives=(_EXPERT_OUTPUT,),
    by_shape=(_EXPERT_OUTPUT,),
    feature="gathers_comm",
)
"""Reduce-scatter of expert outputs over the ranks that share an expert; backward an all-gather."""
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
LOAD_TOKENS = StageKind(
    "load-tokens",
    lane=COPY_LANE,
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    feature="offload_tokens",
    restores=EXPERT,
)
"""What had arrived, from host memory."""
REGATHER = StageKind(
    "regather",
    lane=COMM_LANE,
    takes=(_TOKENS,),
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    feature="regathers_comm",
    restores=EXPERT,
)
"""``gather`` once more, of what was sent once more or comes from host memory."""


def _within_node(kind: StageKind) -> StageKind:
    """The same transfer on the lane of the node, in a block whose other transfers leave the node."""
    feature = f"{str(kind.feature).removesuffix('_comm')}_intra"
    return replace(kind, name=f"{kind.name}-intra", lane=INTRA_LANE, feature=feature)


GATHER_INTRA, SCATTER_INTRA, REGATHER_INTRA = map(_within_node, (GATHER, SCATTER, REGATHER))
REBUILD = StageKind(
    "rebuild",
    takes=(_TOKENS, _PROBS),
    directions=(Direction.BACKWARD,),
    feature="rebuild",
    restores=EXPERT,
)
"""Sorting, first product and activation of the local experts once more, without the second product."""
RESORT = StageKind(
    "resort",
    takes=(_TOKENS, _PROBS),
    directions=(Direction.BACKWARD,),
    feature="resort",
    restores=EXPERT,
)
"""Sorting of what was sent once more; the experts' inner tensors come from host memory."""
LOAD = StageKind("load", lane=COPY_LANE, directions=(Direction.BACKWARD,), feature="offload", restores=EXPERT)
"""What :data:`STORE` has copied, from host memory."""
REDUCE = StageKind(
    "reduce",
    lane=COMM_LANE,
    scope=Scope.WHOLE,
    directions=(Direction.BACKWARD,),
    feature="reduces",
    of_parameters=True,
)
"""Reduction of the gradients that were complete when the pass had ended the block above."""
REDUCE_EXPERTS = StageKind(
    "reduce-experts",
    lane=COMM_LANE,
    scope=Scope.WHOLE,
    directions=(Direction.BACKWARD,),
    feature="reduces_experts",
    of_parameters=True,
)
"""Reduction of the gradients that were complete when the feed-forward half of this block had ended."""

MOE_BLOCK = (
    INPUT_NORM, GATHER_ROWS, GATHER_ROWS_INTRA, QKV, REGATHER_ROWS, REGATHER_ROWS_INTRA, ATTEND, RING, RERING,
    ATTENTION, SCATTER_ROWS, SCATTER_ROWS_INTRA, ADD_NORM, CHOOSE, ROUTE, CONDENSE,
    LOSSES, SHARED, COUNTS, DISPATCH, SPREAD, STORE_TOKENS, GATHER, GATHER_INTRA, EXPERT, STORE, SCATTER,
    SCATTER_INTRA, COLLECT, COMBINE, EXPAND, MERGE, MLP, REPERMUTE, REDISPATCH, RESPREAD, LOAD_TOKENS,
    REGATHER, REGATHER_INTRA, REBUILD, RESORT, LOAD, REDUCE, REDUCE_EXPERTS,
)  # fmt: skip
"""The rows of a transformer block, with an MoE layer or a dense one. A row takes what rows above it give."""

STEPPED = frozenset({ATTEND, RING, RERING})
"""Kinds that a block has in steps (:func:`step_of`), never as such."""
OF_ROWS = frozenset(
    {
        INPUT_NORM, GATHER_ROWS, GATHER_ROWS_INTRA, REGATHER_ROWS, REGATHER_ROWS_INTRA, SCATTER_ROWS,
        SCATTER_ROWS_INTRA, ADD_NORM,
    }
)  # fmt: skip
"""Kinds that only blocks have whose tensor-parallel ranks gather or scatter rows of attention as stages."""


@functools.cache
def step_of(kind: StageKind, step: int) -> StageKind:
    """One step of attention over context-parallel ranks: a kind with the name and number of the step.

    Step 0 attends to the keys of this rank. ``ring<t>`` brings the keys of the rank ``t`` places before, and
    ``attend<t>`` attends to them. It does not begin before the keys of step ``t - 2`` were used, so a rank
    has keys of two others at most. The backward pass goes from the last step to the first: ``rering<t>``
    brings the keys of step ``t`` from the next rank, and the backward of ``ring<t>`` takes their gradients,
    to which every rank adds its part, one place back.
    """

    def keys_of(number: int) -> tuple[Value, ...]:
        # In the backward pass, every step takes what the one before has brought, under the same name.
        suffix = f" {number}" if number else ""
        return tuple(Value(value.name + suffix, value.layout) for value in (_RING_KEY, _RING_VALUE))

    def used(number: int) -> Value:
        return Value(f"used {number}", Layout.STATE)

    found = replace(kind, name=f"{kind.name}{step}", step_of=kind, step=step)
    if kind is ATTEND:
        before = (_CONTEXT,) if step else ()
        return replace(found, takes=(_QUERY, *keys_of(step), *before), gives=(_CONTEXT, used(step)))
    if kind is RING:
        turn = (used(step - 2),) if step > 1 else ()
        return replace(found, takes=(*keys_of(step - 1), *turn), gives=keys_of(step))
    assert kind is RERING, f"{kind} has no steps"
    attends, follows = step_of(ATTEND, step), step_of(ATTEND, step + 2)
    return replace(found, takes=keys_of(0), gives=keys_of(0), restores=attends, follows=follows)


def ring_rows(num_ranks: int) -> tuple[StageKind, ...]:
    """The rows of attention over context-parallel ranks, in place of :data:`STEPPED`."""
    steps = range(1, num_ranks)
    forward = (step_of(kind, step) for step in steps for kind in (RING, ATTEND))
    return (step_of(ATTEND, 0), *forward, *(step_of(RERING, step) for step in reversed(steps)))


def _weights(kind: StageKind) -> StageKind:
    return StageKind(
        f"{kind.name}-weights", scope=Scope.EITHER, directions=(Direction.BACKWARD,), weights_of=kind
    )


WEIGHTS = {kind: _weights(kind) for kind in (QKV, ATTENTION, SHARED, EXPERT, MLP)}
"""For each kind with linear layers, the gradients of their weights as a stage: of one chunk, or of the whole
sequence in one product of all chunks. Nothing waits for them."""
FEED_FORWARD = frozenset({SHARED, EXPERT, MLP})
"""Kinds whose parameters have their gradients before the backward pass comes to attention."""
ALL_KINDS = (*MOE_BLOCK, *WEIGHTS.values())
"""All kinds that a schedule can name."""
