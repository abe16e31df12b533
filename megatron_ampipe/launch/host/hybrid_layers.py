"""Local layers for hybrid models, whose layers Megatron builds from Transformer Engine only.

The contents of Megatron's specification of a hybrid stack are replaced by its local layers. Mamba layers are
computed in torch in place of the GPU kernels of the package mamba-ssm, and need the package einops, as on a
GPU. Layers of other kinds (gated delta net, sparse attention) have no local form.

Mamba 2 is written from the definition of the state space model (Dao and Gu, "Transformers are SSMs", section
6), which has, for each head, a state ``h [P, N]`` and a scalar decay:

    h_s = exp(dt_s * A) * h_(s-1) + dt_s * x_s B_s^T        y_s = h_s C_s + D * x_s

Within a piece of the sequence this is a matrix product with a causal decay matrix; only the state at the end
of a piece is handed to the next. Shapes: S rows, B sequences, H heads of width P, G groups of heads that
share ``B`` and ``C`` of N numbers.
"""

import dataclasses
from typing import Any

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
from torch.nn import functional

_PIECE = 64
"""Rows of a piece; the result does not depend on it, except for rounding."""
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


def local_submodules() -> HybridStackSubmodules:
    """The layers of Megatron's ``hybrid_stack_spec``, of local modules."""
    dense = get_gpt_layer_local_spec(normalization="RMSNorm")
    latent = get_gpt_layer_local_spec(multi_latent_attention=True, normalization="RMSNorm")
    experts = get_gpt_layer_local_spec(num_experts=_ANY_NUMBER, normalization="RMSNorm")
    specs: dict[str, Any] = {
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
    return HybridStackSubmodules(**{name: spec for name, spec in specs.items() if name in known})


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

    Args:
        zxbcdt: ``[B, S, 2 * H * P + 2 * G * N + H]``: gate, x, B, C and dt.
        conv1d_weight: ``[H * P + 2 * G * N, W]``, of a causal convolution with a window of W rows.
        conv1d_bias: ``[H * P + 2 * G * N]``.
        dt_bias: ``[H]``, added to dt before the softplus.
        A: ``[H]``, negative.
        D: ``[H]``, or ``[H, P]``.
        headdim: P; None if ``D`` says it.
        ngroups: G.
        activation: After the convolution; always ``silu``.
        seq_idx: None, as packed documents need the kernels of a GPU.
        kernel: What has no effect here: the norm that follows is the caller's, and so are the pieces.

    Returns:
        ``[B, S, H * P]`` in the dtype of ``zxbcdt``, computed in fp32.
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
    return (y.flatten(-2) * functional.silu(gate.float())).to(zxbcdt.dtype)


def state_space(x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The state space model, without ``D * x``, to ``[B, S, H, P]``.

    From ``x [B, S, H, P]``, ``dt [B, S, H]``, positive, ``decay [H]``, negative, ``b`` and ``c``
    ``[B, S, H, N]``.
    """
    weighted, exponents = x * dt.unsqueeze(-1), dt * decay
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3])
    pieces = []
    for xs, log_decay, bs, cs in zip(
        *(part.split(_PIECE, dim=1) for part in (weighted, exponents, b, c)), strict=True
    ):
        # total[s]: exponent of the decay from before the piece to row s.
        total = log_decay.cumsum(1)
        between = (total.unsqueeze(2) - total.unsqueeze(1)).permute(0, 3, 1, 2)
        causal = torch.ones(between.shape[-2:], dtype=torch.bool).tril()
        weights = between.masked_fill(~causal, float("-inf")).exp()
        scores = torch.einsum("bshn,bthn->bhst", cs, bs) * weights
        inside = torch.einsum("bhst,bthp->bshp", scores, xs)
        carried = torch.einsum("bshn,bhpn->bshp", cs, state) * total.exp().unsqueeze(-1)
        pieces.append(inside + carried)
        rest = (total[:, -1:] - total).exp().unsqueeze(-1)
        state = state * total[:, -1].exp()[..., None, None] + torch.einsum("bshp,bshn->bhpn", xs * rest, bs)
    return torch.cat(pieces, dim=1)


class GroupedRMSNorm(torch.nn.Module):
    """RMSNorm over each group of channels, in place of mamba-ssm's gated norm, here without a gate."""

    tp_group: Any = None

    def __init__(
        self, hidden_size: int, *, eps: float, group_size: int, norm_before_gate: bool, **factory: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, **factory))
        self._eps, self._group_size = eps, group_size

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., C]`` to the same shape and dtype."""
        groups = hidden.float().unflatten(-1, (-1, self._group_size))
        scaled = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + self._eps)
        return (scaled.flatten(-2) * self.weight.float()).to(hidden.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """For checkpoints: split over tensor-parallel ranks along the channels."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
