"""Megatron's transformer layer with its MoE block run as a pipeline of chunks.

Same modules, same parameters, same checkpoint keys as ``TransformerLayer``; only ``forward`` differs.
Built by :mod:`.spec` in place of the stock class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.config import AMPipeConfig
from megatron_ampipe.layers.attention import ChunkAttention, RotaryEmbedding, kernel_of
from megatron_ampipe.layers.dispatcher import CHUNK_DISPATCHERS
from megatron_ampipe.layers.stages import MegatronStages
from megatron_ampipe.runtime.block import BlockPlan, run_block
from megatron_ampipe.runtime.executors import CudaExecutor, Executor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    Kind,
    SequenceLayout,
    build,
    check,
    chunk_sequence,
)


@dataclass(slots=True)
class AMPipeContext:
    """What all layers of a process share.

    Attributes:
        config: The user's settings.
        recorder: Told of every stage.
        executor: What runs the stages; chosen by the first layer that runs if None.
        kernel: Name of the attention kernel; chosen by each layer if None.
    """

    config: AMPipeConfig
    recorder: Recorder = field(default_factory=Recorder)
    executor: Executor | None = None
    kernel: str | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> AMPipeContext:
        """Megatron copies layer specifications; the context in them stays the one of the process."""
        return self


class AMPipeTransformerLayer(TransformerLayer):
    """A transformer layer whose attention and MoE layer are pipelined.

    Args:
        ampipe: Shared settings and machinery.
        args: As for ``TransformerLayer``.
        kwargs: As for ``TransformerLayer``.
    """

    def __init__(self, *args: Any, ampipe: AMPipeContext, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.is_moe_layer, "only MoE layers are built as AMPipe layers"
        self._ampipe = ampipe
        self.capacity_per_chunk = ampipe.config.capacity_scope == "chunk"
        self._plans: dict[BlockFeatures, BlockPlan] = {}
        self._chunks: dict[int, tuple[Chunk, ...]] = {}
        self._attention: ChunkAttention | None = None
        self.recomputed_stages = self._take_over_recompute()
        context, tensor = self.pg_collection.cp, self.pg_collection.tp
        sharded = self.config.sequence_parallel
        self._layout = SequenceLayout(
            tensor_ranks=tensor.size() if sharded else 1,
            tensor_rank=tensor.rank() if sharded else 0,
            context_ranks=context.size(),
            context_rank=context.rank(),
        )
        self.chunk_dispatcher = CHUNK_DISPATCHERS[self.config.moe_token_dispatcher_type](
            self.mlp.num_local_experts,
            self.mlp.local_expert_indices,
            config=self.config,
            pg_collection=self.pg_collection,
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: RotaryEmbedding | None = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass through the block.

        Args:
            hidden_states: ``[S, B, D]``.
            attention_mask: Ignored: attention is causal. Masks of another kind are refused at start-up.
            context: Passed through, as by a stock layer without cross-attention.
            context_mask: Unused.
            rotary_pos_emb: Rotary embedding, or None.
            inference_context: Inference runs the stock layer.
            kwargs: Megatron's other layer arguments, all of which must be None here.

        Returns:
            ``[S, B, D]`` and ``context``.
        """
        if inference_context is not None:
            return super().forward(
                hidden_states,
                attention_mask=attention_mask,
                context=context,
                context_mask=context_mask,
                rotary_pos_emb=rotary_pos_emb,
                inference_context=inference_context,
                **kwargs,
            )
        unknown = [name for name, value in kwargs.items() if value is not None]
        assert not unknown, f"an AMPipe layer was called with {unknown}, which start-up should have refused"
        executor = self._executor(on_gpu=hidden_states.is_cuda)
        stages = MegatronStages(
            self,
            chunks=self._chunks_of(hidden_states.shape[0]),
            attend=self._attend(on_gpu=hidden_states.is_cuda),
            rotary_pos_emb=rotary_pos_emb,
            num_tokens=hidden_states.shape[0] * hidden_states.shape[1],
        )
        output = run_block(
            hidden_states,
            stages=stages,
            plan=self._plan(executor),
            executor=executor,
            recorder=self._ampipe.recorder,
            layer=self.layer_number,
            parameters=self._block_parameters,
        )
        return output, context

    def add_residual(
        self, add: Callable[..., Any], output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor
    ) -> Tensor:
        """Megatron's bias, dropout and residual addition (``self_attn_bda`` or ``mlp_bda``)."""
        if self.config.fp32_residual_connection:
            residual = residual.float()
        apply = add(self.training, self.config.bias_dropout_fusion)
        result: Tensor = apply(output_with_bias, residual, self.hidden_dropout)
        return result

    @cached_property
    def stage_parameters(self) -> dict[Kind, Sequence[Parameter]]:
        """The trainable parameters that each kind of stage uses."""
        attention, moe = self.self_attention, self.mlp
        projection = [
            module
            for name, module in attention.named_children()
            if name not in ("core_attention", "linear_proj")
        ]
        modules: dict[Kind, list[Module | None]] = {
            Kind.QKV: [self.input_layernorm, *projection],
            Kind.ATTENTION: [attention.core_attention, attention.linear_proj, self.pre_mlp_layernorm],
            Kind.ROUTE: [moe.router],
            Kind.LOSSES: [],
            Kind.SHARED: [moe.shared_experts],
            Kind.EXPERT: [moe.experts],
            Kind.MERGE: [],
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
    def _block_parameters(self) -> tuple[Parameter, ...]:
        """All of them, each once."""
        used = {p: None for parameters in self.stage_parameters.values() for p in parameters}
        missing = [name for name, p in self.named_parameters() if p.requires_grad and p not in used]
        assert not missing, f"no stage of the block uses {missing}: their gradients would be lost"
        return tuple(used)

    def _take_over_recompute(self) -> frozenset[Kind]:
        """What Megatron would recompute selectively and our stages do instead, as whole stages.

        Recomputing core attention is left to :class:`ChunkAttention`; a dense MLP is not ours.
        """
        if self.config.recompute_granularity != "selective":
            return frozenset()
        kinds = {
            "moe": {Kind.EXPERT, Kind.SHARED},
            "shared_experts": {Kind.SHARED},
            "mla_up_proj": {Kind.QKV},
        }
        if "mla_up_proj" in self.config.recompute_modules:
            self.self_attention.recompute_up_proj = False
        return frozenset().union(*(kinds.get(name, set()) for name in self.config.recompute_modules))

    def _chunks_of(self, num_rows: int) -> tuple[Chunk, ...]:
        """Chunks of a sequence of which this rank holds ``num_rows`` rows."""
        if num_rows not in self._chunks:
            layout = self._layout
            sequence_length = num_rows * layout.tensor_ranks * layout.context_ranks
            self._chunks[num_rows] = chunk_sequence(
                sequence_length, degree=self._ampipe.config.degree, layout=layout
            )
        return self._chunks[num_rows]

    def _plan(self, executor: Executor) -> BlockPlan:
        router = self.mlp.router
        features = BlockFeatures(
            # As in the stock router: the pass of a recompute that keeps no graph adds and logs no loss.
            losses=self.training and torch.is_grad_enabled() and router.has_losses,
            shared=self.mlp.shared_experts is not None,
            ordered_routing=self.config.moe_expert_capacity_factor is not None
            and not self.capacity_per_chunk,
        )
        if features not in self._plans:
            config = self._ampipe.config
            schedule = build(config.schedule, degree=config.degree, features=features)
            check(schedule, features)
            self._plans[features] = BlockPlan.of(schedule, features=features, executor=executor)
        return self._plans[features]

    def _attend(self, *, on_gpu: bool) -> ChunkAttention:
        if self._attention is None:
            kernel = self._ampipe.kernel or kernel_of(self.self_attention, on_gpu=on_gpu)
            self._attention = ChunkAttention(self.self_attention, kernel=kernel)
        return self._attention

    def _executor(self, *, on_gpu: bool) -> Executor:
        if self._ampipe.executor is None:
            self._ampipe.executor = CudaExecutor() if on_gpu else ThreadExecutor()
        return self._ampipe.executor
