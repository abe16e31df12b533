"""Blocks with stages captured as CUDA graphs, over a stand-in that records operations, compared with stock.

Inputs and weights change from pass to pass, so whatever a graph does not compute anew is an error.
"""

from typing import Any

import pytest
import torch

from tests import cuda_graph_standin
from tests.dist.cases import AUX, SHARED, TOP2, Case, Z
from tests.dist.worker import use_groups

pytestmark = pytest.mark.ranks(2)

TOLERANCE = 1e-5
MODULES = ("attn", "moe_router", "moe_preprocess")
PASSES = 4
"""One warms up, one captures, two replay."""
SWIGLU = {"gated_linear_unit": True, "activation_func": "silu"}
VARIANTS: dict[str, dict[str, Any]] = {
    "degree4": {"model": AUX | Z | TOP2 | SHARED | SWIGLU, "rope": True},
}


@pytest.mark.parametrize("executor", ["sequential", "thread", "cuda"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_replays_equal_stock(variant: str, executor: str) -> None:
    from tests.dist.blocks import build_layers, differences, run

    use_groups()
    case = Case(variant, executor=executor, **VARIANTS[variant])
    rank = torch.distributed.get_rank()
    stock, ours = build_layers(case)
    context_of(ours).graph_modules, context_of(ours).graph_warm_up = frozenset(MODULES), 1
    with cuda_graph_standin.stand_ins():
        for number in range(PASSES):
            expected, found = (run(layer, case, rank=rank + 10 * number) for layer in (stock, ours))
            wrong = {
                name: value for name, value in differences(expected, found).items() if not value <= TOLERANCE
            }
            assert not wrong, f"pass {number} differs from stock: {wrong}"
            assert bool(cuda_graph_standin.REPLAYS) == (number > 0)
            with torch.no_grad():
                for of_stock, of_ours in zip(stock.parameters(), ours.parameters(), strict=True):
                    of_stock.mul_(0.9)
                    of_ours.copy_(of_stock)


def context_of(layer: torch.nn.Module) -> Any:
    """Of the layers of a test."""
    from megatron_ampipe.layers.layer import AMPipeTransformerLayer

    return next(m._block.context for m in layer.modules() if isinstance(m, AMPipeTransformerLayer))
