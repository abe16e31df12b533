"""Local layers for hybrid models, whose layers Megatron builds from Transformer Engine only.

Megatron's specification of a hybrid stack is a constant, which users name with ``--spec`` or get by default.
Its contents are replaced by Megatron's local layers, so that stock and AMPipe get the same ones. Mamba layers
get the arithmetic of :mod:`.mamba` in place of the kernels of the package mamba-ssm, and need the package
einops, as on a GPU. Layers of other kinds (gated delta net, sparse attention) have no local form. Called by
:mod:`.megatron`.
"""

import dataclasses
from typing import Any

import megatron.core.models.hybrid.hybrid_block as hybrid_block
import megatron.core.ssm.mamba_mixer as mamba_mixer
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

from megatron_ampipe.launch.host.mamba import GroupedRMSNorm, mamba_split_conv1d_scan

_ANY_NUMBER = 8
"""Of experts: any number makes a specification an MoE layer's."""


def install() -> None:
    """Replace the layers of Megatron's hybrid stack, its final norm, and the kernels of Mamba."""
    hybrid_stack_spec.submodules = local_submodules()
    hybrid_block.TENorm = WrappedTorchNorm
    if not mamba_mixer.HAVE_MAMBA_SSM:
        mamba_mixer.HAVE_MAMBA_SSM = True
        mamba_mixer.mamba_split_conv1d_scan_combined = mamba_split_conv1d_scan
        mamba_mixer.ExtendedRMSNorm = GroupedRMSNorm
        # Of the versions of packages that the function above stands in for.
        mamba_mixer._check_mamba_sequence_packing_support = lambda **_: (True, None)


def local_submodules() -> HybridStackSubmodules:
    """The layers of Megatron's ``hybrid_stack_spec``, of local modules."""
    dense = get_gpt_layer_local_spec(normalization="RMSNorm")
    latent = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    experts = get_gpt_layer_local_spec(num_experts=_ANY_NUMBER, normalization="RMSNorm")
    found: dict[str, Any] = {
        "mamba_layer": ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=WrappedTorchNorm,
                mixer=ModuleSpec(
                    module=MambaMixer,
                    submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
                ),
                mamba_bda=get_bias_dropout_add,
            ),
        ),
        "attention_layer": _attention_of(dense),
        "mla_layer": _attention_of(latent),
        "mlp_layer": _mlp_of(dense, MLPLayer),
        "moe_layer": _mlp_of(experts, MoETransformerLayer),
        "mtp_block_spec": _mtp_block(),
    }
    # 0.18 has no latent attention in hybrid models.
    known = {field.name for field in dataclasses.fields(HybridStackSubmodules)}
    return HybridStackSubmodules(**{name: spec for name, spec in found.items() if name in known})


def _attention_of(layer: ModuleSpec) -> ModuleSpec:
    """The first half of a layer of a GPT."""
    submodules = dataclasses.replace(
        layer.submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp
    )
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _mlp_of(layer: ModuleSpec, module: type) -> ModuleSpec:
    """The second half of a layer of a GPT."""
    submodules = dataclasses.replace(
        layer.submodules, input_layernorm=IdentityOp, self_attention=IdentityOp, self_attn_bda=IdentityFuncOp
    )
    return ModuleSpec(module=module, submodules=submodules)


def _mtp_block() -> ModuleSpec:
    """Norms and projection of multi-token prediction, whose layers come from the pattern."""
    layer = MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=WrappedTorchNorm,
    )
    return ModuleSpec(
        module=MultiTokenPredictionBlock,
        submodules=MultiTokenPredictionBlockSubmodules(
            layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=layer)]
        ),
    )
