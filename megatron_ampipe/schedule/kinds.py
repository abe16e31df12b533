"""The kinds of stages that a block can consist of, as a table.

A row says where a stage runs, whether once for the sequence or once per chunk, and which values it takes and
gives; :mod:`.block_rows` says which of them a block has. All else follows: which stage waits for which
(:mod:`.flow`, :mod:`.graph`), which tensors pass between stages and when they are released
(``runtime.compile``). A new kind is one row here, its place in :mod:`.block_rows`, one function in
``layers/attention_stages.py`` or ``layers/moe_stages.py``, and one cost in
``plan/stage_costs.py``; ``docs/design.md`` says what else it may need.
"""

from __future__ import annotations

from megatron_ampipe.schedule.stage_kind import (
    COMM_LANE,
    COPY_LANE,
    INTRA_LANE,
    TENSOR_LANE,
    Direction,
    Layout,
    Scope,
    StageKind,
    Value,
)

HIDDEN_STATES = Value("hidden", Layout.HIDDEN)
"""The residual stream: what a block takes, and in its last version what it returns."""
_INPUT, GATHERED = Value("attention input", Layout.HIDDEN), Value("gathered input", Layout.QUERIES)
QUERY = Value("query", Layout.QUERIES)
_KEY, _VALUE = Value("key", Layout.KEYS), Value("value", Layout.KEYS)
RING_KEY, RING_VALUE = Value("ring key", Layout.BLOCK), Value("ring value", Layout.BLOCK)
CONTEXT = Value("context", Layout.QUERIES)
PARTIAL, _PROJECTED = Value("partial projection", Layout.QUERIES), Value("projection", Layout.HIDDEN)
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
    takes=(HIDDEN_STATES,),
    gives=(_INPUT,),
)
"""Input norm of the rows that a tensor-parallel rank owns."""
GATHER_ROWS = StageKind(
    "gather-rows",
    lane=TENSOR_LANE,
    scope=Scope.EITHER,
    takes=(_INPUT,),
    gives=(GATHERED,),
)
"""All-gather of the rows of all tensor-parallel ranks; backward a reduce-scatter."""
QKV = StageKind(
    "qkv",
    scope=Scope.EITHER,
    takes=(HIDDEN_STATES,),
    gives=(QUERY, _KEY, _VALUE),
)
"""Input norm, unless :data:`INPUT_NORM` does it, query/key/value projection, rotary embedding."""
REGATHER_ROWS = StageKind(
    "regather-rows",
    lane=TENSOR_LANE,
    scope=Scope.EITHER,
    directions=(Direction.BACKWARD,),
    restores=QKV,
)
"""The all-gather once more: a rank keeps the rows that it owns."""
ATTEND = StageKind("attend", scope=Scope.EITHER, covers_wait=True, own_backward=True)
"""Core attention to the keys of one context-parallel rank, in steps (:func:`~.derived_kinds.step_of`)."""
RING = StageKind("ring", lane=COMM_LANE, scope=Scope.WHOLE)
"""Keys and values to the next context-parallel rank; backward, their gradients to the one before."""
RERING = StageKind("rering", lane=COMM_LANE, scope=Scope.WHOLE, directions=(Direction.BACKWARD,))
"""In the backward pass, keys and values to the context-parallel rank before: they were not kept."""
ATTENTION = StageKind(
    "attention",
    scope=Scope.EITHER,
    takes=(QUERY, _KEY, _VALUE, CONTEXT, HIDDEN_STATES),
    gives=(_RESIDUAL, _NORMED),
    covers_wait=True,
)
"""Core attention and output projection; and residual and pre-MoE norm, unless :data:`ADD_NORM` does these."""
SCATTER_ROWS = StageKind(
    "scatter-rows",
    lane=TENSOR_LANE,
    scope=Scope.EITHER,
    takes=(PARTIAL,),
    gives=(_PROJECTED,),
)
"""Reduce-scatter of the output projection over tensor-parallel ranks; backward an all-gather."""
ADD_NORM = StageKind(
    "add-norm",
    scope=Scope.EITHER,
    takes=(_PROJECTED, HIDDEN_STATES),
    gives=(_RESIDUAL, _NORMED),
)
"""Bias, dropout, residual, pre-MoE norm, of the rows that a tensor-parallel rank owns."""
CHOOSE = StageKind("choose", scope=Scope.WHOLE, takes=(_NORMED,), gives=(_CHOICE, _SCORES))
"""Router, where its choice for a token depends on tokens of other chunks."""
ROUTE = StageKind(
    "route",
    takes=(_NORMED, _CHOICE, _SCORES),
    gives=(_TOKENS, _PROBS, _LOGITS, _ROUTING),
)
"""Router, unless there is a :data:`CHOOSE`, and permutation of the tokens by expert."""
CONDENSE = StageKind(
    "condense",
    takes=(_TOKENS, _PROBS, _ROUTING),
    gives=(_TOKENS, _PROBS, _OWN_PROBS, _ROUTING),
)
"""Of similar tokens, those that are sent; they go with probabilities of 1."""
LOSSES = StageKind("losses", scope=Scope.WHOLE, takes=(_LOGITS,), gives=(_LOSS,))
"""Auxiliary and z losses of the router, once for the whole block."""
SHARED = StageKind("shared", takes=(_NORMED,), gives=(_SHARED_OUTPUT,), covers_wait=True)
"""Shared experts."""
COUNTS = StageKind(
    "counts",
    lane=COMM_LANE,
    takes=(_ROUTING,),
    gives=(_SPLITS,),
    directions=(Direction.FORWARD,),
    host_reads=True,
)
"""Exchange of the number of tokens each rank sends to each expert."""
DISPATCH = StageKind(
    "dispatch",
    lane=COMM_LANE,
    takes=(_TOKENS, _PROBS, _SPLITS),
    gives=(_TOKENS, _PROBS),
)
"""All-to-all that brings the tokens to the ranks of their experts."""
SPREAD = StageKind("spread", lane=INTRA_LANE, takes=(_TOKENS, _PROBS), gives=(_TOKENS, _PROBS))
"""All-to-all within a node that hands tokens, which came to it, on to the ranks of their experts."""
STORE_TOKENS = StageKind(
    "store-tokens",
    lane=COPY_LANE,
    takes=(_TOKENS,),
    directions=(Direction.FORWARD,),
)
"""What has arrived, to host memory."""
GATHER = StageKind("gather", lane=COMM_LANE, takes=(_TOKENS, _PROBS), gives=(_TOKENS, _PROBS))
"""All-gather over the ranks that share an expert of what has arrived at each; backward a reduce-scatter."""
EXPERT = StageKind("expert", takes=(_TOKENS, _PROBS), gives=(_EXPERT_OUTPUT, _INNER), covers_wait=True)
"""The local experts."""
STORE = StageKind("store", lane=COPY_LANE, takes=(_INNER,), directions=(Direction.FORWARD,))
"""What the experts have kept for their backward, to host memory."""
SCATTER = StageKind(
    "scatter",
    lane=COMM_LANE,
    takes=(_EXPERT_OUTPUT,),
    gives=(_EXPERT_OUTPUT,),
    by_shape=(_EXPERT_OUTPUT,),
)
"""Reduce-scatter of expert outputs over the ranks that share an expert; backward an all-gather."""
COLLECT = StageKind(
    "collect",
    lane=INTRA_LANE,
    takes=(_EXPERT_OUTPUT,),
    gives=(_EXPERT_OUTPUT,),
    by_shape=(_EXPERT_OUTPUT,),
)
"""All-to-all within a node that brings expert outputs back to where ``spread`` began, and adds them there."""
COMBINE = StageKind(
    "combine",
    lane=COMM_LANE,
    takes=(_EXPERT_OUTPUT,),
    gives=(_EXPERT_OUTPUT,),
    by_shape=(_EXPERT_OUTPUT,),
)
"""All-to-all that brings the expert outputs back."""
EXPAND = StageKind("expand", takes=(_EXPERT_OUTPUT, _OWN_PROBS), gives=(_EXPERT_OUTPUT,))
"""Expert outputs of the tokens that were sent, weighted for all tokens."""
MERGE = StageKind(
    "merge",
    takes=(_EXPERT_OUTPUT, _RESIDUAL, _SHARED_OUTPUT),
    gives=(HIDDEN_STATES,),
    by_shape=(_EXPERT_OUTPUT,),
)
"""Unpermutation, projection of latent experts, shared expert output, residual."""
MLP = StageKind("mlp", takes=(_NORMED, _RESIDUAL), gives=(HIDDEN_STATES,), covers_wait=True)
"""Of a layer without experts: its MLP, residual."""

REPERMUTE = StageKind(
    "repermute",
    takes=(_NORMED,),
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    restores=EXPERT,
)
"""Permutation of the tokens by expert once more, for :data:`REDISPATCH`."""
REDISPATCH = StageKind(
    "redispatch",
    lane=COMM_LANE,
    takes=(_TOKENS,),
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    restores=EXPERT,
)
"""All-to-all that sends the tokens once more, because what arrived was not kept."""
RESPREAD = StageKind(
    "respread",
    lane=INTRA_LANE,
    takes=(_TOKENS,),
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    restores=EXPERT,
)
"""``spread`` once more, likewise."""
LOAD_TOKENS = StageKind(
    "load-tokens",
    lane=COPY_LANE,
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    restores=EXPERT,
)
"""What had arrived, from host memory."""
REGATHER = StageKind(
    "regather",
    lane=COMM_LANE,
    takes=(_TOKENS,),
    gives=(_TOKENS,),
    directions=(Direction.BACKWARD,),
    restores=EXPERT,
)
"""``gather`` once more, of what was sent once more or comes from host memory."""

REBUILD = StageKind(
    "rebuild",
    takes=(_TOKENS, _PROBS),
    directions=(Direction.BACKWARD,),
    restores=EXPERT,
)
"""Sorting, first product and activation of the local experts once more, without the second product."""
RESORT = StageKind(
    "resort",
    takes=(_TOKENS, _PROBS),
    directions=(Direction.BACKWARD,),
    restores=EXPERT,
)
"""Sorting of what was sent once more; the experts' inner tensors come from host memory."""
LOAD = StageKind("load", lane=COPY_LANE, directions=(Direction.BACKWARD,), restores=EXPERT)
"""What :data:`STORE` has copied, from host memory."""
REDUCE = StageKind(
    "reduce",
    lane=COMM_LANE,
    scope=Scope.WHOLE,
    directions=(Direction.BACKWARD,),
    of_parameters=True,
)
"""Reduction of the gradients that were complete when the pass had ended the block above."""
REDUCE_EXPERTS = StageKind(
    "reduce-experts",
    lane=COMM_LANE,
    scope=Scope.WHOLE,
    directions=(Direction.BACKWARD,),
    of_parameters=True,
)
"""Reduction of the gradients that were complete when the feed-forward half of this block had ended."""

MOE_BLOCK = (
    INPUT_NORM, GATHER_ROWS, QKV, REGATHER_ROWS, ATTEND, RING, RERING, ATTENTION, SCATTER_ROWS, ADD_NORM,
    CHOOSE, ROUTE, CONDENSE, LOSSES, SHARED, COUNTS, DISPATCH, SPREAD, STORE_TOKENS, GATHER, EXPERT, STORE,
    SCATTER, COLLECT, COMBINE, EXPAND, MERGE, MLP, REPERMUTE, REDISPATCH, RESPREAD, LOAD_TOKENS, REGATHER,
    REBUILD, RESORT, LOAD, REDUCE, REDUCE_EXPERTS,
)  # fmt: skip
"""All of them, in the order of a block; :func:`~.block_rows.rows` makes those of one."""

STEPPED = frozenset({ATTEND, RING, RERING})
"""Kinds that a block has in steps (:func:`~.derived_kinds.step_of`), never as such."""
OF_ROWS = frozenset({INPUT_NORM, GATHER_ROWS, REGATHER_ROWS, SCATTER_ROWS, ADD_NORM})
"""Kinds that only blocks have whose tensor-parallel ranks gather or scatter rows of attention as stages."""
FEED_FORWARD = frozenset({SHARED, EXPERT, MLP})
"""Kinds whose parameters have their gradients before the backward pass comes to attention."""
