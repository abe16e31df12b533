"""Hybrid models: an attention layer followed by an MoE layer, two layers in Megatron, pipelined as one block.

``HybridStack`` builds its layers from a pattern (``*`` attention, ``E`` MoE) and calls one after another.
Here the attention layer of such a pair runs both, and the MoE layer passes its input through. Layers that
stand otherwise run as they are. Parameters and checkpoint keys are the stock stack's.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer
from torch import Tensor

from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.layer import assert_no_extra_arguments
from megatron_ampipe.layers.pipelined_block import PipelinedBlock
from megatron_ampipe.layers.spec import with_chunk_router


class HybridAttentionLayer(TransformerLayer):
    """An attention layer of a hybrid stack; runs the MoE layer behind it as well, once joined to it."""

    block: PipelinedBlock | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As ``TransformerLayer.forward``; the output is the MoE layer's if there is one."""
        if self.block is None or kwargs.get("inference_context") is not None:
            output: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
            return output
        rotary_pos_emb = kwargs.pop("rotary_pos_emb", None)
        kwargs.pop("attention_mask", None)
        assert_no_extra_arguments(kwargs)
        return self.block(hidden_states, rotary_pos_emb), None


class HybridMoELayer(MoETransformerLayer):
    """An MoE layer of a hybrid stack; does nothing where the attention layer before it runs it."""

    joined = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As ``MoETransformerLayer.forward``, or the identity."""
        if not self.joined or kwargs.get("inference_context") is not None:
            output: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
            return output
        return hidden_states, None


class AMPipeHybridStack(HybridStack):
    """A hybrid stack that pipelines every pair of an attention layer and the MoE layer behind it.

    Args:
        ampipe: Shared settings and machinery.
        args: As for ``HybridStack``.
        kwargs: As for ``HybridStack``.
    """

    def __init__(self, *args: Any, ampipe: AMPipeContext, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for attention, moe in pairwise(self.layers):
            if isinstance(attention, HybridAttentionLayer) and isinstance(moe, HybridMoELayer):
                attention.block = PipelinedBlock(attention, moe, ampipe)
                moe.joined = True


def pipelined_stack(spec: ModuleSpec, context: AMPipeContext) -> ModuleSpec:
    """The same hybrid stack with its attention-MoE pairs pipelined; ``spec`` itself at degree 1."""
    if not context.config.pipelined:
        return spec
    submodules: HybridStackSubmodules = spec.submodules
    replaced = {
        name: dataclasses.replace(layer, module=HybridAttentionLayer)
        for name in ("attention_layer", "mla_layer")
        if isinstance(layer := getattr(submodules, name, None), ModuleSpec)
        and layer.module is TransformerLayer
        and layer.submodules.self_attention.module in (SelfAttention, MLASelfAttention)
    }
    moe = submodules.moe_layer
    if isinstance(moe, ModuleSpec) and moe.module in (TransformerLayer, MoETransformerLayer):
        replaced["moe_layer"] = dataclasses.replace(
            moe, module=HybridMoELayer, submodules=with_chunk_router(moe.submodules)
        )
    return ModuleSpec(
        module=AMPipeHybridStack,
        params={**spec.params, "ampipe": context},
        submodules=dataclasses.replace(submodules, **replaced),
    )
