"""Hybrid models: pipelines an attention layer and the MoE layer after it, two layers in Megatron, as a block.

``HybridStack`` builds its layers from a pattern (``*`` attention, ``E`` MoE) and calls them in order. Here
the attention layer of such a pair runs both layers, and the MoE layer returns its input. All other layers run
unchanged. Parameters and checkpoint keys are those of the stock stack.
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
    """An attention layer of a hybrid stack; also runs the MoE layer after it if ``block`` is set."""

    block: PipelinedBlock | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As ``TransformerLayer.forward``; with ``block``, returns the output of the MoE layer."""
        if self.block is None or kwargs.get("inference_context") is not None:
            output: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
            return output
        rotary_pos_emb = kwargs.pop("rotary_pos_emb", None)
        packing, mask = kwargs.pop("packed_seq_params", None), kwargs.pop("attention_mask", None)
        assert_no_extra_arguments(kwargs)
        documents = self.block.documents(packing, mask, hidden_states)
        return self.block(hidden_states, rotary_pos_emb, documents), None


class HybridMoELayer(MoETransformerLayer):
    """An MoE layer of a hybrid stack; returns its input if the attention layer before it runs it."""

    runs_in_block = False

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As ``MoETransformerLayer.forward``, or the identity."""
        if not self.runs_in_block or kwargs.get("inference_context") is not None:
            output: tuple[Tensor, Tensor | None] = super().forward(hidden_states, *args, **kwargs)
            return output
        return hidden_states, None


class AMPipeHybridStack(HybridStack):
    """A hybrid stack that pipelines every pair of an attention layer and the MoE layer after it.

    Args:
        ampipe: State shared by all pipelined layers.
        args: As for ``HybridStack``.
        kwargs: As for ``HybridStack``.
    """

    def __init__(self, *args: Any, ampipe: AMPipeContext, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for attention, moe in pairwise(self.layers):
            if isinstance(attention, HybridAttentionLayer) and isinstance(moe, HybridMoELayer):
                attention.block = PipelinedBlock(attention, moe, ampipe)
                moe.runs_in_block = True


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
