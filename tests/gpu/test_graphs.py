"""CUDA graphs: replays with other inputs and weights equal Megatron's layers, and cost less.

With fixed rows, a graph is a whole pass, else consecutive stages.

The rotary embedding is another tensor in every pass, as inputs are.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable

import pytest
import torch

from megatron_ampipe.schedule import Partner
from tests.dist.cases import AUX, SHARED, Case, Z
from tests.dist.one_device import WAYS, RankCase, tolerance
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
WHOLE_PASSES = [
    dataclasses.replace(FP32, name="whole, 2 chunks", degree=2, fixed_rows=True),
    dataclasses.replace(FP32, name="whole, 4 chunks", degree=4, fixed_rows=True),
    dataclasses.replace(STACK, name="whole stack", fixed_rows=True),
    dataclasses.replace(BF16, name="whole, bf16", fixed_rows=True),
    dataclasses.replace(BF16, name="whole, lancet, bf16", schedule="lancet", degree=2, fixed_rows=True),
]


def captured(case: Case) -> list[torch.nn.Module]:
    """Megatron's layer, and AMPipe's, of which stages or passes are captured after two passes."""
    from tests.dist.blocks import capture

    stock, ours = on_device(case)
    capture(ours, frozenset({"full"}) if case.fixed_rows else MODULES, warm_up=2)
    return [stock, ours]


def learn_budgets(ours: torch.nn.Module) -> None:
    """Learn the budgets of fixed rows in one pass with exact rows, which others then use."""
    from tests.dist.blocks import run
    from tests.dist.test_fixed_rows import fixed_rows_of

    rows = fixed_rows_of(ours)
    rows.is_watched = True
    run(ours, FP32, device="cuda")
    rows.end_step()
    rows.learn(2.0)
    rows.is_active = True


@pytest.mark.parametrize("case", [FP32, BF16, STACK, *WHOLE_PASSES], ids=lambda case: case.name)
def test_replays_equal_stock(case: Case) -> None:
    stock, ours = captured(case)
    if case.fixed_rows:
        learn_budgets(ours)
    for number in range(PASSES):
        assert_equal(stock, ours, case, rank=number)
        with torch.no_grad():
            for of_stock, of_ours in zip(stock.parameters(), ours.parameters(), strict=True):
                of_ours.copy_(of_stock.mul_(0.9))


@pytest.mark.parametrize("case", [WHOLE_PASSES[2], WHOLE_PASSES[4]], ids=lambda case: case.name)
def test_steps_with_partners_equal_stock(case: Case) -> None:
    """Chains of graphs; see ``tests/dist/one_device.py``."""
    one = RankCase("", "chains", case, Partner())
    found = WAYS[one.way](one)
    assert {name: value for name, value in found.items() if not value <= tolerance(case)} == {}


def test_under_data_parallelism() -> None:
    compare_replays(dataclasses.replace(LOCAL, replay=None, model=LOCAL.model | ALL_EXPERTS))


def test_transformer_engine_under_graphs() -> None:
    compare_replays(dataclasses.replace(of_transformer_engine(**SHARED, **ALL_EXPERTS), replay=None))


def compare_replays(case: Case) -> None:
    """Two micro-batches in each of two iterations: the last two replay."""
    from tests.dist.blocks import wrong

    expected, found = (main_gradients(layer, case, turned=True) for layer in captured(case))
    assert wrong(expected, found, BF16_BOUND) == {}


@pytest.mark.parametrize("case", [FP32, WHOLE_PASSES[1]], ids=lambda case: case.name)
def test_replays_do_not_make_the_host_wait(case: Case) -> None:
    _, ours = captured(case)
    if case.fixed_rows:
        learn_budgets(ours)
    run_without_waits(ours, case, passes=PASSES)


@pytest.mark.parametrize("case", [FP32, WHOLE_PASSES[1]], ids=lambda case: case.name)
def test_the_host_has_less_to_do(case: Case, record_property: Callable[[str, object], None]) -> None:
    from tests.dist.blocks import inputs_of, run_pass

    ms = []
    for make in (on_device, captured):
        _, ours = make(case)
        if case.fixed_rows:
            learn_budgets(ours)
        inputs, times = inputs_of(case, rank=0, device="cuda", dtype=torch.float32), []
        for _ in range(25):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run_pass(ours, inputs)
            times.append(time.perf_counter() - begin)
        ms.append(statistics.median(times[10:]) * 1e3)
    plain, replayed = ms
    record_property(f"ms of a pass ({case.name}), without and with graphs", f"{plain:.2f}, {replayed:.2f}")
    assert replayed < plain
