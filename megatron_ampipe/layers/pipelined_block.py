"""An attention layer and an MoE layer of Megatron, run together as a pipeline of chunks.

Not a module: it owns no parameter, so checkpoints look as if it were not there. In a GPT both layers are
one ``TransformerLayer``; in a hybrid model they are two. Used by :mod:`.layer` and :mod:`.hybrid`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.layers.chunk_attention import ChunkAttention, RotaryEmbedding, kernel_of
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.dispatcher import CHUNK_DISPATCHERS
from megatron_ampipe.layers.megatron_stages import MegatronStages
from megatron_ampipe.runtime.autograd_block import run_block
from megatron_ampipe.runtime.block_stages import CompiledSchedule
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    Pipeline,
    SequenceLayout,
    StageKind,
)

_RECOMPUTED = {
    "moe": {StageKind.EXPERT, StageKind.SHARED},
    "shared_experts": {StageKind.SHARED},
    "mla_up_proj": {StageKind.QKV},
}
"""Stages that run again in the backward pass, by Megatron's ``--recompute-modules``.

Core attention is recomputed by :class:`ChunkAttention`; a dense MLP is not ours.
"""


class PipelinedBlock:
    """The two halves of a block and what is needed to pipeline them.

    Args:
        attention_layer: Whose norm, attention and residual come first.
        moe_layer: Whose norm, MoE layer and residual follow; may be the same layer.
        context: Shared settings and machinery.
    """

    def __init__(
        self, attention_layer: TransformerLayer, moe_layer: TransformerLayer, context: AMPipeContext
    ) -> None:
        self.attention_layer, self.moe_layer, self._context = attention_layer, moe_layer, context
        self.config = moe_layer.config
        self.capacity_per_chunk = context.config.capacity_scope == "chunk"
        self.recomputed_stages = self._take_over_recompute()
        # The pipeline can change between two iterations, so what follows from it is kept by pipeline.
        self._plans: dict[tuple[Pipeline, BlockFeatures], CompiledSchedule] = {}
        self._chunks: dict[tuple[Pipeline, int], tuple[Chunk, ...]] = {}
        self._attend: ChunkAttention | None = None
        groups, sharded = moe_layer.pg_collection, self.config.sequence_parallel
        self._layout = SequenceLayout(
            tensor_ranks=groups.tp.size() if sharded else 1,
            tensor_rank=groups.tp.rank() if sharded else 0,
            context_ranks=groups.cp.size(),
            context_rank=groups.cp.rank(),
        )
        # Gathers over tensor or context ranks, and the positions of latent attention, need whole sequences.
        self._chunked_qkv = (
            self._layout == SequenceLayout()
            and type(attention_layer.self_attention) is SelfAttention
            and StageKind.QKV not in self.recomputed_stages
        )
        moe = moe_layer.mlp
        self.chunk_dispatcher = CHUNK_DISPATCHERS[self.config.moe_token_dispatcher_type](
            moe.num_local_experts, moe.local_expert_indices, config=self.config, pg_collection=groups
        )

    def __call__(self, hidden: Tensor, rotary_pos_emb: RotaryEmbedding | None) -> Tensor:
        """``[S, B, D]``, this rank's rows of the residual stream, to the same shape."""
        on_gpu = hidden.is_cuda
        self._add_first_weight_gradients()
        self._context.recorder.passes.saw(*hidden.shape[:2])
        executor = self._context.executor_for(on_gpu=on_gpu)
        stages = MegatronStages(
            self,
            chunks=self._chunks_of(hidden.shape[0]),
            attend=self._attention_of_chunks(on_gpu=on_gpu),
            rotary_pos_emb=rotary_pos_emb,
            num_tokens=hidden.shape[0] * hidden.shape[1],
        )
        return run_block(
            hidden,
            stages=stages,
            plan=self._plan(executor),
            executor=executor,
            recorder=self._context.recorder,
            layer=self.attention_layer.layer_number,
            parameters=self._parameters,
        )

    def add_residual(
        self, add: Callable[..., Any], output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor
    ) -> Tensor:
        """Megatron's bias, dropout and residual addition (``self_attn_bda`` or ``mlp_bda``)."""
        if self.config.fp32_residual_connection:
            residual = residual.float()
        apply = add(self.moe_layer.training, self.config.bias_dropout_fusion)
        result: Tensor = apply(output_with_bias, residual, self.moe_layer.hidden_dropout)
        return result

    @cached_property
    def stage_parameters(self) -> dict[StageKind, Sequence[Parameter]]:
        """The trainable parameters that each kind of stage uses."""
        attention, moe = self.attention_layer.self_attention, self.moe_layer.mlp
        projection = [
            module
            for name, module in attention.named_children()
            if name not in ("core_attention", "linear_proj")
        ]
        modules: dict[StageKind, list[Module | None]] = {
            StageKind.QKV: [self.attention_layer.input_layernorm, *projection],
            StageKind.ATTENTION: [
                attention.core_attention,
                attention.linear_proj,
                self.moe_layer.pre_mlp_layernorm,
            ],
            StageKind.ROUTE: [moe.router],
            StageKind.LOSSES: [],
            StageKind.SHARED: [moe.shared_experts],
            StageKind.EXPERT: [moe.experts],
            StageKind.MERGE: [],
        }
        return {
            kind: tuple(
                parameter
                for module in found
                if module is not None
                for parameter in module.parameters()
                if parameter.requires_grad
            )
            for kind, found in modules.items()
        }

    @cached_property
    def _parameters(self) -> tuple[Parameter, ...]:
        """All of them, each once."""
        used = {p: None for parameters in self.stage_parameters.values() for p in parameters}
        missing = [
            name
            for layer in (self.attention_layer, self.moe_layer)
            for name, p in layer.named_parameters()
            if p.requires_grad and p not in used
        ]
        assert not missing, f"no stage of the block uses {missing}: their gradients would be lost"
        return tuple(used)

    def _add_first_weight_gradients(self) -> None:
        """Make every linear layer of Transformer Engine add its weight's gradient to ``main_grad``.

        Megatron's wrappers let the first forward ever pass for the first micro-batch of an iteration, whose
        backward writes what all others add. Chunk 0 would be that, and is differentiated last. Adding is
        right from the start: Megatron zeroes ``main_grad`` before every iteration.
        """
        for module in self._linear_layers_of_te:
            if module.is_first_microbatch:
                module.is_first_microbatch = False

    @cached_property
    def _linear_layers_of_te(self) -> tuple[Any, ...]:
        """What has the flag, whichever stage uses it."""
        modules = (module for layer in (self.attention_layer, self.moe_layer) for module in layer.modules())
        return tuple({module: None for module in modules if hasattr(module, "is_first_microbatch")})

    def _take_over_recompute(self) -> frozenset[StageKind]:
        """Whole stages in place of what Megatron would recompute selectively."""
        if self.config.recompute_granularity != "selective":
            return frozenset()
        modules = self.config.recompute_modules
        if "mla_up_proj" in modules:
            self.attention_layer.self_attention.recompute_up_proj = False
        return frozenset().union(*(_RECOMPUTED.get(name, set()) for name in modules))

    def _chunks_of(self, num_rows: int) -> tuple[Chunk, ...]:
        """Chunks of a sequence of which this rank holds ``num_rows`` rows."""
        pipeline, layout = self._context.pipeline, self._layout
        key = (pipeline, num_rows)
        if key not in self._chunks:
            length = num_rows * layout.tensor_ranks * layout.context_ranks
            self._chunks[key] = pipeline.chunks(length, layout)
        return self._chunks[key]

    def _plan(self, executor: Executor) -> CompiledSchedule:
        moe = self.moe_layer.mlp
        features = BlockFeatures(
            # As in the stock router: the pass of a recompute that keeps no graph adds and logs no loss.
            losses=self.moe_layer.training and torch.is_grad_enabled() and moe.router.has_losses,
            shared=moe.shared_experts is not None,
            ordered_routing=self.config.moe_expert_capacity_factor is not None
            and not self.capacity_per_chunk,
            chunked_qkv=self._chunked_qkv,
        )
        pipeline = self._context.pipeline
        key = (pipeline, features)
        if key not in self._plans:
            schedule = pipeline.schedule_of(features)
            self._plans[key] = CompiledSchedule.of(schedule, features=features, executor=executor)
        return self._plans[key]

    def _attention_of_chunks(self, *, on_gpu: bool) -> ChunkAttention:
        if self._attend is None:
            attention = self.attention_layer.self_attention
            kernel = self._context.kernel or kernel_of(attention, on_gpu=on_gpu)
            self._attend = ChunkAttention(attention, kernel=kernel)
        return self._attend
