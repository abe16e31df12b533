"""The stage functions of a block's attention half, from its input to the norm before the router.

Megatron's ``TransformerLayer._forward_attention`` and that norm, chunk by chunk. Transfers between
context-parallel or tensor-parallel ranks are separate stages.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.exchange.transports import exchange_sequence_rows
from megatron_ampipe.layers.block_pass import BlockPass
from megatron_ampipe.layers.chunk_attention import project_qkv
from megatron_ampipe.layers.linear_layers import transfers_apart
from megatron_ampipe.layers.stage_functions import ReadBlock, Tensors, runs
from megatron_ampipe.runtime.collectives import Transfer, pass_on
from megatron_ampipe.runtime.saved_tensors import DroppedOutput, RecomputedTensors
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import Direction, kinds

# S sequence rows, B batch, D hidden size, H heads, G key/value heads, C head size of keys, V of values.


def _read_by_qkv(block: ReadBlock) -> list[Module]:
    others = ("core_attention", "linear_proj")
    layer = block.attention_layer
    projection = [module for name, module in layer.self_attention.named_children() if name not in others]
    return [layer.input_layernorm, *projection]


def _read_by_attention(block: ReadBlock) -> list[Module]:
    attention = block.attention_layer.self_attention
    norm = [] if block.scatters_rows else [block.moe_layer.pre_mlp_layernorm]
    return [attention.core_attention, attention.linear_proj, *norm]


def _read_by_add_norm(block: ReadBlock) -> list[Module | Parameter | None]:
    if not block.attends:
        return [block.moe_layer.pre_mlp_layernorm]
    # The bias is added after the reduce-scatter, so only once.
    return [block.moe_layer.pre_mlp_layernorm, block.attention_layer.self_attention.linear_proj.bias]


@runs(kinds.INPUT_NORM, reads=lambda block: [block.attention_layer.input_layernorm])
def input_norm(
    state: BlockPass, chunk: int | None, hidden: Tensor, *, norm: DroppedOutput | None = None
) -> tuple[Tensor, ...]:
    """Normalize ``[rows, B, D]``."""
    return (_normalize(state.block.attention_layer.input_layernorm, hidden, norm),)


def _normalize(module: Module, rows: Tensor, norm: DroppedOutput | None) -> Tensor:
    """Apply a norm, whose output is not saved with ``norm``."""
    output: Tensor = module(rows) if norm is None else norm.compute(module, rows)
    return output


@runs(kinds.GATHER_ROWS, kinds.REGATHER_ROWS)
def gather_rows(
    state: BlockPass, chunks: Sequence[int | None], tensors: Tensors, direction: Direction
) -> Transfer:
    """All-gather the output of :func:`input_norm`, ``[rows, B, D]``, to ``[ranks * rows, B, D]``."""
    group, backward = state.block.row_group, direction is Direction.BACKWARD
    return exchange_sequence_rows(tensors, group, scatter=backward)


@runs(kinds.QKV, reads=_read_by_qkv)
def qkv(
    state: BlockPass, chunk: int | None, hidden: Tensor, *, norm: DroppedOutput | None = None
) -> tuple[Tensor, ...]:
    """Project ``[rows, B, D]`` to queries, keys and values, each ``[rows, B, heads, head size]``."""
    layer = state.block.attention_layer
    project = functools.partial(
        project_qkv,
        layer.self_attention,
        rotary_pos_emb=state.rotary_pos_emb,
        spans=state.rows_of(chunk).queries,
        num_keys=state.whole.num_keys,
        documents=state.documents,
        gathered=not state.features.ring,
    )
    if state.features.gathers_rows:
        with transfers_apart(layer.self_attention.linear_qkv):
            query, key, value = project(hidden)
    elif norm is None:
        query, key, value = project(layer.input_layernorm(hidden))
    else:
        query, key, value = norm.compute_and_feed(layer.input_layernorm, hidden, project)
    if state.features.ring:
        # Views would keep the joint projection alive.
        return query.contiguous(), key.contiguous(), value.contiguous()
    if chunk is not None and len(state.chunks) > 1:
        # Keys and values are copied into buffers of the whole sequence. Queries that are a view of the joint
        # projection would keep a second copy of both alive.
        query = query.contiguous()
    return query, key, value


def attend_backward(
    step: int,
    state: BlockPass,
    chunk: int | None,
    gradient: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    sums: KeyValueSums,
) -> Sequence[Tensor | None]:
    """The gradients of the inputs of :func:`attend`. Step 0, the last to run, gives those of the queries.

    The parameters are those of every backward function of a stage (``runtime.segment``).
    """
    query_gradient = state.ring.differentiate(step, chunk, gradient, key, value, sums)
    if query_gradient is None:
        return None, None, None, gradient
    if state.block.has_gate:
        query_gradient = torch.cat([query_gradient, torch.zeros_like(query_gradient)], dim=-1)
    return query_gradient, None, None


@runs(kinds.ATTEND, backward=attend_backward)
def attend(
    step: int,
    state: BlockPass,
    chunk: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *context: Tensor,
) -> tuple[Tensor, ...]:
    """Attention of one chunk's rows to the keys of the steps up to this one, ``[rows, B, H * V]``."""
    if step:
        return (state.ring.go_on(step, chunk, key, value, *context),)
    query, *_ = _gate_apart(state, query)
    return (state.ring.begin(chunk, query, key, value, spans=state.rows_of(chunk).queries),)


@runs(kinds.RING)
def ring(state: BlockPass, chunks: Sequence[None], tensors: Tensors, direction: Direction) -> Transfer:
    """Send keys and values ``[S, B, G, C]`` to the next rank; in backward, gradients to the previous one."""
    return pass_on(tensors[0], group=state.ring_ranks, back=direction is Direction.BACKWARD)


@runs(kinds.RERING)
def rering(state: BlockPass, chunks: Sequence[None], tensors: Tensors, direction: Direction) -> Transfer:
    """Send keys and values to the previous rank, so that those of the last step arrive first."""
    return pass_on(tensors[0], group=state.ring_ranks, back=True)


@runs(kinds.ATTENTION, reads=_read_by_attention)
def attention(
    state: BlockPass,
    chunk: int | None,
    query: Tensor,
    *rest: Tensor,
    sums: KeyValueSums | None = None,
    core: RecomputedTensors | None = None,
    norm: DroppedOutput | None = None,
) -> tuple[Tensor, ...]:
    """Core attention, projection, residual and norm of one chunk: ``(residual, normed)``, ``[rows, B, D]``.

    Where :func:`scatter_rows` is a stage, only this rank's partial sum of the projection, for all rows.

    Args:
        state: The state of the pass.
        chunk: Index; None for the whole sequence.
        query: The queries of the chunk.
        rest: Keys and values of all rows that the chunk sees, or the output of the last :func:`attend`; then
            the chunk's rows of the residual stream, unless :func:`scatter_rows` is a stage.
        sums: Where the backward adds the gradients of keys and values, instead of returning them.
        core: Runs core attention, if what it saves is recomputed.
        norm: Runs the norm, if its output is recomputed.
    """
    layer = state.block.attention_layer
    attended, hidden = (rest, None) if state.features.row_links else (rest[:-1], rest[-1])
    query, *gate = _gate_apart(state, query)
    if state.features.ring:
        (context,) = attended
    else:
        spans, documents = state.rows_of(chunk).queries, state.documents
        context = state.attend(query, *attended, spans=spans, documents=documents, sums=sums, core=core)
    if gate:
        context = layer.self_attention._apply_output_gate(context, *gate)
    projection = layer.self_attention.linear_proj
    if hidden is None:
        with transfers_apart(projection):
            return (projection(context)[0],)
    return _add_norm(state, projection(context), hidden, norm)


@runs(kinds.SCATTER_ROWS)
def scatter_rows(
    state: BlockPass, chunks: Sequence[int | None], tensors: Tensors, direction: Direction
) -> Transfer:
    """Reduce-scatter partial sums of the projection, ``[ranks * rows, B, D]``, to ``[rows, B, D]``."""
    group, forward = state.block.row_group, direction is Direction.FORWARD
    return exchange_sequence_rows(tensors, group, scatter=forward)


@runs(kinds.ADD_NORM, reads=_read_by_add_norm)
def add_norm(
    state: BlockPass, chunk: int | None, *rows: Tensor, norm: DroppedOutput | None = None
) -> tuple[Tensor, ...]:
    """Add ``[rows, B, D]`` to the residual stream and normalize: ``(residual, normed)``, same shapes.

    A block without attention is given only the residual stream.
    """
    *projected, hidden = rows
    if not projected:
        return hidden, _normalize(state.block.moe_layer.pre_mlp_layernorm, hidden, norm)
    # Hooks need no wait: the same chunk has called the module of this bias before.
    bias = state.block.attention_layer.self_attention.linear_proj.bias
    return _add_norm(state, (*projected, bias), hidden, norm)


def _add_norm(
    state: BlockPass,
    output_with_bias: tuple[Tensor, Tensor | None],
    hidden: Tensor,
    norm: DroppedOutput | None,
) -> tuple[Tensor, ...]:
    block = state.block
    residual = block.add_residual(block.attention_layer.self_attn_bda, output_with_bias, hidden)
    return residual, _normalize(block.moe_layer.pre_mlp_layernorm, residual, norm)


def _gate_apart(state: BlockPass, query: Tensor) -> tuple[Tensor, ...]:
    """Split queries from their gate, if they have one."""
    return query.chunk(2, dim=-1) if state.block.has_gate else (query,)
