"""CUDA graphs of stages: replays with other inputs and weights equal Megatron's layers, and cost less.

The rotary embedding is another tensor in every pass, as inputs are.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from tests.dist.cases import AUX, SHARED, Case, Z
from tests.gpu.test_cuda import (
    BF16_BOUND,
    IN_BF16,
    LLAMA,
    ONE_DEVICE,
    assert_equal,
    on_device,
    run_without_waits,
)
from tests.gpu.test_gradients import LOCAL, main_gradients, of_transformer_engine

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

MODULES = frozenset({"attn", "moe_router", "moe_preprocess"})
PASSES = 5
"""Two warm up, one captures, two replay."""
FP32 = Case("fp32", rope=True, kernel="sdpa", model=LLAMA | AUX | Z | SHARED, **ONE_DEVICE)
# All experts of every token: rounding cannot decide between two that are nearly tied.
ALL_EXPERTS = IN_BF16 | {"moe_router_topk": 4}
BF16 = dataclasses.replace(FP32, name="bf16", model=LLAMA | Z | SHARED | ALL_EXPERTS)
STACK = dataclasses.replace(FP32, name="stack", layers="mdm", stack=0)


def captured(case: Case) -> list[torch.nn.Module]:
    """Megatron's layer, and AMPipe's whose stages are captured in the third pass."""
    from tests.dist.blocks import capture

    stock, ours = on_device(case)
    capture(ours, MODULES, warm_up=2)
    return [stock, ours]


@pytest.mark.parametrize("case", [FP32, BF16, STACK], ids=lambda case: case.name)
def test_replays_equal_stock(case: Case) -> None:
    stock, ours = captured(case)
    for number in range(PASSES):
        assert_equal(stock, ours, case, rank=number)
        with torch.no_grad():
            for of_stock, of_ours in zip(stock.parameters(), ours.parameters(), strict=True):
                of_ours.copy_(of_stock.mul_(0.9))


def test_under_data_parallelism() -> None:
    compare_replays(dataclasses.replace(LOCAL, replay=None, model=LOCAL.model | ALL_EXPERTS))


def test_transformer_engine_under_graphs() -> None:
    compare_replays(dataclasses.replace(of_transformer_engine(**SHARED, **ALL_EXPERTS), replay=None))


def compare_replays(case: Case) -> None:
    """Two micro-batches in each of two iterations: the last two replay."""
    from tests.dist.blocks import wrong

    expected, found = (main_gradients(layer, case, turned=True) for layer in captured(case))
    assert wrong(expected, found, BF16_BOUND) == {}


def test_replays_do_not_make_the_host_wait() -> None:
    run_without_waits(captured(FP32)[1], FP32, passes=PASSES)


def test_the_host_has_less_to_do(record_property: Callable[[str, object], None]) -> None:
    from tests.dist.blocks import inputs_of, run_pass

    ms = []
    for make in (on_device, captured):
        _, ours = make(FP32)
        inputs, times = inputs_of(FP32, rank=0, device="cuda", dtype=torch.float32), []
        for _ in range(25):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run_pass(ours, inputs)
            times.append(time.perf_counter() - begin)
        ms.append(statistics.median(times[10:]) * 1e3)
    plain, replayed = ms
    record_property("ms of a pass, without and with graphs", f"{plain:.2f}, {replayed:.2f}")
    assert replayed < plain
