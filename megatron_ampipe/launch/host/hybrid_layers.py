"""Local layers for hybrid models, which Megatron builds only from Transformer Engine.

In Megatron's specification of a hybrid stack, layers are replaced by Megatron's local layers. Mamba layers
run in torch instead of the GPU kernels of the package mamba-ssm, and need the package einops, as on a GPU.
Layers of other kinds (gated delta net, sparse attention) have no local form.

Mamba 2 follows the definition of the state space model (Dao and Gu, "Transformers are SSMs", section 6). For
each head, the recurrence of a state ``h [P, N]`` with scalar decay equals a product with a causal matrix:

    h_s = exp(dt_s * A) * h_(s-1) + dt_s * x_s B_s^T        y_s = h_s C_s + D * x_s
"""

import dataclasses
from collections.abc import Mapping, Sequence

import megatron.core.models.hybrid.hybrid_block as hybrid_block
import megatron.core.ssm.mamba_mixer as mamba_mixer
import torch
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
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional

# S rows, B sequences, H heads of width P, G groups of heads that share B and C of N numbers.

_NO_MLP = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
_NO_ATTENTION = {"input_layernorm": IdentityOp, "self_attention": IdentityOp, "self_attn_bda": IdentityFuncOp}
_ANY_NUMBER = 8
"""A number of experts: any number makes the specification that of an MoE layer."""


def install() -> None:
    """Replace the layers of Megatron's hybrid stack, its final norm, and the kernels of Mamba."""
    hybrid_stack_spec.submodules = local_submodules()
    hybrid_block.TENorm = WrappedTorchNorm
    if not mamba_mixer.HAVE_MAMBA_SSM:
        mamba_mixer.HAVE_MAMBA_SSM = True
        mamba_mixer.mamba_split_conv1d_scan_combined = mamba_split_conv1d_scan
        mamba_mixer.ExtendedRMSNorm = GroupedRMSNorm


def local_submodules() -> HybridStackSubmodules:
    """The layers of Megatron's ``hybrid_stack_spec``, with local modules."""
    dense = get_gpt_layer_local_spec(normalization="RMSNorm")
    latent = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    experts = get_gpt_layer_local_spec(num_experts=_ANY_NUMBER, normalization="RMSNorm")
    # The layers of multi-token prediction come from the pattern.
    prediction = MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=WrappedTorchNorm,
    )
    specs: dict[str, ModuleSpec] = {
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
        "attention_layer": _half(dense, TransformerLayer, _NO_MLP),
        "mla_layer": _half(latent, TransformerLayer, _NO_MLP),
        "mlp_layer": _half(dense, MLPLayer, _NO_ATTENTION),
        "moe_layer": _half(experts, MoETransformerLayer, _NO_ATTENTION),
        "mtp_block_spec": ModuleSpec(
            module=MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=prediction)]
            ),
        ),
    }
    # 0.18 has no latent attention in hybrid models.
    known = {field.name for field in dataclasses.fields(HybridStackSubmodules)}
    return HybridStackSubmodules(**{name: spec for name, spec in specs.items() if name in known})


def _half(layer: ModuleSpec, module: type, without: dict[str, type]) -> ModuleSpec:
    """One half of a GPT layer."""
    return ModuleSpec(module=module, submodules=dataclasses.replace(layer.submodules, **without))


def mamba_split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    *,
    headdim: int | None,
    ngroups: int,
    activation: str,
    seq_idx: Tensor | None = None,
    **kernel: object,
) -> Tensor:
    """Convolution, state space model and gate of a Mamba layer, as mamba-ssm's ``*_combined`` function.

    Takes ``zxbcdt [B, S, 2 * H * P + 2 * G * N + H]`` (gate, x, B, C and dt) and returns ``[B, S, H * P]``,
    computed in fp32. The convolution, ``[H * P + 2 * G * N, W]``, is causal; the caller applies the norm.
    """
    assert activation == "silu" and seq_idx is None
    num_heads = A.shape[0]
    width = headdim or D.shape[-1]
    inner = num_heads * width
    shared = zxbcdt.shape[-1] - 2 * inner - num_heads
    gate, convolved, dt = zxbcdt.split([inner, inner + shared, num_heads], dim=-1)
    # Each channel over its last rows.
    channels, window = conv1d_weight.shape
    padded, weight = functional.pad(convolved.transpose(1, 2), (window - 1, 0)), conv1d_weight.unsqueeze(1)
    convolved = functional.conv1d(padded, weight, conv1d_bias, groups=channels).transpose(1, 2)
    convolved = functional.silu(convolved)
    x, b, c = convolved.float().split([inner, shared // 2, shared // 2], dim=-1)
    x = x.unflatten(-1, (num_heads, width))
    b, c = (part.unflatten(-1, (ngroups, -1)).repeat_interleave(num_heads // ngroups, 2) for part in (b, c))
    dt = functional.softplus(dt.float() + dt_bias)
    y = state_space(x, dt, A, b, c) + x * D.view(num_heads, -1).float()
    gated: Tensor = y.flatten(-2) * functional.silu(gate.float())
    return gated.to(zxbcdt.dtype)


def state_space(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The output ``[B, S, H, P]`` of the state space model, without ``D * x``.

    Takes ``x [B, S, H, P]``, ``dt [B, S, H]`` (positive), ``decay [H]`` (negative), ``b`` and ``c``
    ``[B, S, H, N]``.
    """
    # Exponent of the decay from the start to each row; in fp64, as differences of nearby rows are used.
    total = (dt * decay).double().cumsum(1).permute(0, 2, 1)
    between = (total.unsqueeze(3) - total.unsqueeze(2)).to(x.dtype)
    causal = torch.ones(between.shape[2:], dtype=torch.bool).tril()
    weights = between.masked_fill(~causal, float("-inf")).exp()
    y: Tensor = torch.einsum("bshn,bthn,bhst,bthp->bshp", c, b, weights, x * dt.unsqueeze(-1))
    return y


class GroupedRMSNorm(torch.nn.Module):
    """RMSNorm over each group of channels, in place of mamba-ssm's gated norm, here without a gate."""

    tp_group: ProcessGroup | None = None

    def __init__(
        self, hidden_size: int, *, eps: float, group_size: int, norm_before_gate: bool, **factory: object
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **factory))  # type: ignore[call-overload]
        self._eps, self._group_size = eps, group_size

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., C]`` to the same shape and dtype."""
        groups = hidden.float().unflatten(-1, (-1, self._group_size))
        scaled = functional.rms_norm(groups, (self._group_size,), eps=self._eps)
        return (scaled.flatten(-2) * self.weight.float()).to(hidden.dtype)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[tuple[int, int, int]] = (),
        metadata: Mapping[str, ProcessGroup] | None = None,
    ) -> dict[str, object]:
        """For checkpoints: split over tensor-parallel ranks along the channels."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        assert metadata is not None
        sharded: dict[str, object] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded
