"""The kinds of experts that a benchmark can have: one after another, or all of a rank in grouped products.

Megatron's grouped experts (``--moe-grouped-gemm``) are its ``TEGroupedMLP`` on Transformer Engine's grouped
linear layers. Where that is not installed, the same ``TEGroupedMLP`` can stand on torch's own grouped product
instead: other kernels, but likewise few launches for all experts, in place of several for each. Used by
:mod:`.blocks`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput, EnvironmentMissing
from megatron_ampipe.tools.measuring.grid import Case

_ALIGNED_BYTES = 16
"""Of a row, for torch's grouped product."""


def require(case: Case, *, on_cuda: bool) -> None:
    """Refuse experts that this machine cannot run.

    Raises:
        EnvironmentMissing: a package is missing or too old.
        BadInput: torch's grouped product cannot do it.
    """
    found = f"expert_kind {case.expert_kind} (case {case.name})"
    if case.expert_kind == "grouped" and not (on_cuda and compat.has_transformer_engine()):
        raise EnvironmentMissing(
            f"{found} needs a GPU and Transformer Engine, whose grouped linear layers Megatron uses. Write "
            "expert_kind: torch-grouped, which needs torch alone"
        )
    if case.expert_kind != "torch-grouped":
        return
    if not hasattr(F, "grouped_mm"):
        raise EnvironmentMissing(
            f"{found} needs torch.nn.functional.grouped_mm, and torch {torch.__version__} has none. Write "
            "expert_kind: sequential, or use a newer torch"
        )
    if on_cuda and case.dtype != "bf16":
        rule = f"torch's grouped product takes no {case.dtype} on a GPU"
        raise BadInput("--grid", found, rule=rule, remedy="Write dtype: bf16, or expert_kind: sequential.")
    size = 4 if case.dtype == "fp32" else 2
    for key in ("hidden", "ffn"):
        if getattr(case, key) * size % _ALIGNED_BYTES:
            rule = f"{key} {getattr(case, key)} is no multiple of {_ALIGNED_BYTES // size}"
            raise BadInput("--grid", found, rule=rule, remedy="Choose one, or expert_kind: sequential.")


def use_experts(spec: ModuleSpec, case: Case) -> None:
    """Put the case's kind of experts into a layer's specification."""
    if case.expert_kind == "sequential":
        return
    submodules = spec.submodules
    moe = compat.moe_submodules(submodules.mlp)
    moe = dataclasses.replace(
        moe, experts=_torch_grouped() if case.expert_kind == "torch-grouped" else _grouped(case)
    )
    submodules.mlp = compat.with_moe_submodules(submodules.mlp, moe)


def _grouped(case: Case) -> Any:
    """As Megatron's specification for Transformer Engine has them."""
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    mlp = get_moe_module_spec_for_backend(TESpecProvider(), num_experts=case.experts, moe_grouped_gemm=True)
    return compat.moe_submodules(mlp).experts


def _torch_grouped() -> Any:
    linear = TorchGroupedLinear
    submodules = GroupedMLPSubmodules(linear_fc1=linear, linear_fc2=linear, activation_func=None)
    return partial(TEGroupedMLP, submodules=submodules)


class TorchGroupedLinear(torch.nn.Module):
    """A linear layer of each local expert, all in one product; in place of Transformer Engine's."""

    def __init__(
        self,
        num_experts: int,
        num_inputs: int,
        num_outputs: int,
        *,
        config: Any,
        init_method: Any,
        bias: bool,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias, "the blocks of a benchmark have none"
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        weight = torch.empty(num_experts, num_outputs, num_inputs, dtype=config.params_dtype, device=device)
        init_method(weight)
        self.weight = torch.nn.Parameter(weight)

    def forward(self, tokens: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """``[T, inputs]``, sorted by expert, to ``[T, outputs]``; and no bias."""
        ends = torch.tensor(tokens_per_expert, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        if tokens.is_cuda:
            # From pinned memory, or the host would wait.
            ends = ends.pin_memory().to(tokens.device, non_blocking=True)
        output = F.grouped_mm(tokens, self.weight.transpose(1, 2), offs=ends)
        return _ContiguousGradient.apply(output), None

    def backward_dw(self) -> None:
        """Nothing is deferred: the gradients of weights are computed with the others."""


class _ContiguousGradient(torch.autograd.Function):
    """The product's backward takes no expanded gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous()
