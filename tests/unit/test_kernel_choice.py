"""The attention kernel that is chosen for a layer and device, and the reasons against faster ones."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import KERNELS, KernelChoice, choose_kernel, pinned_kernel
from megatron_ampipe.compat import Gpu
from tests.reference_pieces import settings_of_plain_attention

HOPPER = Gpu(capability=(9, 0), cudnn=91501, deterministic=False)
BLACKWELL, AMPERE, ADA, TURING = (
    dataclasses.replace(HOPPER, capability=capability) for capability in ((10, 0), (8, 0), (8, 9), (7, 5))
)
OLD_CUDNN = dataclasses.replace(HOPPER, cudnn=91002)
DETERMINISTIC = dataclasses.replace(HOPPER, deterministic=True)

NO_CUDNN = "cudnn: needs Hopper or Blackwell"
NO_FP32 = "flash kernels: do not support float32"
LATENT, SINKS = {"multi_latent_attention": True}, {"softmax_type": "learnable"}
DROPOUT, WINDOW = {"attention_dropout": 0.1}, {"window_size": (5, 0)}
FP32, RING = {"params_dtype": torch.float32}, {"context_parallel_size": 2}


def head_size(size: int, largest: int) -> str:
    return f"head size {size} is not a multiple of 8 up to {largest}"


@pytest.mark.parametrize(
    ("gpu", "settings", "name", "reason"),
    [
        (HOPPER, {}, "cudnn", ""),
        (BLACKWELL, {}, "cudnn", ""),
        (OLD_CUDNN, {}, "torch-flash-2", "cudnn: cuDNN 91002 is older than 91501 (9.15.1)"),
        (DETERMINISTIC, {}, "torch-flash-2", "cudnn: not deterministic"),
        (AMPERE, {}, "torch-flash-2", NO_CUDNN),
        (TURING, {}, "sdpa", f"{NO_CUDNN}; torch-flash-2: needs Ampere or later"),
        (HOPPER, {"kv_channels": 256}, "torch-flash-2", f"cudnn: {head_size(256, 128)}"),
        *(
            (
                HOPPER,
                {"kv_channels": size},
                "sdpa",
                f"cudnn: {head_size(size, 128)}; torch-flash-2: {head_size(size, 256)}",
            )
            for size in (264, 100)
        ),
        (ADA, {"kv_channels": 192}, "torch-flash-2", NO_CUDNN),
        (ADA, {"kv_channels": 256}, "sdpa", f"{NO_CUDNN}; torch-flash-2: {head_size(256, 192)}"),
        *(
            (HOPPER, settings, "sdpa", f"cudnn: no support for {name}; torch-flash-2: no support for {name}")
            for name, settings in (("latent attention", LATENT), ("attention sinks", SINKS))
        ),
        (HOPPER, DROPOUT, "torch-flash-2", "cudnn: no support for attention dropout"),
        (HOPPER, WINDOW, "torch-flash-2", "cudnn: no support for sliding window"),
        (HOPPER, FP32, "sdpa", NO_FP32),
        # A ring takes a kernel of pieces.
        (HOPPER, FP32 | RING, "exact-pieces", NO_FP32),
        (
            HOPPER,
            FP32 | RING | {"cp_comm_type": "all_gather"},
            "sdpa",
            NO_FP32,
        ),
        # On a CPU.
        (None, FP32, "cpu-flash", ""),
        (None, DROPOUT | WINDOW, "sdpa", "cpu-flash: no support for attention dropout or sliding window"),
    ],
)
def test_the_fastest_usable_kernel_is_chosen(
    gpu: Gpu | None, settings: dict[str, Any], name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "current_gpu", lambda: gpu)
    choice = choose_kernel(settings_of_plain_attention(**settings), local=True, on_gpu=gpu is not None)
    assert choice == KernelChoice(name, reason)
    assert name in KERNELS


def test_transformer_engine_layers_keep_its_kernel_except_with_context_parallelism_or_documents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "current_gpu", lambda: HOPPER)
    for ranks, documents, choice in (
        (1, False, KernelChoice("te")),
        (2, False, KernelChoice("cudnn")),
        # A kernel that takes all documents at once is preferred.
        (1, True, KernelChoice("torch-flash-2", "cudnn: one call for each document")),
    ):
        settings = settings_of_plain_attention(context_parallel_size=ranks)
        assert choose_kernel(settings, local=False, on_gpu=True, documents=documents) == choice


def test_the_pinned_kernel_never_lets_torch_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "current_gpu", lambda: HOPPER)
    names = [
        pinned_kernel(on_gpu=True, dtype=dtype, head_size=head_size)
        for dtype, head_size in ((torch.bfloat16, 128), (torch.bfloat16, 100), (torch.float32, 128))
    ]
    assert names == ["cudnn", "exact-pieces", "exact-pieces"]
    assert pinned_kernel(on_gpu=False, dtype=torch.float32, head_size=16) == "cpu-flash"
