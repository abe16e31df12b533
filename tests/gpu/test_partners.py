"""Two micro-batches as partners, on the device: compared with Megatron's layer, all gradients (fp32)."""

import pytest

from tests.dist.cases import Case
from tests.dist.test_partners import ALL_WAYS, NAMES, TOLERANCE, WAYS
from tests.gpu.test_cuda import LAYERS, on_device

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
    from tests.dist.blocks import wrong
    from tests.dist.micro_batches import step

    stock, ours = on_device(case)
    assert wrong(step(stock, case), step(ours, case, partner=WAYS[way]), TOLERANCE) == {}
