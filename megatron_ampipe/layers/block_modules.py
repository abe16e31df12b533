"""The Megatron modules of one block: which stage uses which parameters, and what is set on them.

Used by :mod:`.pipelined_block`, which decides how they are run, and by :mod:`.attention_stages` and
:mod:`.moe_stages`, which call them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn import Module, Parameter

from megatron_ampipe.block_features import has_latent_experts
from megatron_ampipe.errors import BadInput
from megatron_ampipe.exchange.flex import FlexChunk
from megatron_ampipe.exchange.hops import node_groups
from megatron_ampipe.exchange.packing import AllGatherChunk, AllToAllChunk
from megatron_ampipe.layers.expert_products import ExpertProducts
from megatron_ampipe.layers.linear_weights import Linear, linears_of
from megatron_ampipe.layers.routing_records import sees_whole_blocks
from megatron_ampipe.layers.token_ids import TokenIds
from megatron_ampipe.runtime.block_functions import AddedStage
from megatron_ampipe.runtime.segment import BlockParameters
from megatron_ampipe.schedule import Exchange, StageKind, kinds

_RECOMPUTED = {
    "moe": {kinds.EXPERT, kinds.SHARED},
    "shared_experts": {kinds.SHARED},
    "mla_up_proj": {kinds.QKV},
    "mlp": {kinds.MLP},
}
"""Stages that run again in the backward pass, by Megatron's ``--recompute-modules``.

Core attention is recomputed by :class:`~.chunk_attention.ChunkAttention`.
"""


class BlockModules:
    """An attention layer and an MoE layer of Megatron; in a GPT both are one layer.

    Args:
        attention_layer: Whose norm, attention and residual come first.
        moe_layer: Whose norm, MoE layer and residual follow; a dense layer has an MLP in its place.
        capacity_per_chunk: Whether the capacity of experts is that of a chunk (``--ampipe-capacity-scope``).
        chooses: Whether the router chooses for all chunks at once.
        ranks_per_node: As in ``AMPipeConfig``.
        added: Stages beyond those of the table.
    """

    def __init__(
        self,
        attention_layer: TransformerLayer,
        moe_layer: TransformerLayer,
        *,
        capacity_per_chunk: bool,
        chooses: bool = False,
        ranks_per_node: int | None = None,
        added: Sequence[AddedStage] = (),
    ) -> None:
        self.attention_layer, self.moe_layer, self.moe = attention_layer, moe_layer, moe_layer.mlp
        self.dense = not moe_layer.is_moe_layer
        self.is_latent = not self.dense and has_latent_experts(moe_layer.config)
        self.config, self.capacity_per_chunk, self._added = moe_layer.config, capacity_per_chunk, added
        self.chooses = chooses and not self.dense
        self._ranks_per_node = ranks_per_node
        self.recomputed_stages = self._take_over_recompute()
        # The exchange can change between two iterations.
        self.dispatcher = cache(self._make_dispatcher)
        """The dispatcher of a chunk, by :class:`~megatron_ampipe.schedule.Exchange`, to be copied."""

    def _make_dispatcher(self, exchange: Exchange) -> AllToAllChunk | AllGatherChunk | FlexChunk:
        groups, name = self.moe_layer.pg_collection, self.config.moe_token_dispatcher_type
        local = self.moe.num_local_experts, self.moe.local_expert_indices
        if name != "alltoall":
            kind = FlexChunk if name == "flex" else AllGatherChunk
            return kind(*local, config=self.config, pg_collection=groups)
        return AllToAllChunk(
            *local,
            config=self.config,
            pg_collection=groups,
            once=not exchange.sends_every_copy,
            nodes=node_groups(groups.ep, self._ranks_per_node) if exchange.has_two_hops else None,
            has_fixed_choices=self.moe.router.has_stock_routing,
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

    @property
    def id_source(self) -> TokenIds | None:
        """Where the router reads the ids of tokens; None if it does not."""
        return getattr(self.moe.router, "id_source", None) if not self.dense else None

    @property
    def has_router_hook(self) -> bool:
        """Whether something reads the routing of whole sequences, such as ``--moe-routing-trace-path``."""
        return not self.dense and sees_whole_blocks(self.moe.router)

    @cached_property
    def scatters_rows(self) -> bool:
        """Whether tensor-parallel ranks add and scatter what attention projects, as a stage.

        Megatron's local layers can leave that to others; those of Transformer Engine do it inside.
        """
        projection = self.attention_layer.self_attention.linear_proj
        return (
            type(projection) is RowParallelLinear
            and projection.sequence_parallel
            and projection.skip_bias_add
            and projection.tp_group.size() > 1
        )

    @cached_property
    def gathers_rows(self) -> bool:
        """Whether they can also gather what attention is given: one such layer projects queries and keys."""
        attention = self.attention_layer.self_attention
        return (
            self.scatters_rows
            and isinstance(attention, SelfAttention)
            and type(attention.linear_qkv) is ColumnParallelLinear
        )

    @cached_property
    def _stage_modules(self) -> Mapping[StageKind, Sequence[Module]]:
        """The modules with parameters that each kind of stage calls."""
        attention, moe = self.attention_layer.self_attention, self.moe
        projection = [
            module
            for name, module in attention.named_children()
            if name not in ("core_attention", "linear_proj")
        ]
        used: dict[StageKind, list[Module | None]] = {
            kinds.QKV: [self.attention_layer.input_layernorm, *projection],
            kinds.ATTENTION: [
                attention.core_attention,
                attention.linear_proj,
                self.moe_layer.pre_mlp_layernorm,
            ],
        }
        if self.scatters_rows:
            used[kinds.ADD_NORM] = [used[kinds.ATTENTION].pop()]
        if self.gathers_rows:
            # Of the stage ``qkv`` where a block has no such stage.
            used[kinds.INPUT_NORM] = [self.attention_layer.input_layernorm]
        if self.dense:
            used[kinds.MLP] = [moe]
        else:
            used |= {
                kinds.CHOOSE if self.chooses else kinds.ROUTE: [moe.router],
                kinds.SHARED: [moe.shared_experts],
                kinds.EXPERT: [moe.experts],
            }
            if self.is_latent:
                used[kinds.ROUTE] = [*used.get(kinds.ROUTE, ()), moe.fc1_latent_proj]
                used[kinds.MERGE] = [moe.fc2_latent_proj]
        return {kind: [module for module in modules if module is not None] for kind, modules in used.items()}

    @cached_property
    def linears(self) -> Mapping[StageKind, Sequence[Linear]]:
        """The linear layers of each kind of stage whose weight gradients can be separate stages."""
        return {kind: linears_of(modules) for kind, modules in self._stage_modules.items()}

    @cached_property
    def stage_parameters(self) -> Mapping[StageKind, Sequence[Parameter]]:
        """The trainable parameters of each kind of stage that has any."""
        found = {
            kind: tuple(
                parameter
                for module in modules
                for parameter in module.parameters()
                if parameter.requires_grad
            )
            for kind, modules in self._stage_modules.items()
        }
        if self.scatters_rows:
            bias = self.attention_layer.self_attention.linear_proj.bias
            if bias is not None and bias.requires_grad:
                # Added after the sum, and so once.
                found[kinds.ADD_NORM] += (bias,)
        return found | {stage.kind: tuple(stage.parameters) for stage in self._added}

    def require_linears(self, weights: Iterable[StageKind]) -> None:
        """Check that gradients of weights can be separate stages.

        Raises:
            BadInput: a stage of these kinds would have nothing to compute.
        """
        for kind in weights:
            of = kind.weights_of
            if of in self._stage_modules and self._stage_modules[of] and not self.linears[of]:
                raise BadInput(
                    "--ampipe-schedule",
                    f"with {kind}",
                    rule=f"the linear layers of the stage {of} are not Megatron's local ones, which alone "
                    "can compute gradients of weights apart",
                    remedy="Use --transformer-impl local, or --ampipe-schedule ampipe.",
                )

    @cached_property
    def expert_products(self) -> ExpertProducts:
        """The products of the local experts."""
        return ExpertProducts.of(self.moe.experts)

    @cached_property
    def parameters(self) -> BlockParameters:
        """All trainable parameters of the block, each once."""
        used: dict[Parameter, bool] = {}
        for kind, parameters in self.stage_parameters.items():
            for parameter in parameters:
                used[parameter] = used.get(parameter, True) and kind in kinds.FEED_FORWARD
        missing = [
            name
            for layer in (self.attention_layer, self.moe_layer)
            for name, p in layer.named_parameters()
            if p.requires_grad and p not in used
        ]
        assert not missing, f"no stage of the block uses {missing}: their gradients would be lost"
        return BlockParameters(
            tuple(parameter for parameter, is_early in used.items() if is_early),
            tuple(parameter for parameter, is_early in used.items() if not is_early),
        )

    def add_first_weight_gradients(self) -> None:
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
