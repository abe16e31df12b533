"""The table of all kinds of stages, and the rows of a block.

A row of the table gives the lane of a kind, whether it runs once per sequence or once per chunk, and the
values that it takes and gives. :func:`rows` lists the rows of a block in order, with the lane and scope that
they have there. Other fields say what a kind restores, whose weight gradients it computes, and whether its
chunks are ordered. All else follows: the dependencies (:mod:`.dataflow`), and which tensors pass between
stages and when they are released (``runtime.compile``). A new kind needs a row here with its place in
:func:`rows`, a function in ``layers``, and a cost in ``plan``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_ampipe.schedule.features import BlockFeatures
from megatron_ampipe.schedule.saved import Saved
from megatron_ampipe.schedule.stage_kind import (
    COMM_LANE,
    COMPUTE_LANE,
    COPY_LANE,
    INTRA,
    INTRA_LANE,
    TENSOR_INTRA_LANE,
    TENSOR_LANE,
    Direction,
    Layout,
    Scope,
    StageKind,
    Value,
)

HIDDEN_STATES = Value("hidden", Layout.HIDDEN)
"""The residual stream: the input of a block; its last version is the output."""
_INPUT, GATHERED = Value("attention input", Layout.HIDDEN), Value("gathered input", Layout.QUERIES)
QUERY = Value("query", Layout.QUERIES)
_KEY, _VALUE = Value("key", Layout.KEYS), Value("value", Layout.KEYS)
RING_KEY, RING_VALUE = Value("ring key", Layout.BLOCK), Value("ring value", Layout.BLOCK)
CONTEXT = Value("context", Layout.QUERIES)
PARTIAL, _PROJECTED = Value("partial projection", Layout.QUERIES), Value("projection", Layout.HIDDEN)
_RESIDUAL, NORMED = Value("residual", Layout.HIDDEN), Value("normed", Layout.HIDDEN)
_TOKENS, _PROBS = Value("tokens", Layout.CHUNK), Value("probs", Layout.CHUNK)
_OWN_PROBS = Value("own probs", Layout.CHUNK)
_LOGITS, _LOSS = Value("logits", Layout.CHUNK), Value("loss", Layout.SCALAR)
_CHOICE, _SCORES = Value("choice", Layout.HIDDEN), Value("scores", Layout.HIDDEN)
_ROUTING, _SPLITS = Value("routing", Layout.STATE), Value("splits", Layout.STATE)
_INNER = Value("inner tensors", Layout.STATE)
_SHARED_OUTPUT = Value("shared output", Layout.CHUNK)
_EXPERT_OUTPUT = Value("expert output", Layout.CHUNK)
_OUTPUT_SHAPE = replace(_EXPERT_OUTPUT, by_shape=True)

_EITHER, _WHOLE = Scope.EITHER, Scope.WHOLE
_FORWARD, _BACKWARD = (Direction.FORWARD,), (Direction.BACKWARD,)

INPUT_NORM = StageKind("input-norm", COMPUTE_LANE, _EITHER, takes=(HIDDEN_STATES,), gives=(_INPUT,))
"""Input norm of the rows that a tensor-parallel rank owns."""
GATHER_ROWS = StageKind("gather-rows", TENSOR_LANE, _EITHER, takes=(_INPUT,), gives=(GATHERED,))
"""All-gather of the rows of all tensor-parallel ranks; backward a reduce-scatter."""
QKV = StageKind("qkv", COMPUTE_LANE, _EITHER, takes=(HIDDEN_STATES,), gives=(QUERY, _KEY, _VALUE))
"""Input norm, unless :data:`INPUT_NORM` does it, query/key/value projection, rotary embedding."""
REGATHER_ROWS = replace(GATHER_ROWS, name="regather-rows", directions=_BACKWARD, restores=QKV)
"""The same all-gather in the backward pass: a rank saves only the rows that it owns."""
_RING = (RING_KEY, RING_VALUE)
ATTEND = StageKind("attend", COMPUTE_LANE, _EITHER, takes=(QUERY, *_RING), gives=(CONTEXT,), covers_wait=True)
"""Core attention to the keys of one context-parallel rank, in steps (:func:`step_of`)."""
RING = StageKind("ring", COMM_LANE, _WHOLE, takes=_RING, gives=_RING)
"""Sends keys and values to the next context-parallel rank; backward, gradients to the previous one."""
RERING = replace(RING, name="rering", directions=_BACKWARD)
"""In the backward pass, sends keys and values, which were not saved, to the previous rank."""
_ATTENDED = (QUERY, _KEY, _VALUE, CONTEXT, HIDDEN_STATES)
ATTENTION = StageKind(
    "attention", COMPUTE_LANE, _EITHER, takes=_ATTENDED, gives=(_RESIDUAL, NORMED), covers_wait=True
)
"""Core attention and output projection; also residual and pre-MoE norm, unless :data:`ADD_NORM` does them."""
SCATTER_ROWS = StageKind("scatter-rows", TENSOR_LANE, _EITHER, takes=(PARTIAL,), gives=(_PROJECTED,))
"""Reduce-scatter of the output projection over tensor-parallel ranks; backward an all-gather."""
ADD_NORM = replace(INPUT_NORM, name="add-norm", takes=(_PROJECTED, HIDDEN_STATES), gives=(_RESIDUAL, NORMED))
"""Bias, dropout, residual and pre-MoE norm for the rows that a tensor-parallel rank owns; only the norm in
a block without attention."""
CHOOSE = StageKind("choose", COMPUTE_LANE, _WHOLE, takes=(NORMED,), gives=(_CHOICE, _SCORES))
"""Router for all chunks at once, if its choice for a token depends on tokens of other chunks."""
ROUTE = StageKind("route", takes=(NORMED, _CHOICE, _SCORES), gives=(_TOKENS, _PROBS, _LOGITS, _ROUTING))
"""Router, unless there is a :data:`CHOOSE`, and permutation of the tokens by expert."""
CONDENSE = StageKind(
    "condense", takes=(_TOKENS, _PROBS, _ROUTING), gives=(_TOKENS, _PROBS, _OWN_PROBS, _ROUTING)
)
"""Selects one of each group of similar tokens to be sent, with a probability of 1."""
LOSSES = StageKind("losses", COMPUTE_LANE, _WHOLE, takes=(_LOGITS,), gives=(_LOSS,))
"""Auxiliary and z losses of the router, once for the whole block."""
SHARED = StageKind("shared", takes=(NORMED,), gives=(_SHARED_OUTPUT,), covers_wait=True)
"""Shared experts."""
COUNTS = StageKind(
    "counts", COMM_LANE, takes=(_ROUTING,), gives=(_SPLITS,), directions=_FORWARD, host_reads=True
)
"""Exchange of the numbers of tokens that each rank sends to each expert."""
DISPATCH = StageKind("dispatch", COMM_LANE, takes=(_TOKENS, _PROBS, _SPLITS), gives=(_TOKENS, _PROBS))
"""All-to-all that sends tokens to the ranks of their experts."""
SPREAD = StageKind("spread", INTRA_LANE, takes=(_TOKENS, _PROBS), gives=(_TOKENS, _PROBS))
"""All-to-all within a node that forwards received tokens to the ranks of their experts."""
STORE_TOKENS = StageKind("store-tokens", COPY_LANE, takes=(_TOKENS,), directions=_FORWARD)
"""Copies received tokens to host memory."""
GATHER = StageKind("gather", COMM_LANE, takes=(_TOKENS, _PROBS), gives=(_TOKENS, _PROBS))
"""All-gather of received tokens over the ranks that share an expert; backward a reduce-scatter."""
EXPERT = StageKind("expert", takes=(_TOKENS, _PROBS), gives=(_EXPERT_OUTPUT, _INNER), covers_wait=True)
"""The local experts."""
STORE = StageKind("store", COPY_LANE, takes=(_INNER,), directions=_FORWARD)
"""Copies the saved activations of the experts to host memory."""
SCATTER = StageKind("scatter", COMM_LANE, takes=(_OUTPUT_SHAPE,), gives=(_EXPERT_OUTPUT,))
"""Reduce-scatter of expert outputs over the ranks that share an expert; backward an all-gather."""
COLLECT = StageKind("collect", INTRA_LANE, takes=(_OUTPUT_SHAPE,), gives=(_EXPERT_OUTPUT,))
"""All-to-all within a node that returns expert outputs to the ranks that ``spread`` them, and adds them."""
COMBINE = StageKind("combine", COMM_LANE, takes=(_OUTPUT_SHAPE,), gives=(_EXPERT_OUTPUT,))
"""All-to-all that returns expert outputs to the ranks of their tokens."""
EXPAND = StageKind("expand", takes=(_EXPERT_OUTPUT, _OWN_PROBS), gives=(_EXPERT_OUTPUT,))
"""Expands the outputs of the sent tokens to all similar tokens, each with its own weight."""
MERGE = StageKind("merge", takes=(_OUTPUT_SHAPE, _RESIDUAL, _SHARED_OUTPUT), gives=(HIDDEN_STATES,))
"""Unpermutation, projection of latent experts, shared expert output, residual."""
MLP = StageKind("mlp", takes=(NORMED, _RESIDUAL), gives=(HIDDEN_STATES,), covers_wait=True)
"""MLP of a layer without experts, residual."""

# The kinds that restore activations which the experts have not saved.
REPERMUTE = StageKind("repermute", takes=(NORMED,), gives=(_TOKENS,), directions=_BACKWARD, restores=EXPERT)
"""Permutes the tokens by expert again, for :data:`REDISPATCH`."""
REDISPATCH = replace(REPERMUTE, name="redispatch", lane=COMM_LANE, takes=(_TOKENS,))
"""Dispatches the tokens again, because received tokens were not saved."""
RESPREAD = replace(REDISPATCH, name="respread", lane=INTRA_LANE)
"""Repeats ``spread``, likewise."""
LOAD_TOKENS = replace(REPERMUTE, name="load-tokens", lane=COPY_LANE, takes=())
"""Copies received tokens back from host memory."""
REGATHER = replace(REDISPATCH, name="regather")
"""Repeats ``gather`` for tokens that were redispatched or copied back from host memory."""
REBUILD = replace(REPERMUTE, name="rebuild", takes=(_TOKENS, _PROBS), gives=())
"""Repeats sorting, first linear layer and activation of the local experts, not the second linear layer."""
RESORT = replace(REBUILD, name="resort")
"""Sorts redispatched tokens; the experts' inner tensors come from host memory."""
LOAD = replace(LOAD_TOKENS, name="load", gives=())
"""Copies back what :data:`STORE` has copied to host memory."""
REDUCE = StageKind("reduce", COMM_LANE, _WHOLE, directions=_BACKWARD)
"""Reduction of the parameter gradients that were complete when the block above had ended."""
REDUCE_EXPERTS = replace(REDUCE, name="reduce-experts")
"""Reduction of the parameter gradients that were complete when this block's feed-forward half had ended."""

MOE_BLOCK = tuple(row for row in list(globals().values()) if isinstance(row, StageKind))
"""All kinds above, in the order of a block; :func:`rows` selects those of a given block."""

STEPPED = frozenset({ATTEND, RING, RERING})
"""Kinds that a block has only as numbered steps (:func:`step_of`)."""
FEED_FORWARD = frozenset({SHARED, EXPERT, MLP})
"""Kinds whose parameter gradients are complete before the backward pass reaches attention."""


def step_of(kind: StageKind, step: int) -> StageKind:
    """One step of ring attention: the kind with the name and number of the step.

    Step 0 attends to the keys of this rank. ``ring<t>`` receives the keys of the rank ``t`` places before,
    and ``attend<t>`` attends to them. ``ring<t>`` waits until the keys of step ``t - 2`` have been used, so a
    rank holds the keys of at most two other ranks. The backward pass goes from the last step to the first:
    ``rering<t>`` receives the keys of step ``t`` from the next rank, and the backward of ``ring<t>`` sends
    their gradients, to which every rank has added its part, to the previous rank.
    """

    def keys_of(number: int) -> tuple[Value, ...]:
        # In the backward pass, every step takes the keys that it has received under the same name.
        suffix = f" {number}" if number else ""
        return tuple(Value(value.name + suffix, value.layout) for value in _RING)

    def used(number: int) -> Value:
        return Value(f"used {number}", Layout.STATE)

    numbered = replace(kind, name=f"{kind.name}{step}", step_of=kind, step=step)
    if kind == ATTEND:
        before = (CONTEXT,) if step else ()
        return replace(numbered, takes=(QUERY, *keys_of(step), *before), gives=(CONTEXT, used(step)))
    if kind == RING:
        turn = (used(step - 2),) if step > 1 else ()
        return replace(numbered, takes=(*keys_of(step - 1), *turn), gives=keys_of(step))
    assert kind == RERING, f"{kind} has no steps"
    return replace(numbered, takes=keys_of(0), gives=keys_of(0), restores=step_of(ATTEND, step))


def ring_rows(num_ranks: int) -> tuple[StageKind, ...]:
    """The rows of ring attention, in place of :data:`STEPPED`."""
    steps = range(1, num_ranks)
    forward = (step_of(kind, step) for step in steps for kind in (RING, ATTEND))
    return (step_of(ATTEND, 0), *forward, *(step_of(RERING, step) for step in reversed(steps)))


GRAPH_MODULES: Mapping[str, frozenset[StageKind]] = {
    "attn": frozenset({INPUT_NORM, QKV, ATTENTION, ADD_NORM}),
    "moe_router": frozenset({ROUTE, SHARED}),
    # ``merge`` reads what ``route`` has left on the device. Megatron's local graphs also have both.
    "moe_preprocess": frozenset({ROUTE, SHARED, MERGE}),
    "mlp": frozenset({MLP}),
}
"""For values of Megatron's ``--cuda-graph-modules``, the kinds that can be captured as CUDA graphs."""
NEEDED_IN_GRAPHS: Mapping[StageKind, StageKind] = {MERGE: ROUTE, QKV: ATTENTION}
"""For a kind, the kind without which it cannot be captured: ``merge`` reads what ``route`` has left in the
state of the block, and the backward pass of ``qkv`` sums of gradients that ``attention`` has made."""
WEIGHTS = {
    kind: StageKind(f"{kind}-weights", COMPUTE_LANE, _EITHER, directions=_BACKWARD, weights_of=kind)
    for kind in (QKV, ATTENTION, SHARED, EXPERT, MLP)
}
"""For each kind with linear layers, the stage of their weight gradients: of one chunk, or of the whole
sequence with one product for all chunks. Nothing waits for them."""
SUM_BYTES = 4
"""Bytes of an element in a sum of gradients of several chunks."""
ALL_KINDS = (*MOE_BLOCK, *WEIGHTS.values())
"""All kinds that a schedule can name."""


def rows(block: BlockFeatures) -> tuple[StageKind, ...]:
    """The rows of a block with these features."""
    every = [
        *_attention(block),
        *([(True, MLP)] if block.dense else _experts(block)),
        (block.reduces, REDUCE),
        (block.reduces_experts, REDUCE_EXPERTS),
    ]
    return tuple(kind for has_it, kind in every if has_it)


type _Candidates = Sequence[tuple[bool, StageKind]]
"""Kinds in the order of a block, each with whether the block has it."""


def _attention(block: BlockFeatures) -> _Candidates:
    """From the input norm to the norm before the router."""
    if not block.attention:
        return [(True, replace(ADD_NORM, scope=Scope.CHUNK, takes=(HIDDEN_STATES,)))]
    lane = TENSOR_INTRA_LANE if block.row_links == INTRA_LANE.resource else TENSOR_LANE
    scope = Scope.EITHER if block.chunked_qkv else Scope.WHOLE
    scatters = bool(block.row_links)
    qkv = replace(QKV, scope=scope, takes=(GATHERED,) if block.gathers_rows else QKV.takes)
    if block.ring:
        qkv = replace(qkv, gives=(QUERY, RING_KEY, RING_VALUE))
    unscattered = tuple(value for value in ATTENTION.takes if value != HIDDEN_STATES)
    saved = block.saved
    return [
        (block.gathers_rows, replace(INPUT_NORM, scope=scope)),
        (block.gathers_rows, replace(GATHER_ROWS, scope=scope, lane=lane)),
        (True, qkv),
        (block.gathers_rows and saved.resends_rows, replace(REGATHER_ROWS, scope=scope, lane=lane)),
        *((block.ring, kind) for kind in ring_rows(block.ring_ranks)),
        (True, replace(ATTENTION, takes=unscattered, gives=(PARTIAL,)) if scatters else ATTENTION),
        (scatters, replace(SCATTER_ROWS, lane=lane)),
        (scatters, ADD_NORM),
    ]


def _experts(block: BlockFeatures) -> _Candidates:
    """From the router to the output of the block, and the kinds that restore saved activations."""
    # Ranks that share an expert use the links within their node, if tokens are sent between nodes.
    node_lane = INTRA_LANE if block.nodes or block.gathers == INTRA else COMM_LANE
    gathers = bool(block.gathers)
    saved = block.saved
    redispatches = saved.restores(tokens=Saved.RESEND)
    offloads = saved.restores(inner=Saved.HOST)
    offloads_tokens = any(policy.stores_tokens for policy in saved.experts)
    repermute = REPERMUTE if saved.normed is Saved.KEEP else replace(REPERMUTE, takes=())
    # The outputs of latent experts are projected here, so the backward needs their values.
    merge = replace(MERGE, takes=(_EXPERT_OUTPUT, *MERGE.takes[1:])) if block.latent else MERGE
    return [
        (block.chooses, CHOOSE),
        (True, replace(ROUTE, ordered=block.ordered_routing)),
        (block.condensed, CONDENSE),
        (block.losses, LOSSES),
        (block.shared, SHARED),
        (not block.flex, COUNTS),
        (True, DISPATCH),
        (block.nodes, SPREAD),
        (offloads_tokens, STORE_TOKENS),
        (gathers, replace(GATHER, lane=node_lane)),
        (True, EXPERT),
        (offloads, STORE),
        (gathers, replace(SCATTER, lane=node_lane)),
        (block.nodes, COLLECT),
        (True, COMBINE),
        (block.condensed, EXPAND),
        (True, merge),
        (redispatches, repermute),
        (redispatches, REDISPATCH),
        (redispatches and block.nodes, RESPREAD),
        (offloads_tokens, LOAD_TOKENS),
        (gathers and (redispatches or offloads_tokens), replace(REGATHER, lane=node_lane)),
        (saved.restores(inner=Saved.RECOMPUTE), REBUILD),
        (saved.restores(tokens=Saved.RESEND, inner=Saved.HOST), RESORT),
        (offloads, LOAD),
    ]
