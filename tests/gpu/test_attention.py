"""Compares all attention kernels that this device supports with the reference, and checks their backends.

bf16 is compared with fp64 of the same inputs: whole sequences and later chunks, even and odd lengths.
"""

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import (
    DROPOUT,
    FLASH_KERNELS,
    KERNELS,
    LATENT,
    SINKS,
    WINDOW,
    Needs,
    choose_kernel,
    why_not,
)
from tests import attention_checks
from tests.attention_checks import DOCUMENTS, DROPPED_DOCUMENTS, LATENT_SIZES, ODD, SIZES, On, Sizes
from tests.reference_pieces import settings_of_plain_attention

pytestmark = pytest.mark.gpu

ON_GPU = On("cuda", torch.bfloat16, 2**-6)
"""The bound is a few roundings of bf16 (2**-8 each)."""
MARKS = {
    "cudnn": "cudnn",
    "torch-flash-2": "pytorch_flash::",
    "flash-attn-2": "void flash::flash_",
    "flash-attn-3": "FlashAttnFwdSm90",
    "flash-attn-4": "FlashAttentionForward",
}
"""For each kernel, a part of the names of its device kernels; of the last two as their source has them."""
SEEN = ("cudnn", "torch-flash-2")
"""The kernels whose names have been read on a GPU."""


def usable(kernel: str, *, sizes: Sizes, features: tuple[str, ...] = (), documents: bool = False) -> None:
    """Skip the test, with the reason, if a kernel cannot be used."""
    needs = Needs(
        head_size=sizes.head_size,
        value_size=sizes.value_size or sizes.head_size,
        features=features,
        documents=documents,
    )
    is_flash = kernel in FLASH_KERNELS
    objection = why_not(kernel, compat.current_gpu(), needs) if is_flash else None
    if objection is not None:
        pytest.skip(f"{kernel}: {objection}")


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: sizes.name)
@pytest.mark.parametrize("kernel", [*MARKS, "sdpa"])
def test_attention_kernel_in_bf16(kernel: str, sizes: Sizes) -> None:
    usable(kernel, sizes=sizes)
    assert attention_checks.compare(kernel, sizes, ON_GPU) == {}
    assert attention_checks.compare_sums(kernel, sizes, ON_GPU) == {}


@pytest.mark.parametrize("kernel", [*MARKS, "exact-pieces"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "no mask"])
def test_log_sum_exp_of_pieces(kernel: str, causal: bool) -> None:
    """The causal pieces of cuDNN have as many keys as rows; others are aligned to the bottom right."""
    usable(kernel, sizes=ODD)
    sizes = SIZES[0] if causal and kernel == "cudnn" else ODD
    assert attention_checks.compare_pieces(kernel, sizes, ON_GPU, causal=causal) == {}


BEYOND: list[tuple[tuple[str, ...], Sizes, dict[str, Any]]] = [
    ((), ODD, {"documents": DOCUMENTS}),
    ((WINDOW,), ODD, {"window": 9}),
    ((WINDOW,), SIZES[1], {"window": 1000}),
    ((WINDOW,), ODD, {"window": 9, "documents": DOCUMENTS}),
    ((LATENT,), LATENT_SIZES, {}),
    ((LATENT,), LATENT_SIZES, {"documents": attention_checks.ONE_DOCUMENT}),
    ((SINKS,), ODD, {"sinks": torch.linspace(-1, 2, 8)}),
    ((SINKS, WINDOW), ODD, {"sinks": torch.linspace(-1, 2, 8), "window": 9, "documents": DOCUMENTS}),
]


@pytest.mark.parametrize(("features", "sizes", "options"), BEYOND)
@pytest.mark.parametrize("kernel", [*MARKS, "sdpa"])
def test_features_beyond_plain_attention(
    kernel: str, features: tuple[str, ...], sizes: Sizes, options: dict[str, Any]
) -> None:
    usable(kernel, sizes=sizes, features=features, documents="documents" in options)
    assert attention_checks.compare(kernel, sizes, ON_GPU, **options) == {}


@pytest.mark.parametrize("options", [{}, {"documents": DROPPED_DOCUMENTS}, {"window": 9}])
@pytest.mark.parametrize("kernel", [*MARKS, "sdpa"])
def test_the_backward_drops_the_weights_of_the_forward(kernel: str, options: dict[str, Any]) -> None:
    features = (DROPOUT, WINDOW) if "window" in options else (DROPOUT,)
    usable(kernel, sizes=ODD, features=features, documents="documents" in options)
    assert attention_checks.compare_dropout(kernel, ON_GPU, **options) == {}


@pytest.mark.parametrize("kernel", MARKS)
def test_all_chunks_use_the_same_backend(kernel: str) -> None:
    usable(kernel, sizes=SIZES[0])
    ran = []
    for sizes in SIZES[:2]:
        tensors = attention_checks.inputs(sizes, ON_GPU)
        attend = KERNELS[kernel]
        # cuDNN and FlashAttention 4 compile a kernel at the first call with a shape.
        for _ in range(2):
            with profile(activities=[ProfilerActivity.CUDA]) as recorded:
                output = attend(*tensors, spans=sizes.spans, scale=0.1)
                torch.autograd.grad(output, tensors, torch.ones_like(output))
                torch.cuda.synchronize()
        names = {event.key for event in recorded.key_averages()}
        ran.append({of for of, mark in MARKS.items() if any(mark in name for name in names)})
    expected = [{kernel}] * 2
    assert ran == expected or (kernel not in SEEN and ran == [set()] * 2), f"{kernel} ran {ran}"


def test_the_chosen_kernel_runs() -> None:
    choice = choose_kernel(settings_of_plain_attention(), local=True, on_gpu=True)
    print(f"chosen: {choice.name} ({choice.reason})")
    test_attention_kernel_in_bf16(choice.name, SIZES[1])
