"""Layer specifications as users name them with ``--spec``: of a block, and of one layer for all."""

from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tests.gated_delta_net_standin import with_gated_delta_net
from tests.te_linear_standin import with_grouped_experts

moe_layer = get_gpt_layer_local_spec(num_experts=4, normalization="LayerNorm")
delta_layer = with_gated_delta_net(moe_layer)
deltas = TransformerBlockSubmodules(layer_specs=[*[delta_layer] * 3, moe_layer], layer_norm=WrappedTorchNorm)


def layer_of(config: Any) -> ModuleSpec:
    """One specification for all layers, as a function of the model's configuration."""
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )


def engine_layer_of(config: Any) -> ModuleSpec:
    """The same, with stand-ins of Transformer Engine's grouped linear layers in the experts."""
    spec: ModuleSpec = with_grouped_experts(layer_of(config))
    return spec
