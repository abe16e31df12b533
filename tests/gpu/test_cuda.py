"""What only a GPU can show: streams, 16-bit kernels, and that the host does not wait between chunks.

One device, one rank: collectives of a group of one rank are skipped, but not the code around them. Memory
that several streams use is tested in ``test_stress.py``.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator

import pytest
import torch

from tests.dist.cases import AUX, PARITY, TIGHT, Case, Z

pytestmark = pytest.mark.gpu

LLAMA = {"gated_linear_unit": True, "activation_func": "silu", "moe_router_topk": 2, "num_query_groups": 2}
CASES = [
    Case(
        f"{schedule}-degree{degree}",
        world_size=1,
        degree=degree,
        schedule=schedule,
        executor="cuda",
        rope=True,
        model=LLAMA | AUX | Z,
    )
    for schedule in ("ampipe", "moe-only", "sequential")
    for degree in (2, 4, 8)
]
CASES.append(Case("capacity", world_size=1, executor="cuda", model=TIGHT | AUX))
# Every layer that the CPU tests know, on the one device there is: all its experts on one rank. Not those with
# biases, which Megatron's own layer then adds in place to a view and fails.
LAYERS = [
    dataclasses.replace(
        case, world_size=1, executor="cuda", kernel="sdpa" if case.kernel == "cpu-flash" else case.kernel
    )
    for case in PARITY
    if case.executor == "thread"
    and case.world_size <= 2
    and not case.parallel
    and not case.model.get("add_bias_linear")
]
BF16_BOUND = 2**-6
"""Relative to the largest value: a few roundings of bf16 (2**-8 each) in sums of another order."""


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of one rank on the device."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(0)
    with tempfile.NamedTemporaryFile() as rendezvous:
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{rendezvous.name}", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_stock_in_fp32(case: Case) -> None:
    from tests.dist.blocks import build_layers, differences, run

    torch.backends.cuda.matmul.allow_tf32 = False
    stock, ours = (layer.cuda() for layer in build_layers(case))
    found = differences(run(stock, case, rank=0, device="cuda"), run(ours, case, rank=0, device="cuda"))
    assert {name: value for name, value in found.items() if not value <= 1e-5} == {}


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_every_layer_case_in_fp32(case: Case) -> None:
    test_equals_stock_in_fp32(case)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.name)
def test_equals_stock_in_bf16(case: Case) -> None:
    from tests.dist.blocks import build_layers, differences, run

    case = dataclasses.replace(
        case, kernel="sdpa", model=case.model | {"bf16": True, "moe_router_dtype": "fp32"}
    )
    stock, ours = (layer.cuda().bfloat16() for layer in build_layers(case))
    found = differences(run(stock, case, rank=0, device="cuda"), run(ours, case, rank=0, device="cuda"))
    outputs = {name: found[name] for name in ("output", "input gradient")}
    assert {name: value for name, value in outputs.items() if not value <= BF16_BOUND} == {}


def test_nothing_makes_the_host_wait_between_chunks() -> None:
    """torch raises at any synchronizing call; only AMPipe's event for the counts is allowed."""
    from tests.dist.blocks import build_layers, inputs_of, run_pass

    case = dataclasses.replace(CASES[1], kernel="sdpa")
    _, ours = (layer.cuda() for layer in build_layers(case))
    # Copies to the device synchronize, so all inputs are copied before.
    inputs = inputs_of(case, rank=0, device="cuda", dtype=torch.float32)
    run_pass(ours, inputs)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run_pass(ours, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
