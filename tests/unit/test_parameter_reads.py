"""``ParameterReads`` of the parity tests finds early reads, and nothing in a module that is called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.parameter_reads import ParameterReads

NOTHING = {"early": {}, "never entered": [], "never read": []}


class Product(torch.autograd.Function):
    """A matrix product like that of Megatron's linear layers."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Pair(torch.nn.Module):
    """Two linear layers; ``way`` selects how the second one is used."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)
        self.way = way

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows)
        if self.way == "called":
            return self.second(rows)
        if self.way == "method":
            return self.second.forward(rows)
        if self.way == "a view of its weight":
            return rows @ self.second.weight.data.t()[:, :2]
        if self.way == "called too late":
            return rows @ self.second.weight.t() + self.second(rows)
        if self.way == "an autograd function":
            return Product.apply(rows, self.second.weight)
        with torch.no_grad():
            more = self.second.forward(rows)
        return rows + more


def watched(way: str) -> dict[str, object]:
    module = Pair(way)
    with ParameterReads(module) as reads:
        module(torch.randn(2, 3)).sum().backward()
    assert not module.first._forward_pre_hooks
    report = reads.report()
    assert report.pop("watched") == 3
    return report


def test_a_module_that_is_called_gives_no_finding() -> None:
    assert watched("called") == NOTHING


@pytest.mark.parametrize(
    "way", ["method", "a view of its weight", "an autograd function", "without gradients"]
)
def test_a_parameter_read_without_a_call_is_found(way: str) -> None:
    found = watched(way)
    assert found["early"].keys() == {"second.weight"}
    assert found["never entered"] == ["second"]
    assert found["never read"] == []


def test_a_call_after_the_first_read_is_too_late() -> None:
    found = watched("called too late")
    assert found == NOTHING | {"early": found["early"]}
    assert found["early"].keys() == {"second.weight"}


def test_a_module_that_is_not_used_is_found() -> None:
    module = Pair("called")
    with ParameterReads(module) as reads:
        module.first(torch.randn(2, 3))
    report = reads.report()
    assert report["never entered"] == ["second"]
    assert report["never read"] == ["second.weight"]
