"""The attention kernel that is chosen for a layer and device, and the reasons against faster ones."""

import dataclasses
from typing import Any

import pytest
import torch

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import KERNELS, KernelChoice, choose_kernel, pinned_kernel
from megatron_ampipe.compat import Gpu
from tests.reference_pieces import settings_of_plain_attention

HOPPER = Gpu(capability=(9, 0), cudnn=91501, torch_flash=True, deterministic=False)
BLACKWELL, AMPERE, ADA, TURING = (
    dataclasses.replace(HOPPER, capability=capability) for capability in ((10, 0), (8, 0), (8, 9), (7, 5))
)
OLD_CUDNN = dataclasses.replace(HOPPER, cudnn=91002)
DETERMINISTIC = dataclasses.replace(HOPPER, deterministic=True)
NO_TORCH_FLASH = dataclasses.replace(AMPERE, torch_flash=False)

PACKAGES = ("flash-attn-3", "flash-attn-4", "flash-attn-2")
NO_FP32 = "flash kernels: do not support float32"
LATENT, SINKS = {"multi_latent_attention": True}, {"softmax_type": "learnable"}
DROPOUT, WINDOW = {"attention_dropout": 0.1}, {"window_size": (5, 0)}
FP32, RING = {"params_dtype": torch.float32}, {"context_parallel_size": 2}
NO_3, NO_4, NO_2 = (f"{kernel}: not installed" for kernel in PACKAGES)
NOT_HOPPER, NOT_NEW = "flash-attn-3: needs Hopper", "cudnn: needs Hopper or Blackwell"
NOT_NEW_4 = "flash-attn-4: needs Hopper or Blackwell"
WITHOUT = "torch-flash-2: this torch was built without FlashAttention"


def head_size(size: int, largest: int) -> str:
    return f"head size {size} is not a multiple of 8 up to {largest}"


def unsupported(feature: str, *kernels: str) -> list[str]:
    return [f"{kernel}: no support for {feature}" for kernel in kernels]


def too_large(size: int, **largest: int) -> list[str]:
    return [f"{kernel.replace('_', '-')}: {head_size(size, most)}" for kernel, most in largest.items()]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels whose packages are installed; none at first."""
    kernels: set[str] = set()

    def problem(kernel: str) -> str | None:
        return "not installed" if kernel in PACKAGES and kernel not in kernels else None

    monkeypatch.setattr(compat, "flash_attention_problem", problem)
    return kernels


ALL_BUT_4 = ("flash-attn-3", "cudnn", "torch-flash-2", "flash-attn-2")
LARGE = {"flash_attn_3": 256, "cudnn": 128, "flash_attn_4": 256, "torch_flash_2": 256, "flash_attn_2": 256}


@pytest.mark.parametrize(
    ("gpu", "settings", "name", "reason"),
    [
        (HOPPER, {}, "cudnn", [NO_3]),
        (BLACKWELL, {}, "cudnn", [NOT_HOPPER]),
        (OLD_CUDNN, {}, "torch-flash-2", [NO_3, "cudnn: cuDNN 91002 is older than 91501 (9.15.1)", NO_4]),
        (DETERMINISTIC, {}, "torch-flash-2", [NO_3, "cudnn: not deterministic", NO_4]),
        (AMPERE, {}, "torch-flash-2", [NOT_HOPPER, NOT_NEW, NOT_NEW_4]),
        (NO_TORCH_FLASH, {}, "sdpa", [NOT_HOPPER, NOT_NEW, NOT_NEW_4, WITHOUT, NO_2]),
        (
            TURING,
            {},
            "sdpa",
            [
                *(NOT_HOPPER, NOT_NEW, NOT_NEW_4, "torch-flash-2: needs Ampere or later"),
                "flash-attn-2: needs Ampere or later",
            ],
        ),
        (HOPPER, {"kv_channels": 256}, "torch-flash-2", [NO_3, *too_large(256, cudnn=128), NO_4]),
        *((HOPPER, {"kv_channels": size}, "sdpa", too_large(size, **LARGE)) for size in (264, 100)),
        (ADA, {"kv_channels": 192}, "torch-flash-2", [NOT_HOPPER, NOT_NEW, NOT_NEW_4]),
        (
            ADA,
            {"kv_channels": 256},
            "sdpa",
            [NOT_HOPPER, NOT_NEW, NOT_NEW_4, *too_large(256, torch_flash_2=192), NO_2],
        ),
        (
            HOPPER,
            LATENT,
            "sdpa",
            [
                *(NO_3, *unsupported("latent attention", "cudnn"), NO_4),
                *unsupported("latent attention", "torch-flash-2", "flash-attn-2"),
            ],
        ),
        (
            HOPPER,
            SINKS,
            "sdpa",
            [
                *unsupported("attention sinks", "flash-attn-3", "cudnn"),
                *(NO_4, *unsupported("attention sinks", "torch-flash-2", "flash-attn-2")),
            ],
        ),
        (
            HOPPER,
            DROPOUT,
            "torch-flash-2",
            unsupported("attention dropout", "flash-attn-3", "cudnn", "flash-attn-4"),
        ),
        (HOPPER, WINDOW, "torch-flash-2", [NO_3, *unsupported("sliding window", "cudnn"), NO_4]),
        (HOPPER, FP32, "sdpa", [NO_FP32]),
        # A ring takes a kernel of pieces.
        (HOPPER, FP32 | RING, "exact-pieces", [NO_FP32]),
        (HOPPER, FP32 | RING | {"cp_comm_type": "all_gather"}, "sdpa", [NO_FP32]),
        # On a CPU.
        (None, FP32, "cpu-flash", []),
        (None, DROPOUT | WINDOW, "sdpa", ["cpu-flash: no support for attention dropout or sliding window"]),
    ],
)
def test_the_first_usable_kernel_is_chosen(
    gpu: Gpu | None,
    settings: dict[str, Any],
    name: str,
    reason: list[str],
    installed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No package of FlashAttention is installed."""
    monkeypatch.setattr(compat, "current_gpu", lambda: gpu)
    choice = choose_kernel(settings_of_plain_attention(**settings), local=True, on_gpu=gpu is not None)
    assert choice == KernelChoice(name, "; ".join(reason))
    assert name in KERNELS


@pytest.mark.parametrize(
    ("gpu", "settings", "name", "reason"),
    [
        (HOPPER, {}, "flash-attn-3", []),
        (HOPPER, {"kv_channels": 256}, "flash-attn-3", []),
        (HOPPER, WINDOW, "flash-attn-3", []),
        # In a ring, latent attention has a flash kernel, which returns the log-sum-exp.
        (HOPPER, LATENT | RING, "flash-attn-3", []),
        (
            HOPPER,
            LATENT | {"v_head_dim": 64},
            "sdpa",
            [
                "flash-attn-3: head sizes 192 and 64 differ, and are not 192 and 128",
                *unsupported("latent attention", "cudnn"),
                "flash-attn-4: head sizes 192 and 64 differ, and are not 192 and 128",
                *unsupported("latent attention", "torch-flash-2", "flash-attn-2"),
            ],
        ),
        (HOPPER, SINKS, "flash-attn-4", unsupported("attention sinks", "flash-attn-3", "cudnn")),
        (
            HOPPER,
            DROPOUT,
            "torch-flash-2",
            unsupported("attention dropout", "flash-attn-3", "cudnn", "flash-attn-4"),
        ),
        (
            DETERMINISTIC,
            {"kv_channels": 256},
            "flash-attn-4",
            [*too_large(256, flash_attn_3=192), "cudnn: not deterministic"],
        ),
        (BLACKWELL, {}, "cudnn", [NOT_HOPPER]),
        (BLACKWELL, WINDOW, "flash-attn-4", [NOT_HOPPER, *unsupported("sliding window", "cudnn")]),
        (BLACKWELL, {"kv_channels": 256}, "flash-attn-4", [NOT_HOPPER, *too_large(256, cudnn=128)]),
        (
            BLACKWELL,
            {"kv_channels": 192},
            "torch-flash-2",
            [NOT_HOPPER, *too_large(192, cudnn=128, flash_attn_4=128)],
        ),
        (
            BLACKWELL,
            SINKS | {"kv_channels": 256},
            "sdpa",
            [
                *(NOT_HOPPER, *unsupported("attention sinks", "cudnn"), *too_large(256, flash_attn_4=128)),
                *unsupported("attention sinks", "torch-flash-2", "flash-attn-2"),
            ],
        ),
        (NO_TORCH_FLASH, DROPOUT, "flash-attn-2", [NOT_HOPPER, NOT_NEW, NOT_NEW_4, WITHOUT]),
        (
            ADA,
            {"kv_channels": 256},
            "flash-attn-2",
            [NOT_HOPPER, NOT_NEW, NOT_NEW_4, *too_large(256, torch_flash_2=192)],
        ),
        (
            ADA,
            DROPOUT | {"kv_channels": 256},
            "sdpa",
            [NOT_HOPPER, NOT_NEW, NOT_NEW_4, *too_large(256, torch_flash_2=192, flash_attn_2=192)],
        ),
    ],
)
def test_packages_are_used_where_they_are_needed_or_faster(
    gpu: Gpu,
    settings: dict[str, Any],
    name: str,
    reason: list[str],
    installed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed.update(PACKAGES)
    monkeypatch.setattr(compat, "current_gpu", lambda: gpu)
    choice = choose_kernel(settings_of_plain_attention(**settings), local=True, on_gpu=True)
    assert choice == KernelChoice(name, "; ".join(reason))


@pytest.mark.parametrize(
    ("gpu", "expected"), [(HOPPER, "flash-attn-3"), (BLACKWELL, "flash-attn-4"), (AMPERE, "torch-flash-2")]
)
def test_all_documents_in_one_call(
    gpu: Gpu, expected: str, installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.update(PACKAGES)
    monkeypatch.setattr(compat, "current_gpu", lambda: gpu)
    settings = settings_of_plain_attention()
    choice = choose_kernel(settings, local=False, on_gpu=True, documents=True)
    assert choice.name == expected
    assert KERNELS[choice.name].documents is not None


def test_transformer_engine_layers_keep_its_kernel_except_with_context_parallelism_or_documents(
    installed: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "current_gpu", lambda: HOPPER)
    for ranks, documents, choice in (
        (1, False, KernelChoice("te")),
        (2, False, KernelChoice("cudnn", NO_3)),
        # A kernel that takes all documents at once is preferred.
        (1, True, KernelChoice("torch-flash-2", f"{NO_3}; cudnn: one call for each document; {NO_4}")),
    ):
        settings = settings_of_plain_attention(context_parallel_size=ranks)
        assert choose_kernel(settings, local=False, on_gpu=True, documents=documents) == choice


def test_the_pinned_kernel_never_lets_torch_choose(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "current_gpu", lambda: HOPPER)
    names = [
        pinned_kernel(on_gpu=True, dtype=dtype, head_size=head_size)
        for dtype, head_size in ((torch.bfloat16, 128), (torch.bfloat16, 100), (torch.float32, 128))
    ]
    assert names == ["cudnn", "exact-pieces", "exact-pieces"]
    installed.update(PACKAGES)
    assert pinned_kernel(on_gpu=True, dtype=torch.bfloat16, head_size=128) == "flash-attn-3"
    assert pinned_kernel(on_gpu=False, dtype=torch.float32, head_size=16) == "cpu-flash"
