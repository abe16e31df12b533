"""What the stages of a block's attention half compute, from its input to the norm before the router.

Megatron's ``TransformerLayer._forward_attention``, chunk by chunk, and that norm, with what context-parallel
and tensor-parallel ranks send one another as stages. :mod:`.moe_stages` is the other half.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

from megatron_ampipe.attention.ring import RingAttention
from megatron_ampipe.exchange.row_scatter import RowTransfers
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.chunk_attention import ChunkAttention, RotaryEmbedding, has_gate, project_qkv
from megatron_ampipe.layers.linear_layers import transfers_apart
from megatron_ampipe.layers.stage_functions import ATTENTION
from megatron_ampipe.runtime.collectives import Transfer, pass_on
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.schedule import Chunk, Direction, kinds
from megatron_ampipe.schedule.documents import Documents

# S sequence rows, B batch, D hidden size, H heads, G key/value heads, C head size of keys, V of values.


def _read_by_qkv(block: BlockModules) -> list[Module]:
    others = ("core_attention", "linear_proj")
    layer = block.attention_layer
    projection = [module for name, module in layer.self_attention.named_children() if name not in others]
    return [layer.input_layernorm, *projection]


def _read_by_attention(block: BlockModules) -> list[Module]:
    attention = block.attention_layer.self_attention
    norm = [] if block.scatters_rows else [block.moe_layer.pre_mlp_layernorm]
    return [attention.core_attention, attention.linear_proj, *norm]


def _read_by_add_norm(block: BlockModules) -> list[Module | Parameter | None]:
    # The bias is added after the sum, and so once.
    return [block.moe_layer.pre_mlp_layernorm, block.attention_layer.self_attention.linear_proj.bias]


class AttentionStages:
    """The attention half of one pass of one micro-batch through a block.

    Args:
        modules: What is called.
        chunks: Where the sequence is cut.
        whole: All of it as one chunk.
        attend: Core attention of a chunk.
        rotary_pos_emb: As Megatron passes it to the layer.
        documents: Of the micro-batch, if rows attend to their own document only.
        ring_ranks: The context-parallel ranks, if they pass keys on to one another.
        row_transfers: Between tensor-parallel ranks, if these are stages.
    """

    def __init__(
        self,
        modules: BlockModules,
        *,
        chunks: Sequence[Chunk],
        whole: Chunk,
        attend: ChunkAttention,
        rotary_pos_emb: RotaryEmbedding | None,
        documents: Documents | None,
        ring_ranks: ProcessGroup | None = None,
        row_transfers: RowTransfers | None = None,
    ) -> None:
        self._modules, self._attend, self._rotary_pos_emb = modules, attend, rotary_pos_emb
        self._chunks, self._whole, self._documents = chunks, whole, documents
        self._ring_ranks, self._row_transfers = ring_ranks, row_transfers
        self._has_gate = has_gate(modules.attention_layer.self_attention)
        self._ring = self._new_ring()

    def again(self) -> AttentionStages:
        """See ``BlockPass.again``."""
        second = copy.copy(self)
        second._row_transfers = None if self._row_transfers is None else self._row_transfers.again()
        second._ring = self._new_ring()
        return second

    def _new_ring(self) -> RingAttention | None:
        return None if self._ring_ranks is None else self._attend.ring(self._ring_ranks)

    @ATTENTION.runs(kinds.INPUT_NORM, reads=lambda block: [block.attention_layer.input_layernorm])
    def input_norm(self, chunk: int | None, hidden: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to the same shape."""
        return (self._modules.attention_layer.input_layernorm(hidden),)

    @ATTENTION.runs(kinds.GATHER_ROWS)
    def gather_rows(
        self, chunks: Sequence[int | None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """``[rows, B, D]`` that :meth:`input_norm` gave, to ``[ranks * rows, B, D]``."""
        rows, num_rows = self._rows_exchanged(chunks)
        if direction is Direction.FORWARD:
            return rows.gather(chunks, tensors, num_rows)
        return rows.exchange(tensors, num_rows, scatter=True)

    @ATTENTION.runs(kinds.REGATHER_ROWS)
    def regather_rows(
        self, chunks: Sequence[int | None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """The same rows once more, for the backward of :meth:`qkv`."""
        rows, num_rows = self._rows_exchanged(chunks)
        return rows.regather(chunks, num_rows)

    def _rows_exchanged(self, chunks: Sequence[int | None]) -> tuple[RowTransfers, list[int]]:
        assert self._row_transfers is not None
        return self._row_transfers, [
            sum(span.length for span in self._rows_of(chunk).hidden) for chunk in chunks
        ]

    @ATTENTION.runs(kinds.QKV, reads=_read_by_qkv, recompute=("mla_up_proj",))
    def qkv(self, chunk: int | None, hidden: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to queries, keys and values, each ``[rows, B, heads, head size]``.

        ``hidden`` is what :meth:`gather_rows` gave, where rows are gathered as a stage.
        """
        layer, rows = self._modules.attention_layer, self._row_transfers
        project = functools.partial(
            project_qkv,
            layer.self_attention,
            rotary_pos_emb=self._rotary_pos_emb,
            spans=self._rows_of(chunk).queries,
            num_keys=self._whole.num_keys,
            documents=self._documents,
            gathered=self._ring is None,
        )
        if rows is None or not rows.gathers:
            query, key, value = project(layer.input_layernorm(hidden))
        else:
            with transfers_apart(layer.self_attention.linear_qkv), rows.dropped(chunk, hidden):
                query, key, value = project(hidden)
        if self._ring is not None:
            # Views would keep the joint projection.
            return query.contiguous(), key.contiguous(), value.contiguous()
        if chunk is not None and len(self._chunks) > 1:
            # Keys and values are copied into the rows of the sequence. Queries that are a view of the joint
            # projection would keep a second copy of both.
            query = query.contiguous()
        return query, key, value

    @ATTENTION.runs(kinds.ATTEND)
    def attend(
        self, step: int, chunk: int | None, query: Tensor, key: Tensor, value: Tensor, *context: Tensor
    ) -> tuple[Tensor, ...]:
        """Rows of one chunk to ``[rows, B, H * V]``: attention to the keys of the steps up to this one."""
        assert self._ring is not None
        if step:
            return (self._ring.go_on(step, chunk, key, value, *context),)
        query, *_ = self._gate_apart(query)
        return (self._ring.begin(chunk, query, key, value, spans=self._rows_of(chunk).queries),)

    @ATTENTION.differentiates(kinds.ATTEND)
    def attend_backward(
        self,
        step: int,
        chunk: int | None,
        gradients: Sequence[Tensor | None],
        recalled: Sequence[Tensor],
        sums: KeyValueSums,
    ) -> Sequence[Tensor | None]:
        """The gradients of what :meth:`attend` took; of the queries all at once, in step 0."""
        (gradient,), (key, value) = gradients, recalled
        assert self._ring is not None and gradient is not None
        of_query = self._ring.differentiate(step, chunk, gradient, key, value, sums)
        if of_query is None:
            return None, None, None, gradient
        if self._has_gate:
            of_query = torch.cat([of_query, torch.zeros_like(of_query)], dim=-1)
        return of_query, None, None

    @ATTENTION.runs(kinds.RING)
    def ring(
        self, chunks: Sequence[None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Keys and values ``[S, B, G, C]`` to the next rank; their gradients to the one before."""
        assert self._ring_ranks is not None
        return pass_on(tensors[0], group=self._ring_ranks, back=direction is Direction.BACKWARD)

    @ATTENTION.runs(kinds.RERING)
    def rering(
        self, chunks: Sequence[None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Keys and values to the rank before, so that those of the last step arrive first."""
        assert self._ring_ranks is not None
        return pass_on(tensors[0], group=self._ring_ranks, back=True)

    @ATTENTION.runs(kinds.ATTENTION, reads=_read_by_attention)
    def attention(
        self, chunk: int | None, query: Tensor, *rest: Tensor, sums: KeyValueSums | None = None
    ) -> tuple[Tensor, ...]:
        """Rows of one chunk to ``(residual, normed)``, both ``[rows, B, D]``.

        Where tensor-parallel ranks scatter rows as a stage, to this rank's part of their sum, of the rows of
        all ranks.

        Args:
            chunk: Index; None for the whole sequence.
            query: Of its rows.
            rest: Keys and values of all rows that it sees, or what :meth:`attend` gave of the last step; then
                its rows of the residual stream, unless rows are scattered.
            sums: Where its backward may add the gradients of keys and values; it then gives none.
        """
        layer = self._modules.attention_layer
        attended, hidden = (rest, None) if self._row_transfers is not None else (rest[:-1], rest[-1])
        query, *gate = self._gate_apart(query)
        if self._ring is not None:
            (context,) = attended
        else:
            spans, documents = self._rows_of(chunk).queries, self._documents
            context = self._attend(query, *attended, spans=spans, documents=documents, sums=sums)
        if gate:
            context = layer.self_attention._apply_output_gate(context, *gate)
        projection = layer.self_attention.linear_proj
        if hidden is None:
            with transfers_apart(projection):
                return (projection(context)[0],)
        return self._add_norm(projection(context), hidden)

    @ATTENTION.runs(kinds.SCATTER_ROWS)
    def scatter_rows(
        self, chunks: Sequence[int | None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Parts of the projection ``[ranks * rows, B, D]`` to the sums of this rank's ``[rows, B, D]``."""
        rows, num_rows = self._rows_exchanged(chunks)
        return rows.exchange(tensors, num_rows, scatter=direction is Direction.FORWARD)

    @ATTENTION.runs(kinds.ADD_NORM, reads=_read_by_add_norm)
    def add_norm(self, chunk: int | None, projected: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` and the residual stream to ``(residual, normed)``, both ``[rows, B, D]``."""
        # The bias is a parameter of a module that the same chunk has called before.
        bias = self._modules.attention_layer.self_attention.linear_proj.bias
        return self._add_norm((projected, bias), hidden)

    def _add_norm(self, output_with_bias: tuple[Tensor, Tensor | None], hidden: Tensor) -> tuple[Tensor, ...]:
        modules = self._modules
        residual = modules.add_residual(modules.attention_layer.self_attn_bda, output_with_bias, hidden)
        return residual, modules.moe_layer.pre_mlp_layernorm(residual)

    def _gate_apart(self, query: Tensor) -> tuple[Tensor, ...]:
        """Queries and their gate, if they have one."""
        return query.chunk(2, dim=-1) if self._has_gate else (query,)

    def _rows_of(self, chunk: int | None) -> Chunk:
        return self._whole if chunk is None else self._chunks[chunk]
