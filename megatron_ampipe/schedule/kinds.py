"""What stages a block consists of, as a table: one row for each kind of stage.

A row says where a stage runs, whether once for the sequence or once per chunk, and which values it takes and
gives. All else follows from the rows: which stage waits for which (:mod:`.flow`, :mod:`.graph`), which
tensors pass between stages and when they are released (``runtime.values``). A new kind is one row here, one
function in ``layers/attention_stages.py`` or ``layers/moe_stages.py``, and one cost in
``plan/stage_costs.py``; ``docs/design.md`` says what else it may need.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ampipe.schedule.stage_kind import (
    COMM_LANE,
    COPY_LANE,
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
"""The residual stream: what a block takes, and in its last version what it returns."""
_INPUT, _GATHERED = Value("attention input", Layout.HIDDEN), Value("gathered input", Layout.QUERIES)
QUERY = Value("query", Layout.QUERIES)
_KEY, _VALUE = Value("key", Layout.KEYS), Value("value", Layout.KEYS)
RING_KEY, RING_VALUE = Value("ring key", Layout.BLOCK), Value("ring value", Layout.BLOCK)
CONTEXT = Value("context", Layout.QUERIES)
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
    gives=(QUERY, _KEY, _VALUE),
    gives_with=("ring", (QUERY, RING_KEY, RING_VALUE)),
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
"""Core attention to the keys of one context-parallel rank, in steps (:func:`~.derived_kinds.step_of`)."""
RING = StageKind("ring", lane=COMM_LANE, scope=Scope.WHOLE, feature="ring")
"""Keys and values to the next context-parallel rank; backward, their gradients to the one before."""
RERING = StageKind(
    "rering", lane=COMM_LANE, scope=Scope.WHOLE, directions=(Direction.BACKWARD,), feature="ring"
)
"""In the backward pass, keys and values to the context-parallel rank before: they were not kept."""
ATTENTION = StageKind(
    "attention",
    scope=Scope.EITHER,
    takes=(QUERY, _KEY, _VALUE, CONTEXT, HIDDEN_STATES),
    gives=(_RESIDUAL, _NORMED),
    takes_with=("scatters_rows", (QUERY, _KEY, _VALUE, CONTEXT)),
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
"""Kinds that a block has in steps (:func:`~.derived_kinds.step_of`), never as such."""
OF_ROWS = frozenset(
    {
        INPUT_NORM, GATHER_ROWS, GATHER_ROWS_INTRA, REGATHER_ROWS, REGATHER_ROWS_INTRA, SCATTER_ROWS,
        SCATTER_ROWS_INTRA, ADD_NORM,
    }
)  # fmt: skip
"""Kinds that only blocks have whose tensor-parallel ranks gather or scatter rows of attention as stages."""
FEED_FORWARD = frozenset({SHARED, EXPERT, MLP})
"""Kinds whose parameters have their gradients before the backward pass comes to attention."""
