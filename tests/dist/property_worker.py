"""Compares a case with stock, and computes the smallest routing margin of its tokens."""

from __future__ import annotations

from typing import Any

from tests.dist.cases import Case
from tests.dist.service import serve
from tests.dist.worker import start, use_groups


def main() -> None:
    rank, _ = start()
    import torch
    from torch import Tensor

    from tests.dist.blocks import build_layers, differences, run

    groups: object = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal groups
        case = Case(**request)
        if case.parallel != groups:
            use_groups(**case.parallel)
            groups = case.parallel
        stock, ours = build_layers(case)
        make_ranks_differ(stock, ours)
        router = stock.mlp.router
        if router.expert_bias is not None:
            # It is initially zero and would have no effect.
            generator = torch.Generator().manual_seed(3)
            bias = torch.randn(router.expert_bias.shape, generator=generator) * 0.1
            for layer in (stock, ours):
                layer.mlp.router.expert_bias.copy_(bias)
        logits: list[Tensor] = []
        gating = router.gating
        router.gating = lambda hidden: logits.append(found := gating(hidden)) or found
        expected = run(stock, case, rank=rank)
        found = run(ours, case, rank=rank)
        return {
            "differences": measured(differences(expected, found), expected),
            "margin": margin(router, logits[0].detach().flatten(0, -2).double()),
            "class": type(ours).__name__,
        }

    def make_ranks_differ(stock: torch.nn.Module, ours: torch.nn.Module) -> None:
        """Give each rank a different part of what is split over ranks, so that mixed-up parts are visible."""
        generator = torch.Generator().manual_seed(1000 + rank)
        with torch.no_grad():
            for (name, parameter), other in zip(stock.named_parameters(), ours.parameters(), strict=True):
                if name.startswith("mlp.experts.") or getattr(parameter, "tensor_model_parallel", False):
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
                    other.copy_(parameter)

    def measured(relative: dict[str, float], stock: dict[str, Tensor]) -> dict[str, float]:
        """Differences relative to the stock entry, or to a hundredth of the largest gradient.

        The gradient of a bias is a sum over tokens that can cancel, down to rounding errors.
        """
        sizes = {name: value.abs().max().item() for name, value in stock.items()}
        floor = 0.01 * max(size for name, size in sizes.items() if name.startswith("gradient of"))
        return {
            name: value * size / max(size, floor) if name.startswith("gradient of") and size else value
            for (name, value), size in zip(relative.items(), sizes.values(), strict=True)
        }

    def margin(router: Any, logits: Tensor) -> float:
        """The smallest score difference between a selected and a not selected expert, or group of experts.

        Args:
            logits: ``[tokens, experts]``.
        """
        config = router.config
        scores = {
            "softmax": logits.softmax(-1) if config.moe_router_pre_softmax else logits,
            "sigmoid": logits.sigmoid(),
            "sqrtsoftplus": torch.nn.functional.softplus(logits).sqrt(),
        }[config.moe_router_score_function]
        if router.expert_bias is not None:
            scores = scores + router.expert_bias.double()
        smallest = float("inf")
        if config.moe_router_group_topk:
            per_group = router.topk // config.moe_router_group_topk
            grouped = scores.unflatten(-1, (config.moe_router_num_groups, -1))
            group_scores = grouped.topk(per_group).values.sum(-1)
            smallest = gap(group_scores, config.moe_router_group_topk)
            chosen = torch.zeros_like(group_scores, dtype=torch.bool)
            chosen.scatter_(1, group_scores.topk(config.moe_router_group_topk).indices, True)
            scores = grouped.masked_fill(~chosen.unsqueeze(-1), -1e3).flatten(-2)
        return min(smallest, gap(scores, router.topk))

    def gap(scores: Tensor, num_chosen: int) -> float:
        if num_chosen == scores.shape[-1]:
            return float("inf")
        ordered = scores.sort(-1, descending=True).values
        return (ordered[:, num_chosen - 1] - ordered[:, num_chosen]).min().item()

    serve(answer)


if __name__ == "__main__":
    main()
