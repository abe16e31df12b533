"""Hybrid models: runs an attention layer and the MoE layer after it, two layers in Megatron, as one block.

The attention layer of such a pair runs both layers, and the second layer returns its input. Adjacent pairs
can share a schedule, also with pairs of an attention layer and an MLP. An MoE layer after any other layer is
a block without attention. All other layers, such as Mamba, run unchanged and end a shared schedule.
Parameters and checkpoint keys are those of the stock stack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from torch import Tensor

from megatron_ampipe.block.hybrid_pattern import runs_of_pairs
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.block_stack import BlockStack, ConsecutiveLayers
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.layer import (
    ATTENTION,
    refuse_extra_arguments,
    require_class,
    with_chunk_router,
)
from megatron_ampipe.layers.process_groups import make_groups_of_model


class _PairedLayer(TransformerLayer):
    """A layer of a hybrid stack. It belongs to a block if ``block`` is set."""

    block: BlockModules | None = None
    """The block that the layer belongs to: a pair of layers, or an MoE layer alone."""
    stack: Callable[[], BlockStack | None]
    """Gets the stack that begins with the block; None if an earlier pair runs the block."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """``[S, B, D]`` to the same shape and None; returns its input if an earlier layer runs this one."""
        output: tuple[Tensor, Tensor | None]
        if self.block is None or kwargs.get("inference_context") is not None:
            output = super().forward(hidden_states, *args, **kwargs)
            return output
        stack = self.stack()
        # A pair without experts that shares no schedule has no communication to hide.
        if stack is not None and stack.is_dense:
            output = super().forward(hidden_states, *args, **kwargs)
            return output
        if stack is not None and self is self.block.attention_layer:
            rotary_pos_emb = kwargs.pop("rotary_pos_emb", None)
            packing, mask = kwargs.pop("packed_seq_params", None), kwargs.pop("attention_mask", None)
            padding = kwargs.pop("padding_mask", None)
            refuse_extra_arguments(kwargs)
            documents = self.block.documents(packing, mask, hidden_states)
            hidden_states = stack(hidden_states, rotary_pos_emb, documents, padding)
        return hidden_states, None


class HybridAttentionLayer(_PairedLayer):
    """An attention layer of a hybrid stack."""


class HybridMoELayer(_PairedLayer, MoETransformerLayer):
    """An MoE layer of a hybrid stack."""


class HybridMLPLayer(_PairedLayer, MLPLayer):
    """An MLP layer of a hybrid stack."""


class AMPipeHybridStack(HybridStack):
    """A hybrid stack that pipelines every MoE layer, with the attention layer before it if there is one.

    Raises:
        BadInput: one of these layers has a class that AMPipe does not support.
    """

    def __init__(
        self, config: TransformerConfig, *args: object, ampipe: AMPipeContext, **kwargs: object
    ) -> None:
        # Every rank builds a stack for each of its models; only some also build one to predict more tokens.
        if not kwargs.get("is_mtp_layer"):
            make_groups_of_model(config, ampipe, kwargs.get("pg_collection"))
        super().__init__(config, *args, **kwargs)
        for first, num_pairs in runs_of_pairs(self.layer_type_list):
            _join(list(self.layers[first : first + 2 * num_pairs]), ampipe)
        for layer in self.layers:
            if isinstance(layer, HybridMoELayer) and layer.block is None:
                require_class(type(layer.mlp), (MoELayer,), "hybrid MoE layer")
                layer.block = BlockModules(layer, layer, ampipe)
                layer.stack = ConsecutiveLayers(ampipe).add(layer.block)


def _join(layers: Sequence[TransformerLayer], context: AMPipeContext) -> None:
    """Join each two consecutive layers into a block, and all blocks into one run."""
    run = ConsecutiveLayers(context)
    for attention, second in zip(layers[::2], layers[1::2], strict=True):
        # A class that ``pipelined_stack`` has not replaced must be Megatron's.
        if type(attention) is not HybridAttentionLayer:
            require_class(type(attention), (TransformerLayer,), "hybrid attention layer")
        require_class(type(attention.self_attention), ATTENTION, "hybrid attention")
        if type(second) not in (HybridMoELayer, HybridMLPLayer):
            require_class(type(second), (MoETransformerLayer, MLPLayer), "hybrid layer after attention")
        require_class(type(second.mlp), (MoELayer, MLP), "hybrid layer after attention")
        attention.block = second.block = BlockModules(attention, second, context)
        attention.stack = second.stack = run.add(attention.block)


def pipelined_stack(spec: ModuleSpec, context: AMPipeContext) -> ModuleSpec:
    """The same hybrid stack with its attention-MoE pairs pipelined; ``spec`` itself at degree 1.

    Raises:
        BadInput: the specification is not one of ``HybridStack``, or AMPipe does not support the class of its
            MoE layer.
    """
    if not context.pipelined:
        return spec
    require_class(spec.module, (HybridStack,), "hybrid stack")
    submodules: HybridStackSubmodules = spec.submodules
    replaced: dict[str, ModuleSpec] = {}
    for name, known, module in (
        ("attention_layer", (TransformerLayer,), HybridAttentionLayer),
        ("mla_layer", (TransformerLayer,), HybridAttentionLayer),
        ("mlp_layer", (MLPLayer, TransformerLayer), HybridMLPLayer),
        ("moe_layer", (MoETransformerLayer, TransformerLayer), HybridMoELayer),
    ):
        layer = getattr(submodules, name, None)
        # Other classes are refused by ``AMPipeHybridStack``, and only if the pattern uses the layer.
        if isinstance(layer, ModuleSpec) and layer.module in known:
            replaced[name] = dataclasses.replace(layer, module=module)
    if "moe_layer" in replaced:
        moe = replaced["moe_layer"]
        replaced["moe_layer"] = dataclasses.replace(
            moe, submodules=with_chunk_router(moe.submodules, context)
        )
    return ModuleSpec(
        module=AMPipeHybridStack,
        params={**spec.params, "ampipe": context},
        submodules=dataclasses.replace(submodules, **replaced),
    )
