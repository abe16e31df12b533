"""HybridEP with a budget of rows, over a stand-in: no host waits, and a step that did not fit is repeated.

Compared with Megatron's layer and its all-to-all, which drop nothing (fp32, two expert-parallel ranks).
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import deep_ep_standin
from tests.dist.cases import ALL_TO_ALL, HYBRID, LARGE, Case

pytestmark = pytest.mark.ranks(2)

TOLERANCE = 1e-5
BUDGET = {"use_transformer_engine_op_fuser": True, "moe_expert_rank_capacity_factor": 2.0}
NO_BUDGET = {"use_transformer_engine_op_fuser": False, "moe_expert_rank_capacity_factor": None}
"""Megatron rounds a budget up to 256 rows."""
CASES = {
    "degree4": {},
    "two-degrees": {"backward_degree": 2},
    "recompute": {"layers": "mm", "stack": 0, "recompute": 2, "degree": 2},
}


@pytest.fixture(autouse=True, scope="module")
def _stand_ins() -> None:
    deep_ep_standin.install()


class Written(torch.autograd.Function):
    """The rows that were written; the gradients of others are left unwritten too, here NaN."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, count: int) -> Tensor:
        ctx.shape = rows.shape
        return rows[:count].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        found = gradient.new_full(ctx.shape, float("nan"))
        found[: len(gradient)] = gradient
        return found, None


def take_buffers(experts: Any) -> None:
    """Let Megatron's experts take more rows than they are told of, as those of Transformer Engine's fuser."""
    compute = experts.forward

    def forward(tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        count, most = int(tokens_per_expert.sum()), len(tokens)
        written = [Written.apply(rows, count) for rows in (tokens, probs)]
        output, bias = compute(written[0], tokens_per_expert, written[1])
        assert bias is None
        return torch.cat([output, output.new_full((most - count, output.shape[1]), float("nan"))]), None

    experts.forward = forward


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_told_and_repeated_without_a_budget(name: str) -> None:
    """As ``PagedStashRunner`` of Megatron does it; what fits is not dropped."""
    from tests.dist.blocks import build_layers, run, wrong

    fields = {"stock": ALL_TO_ALL | NO_BUDGET, "sequence_length": 256, "batch": 2, **CASES[name]}
    case = Case("budget", model=LARGE | HYBRID | BUDGET, **fields)
    stock, ours = build_layers(case)
    modules = [layer.mlp for layer in getattr(ours, "layers", [ours])]
    for module in modules:
        take_buffers(module.experts)
    rank = torch.distributed.get_rank()
    expected = run(stock, case, rank=rank)
    for factor, fits in ((2.0, True), (0.01, False), (None, True)):
        for module in modules:
            module.token_dispatcher._comm_manager.moe_expert_rank_capacity_factor = factor
            module.token_dispatcher.reset_over_budget()
        assert (wrong(expected, run(ours, case, rank=rank), TOLERANCE) == {}) is fits
        told = sum(module.token_dispatcher.check_over_budget().int() for module in modules)
        torch.distributed.all_reduce(told)
        assert bool(told) is not fits
