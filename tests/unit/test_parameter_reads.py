"""``ParameterReads`` of the parity tests finds early reads, and nothing in a module that is called."""

from __future__ import annotations

import pytest
import torch

from tests.dist.parameter_reads import ParameterReads

NOTHING = {"early": {}, "never entered": [], "never read": []}


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
        return rows


def watched(way: str) -> dict[str, object]:
    module = Pair(way)
    with ParameterReads(module) as reads:
        module(torch.randn(2, 3)).sum().backward()
    report = reads.report()
    assert report.pop("watched") == 3
    return report


def test_a_module_that_is_called_gives_no_finding() -> None:
    assert watched("called") == NOTHING


@pytest.mark.parametrize("way", ["method", "a view of its weight"])
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
    assert watched("not used") == NOTHING | {"never entered": ["second"], "never read": ["second.weight"]}
