"""``ParameterReads`` of the parity tests finds early reads, and nothing in a module that is called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist.parameter_reads import ParameterReads


class Pair(torch.nn.Module):
    """Two linear layers; ``use`` is how the second one is used."""

    def __init__(self, use: Callable[[torch.nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, bias=False)
        self.use = use

    def forward(self, rows: torch.Tensor) -> Any:
        return self.use(self.second, self.first(rows))


EARLY = {"early": ["second.weight"]}
NEVER_ENTERED = {"never entered": ["second"]}


@pytest.mark.parametrize(
    ("use", "findings"),
    [
        (lambda layer, rows: layer(rows), {}),
        (lambda layer, rows: layer.forward(rows), EARLY | NEVER_ENTERED),
        (lambda layer, rows: rows @ layer.weight.data.t()[:, :2], EARLY | NEVER_ENTERED),
        (lambda layer, rows: rows @ layer.weight.t() + layer(rows), EARLY),
        (lambda layer, rows: rows, NEVER_ENTERED | {"never read": ["second.weight"]}),
    ],
    ids=["called", "method", "view", "called too late", "not used"],
)
def test_a_parameter_that_is_read_without_a_call_is_found(use: Any, findings: dict[str, Any]) -> None:
    module = Pair(use)
    with ParameterReads(module) as reads:
        module(torch.randn(2, 3))
    assert not module.first._forward_pre_hooks
    report = reads.report()
    nothing = {"early": [], "never entered": [], "never read": []}
    assert report | {"early": [*report["early"]]} == {"watched": 3} | nothing | findings
