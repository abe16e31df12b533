"""An attention layer and an MoE layer of Megatron, run together as a pipeline of chunks.

Not a module: it owns no parameter, so checkpoints look as if it were not there. In a GPT both layers are
one ``TransformerLayer``; in a hybrid model they are two. Used by :mod:`.layer` and :mod:`.hybrid`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_ampipe.block_features import features_of_settings
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.chunk_attention import ChunkAttention, RotaryEmbedding, kernel_of
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.megatron_stages import MegatronStages
from megatron_ampipe.runtime.autograd_block import run_block
from megatron_ampipe.runtime.block_stages import CompiledSchedule
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.schedule import BlockFeatures, Chunk, Pipeline, SequenceLayout


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
        self._context = context
        self._modules = BlockModules(
            attention_layer,
            moe_layer,
            capacity_per_chunk=context.config.capacity_scope == "chunk",
            added=context.added,
        )
        # The pipeline can change between two iterations, so what follows from it is kept by pipeline.
        self._schedules: dict[tuple[Pipeline, BlockFeatures], CompiledSchedule] = {}
        self._chunks: dict[tuple[Pipeline, int], tuple[Chunk, ...]] = {}
        self._attend: ChunkAttention | None = None
        groups, sharded = moe_layer.pg_collection, moe_layer.config.sequence_parallel
        self._layout = SequenceLayout(
            tensor_ranks=groups.tp.size() if sharded else 1,
            tensor_rank=groups.tp.rank() if sharded else 0,
            context_ranks=groups.cp.size(),
            context_rank=groups.cp.rank(),
        )

    def __call__(self, hidden: Tensor, rotary_pos_emb: RotaryEmbedding | None) -> Tensor:
        """``[S, B, D]``, this rank's rows of the residual stream, to the same shape."""
        on_gpu = hidden.is_cuda
        self._modules.add_first_weight_gradients()
        self._context.recorder.passes.record_shape(*hidden.shape[:2])
        executor = self._context.executor_for(on_gpu=on_gpu)
        stages = MegatronStages(
            self._modules,
            chunks=self._chunks_of(hidden.shape[0]),
            attend=self._attention_of_chunks(on_gpu=on_gpu),
            rotary_pos_emb=rotary_pos_emb,
            num_tokens=hidden.shape[0] * hidden.shape[1],
            added=self._context.added,
        )
        return run_block(
            hidden,
            stages=stages,
            schedule=self._schedule(executor),
            executor=executor,
            recorder=self._context.recorder,
            layer=self._modules.attention_layer.layer_number,
            parameters=self._modules.parameters,
        )

    def _chunks_of(self, num_rows: int) -> tuple[Chunk, ...]:
        """Chunks of a sequence of which this rank holds ``num_rows`` rows."""
        pipeline, layout = self._context.pipeline, self._layout
        key = (pipeline, num_rows)
        if key not in self._chunks:
            length = num_rows * layout.tensor_ranks * layout.context_ranks
            self._chunks[key] = pipeline.chunks(length, layout)
        return self._chunks[key]

    def _schedule(self, executor: Executor) -> CompiledSchedule:
        modules = self._modules
        features = replace(
            features_of_settings(
                modules.config,
                capacity_scope=self._context.config.capacity_scope,
                # As in the stock router: the pass of a recompute that keeps no graph adds and logs no loss.
                with_losses=modules.moe_layer.training and torch.is_grad_enabled(),
            ),
            added=tuple(stage.kind for stage in self._context.added),
        )
        pipeline = self._context.pipeline
        key = (pipeline, features)
        if key not in self._schedules:
            schedule = pipeline.schedule_of(features)
            self._schedules[key] = CompiledSchedule.of(schedule, features=features, executor=executor)
        return self._schedules[key]

    def _attention_of_chunks(self, *, on_gpu: bool) -> ChunkAttention:
        if self._attend is None:
            attention = self._modules.attention_layer.self_attention
            kernel = self._context.kernel or kernel_of(attention, on_gpu=on_gpu)
            self._attend = ChunkAttention(attention, kernel=kernel)
        return self._attend
