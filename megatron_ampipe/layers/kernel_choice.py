"""Which attention kernel a layer gets, and why not another one. The only place that chooses.

What is installed says ``compat``. Used by layers, by the start-up table and by benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_ampipe import compat
from megatron_ampipe.runtime.attention_kernels import KERNELS
from megatron_ampipe.runtime.merged import MergedAttention


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """An attention kernel.

    Attributes:
        name: ``te`` or one of ``runtime.attention.KERNELS``.
        reason: What keeps each better kernel from being used; empty where there is none.
    """

    name: str
    reason: str = ""


def choose_kernel(
    *,
    local: bool,
    on_gpu: bool,
    dtype: torch.dtype,
    head_size: int | None = None,
    context_parallel: bool = False,
    latent: bool = False,
    dropout: bool = False,
    window: bool = False,
) -> KernelChoice:
    """Which kernel attends to all chunks of a layer.

    A layer built with Transformer Engine keeps it, unless context parallelism would start TE's own
    exchange of keys and values. A local layer, whose own kernel holds the scores of the whole sequence,
    gets the fastest kernel there is that computes the same function.

    Args:
        local: The layer is made of Megatron's local modules rather than Transformer Engine's.
        on_gpu: Where it runs.
        dtype: Of its parameters.
        head_size: Of queries and keys; asked for on a GPU only.
        context_parallel: The sequence is spread over ranks.
        latent: Values may have another head size than keys.
        dropout: Attention weights are dropped.
        window: Attention sees a sliding window.
    """
    if not local and not context_parallel:
        return KernelChoice("te")
    asked = {"latent attention": latent, "attention dropout": dropout, "sliding window": window}
    special = [name for name, is_asked in asked.items() if is_asked]
    if not on_gpu:
        if not special and compat.has_cpu_flash():
            return KernelChoice("cpu-flash")
        return KernelChoice("sdpa", f"cpu-flash: {_cannot(special) or 'this torch does not have it'}")
    if dtype not in (torch.float16, torch.bfloat16):
        return KernelChoice("sdpa", f"flash kernels: not for {str(dtype).removeprefix('torch.')}")
    if special:
        # The public function of flash-attn knows dropout and windows.
        name = "flash-attn" if compat.has_flash_attn() and not latent else "sdpa"
        return KernelChoice(name, f"kernels by pieces: {_cannot(special)}")
    assert head_size is not None
    return _best_on(compat.current_gpu(), head_size)


def _cannot(special: list[str]) -> str:
    return f"no {' or '.join(special)}" if special else ""


def _best_on(gpu: compat.Gpu, head_size: int) -> KernelChoice:
    """The first kernel in the order of speed that can be used."""
    objections: list[str] = []
    for name, objection_to in BY_SPEED.items():
        objection = objection_to(gpu, head_size)
        if objection is None:
            return KernelChoice(name, "; ".join(objections))
        objections.append(f"{name}: {objection}")
    name = "flash-attn" if compat.has_flash_attn() and gpu.capability >= (8, 0) else "sdpa"
    return KernelChoice(name, "; ".join(objections))


_HOPPER = (9, 0)
_CUDNN = 91501
"""Older ones gave NaN or wrong gradients for lengths that are not multiples of 128."""


def _not_flash_attn_3(gpu: compat.Gpu, head_size: int) -> str | None:
    if gpu.capability != _HOPPER:
        return "for Hopper"
    if not compat.has_flash_attn_3():
        return "not installed"
    return _not_of_size(head_size, largest=192 if gpu.deterministic else 256)


def _not_cudnn(gpu: compat.Gpu, head_size: int) -> str | None:
    if gpu.capability != _HOPPER and gpu.capability[0] != 10:
        return "for Hopper and Blackwell"
    if gpu.cudnn < _CUDNN:
        return f"cuDNN {_dotted(gpu.cudnn)} is older than {_dotted(_CUDNN)}"
    if gpu.deterministic:
        return "not deterministic"
    return _not_of_size(head_size, largest=128)


def _not_flash_attn_2(gpu: compat.Gpu, head_size: int) -> str | None:
    if not compat.has_flash_attn_internals():
        return f"needs flash-attn {compat.FLASH_ATTN_INTERNALS}"
    return _not_ampere(gpu) or _not_of_size(head_size, largest=_largest_of_flash_2(gpu))


def _not_torch_flash_2(gpu: compat.Gpu, head_size: int) -> str | None:
    if not gpu.torch_flash:
        return "this torch was built without"
    return _not_ampere(gpu) or _not_of_size(head_size, largest=_largest_of_flash_2(gpu))


def _not_ampere(gpu: compat.Gpu) -> str | None:
    return None if gpu.capability >= (8, 0) else "for Ampere and later"


def _largest_of_flash_2(gpu: compat.Gpu) -> int:
    """Devices with less shared memory cannot differentiate all larger ones."""
    return 256 if gpu.capability == (8, 0) or gpu.capability[0] in (9, 10) else 192


def _not_of_size(head_size: int, *, largest: int) -> str | None:
    if head_size % 8 == 0 and head_size <= largest:
        return None
    return f"head size {head_size} is not a multiple of 8 up to {largest}"


def _dotted(cudnn: int) -> str:
    # Before 9.0 the first digit was of another weight.
    major = 10000 if cudnn >= 90000 else 1000
    return f"{cudnn // major}.{cudnn % major // 100}.{cudnn % 100}"


BY_SPEED: dict[str, Callable[[compat.Gpu, int], str | None]] = {
    "flash-attn-3": _not_flash_attn_3,
    "cudnn": _not_cudnn,
    "flash-attn-2": _not_flash_attn_2,
    "torch-flash-2": _not_torch_flash_2,
}
"""The kernels by pieces, the fastest first: what keeps one from being used, or None."""


def pinned_kernel(*, on_gpu: bool, dtype: torch.dtype, head_size: int) -> str:
    """The name of the kernel for a comparison of local layers: one whose backend depends on no shape."""
    name = choose_kernel(local=True, on_gpu=on_gpu, dtype=dtype, head_size=head_size).name
    return "sdpa-efficient" if on_gpu and name == "sdpa" else name


def describe_kernel(name: str) -> str:
    """Which backend computes which part of a chunk's attention, for people."""
    if name == "te":
        return "te (Transformer Engine chooses)"
    if name == "sdpa":
        return "sdpa (torch chooses)"
    kernel = KERNELS[name]
    if isinstance(kernel, MergedAttention) and kernel.num_calls > 1:
        return f"{name} (own keys causal, earlier keys without a mask, merged)"
    return f"{name} (own and earlier keys at once)"
