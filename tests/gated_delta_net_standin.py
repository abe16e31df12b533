"""Stand-ins for the kernels of Megatron's gated delta net, which the package flash-linear-attention has.

For tests on a CPU. The delta rule is its definition, row by row, in fp64: gradients of the decays are small
sums of large numbers.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def documents_of(rows: Tensor, bounds: Tensor | None) -> list[Tensor]:
    """``[B, S, ...]`` in parts, one for each packed document."""
    return [rows] if bounds is None else list(rows.split(bounds.diff().tolist(), dim=1))


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    cu_seqlens: Tensor | None,
    **states: Any,
) -> tuple[Tensor, None]:
    """``[B, S, D]`` to the same shape: each channel over its last rows, ``weight [D, W]``, then SiLU."""
    assert activation == "silu" and not any(states.values())
    channels, window = weight.shape
    parts = []
    for rows in documents_of(x, cu_seqlens):
        padded = functional.pad(rows.transpose(1, 2), (window - 1, 0))
        convolved = functional.conv1d(padded, weight.unsqueeze(1), bias, groups=channels)
        parts.append(functional.silu(convolved).transpose(1, 2))
    return torch.cat(parts, dim=1), None


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    **states: Any,
) -> tuple[Tensor, None]:
    """``q, k [B, S, H, K]``, ``v [B, S, H, V]`` and ``g, beta [B, S, H]`` to ``[B, S, H, V]``."""
    assert not any(states.values())
    if cu_seqlens is not None:
        parts = zip(*(documents_of(rows, cu_seqlens) for rows in (q, k, v, g, beta)), strict=True)
        return torch.cat([delta_rule(*part[:3], g=part[3], beta=part[4])[0] for part in parts], 1), None
    q, k, v, decay, beta = q.double(), k.double(), v.double(), g.double().exp(), beta.double()
    state, rows = torch.zeros(*k.shape[:1], *k.shape[2:], v.shape[-1], dtype=v.dtype, device=v.device), []
    for row in range(q.shape[1]):
        state = state * decay[:, row, :, None, None]
        known = torch.einsum("bhkv,bhk->bhv", state, k[:, row])
        change = beta[:, row, :, None] * (v[:, row] - known)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, row], change)
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, row]) / q.shape[-1] ** 0.5)
    return torch.stack(rows, 1).to(g.dtype), None


def install() -> None:
    """Make the stand-ins what Megatron has found."""
    from megatron.core.ssm import gated_delta_net as package

    # One module before 0.19.
    common, gdn = getattr(package, "common", package), getattr(package, "gdn", package)
    common.HAVE_FLA = True
    common.l2norm = functools.partial(functional.normalize, dim=-1, eps=1e-6)
    common.chunk_gated_delta_rule = gdn.chunk_gated_delta_rule = delta_rule
    common.causal_conv1d = gdn.causal_conv1d = causal_conv1d


def with_gated_delta_net(layer: Any) -> Any:
    """A specification of a local layer with gated delta net in place of its attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    install()
    attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
        ),
    )
    submodules = dataclasses.replace(layer.submodules, self_attention=attention)
    return dataclasses.replace(layer, submodules=submodules)
