"""Two micro-batches as partners, on the device: compared with Megatron's layer, all gradients (fp32)."""

import pytest
import torch

from tests.dist.cases import Case
from tests.dist.test_partners import ALL_WAYS, NAMES, TOLERANCE, WAYS, step, step_with_partners
from tests.gpu.test_cuda import LAYERS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, id=f"{case.name}-{way}")
        for case in LAYERS
        if case.name in NAMES
        for way in WAYS
        if way != "degree2" or case.name in ALL_WAYS
    ],
)
def test_partners_equal_stock_in_fp32(case: Case, way: str) -> None:
    from tests.dist.blocks import build_layers, differences

    torch.backends.cuda.matmul.allow_tf32 = False
    stock, ours = (layer.cuda() for layer in build_layers(case))
    found = differences(step(stock, case), step_with_partners(ours, case, WAYS[way]))
    assert {name: value for name, value in found.items() if not value <= TOLERANCE} == {}
