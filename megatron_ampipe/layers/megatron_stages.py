"""What every stage of a Megatron MoE block computes: one object per forward call.

Implements ``runtime.block_stages.BlockStages`` on the modules of a :class:`~.pipelined_block.PipelinedBlock`:
Megatron's ``TransformerLayer._forward_attention`` and ``_forward_mlp`` and ``MoELayer.forward``, cut at the
places where tokens travel. A module with parameters is entered by calling it, never by one of its methods:
Megatron's forward hooks wait for the parameters under ``--overlap-param-gather``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.layers.chunk_attention import (
    ChunkAttention,
    RotaryEmbedding,
    project_qkv,
    rotary_of_rows,
)
from megatron_ampipe.runtime.collectives import Transport
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.schedule import Chunk, StageKind

if TYPE_CHECKING:
    from megatron_ampipe.layers.pipelined_block import PipelinedBlock


class MegatronStages:
    """The stages of one pass of one micro-batch through a block.

    Args:
        block: Whose modules are called.
        chunks: Where the sequence is cut.
        attend: Core attention of a chunk.
        rotary_pos_emb: As Megatron passes it to the layer.
        num_tokens: Tokens of this rank in the block, ``S * B``.
    """

    def __init__(
        self,
        block: PipelinedBlock,
        *,
        chunks: Sequence[Chunk],
        attend: ChunkAttention,
        rotary_pos_emb: RotaryEmbedding | None,
        num_tokens: int,
    ) -> None:
        self.chunks = chunks
        self._block, self._attend, self._rotary_pos_emb = block, attend, rotary_pos_emb
        self._attention_layer, self._moe_layer = block.attention_layer, block.moe_layer
        self._moe = block.moe_layer.mlp
        self._routing = self._moe.router.begin_block(num_tokens, per_chunk=block.capacity_per_chunk)
        template = block.chunk_dispatcher
        # The state of a chunk is bound to attributes of its own copy; the constants are shared.
        self._dispatchers = [copy.copy(template) for _ in chunks]
        self.counts_group = template.counts_group
        self.recomputed = block.recomputed_stages

    def parameters(self, kind: StageKind) -> Sequence[Parameter]:
        """See ``BlockStages``."""
        return self._block.stage_parameters[kind]

    def qkv(self, chunk: Chunk, hidden: Tensor) -> tuple[Tensor, ...]:
        """See ``BlockStages``."""
        layer = self._attention_layer
        embedding = rotary_of_rows(self._rotary_pos_emb, chunk.queries)
        return project_qkv(layer.self_attention, layer.input_layernorm(hidden), embedding)

    def attention(
        self,
        chunk: Chunk,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        *,
        sums: KeyValueSums | None,
    ) -> tuple[Tensor, ...]:
        """See ``BlockStages``."""
        layer = self._attention_layer
        context = self._attend(query, key, value, spans=chunk.queries, sums=sums)
        output_with_bias = layer.self_attention.linear_proj(context)
        residual = self._block.add_residual(layer.self_attn_bda, output_with_bias, hidden)
        return residual, self._moe_layer.pre_mlp_layernorm(residual)

    def route(self, index: int, normed: Tensor) -> tuple[Tensor, ...]:
        """See ``BlockStages``."""
        probs, routing_map, logits = self._moe.router(normed, block=self._routing)
        tokens, token_probs = self._dispatchers[index].dispatch_preprocess(normed, routing_map, probs)
        return tokens, token_probs, logits

    def counts(self, index: int) -> Tensor:
        """See ``BlockStages``."""
        return self._dispatchers[index].counts

    def set_counts(self, index: int, gathered: Tensor) -> None:
        """See ``BlockStages``."""
        self._dispatchers[index].set_counts(gathered)

    def transport(self, index: int) -> Transport:
        """See ``BlockStages``."""
        return self._dispatchers[index].transport()

    def losses(self, *logits: Tensor) -> tuple[Tensor, ...]:
        """See ``BlockStages``."""
        return (self._moe.router.block_losses(torch.cat(logits)),)

    def shared(self, normed: Tensor) -> tuple[Tensor, ...]:
        """See ``BlockStages``."""
        return (self._moe.shared_experts(normed),)

    def expert(self, index: int, tokens: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """See ``BlockStages``."""
        dispatcher = self._dispatchers[index]
        tokens, tokens_per_expert, probs = dispatcher.dispatch_postprocess(tokens, probs)
        output, bias = self._moe.experts(tokens, tokens_per_expert, probs)
        assert bias is None, "Megatron's experts add their bias themselves"
        return (dispatcher.combine_preprocess(output),)

    def merge(self, index: int, combined: Tensor, residual: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """See ``BlockStages``."""
        output = self._dispatchers[index].combine_postprocess(combined)
        for part in shared:
            output = output + part
        return (self._block.add_residual(self._moe_layer.mlp_bda, (output, None), residual),)
