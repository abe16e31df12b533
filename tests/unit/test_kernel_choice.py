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
BLACKWELL = dataclasses.replace(HOPPER, capability=(10, 0))
AMPERE = dataclasses.replace(HOPPER, capability=(8, 0))
ADA = dataclasses.replace(HOPPER, capability=(8, 9))
TURING = dataclasses.replace(HOPPER, capability=(7, 5))


def chosen(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, *, head_size: int = 128) -> KernelChoice:
    monkeypatch.setattr(compat, "current_gpu", lambda: gpu)
    return choose_kernel(settings_of_plain_attention(kv_channels=head_size), local=True, on_gpu=True)


@pytest.mark.parametrize(
    ("gpu", "name", "reasons"),
    [
        (HOPPER, "cudnn", []),
        (
            dataclasses.replace(HOPPER, cudnn=91002),
            "torch-flash-2",
            ["cudnn: cuDNN 91002 is older than 91501 (9.15.1)"],
        ),
        (dataclasses.replace(HOPPER, deterministic=True), "torch-flash-2", ["cudnn: not deterministic"]),
        (BLACKWELL, "cudnn", []),
        (AMPERE, "torch-flash-2", ["cudnn: needs Hopper or Blackwell"]),
        (TURING, "sdpa", ["cudnn: needs Hopper or Blackwell", "torch-flash-2: needs Ampere or later"]),
    ],
)
def test_the_fastest_usable_kernel_is_chosen(
    gpu: Gpu, name: str, reasons: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(gpu, monkeypatch) == KernelChoice(name, "; ".join(reasons))
    assert name in KERNELS


@pytest.mark.parametrize(
    ("gpu", "head_size", "name"),
    [
        (HOPPER, 64, "cudnn"),
        (HOPPER, 192, "torch-flash-2"),
        (HOPPER, 256, "torch-flash-2"),
        (HOPPER, 264, "sdpa"),
        (HOPPER, 100, "sdpa"),
        (ADA, 192, "torch-flash-2"),
        (ADA, 256, "sdpa"),
    ],
)
def test_head_sizes(gpu: Gpu, head_size: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = chosen(gpu, monkeypatch, head_size=head_size)
    assert choice.name == name
    refused = choice.reason.count(f"head size {head_size} is not a multiple of 8 up to")
    assert refused == {"cudnn": 0, "torch-flash-2": gpu is HOPPER, "sdpa": 1 + (gpu is HOPPER)}[name]


@pytest.mark.parametrize(
    ("feature", "setting"),
    [
        ("latent attention", {"multi_latent_attention": True}),
        ("attention dropout", {"attention_dropout": 0.1}),
        ("sliding window", {"window_size": (5, 0)}),
        ("attention sinks", {"softmax_type": "learnable"}),
    ],
)
def test_features_that_flash_kernels_do_not_support_are_named(
    feature: str, setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "current_gpu", lambda: HOPPER)
    settings, unsupported = settings_of_plain_attention(**setting), f"no support for {feature}"
    assert choose_kernel(settings, local=True, on_gpu=False) == KernelChoice(
        "sdpa", f"cpu-flash: {unsupported}"
    )
    choice = choose_kernel(settings, local=True, on_gpu=True)
    if feature in ("attention dropout", "sliding window"):
        assert choice == KernelChoice("torch-flash-2", f"cudnn: {unsupported}")
    else:
        assert choice == KernelChoice("sdpa", f"cudnn: {unsupported}; torch-flash-2: {unsupported}")


def test_what_no_flash_kernel_computes() -> None:
    settings = settings_of_plain_attention(params_dtype=torch.float32)
    choice = choose_kernel(settings, local=True, on_gpu=True)
    assert choice == KernelChoice("sdpa", "flash kernels: do not support float32")
    assert choose_kernel(settings, local=True, on_gpu=False) == KernelChoice("cpu-flash")


def test_transformer_engine_layers_keep_its_kernel_except_with_context_parallelism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compat, "current_gpu", lambda: HOPPER)
    found = [
        choose_kernel(settings_of_plain_attention(context_parallel_size=ranks), local=False, on_gpu=True).name
        for ranks in (1, 2)
    ]
    assert found == ["te", "cudnn"]


def test_a_ring_takes_a_kernel_of_pieces() -> None:
    in_ring = {"params_dtype": torch.float32, "context_parallel_size": 2}
    choice = choose_kernel(settings_of_plain_attention(**in_ring), local=True, on_gpu=True)
    assert choice == KernelChoice("exact-pieces", "flash kernels: do not support float32")
    gathered = settings_of_plain_attention(**in_ring, cp_comm_type="all_gather")
    assert choose_kernel(gathered, local=True, on_gpu=True).name == "sdpa"


def test_the_pinned_kernel_never_lets_torch_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "current_gpu", lambda: HOPPER)
    names = [
        pinned_kernel(on_gpu=True, dtype=dtype, head_size=head_size)
        for dtype, head_size in ((torch.bfloat16, 128), (torch.bfloat16, 100), (torch.float32, 128))
    ]
    assert names == ["cudnn", "exact-pieces", "exact-pieces"]
    assert pinned_kernel(on_gpu=False, dtype=torch.float32, head_size=16) == "cpu-flash"
