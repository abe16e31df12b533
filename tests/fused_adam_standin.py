"""Stands in for Transformer Engine's ``FusedAdam`` with what ``--use-precision-aware-optimizer`` needs of it.

Gradients are read from ``decoupled_grad``, and moments are stored in the dtypes that Megatron asks for. A
step is computed in fp32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """Its constructor has the arguments that Megatron passes, or looks for."""

    steps = 0
    """Of all optimizers of this process."""

    def __init__(
        self,
        params: Any,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        eps: float,
        *,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        **others: bool,
    ) -> None:
        assert use_decoupled_grad and master_weights and master_weight_dtype is torch.float32
        assert others.pop("adam_w_mode") and not any(others.values()), others
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})
        self._dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype}

    def initialize_state(self, parameter: Tensor) -> None:
        """Moments of zero."""
        for name, dtype in self._dtypes.items():
            self.state[parameter][name] = torch.zeros_like(parameter, dtype=dtype)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """A step of AdamW."""
        assert closure is None
        FusedAdam.steps += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if parameter.decoupled_grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        assert parameter.dtype is torch.float32, "a parameter of 16 bits would need its main weights"
        if not self.state[parameter]:
            self.initialize_state(parameter)
        state, gradient = self.state[parameter], parameter.decoupled_grad.float()
        beta, beta_sq = group["betas"]
        mean = state["exp_avg"].float().lerp(gradient, 1 - beta)
        square = state["exp_avg_sq"].float().lerp(gradient.square(), 1 - beta_sq)
        step_size = group["lr"] / (1 - beta ** group["step"])
        scale = (square / (1 - beta_sq ** group["step"])).sqrt() + group["eps"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).addcdiv_(mean, scale, value=-step_size)
        state["exp_avg"].copy_(mean)
        state["exp_avg_sq"].copy_(square)
