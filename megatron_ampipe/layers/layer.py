"""Megatron's transformer layer as a pipeline of chunks, and the layer specifications that install it.

Where AMPipe changes nothing (``schedule.pipeline.builds_layers``), all layers keep their stock classes. A
dense layer keeps it otherwise too, unless it can share a schedule with an MoE layer. :mod:`.hybrid` does the
same for hybrid models.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    _get_block_submodules,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.block_stack import ConsecutiveLayers
from megatron_ampipe.layers.chunk_attention import RotaryEmbedding
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.router import chunk_router_of

ATTENTION = (SelfAttention, MLASelfAttention)
"""The classes of attention that can be pipelined."""
_OTHER_ATTENTION = (GatedDeltaNet,)
"""The classes that Megatron runs: only the MoE layer after them is pipelined."""


class AMPipeTransformerLayer(TransformerLayer):
    """A transformer layer whose attention and MoE layer, or MLP, are pipelined.

    Without softmax attention, only the MoE layer is pipelined. Modules, parameters and checkpoint keys are
    those of ``TransformerLayer``; only ``forward`` differs.

    Args:
        ampipe: State shared by all pipelined layers.
        shares_schedule_with_previous: Whether the layer can share a schedule with the layer that was built
            before it.
    """

    def __init__(
        self,
        *args: object,
        ampipe: AMPipeContext,
        shares_schedule_with_previous: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # A layer of multi-token prediction is built from the specification of another layer.
        if not shares_schedule_with_previous or self.is_mtp_layer:
            ampipe.layers_being_built = ConsecutiveLayers(ampipe)
        number = math.inf if self.is_mtp_layer else kwargs.get("layer_number", 1)
        recomputed = number <= ampipe.recomputed_layers
        self._block = BlockModules(self, self, ampipe, recomputed=recomputed)
        layers = ampipe.layers_being_built
        assert isinstance(layers, ConsecutiveLayers), "no layer was built before this one"
        self._stack = layers.add(self._block)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: RotaryEmbedding | None = None,
        inference_context: object = None,
        padding_mask: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the block. The first layer of a stack runs all its blocks; the others return their input.

        The stock layer runs for inference, for a dense layer that shares no schedule, and while the pipeline
        is one chunk without overlap (``--ampipe-degree auto``), unless documents are separated.

        Args:
            hidden_states: ``[S, B, D]``.
            attention_mask: Read only to separate documents; attention is always causal.
            context: Returned unchanged, as by a stock layer without cross-attention.
            rotary_pos_emb: As in Megatron.
            inference_context: As in Megatron.
            padding_mask: ``[B, S]``, True for rows that count in no loss of the router.
            kwargs: Megatron's other arguments; all must be None except ``packed_seq_params``.

        Returns:
            ``[S, B, D]`` and ``context``.
        """
        block, ampipe, stack = self._block, self._block.context, self._stack()
        packing = kwargs.pop("packed_seq_params", None)
        untimed = inference_context is not None or (stack is not None and stack.is_dense)
        documents = None if untimed else block.documents(packing, attention_mask, hidden_states)
        if untimed or (ampipe.runs_megatron_layers and documents is None):
            stock = functools.partial(
                block.in_precision(super().forward, self),
                attention_mask=attention_mask,
                context=context,
                rotary_pos_emb=rotary_pos_emb,
                inference_context=inference_context,
                packed_seq_params=packing,
                padding_mask=padding_mask,
                **kwargs,
            )
            layer = functools.partial(checkpoint, stock, False) if block.recomputes else stock
            if untimed:
                output: tuple[Tensor, Tensor | None] = layer(hidden_states)
                return output
            # Recorded as a pass of a schedule is.
            passes = ampipe.recorder.passes
            passes.record_shape(*hidden_states.shape[:2])
            return passes.timed_layer(layer, hidden_states)
        refuse_extra_arguments(kwargs)
        if not block.attends:
            attention = functools.partial(
                block.in_precision(self._forward_attention, self),
                attention_mask=attention_mask,
                context=context,
                rotary_pos_emb=rotary_pos_emb,
                packed_seq_params=packing,
            )
            half = functools.partial(checkpoint, attention, False) if block.recomputes else attention
            hidden_states, context = half(hidden_states)
        if stack is not None:
            hidden_states = stack(hidden_states, rotary_pos_emb, documents, padding_mask)
        return hidden_states, context


def refuse_extra_arguments(kwargs: dict[str, object]) -> None:
    """Raise :class:`BadInput` for an argument that no stage reads; start-up refuses flags that set one."""
    for name, value in kwargs.items():
        if value is not None:
            raise BadInput(
                name,
                f"of the type {type(value).__name__}",
                rule="the model passes it to its layers, and no chunk reads it",
                remedy="Leave it out of the call of the model, or train at degree 1.",
            )


def pipelined(
    spec: TransformerBlockSubmodules | ModuleSpec, context: AMPipeContext
) -> TransformerBlockSubmodules | ModuleSpec:
    """The specification with :class:`AMPipeTransformerLayer` for MoE layers; ``spec`` itself for stock runs.

    Where layers are to share schedules, a specification of one layer has been :func:`listed`.

    Raises:
        BadInput: an MoE layer has a class that AMPipe does not support.
    """
    if not context.pipelined:
        return spec
    if isinstance(spec, ModuleSpec):
        if issubclass(spec.module, TransformerBlock):
            return dataclasses.replace(spec, submodules=pipelined(spec.submodules, context))
        if not _is_moe(spec):
            # A dense model, as Megatron builds one to upcycle it.
            return spec
        assert context.given.stack == 1, "one specification for all layers does not give their order"
        return _pipelined_layer(spec, context)
    assert spec.layer_specs is not None
    layers: list[ModuleSpec] = []
    for can_share, specs in itertools.groupby(spec.layer_specs, key=lambda layer: _can_share(layer, context)):
        run_specs = list(specs)
        shares = can_share and any(map(_is_moe, run_specs))
        layers += [
            _pipelined_layer(
                layer, context, shares=shares, shares_schedule_with_previous=shares and place > 0
            )
            for place, layer in enumerate(run_specs)
        ]
    return dataclasses.replace(spec, layer_specs=layers)


def listed(
    spec: TransformerBlockSubmodules | ModuleSpec,
    transformer: TransformerConfig,
    context: AMPipeContext,
    *,
    vp_stage: int | None,
) -> TransformerBlockSubmodules | ModuleSpec:
    """The specification with the list of the layers that Megatron builds of it, if they can share schedules.

    One specification for all layers does not give their order. ``transformer`` is their configuration.
    """
    if context.given.stack == 1:
        return spec
    submodules: TransformerBlockSubmodules = _get_block_submodules(transformer, spec, vp_stage)
    return submodules


def _pipelined_layer(
    spec: ModuleSpec,
    context: AMPipeContext,
    *,
    shares: bool = False,
    shares_schedule_with_previous: bool = False,
) -> ModuleSpec:
    is_moe = _is_moe(spec)
    if not is_moe and not shares:
        return spec
    if is_moe:
        require_class(compat.mlp_class(spec.submodules.mlp), (MoELayer,), "MoE layer")
        require_class(spec.module, (TransformerLayer,), "MoE block")
        require_class(spec.submodules.self_attention.module, ATTENTION + _OTHER_ATTENTION, "MoE attention")
    for name in _not_called(spec.submodules):
        rule = "the layer specification has a module there, which no stage would call"
        raise BadInput("layer", name, rule=rule, remedy="Train with --ampipe-degree 1.")
    return ModuleSpec(
        module=AMPipeTransformerLayer,
        params={
            **spec.params,
            "ampipe": context,
            "shares_schedule_with_previous": shares_schedule_with_previous,
        },
        submodules=with_chunk_router(spec.submodules, context) if is_moe else spec.submodules,
    )


def _not_called(submodules: TransformerLayerSubmodules) -> list[str]:
    """The modules of a layer that no stage calls: cross-attention, or modules that a patch adds."""
    known = {"input_layernorm", "self_attention", "self_attn_bda", "pre_mlp_layernorm", "mlp", "mlp_bda"}
    names = {field.name for field in dataclasses.fields(submodules)} - known - {"sharded_state_dict_keys_map"}
    return sorted(n for n in names if getattr(submodules, n) not in (IdentityOp, IdentityFuncOp))


def _is_moe(spec: ModuleSpec) -> bool:
    built = compat.mlp_class(spec.submodules.mlp)
    return isinstance(built, type) and issubclass(built, BaseMoELayer)


def _can_share(spec: ModuleSpec, context: AMPipeContext) -> bool:
    """Whether a layer can share a schedule with its neighbors."""
    if context.given.stack == 1 and not context.settings.automatic:
        return False
    if _is_moe(spec):
        return spec.submodules.self_attention.module not in _OTHER_ATTENTION
    return (
        spec.module is TransformerLayer
        and spec.submodules.self_attention.module in ATTENTION
        and compat.mlp_class(spec.submodules.mlp) is MLP
    )


def with_gate(spec: Any, gate: type[TopKRouter]) -> Any:
    """The specification of layers, or of a hybrid stack, with ``gate`` as router of every MoE layer.

    Raises:
        BadInput: the router of an MoE layer is not Megatron's.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        assert spec.layer_specs is not None
        return dataclasses.replace(spec, layer_specs=[with_gate(layer, gate) for layer in spec.layer_specs])
    submodules = spec.submodules
    if issubclass(spec.module, TransformerBlock):
        submodules = with_gate(submodules, gate)
    elif hasattr(submodules, "moe_layer"):
        submodules = dataclasses.replace(submodules, moe_layer=with_gate(submodules.moe_layer, gate))
    elif _is_moe(spec):
        submodules = _with_router(submodules, (TopKRouter,), lambda _: gate)
    return dataclasses.replace(spec, submodules=submodules)


def with_chunk_router(
    submodules: TransformerLayerSubmodules, context: AMPipeContext
) -> TransformerLayerSubmodules:
    """The submodules of an MoE layer, with its router (Megatron's or the user's) extended to route chunks."""
    known = (TopKRouter,) if context.gate is None else (TopKRouter, context.gate)
    return _with_router(submodules, known, chunk_router_of)  # type: ignore[arg-type]  # classes are hashable


def _with_router(
    submodules: TransformerLayerSubmodules,
    known: tuple[type, ...],
    change: Callable[[type[TopKRouter]], type[TopKRouter]],
) -> TransformerLayerSubmodules:
    moe = compat.moe_submodules(submodules.mlp)
    require_class(moe.router, known, "MoE router")
    moe = dataclasses.replace(moe, router=change(moe.router))
    return dataclasses.replace(submodules, mlp=compat.with_moe_submodules(submodules.mlp, moe))


def require_class(module_class: type, known: tuple[type, ...], role: str) -> None:
    """Check that the module with this role in a layer has a class that the stages replace completely.

    Raises:
        BadInput: The class is not one of ``known``. Subclasses are refused too: no stage runs what they add.
    """
    if module_class not in known:
        raise BadInput(
            role,
            getattr(module_class, "__name__", module_class),
            rule=f"only Megatron's {' and '.join(cls.__name__ for cls in known)} can be pipelined",
            remedy="Use the default layer specification, or train with --ampipe-degree 1.",
        )
