"""HybridEP with a budget of rows, over a stand-in: no host waits, and a step that did not fit is repeated.

Compared with Megatron's layer and its all-to-all, which drop nothing (fp32, two expert-parallel ranks).
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import deep_ep_standin
from tests.dist.cases import ALL_TO_ALL, HYBRID, LARGE, Case
from tests.dist.worker import use_groups

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
    if use_groups():
        deep_ep_standin.forget_groups()


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


def pair(name: str, **model: Any) -> tuple[Case, Any, list[Any]]:
    """A case, Megatron's layers, and AMPipe's with their MoE layers."""
    from tests.dist.blocks import build_layers

    fields = {"stock": ALL_TO_ALL | NO_BUDGET, "sequence_length": 256, "batch": 2, **CASES[name]}
    case = Case("budget", model=LARGE | HYBRID | BUDGET | model, **fields)
    stock, ours = build_layers(case)
    for layer in getattr(ours, "layers", [ours]):
        take_buffers(layer.mlp.experts)
    return case, stock, ours


def run(layer: Any, case: Case) -> dict[str, Tensor]:
    from tests.dist import blocks

    return blocks.run(layer, case, rank=torch.distributed.get_rank())


def dispatchers(layer: Any) -> list[Any]:
    """Those that Megatron asks after a step."""
    return [one.mlp.token_dispatcher for one in getattr(layer, "layers", [layer])]


@pytest.mark.parametrize("name", CASES)
def test_what_fits_is_not_dropped(name: str) -> None:
    from tests.dist.blocks import wrong

    case, stock, ours = pair(name)
    assert not wrong(run(stock, case), run(ours, case), TOLERANCE)
    assert not any(dispatcher.check_over_budget() for dispatcher in dispatchers(ours))


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_told_and_repeated_without_a_budget(name: str) -> None:
    """As ``PagedStashRunner`` of Megatron does it."""
    from tests.dist.blocks import wrong

    case, stock, ours = pair(name, moe_expert_rank_capacity_factor=0.01)
    expected = run(stock, case)
    assert wrong(expected, run(ours, case), TOLERANCE)
    told = torch.stack([dispatcher.check_over_budget() for dispatcher in dispatchers(ours)]).int().sum()
    torch.distributed.all_reduce(told)
    assert told
    for dispatcher in dispatchers(ours):
        dispatcher._comm_manager.moe_expert_rank_capacity_factor = None
        dispatcher.reset_over_budget()
    assert not wrong(expected, run(ours, case), TOLERANCE)
    assert not any(dispatcher.check_over_budget() for dispatcher in dispatchers(ours))
