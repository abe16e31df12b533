"""The modules of one block: an attention layer and an MoE layer of Megatron, with all that passes share.

In a GPT both are one ``TransformerLayer``; in a hybrid model they are two. ``BlockModules`` is not a
``torch.nn.Module`` and owns no parameter, so checkpoints do not change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, cached_property

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.attention.kernels import TRANSFORMER_ENGINE, choose_kernel
from megatron_ampipe.errors import BadInput
from megatron_ampipe.layers import precision
from megatron_ampipe.layers.chunk_attention import ChunkAttention, reads_mask
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.dispatchers import Dispatcher, make_dispatcher, make_fixed_dispatcher
from megatron_ampipe.layers.fixed_experts import has_local_experts
from megatron_ampipe.layers.linear_layers import (
    Products,
    delay_wgrad,
    expert_products,
    linears_of,
    refuse_overwritten_gradients,
)
from megatron_ampipe.layers.process_groups import possible_exchanges, row_group
from megatron_ampipe.layers.stage_functions import FUNCTIONS, bound_to_step
from megatron_ampipe.layers.user_changes import UserChanges
from megatron_ampipe.runtime.block_functions import Function
from megatron_ampipe.runtime.groups import made_group
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.runtime.segment import BlockParameters, WeightProducts
from megatron_ampipe.schedule import (
    KEEP,
    BlockFeatures,
    Exchange,
    Pipeline,
    RecomputeRequest,
    StageKind,
    data_flow,
    decide,
    kinds,
    with_exchange,
)
from megatron_ampipe.schedule.chunks import Documents, SequenceLayout
from megatron_ampipe.schedule.features import WEIGHTS_TOGETHER, features_of_settings

_OF_ATTENTION = frozenset({kinds.INPUT_NORM, kinds.QKV, kinds.ATTENTION, kinds.ADD_NORM})
"""Computed kinds that run modules of the attention layer."""

_PROJECTING = frozenset({kinds.QKV, kinds.ATTENTION})


class BlockModules:
    """The modules of a block, and the functions of its stages (``runtime.block_functions.BlockFunctions``).

    The block runs norm, attention and residual of ``attention_layer``, then norm, MoE layer and residual of
    ``moe_layer``; both may be the same layer. Without softmax attention, Megatron runs the attention half,
    and the block begins with the norm before the MoE layer. A dense layer, with an MLP in place of experts,
    can share the schedule of other blocks. If ``recomputed``, training saves only the input of the block,
    and the backward pass runs the forward again.
    """

    def __init__(
        self,
        attention_layer: TransformerLayer,
        moe_layer: TransformerLayer,
        context: AMPipeContext,
        *,
        recomputed: bool = False,
    ) -> None:
        self.attention_layer, self.moe_layer, self.moe = attention_layer, moe_layer, moe_layer.mlp
        self.config, self.context = moe_layer.config, context
        self.dense = not moe_layer.is_moe_layer
        self.attends = isinstance(attention_layer.self_attention, Attention)
        """Whether the block includes attention."""
        self.is_latent = not self.dense and bool(self.config.moe_latent_size)
        self.has_gate = self.attends and bool(attention_layer.config.attention_output_gate)
        """Whether core attention's output is multiplied by a gate, which is passed along with the query."""
        self._recomputes = (
            {*self.config.recompute_modules} if self.config.recompute_granularity == "selective" else set()
        )
        """Megatron's names of the modules that are recomputed in the backward pass."""
        precision.check_recipe(self.config)
        if self.attends and "mla_up_proj" in self._recomputes:
            attention_layer.self_attention.recompute_up_proj = False
        self._recompute = self._requested_recompute(full=recomputed)
        # Pipeline and mode can change between two passes.
        self.dispatcher = cache(self._make_dispatcher)
        """Gives the dispatcher of an :class:`~megatron_ampipe.schedule.Exchange`; each chunk copies it."""
        self.attend = cache(self._make_attention)
        """Gives core attention of a chunk, from ``(on_gpu, documents)``."""
        self._features = cache(self._make_features)
        self._reads_mask = self.attends and reads_mask(attention_layer.self_attention)
        if self.scatters_rows:
            self.row_group = made_group(row_group(attention_layer.pg_collection.tp))
        if not self.dense:
            # Before the first batch: a budget of HybridEP is shared with Megatron's dispatcher.
            for exchange in sorted(possible_exchanges(self.config, context)):
                self.dispatcher(exchange)
        self._changes = UserChanges(self)
        # Scripts may wrap and replace modules before the first pass.
        self._forget("_read")

    def _requested_recompute(self, *, full: bool) -> RecomputeRequest:
        """What Megatron's recompute flags ask of the layers, which know where a flag applies."""
        modules = self._recomputes - {"core_attn"}
        if self.attends and self.attention_layer.self_attention.checkpoint_core_attention:
            modules.add("core_attn")
        return RecomputeRequest(
            full=full,
            modules=frozenset(modules),
            input_norm=bool(self.attention_layer.recompute_input_layernorm),
            pre_mlp_norm=bool(self.moe_layer.recompute_pre_mlp_layernorm),
        )

    def _make_dispatcher(self, exchange: Exchange) -> Dispatcher:
        if self.context.fixed_rows is not None:
            return make_fixed_dispatcher(self.moe_layer, self.context.fixed_rows)
        return make_dispatcher(self.moe_layer, exchange, self.context.settings.ranks_per_node)

    def _make_attention(self, on_gpu: bool, documents: bool) -> ChunkAttention:
        attention = self.attention_layer.self_attention
        local = isinstance(attention.core_attention, DotProductAttention)
        chosen = choose_kernel(attention.config, local=local, on_gpu=on_gpu, documents=documents)
        return ChunkAttention(attention, kernel=self.context.kernel or chosen.name)

    @cached_property
    def scatters_rows(self) -> bool:
        """Whether the reduce-scatter of attention's output projection is a separate stage."""
        if not self.attends:
            return False
        projection = self.attention_layer.self_attention.linear_proj
        return (
            type(projection) is RowParallelLinear
            and projection.sequence_parallel
            and projection.skip_bias_add
            and projection.tp_group.size() > 1
        )

    @cached_property
    def _gathers_rows(self) -> bool:
        """Whether the all-gather of attention's input can also be a separate stage."""
        attention = self.attention_layer.self_attention
        return (
            self.scatters_rows
            and isinstance(attention, SelfAttention)
            and type(attention.linear_qkv) is ColumnParallelLinear
        )

    def features(self, *, shares_schedule: bool, packed: bool = False) -> BlockFeatures:
        """The features of the block in the current pass; ``packed``: of packed documents."""
        context, training = self.context, self.moe_layer.training
        features: BlockFeatures = self._features(
            context.pipeline, context.reductions, training, torch.is_grad_enabled(), shares_schedule, packed
        )
        return features

    def _make_features(
        self,
        pipeline: Pipeline,
        reductions: Reductions | None,
        training: bool,
        with_graph: bool,
        shares: bool,
        packed: bool,
    ) -> BlockFeatures:
        trains = training and with_graph
        # As in the stock router: a forward pass without a graph (before a recompute) adds and logs no loss.
        features = self._features_of_settings(with_losses=trains, shares_schedule=shares)
        features = replace(features, gathers_rows=features.gathers_rows and self._gathers_rows)
        features = with_exchange(features, pipeline.exchange)
        if packed:
            # Rows of a document see keys of some ranks only, which are gathered.
            features = replace(features, ring_ranks=1)
        if not with_graph:
            return features
        saved = decide(
            replace(self._recompute, full=self._recompute.full and trains),
            memory=KEEP if features.dense else pipeline.memory,
            uses_ring=features.ring,
        )
        features = replace(features, saved=saved)
        if reductions is not None:
            reduces_experts = not features.dense and reductions.with_experts
            features = replace(features, reduces=True, reduces_experts=reduces_experts)
        return features

    def _features_of_settings(self, *, with_losses: bool, shares_schedule: bool) -> BlockFeatures:
        features = features_of_settings(
            self.config,
            self.context.settings,
            with_losses=with_losses,
            dense=self.dense,
            shares_schedule=shares_schedule,
            local=self.scatters_rows,
        )
        return features if self.attends else features.without_attention

    @property
    def chooses(self) -> bool:
        """Whether the router chooses for all chunks at once."""
        return self._features_of_settings(with_losses=True, shares_schedule=False).chooses

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass will run the current forward pass again."""
        return self._recompute.full and self.moe_layer.training and torch.is_grad_enabled()

    @property
    def draws(self) -> bool:
        """Whether a stage may draw random numbers."""
        config = self.config
        return bool(
            config.attention_dropout
            or config.hidden_dropout
            or config.moe_input_jitter_eps
            or config.moe_router_force_load_balancing
            or self.context.gate
        )

    def function_of(self, kind: StageKind) -> Function:
        """See ``BlockFunctions``."""
        function = bound_to_step(FUNCTIONS[kind.row].run, kind)
        layer = self.attention_layer if kind.row in _OF_ATTENTION else self.moe_layer
        return self.in_precision(function, layer) if kind.lane.computes else function

    def in_precision(self, function: Function, layer: TransformerLayer) -> Function:
        """Wrap a function of a layer so that every call of it runs in the precision of that layer."""
        return precision.in_precision(function, layer) if self.config.fp8 else function

    def differentiate(self, kind: StageKind) -> Function:
        """See ``BlockFunctions``."""
        backward = FUNCTIONS[kind.row].backward
        assert backward is not None
        return bound_to_step(backward, kind)

    def delay_wgrad(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """See ``BlockFunctions``."""
        linears = self._linears[kind]
        if not linears:
            rule, remedy = WEIGHTS_TOGETHER
            raise BadInput("--ampipe-schedule", self.context.pipeline.name, rule=rule, remedy=remedy)
        return delay_wgrad(linears, products)

    @property
    def layers(self) -> tuple[TransformerLayer, ...]:
        """The layers of the block, each once."""
        return tuple(dict.fromkeys((self.attention_layer, self.moe_layer)))

    def follow_changes(self, *, within_documents: bool) -> int:
        """Take over what a script has changed in the modules since the last pass.

        Args:
            within_documents: Whether attention stays within documents.

        Returns:
            A number for the modules and for which parameters are trained; tapes depend on both.

        Raises:
            BadInput: A change would be ignored.
        """
        changes = self._changes
        if changes.has_other_modules():
            self._forget("_read", "_called", "stage_modules", "buffer_modules", "caching_modules")
            self._forget("_linears", "expert_products", "_linear_layers_of_te")
            self.attend.cache_clear()
            changes.refuse_replaced_modules()
        revision = changes.revision
        if revision != self._revision:
            self._forget("stage_parameters", "parameters")
            self._revision = revision
        changes.refuse_ignored(within_documents=within_documents)
        return revision

    _revision = -1
    """What :meth:`follow_changes` has returned last."""

    def _forget(self, *names: str) -> None:
        """Compute these cached properties again at their next use."""
        for name in names:
            vars(self).pop(name, None)

    @property
    def called(self) -> Mapping[Module, None]:
        """The modules that stages call, without those inside of them."""
        read = self._read
        if self.context.fixed_rows is not None and not self.dense and has_local_experts(self.moe.experts):
            # Products over the rows of all experts run in place of these modules.
            read = {kind: parts for kind, parts in read.items() if kind != kinds.EXPERT}
        parts = itertools.chain.from_iterable(read.values())
        return dict.fromkeys(part for part in parts if isinstance(part, Module))

    @property
    def exchanging(self) -> tuple[Module, ...]:
        """Those of :attr:`called` that exchange rows in Megatron, and are called without that."""
        if not self.scatters_rows:
            return ()
        attention = self.attention_layer.self_attention
        gathers = self._gathers_rows and self.context.pipeline.stack != 1
        return (attention.linear_proj, attention.linear_qkv) if gathers else (attention.linear_proj,)

    @property
    def repeated(self) -> tuple[Module, ...]:
        """Those of :attr:`called` whose stages are captured as CUDA graphs."""
        if not self.context.graph_modules:
            return ()
        parts = itertools.chain.from_iterable(self._read.get(kind, ()) for kind in self.captured)
        return tuple(part for part in parts if isinstance(part, Module))

    def calls_core_attention(self, *, within_documents: bool) -> bool:
        """Whether core attention is a call of Megatron's module."""
        attention = self.attention_layer.self_attention
        local = isinstance(attention.core_attention, DotProductAttention)
        chosen = choose_kernel(attention.config, local=local, on_gpu=False, documents=within_documents)
        return (self.context.kernel or chosen.name) == TRANSFORMER_ENGINE

    @cached_property
    def _read(self) -> Mapping[StageKind, Sequence[Module | Parameter]]:
        """The modules and parameters that each kind of stage can read."""
        present: set[StageKind] = set()
        for shares_schedule in (False, True):
            features = self._features_of_settings(with_losses=True, shares_schedule=shares_schedule)
            present.update(kind.row for kind in data_flow(features).kinds)
        return {
            kind: [part for part in FUNCTIONS[kind].reads(self) if part is not None]
            for kind in kinds.MOE_BLOCK
            if kind in present and kind in FUNCTIONS
        }

    @property
    def captured(self) -> frozenset[StageKind]:
        """Kinds of stages that are captured as CUDA graphs."""
        context = self.context
        if context.captures_passes:
            return frozenset(FUNCTIONS)
        modules = (kinds.GRAPH_MODULES.get(name, frozenset()) for name in context.graph_modules)
        captured = frozenset(itertools.chain.from_iterable(modules)) - context.left_out_of_graphs
        shares_ranks = self.config.tensor_model_parallel_size > 1
        if shares_ranks and not self.scatters_rows:
            # Its projections exchange rows with other ranks.
            captured -= _PROJECTING
        return captured

    @cached_property
    def _called(self) -> Mapping[StageKind, Sequence[Module]]:
        """All modules that each kind of stage can call."""
        return {
            kind: tuple(module for part in parts if isinstance(part, Module) for module in part.modules())
            for kind, parts in self._read.items()
        }

    @cached_property
    def stage_modules(self) -> Mapping[StageKind, Sequence[Module]]:
        """See ``BlockFunctions``."""
        return {
            kind: tuple(module for module in modules if module._parameters)
            for kind, modules in self._called.items()
        }

    @cached_property
    def buffer_modules(self) -> Mapping[StageKind, Sequence[Module]]:
        """See ``BlockFunctions``."""
        return {
            kind: tuple(module for module in modules if module._buffers)
            for kind, modules in self._called.items()
        }

    @cached_property
    def caching_modules(self) -> Sequence[Module]:
        """See ``BlockFunctions``: the rotary embeddings of latent attention."""
        return tuple(
            module for part in self._parts for module in part.modules() if isinstance(module, RotaryEmbedding)
        )

    @cached_property
    def stage_parameters(self) -> Mapping[StageKind, Sequence[Parameter]]:
        """See ``BlockFunctions``."""
        return {
            kind: tuple(
                parameter
                for part in parts
                for parameter in ((part,) if isinstance(part, Parameter) else part.parameters())
                if parameter.requires_grad
            )
            for kind, parts in self._read.items()
        }

    @cached_property
    def parameters(self) -> BlockParameters:
        """See ``BlockFunctions``; also refuses what would overwrite sums of gradients."""
        used: dict[Parameter, bool] = {}
        for kind, parameters in self.stage_parameters.items():
            for parameter in parameters:
                used[parameter] = used.get(parameter, True) and kind in kinds.FEED_FORWARD
        missing = [
            name
            for part in self._parts
            for name, parameter in part.named_parameters()
            if parameter.requires_grad and parameter not in used
        ]
        if missing:
            self._changes.refuse_parameter(missing[0])
        if self.config.gradient_accumulation_fusion:
            refuse_overwritten_gradients(used)
        return BlockParameters(
            tuple(parameter for parameter, is_early in used.items() if is_early),
            tuple(parameter for parameter, is_early in used.items() if not is_early),
        )

    @property
    def _parts(self) -> tuple[Module, ...]:
        """The modules that the block runs."""
        layer = self.moe_layer
        return (self.attention_layer, layer) if self.attends else (layer.pre_mlp_layernorm, layer.mlp)

    @cached_property
    def _linears(self) -> Mapping[StageKind, Sequence[Module]]:
        """The linear layers of each kind of stage whose weight gradients can be separate stages."""
        return {kind: linears_of(parts) for kind, parts in self._read.items()}

    @cached_property
    def expert_products(self) -> Products:
        """The linear layers of the local experts."""
        return expert_products(self.moe.experts)

    def documents(
        self, packing: PackedSeqParams | None, mask: Tensor | None, hidden: Tensor
    ) -> Documents | None:
        """The documents of a micro-batch, from the arguments that Megatron passes to the layer."""
        groups = self.attention_layer.pg_collection
        layout = SequenceLayout(
            tensor_ranks=groups.tp.size() if self.config.sequence_parallel else 1,
            context_ranks=groups.cp.size(),
            context_rank=groups.cp.rank(),
        )
        return self.context.documents.read(packing, mask, num_rows=hidden.shape[0], layout=layout)

    def separate(self, documents: Documents | None) -> Documents | None:
        """The documents, if the block's attention must not cross their bounds; else None."""
        ignored = documents is not None and not documents.own_positions and not self._reads_mask
        return None if ignored else documents

    def add_residual(
        self,
        add: Callable[..., Callable[..., Tensor]],
        output_with_bias: tuple[Tensor, Tensor | None],
        residual: Tensor,
    ) -> Tensor:
        """Megatron's bias, dropout and residual addition (``self_attn_bda`` or ``mlp_bda``)."""
        if self.config.fp32_residual_connection:
            residual = residual.float()
        apply = add(self.moe_layer.training, self.config.bias_dropout_fusion)
        return apply(output_with_bias, residual, self.moe_layer.hidden_dropout)

    def begin_micro_batch(self) -> None:
        """Let linear layers add gradients of weights, see :func:`.precision.begin_micro_batch`."""
        if self._linear_layers_of_te:
            precision.begin_micro_batch(self._linear_layers_of_te, fp8=bool(self.config.fp8))

    def forget_quantized_weights(self) -> None:
        """See ``BlockFunctions``."""
        if self.config.fp8:
            precision.forget_quantized_weights(self._linear_layers_of_te)

    @cached_property
    def _linear_layers_of_te(self) -> Sequence[precision.TransformerEngineLinear]:
        return precision.linear_layers_of_te(self._parts)
