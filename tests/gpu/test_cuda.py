"""What only a GPU can show: streams, 16-bit kernels, and that the host does not wait between chunks.

One device, one rank: collectives of a group of one rank are skipped, but not the code around them. Memory
that several streams use is tested in ``test_stress.py``.
"""

import dataclasses
import os
from typing import Any

import pytest
import torch

from tests.dist.cases import AGAIN, AUX, PARITY, TIGHT, Case, Z

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]

LLAMA = {"gated_linear_unit": True, "activation_func": "silu", "moe_router_topk": 2, "num_query_groups": 2}
IN_BF16 = {"bf16": True, "moe_router_dtype": "fp32"}
ONE_DEVICE = {"world_size": 1, "executor": "cuda"}
CASES = [
    Case(
        f"{schedule}-degree{degree}", degree=degree, schedule=schedule, rope=True, model=LLAMA | AUX | Z,
        **ONE_DEVICE,
    )
    for schedule in ("ampipe", "moe-only", "sequential")
    for degree in (2, 4, 8)
] + [Case("capacity", model=TIGHT | AUX, **ONE_DEVICE)]  # fmt: skip


def runs_here(case: Case) -> bool:
    """Whether a case of the CPU tests equals Megatron's layer on one device, with all experts on it."""
    return (
        case.executor == "thread"
        and case.world_size <= 2
        and not case.parallel
        # Megatron's flex dispatcher needs TP x EP > 1.
        and case.model.get("moe_token_dispatcher_type") != "flex"
        # Numbers that are drawn for chunks are not those of the whole.
        and case.router != "noisy-topk"
        # CASES has degrees and schedules; a length or a zero gradient makes no difference to a device.
        and not case.name.startswith(("degree", "length", "only"))
        and not (case.name.startswith("backward-degree") and case.schedule != "ampipe")
        # Megatron has their linear layers from Transformer Engine only.
        and not case.model.get("moe_latent_size")
        # Only with Transformer Engine; tests/te_permutation_standin.py is for the CPU.
        and not case.model.get("moe_permute_fusion")
        and not case.model.get("moe_router_fusion")
        # The kernels of gated delta nets are stand-ins for the CPU.
        and "g" not in case.layers
        # Megatron's own layer adds a bias in place to a view, and fails.
        and not case.model.get("add_bias_linear")
    )


LAYERS = [
    dataclasses.replace(
        case,
        **ONE_DEVICE,
        kernel="sdpa" if case.kernel == "cpu-flash" else case.kernel,
        # Megatron's own checkpoint of a norm asks Transformer Engine.
        stock=case.stock | ({"recompute_granularity": None} if case in AGAIN else {}),
    )
    for case in PARITY
    if runs_here(case)
]
COMPILED = [case for case in LAYERS if case.model.get("moe_router_enable_expert_bias")]
"""Layers with a function that Megatron compiles."""
ROUNDED_BOUND = 2**-4
"""Relative to the largest value: a row of which one number was rounded to the next one of fp8."""
BF16_BOUND = 2**-6
"""Relative to the largest value: a few roundings of bf16 (2**-8 each) in sums of another order."""


def on_device(case: Case, **options: Any) -> list[torch.nn.Module]:
    """Megatron's layer and AMPipe's, in the precision of a case; options as of ``build_layers``."""
    from tests.dist.blocks import build_layers

    torch.backends.cuda.matmul.allow_tf32 = False
    layers = [layer.cuda() for layer in build_layers(case, **options)]
    return [layer.bfloat16() for layer in layers] if case.model.get("bf16") else layers


def assert_equal(stock: torch.nn.Module, ours: torch.nn.Module, case: Case, *, rank: int = 0) -> None:
    """A pass of both computes the same; of bf16, the output and all gradients are compared."""
    from tests.dist.blocks import differences, run

    in_bf16 = case.model.get("bf16")
    # What differs in its last bit may then differ in its first.
    bound = BF16_BOUND if in_bf16 else ROUNDED_BOUND if case.wire in ("fp8", "bf16") else 1e-5
    found = differences(*(run(layer, case, rank=rank, device="cuda") for layer in (stock, ours)))
    wrong = {name: value for name, value in found.items() if not value <= bound}
    assert {name for name in wrong if not in_bf16 or "gradient" in name or name == "output"} == set(), wrong


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_stock_in_fp32(case: Case) -> None:
    assert_equal(*on_device(case), case)


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
def test_every_layer_case_in_fp32(case: Case) -> None:
    assert_equal(*on_device(case), case)


@pytest.mark.parametrize("case", COMPILED[:2], ids=lambda case: case.name)
@pytest.mark.skipif(os.environ.get("TORCHDYNAMO_DISABLE") != "0", reason="needs TORCHDYNAMO_DISABLE=0")
def test_compiled_by_megatron_in_fp32(case: Case) -> None:
    """Where torch may compile, with Triton and the C compiler: the cases above do without."""
    from torch._dynamo.utils import counters

    assert_equal(*on_device(case), case)
    assert counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_equals_stock_in_bf16(degree: int) -> None:
    """With a prescribed choice of experts: rounding decides between two that are nearly tied."""
    # The auxiliary loss chooses its experts itself.
    options = {"kernel": "sdpa", "rope": True, "replay": "replay_forward", "model": LLAMA | Z | IN_BF16}
    case = Case(f"ampipe-degree{degree}", degree=degree, **options, **ONE_DEVICE)
    assert_equal(*on_device(case), case)


def run_without_waits(layer: torch.nn.Module, case: Case, *, passes: int, rank: int = 0) -> None:
    """One more pass after some, in which torch raises at any call that makes the host wait."""
    from tests.dist.blocks import inputs_of, run_pass

    # Copies to the device synchronize, so all inputs are copied before.
    inputs = inputs_of(case, rank=rank, device="cuda", dtype=torch.float32)
    for _ in range(passes):
        run_pass(layer, inputs)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        run_pass(layer, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nothing_makes_the_host_wait_between_chunks() -> None:
    """Only AMPipe's event for the counts is allowed."""
    case = dataclasses.replace(CASES[1], kernel="sdpa")
    run_without_waits(on_device(case)[1], case, passes=1)
