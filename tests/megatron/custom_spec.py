"""A layer specification as users name it with ``--spec``: of a block."""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from tests.gated_delta_net_standin import with_gated_delta_net

moe_layer = get_gpt_layer_local_spec(num_experts=4, normalization="LayerNorm")
delta_layer = with_gated_delta_net(moe_layer)
deltas = TransformerBlockSubmodules(layer_specs=[*[delta_layer] * 3, moe_layer], layer_norm=WrappedTorchNorm)
