"""Chooses the attention kernel of a layer, and gives the reason why no faster one is used.

No other module chooses a kernel; ``compat`` tells what is installed. Used by layers, the start-up table and
the benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megatron_ampipe import compat
from megatron_ampipe.runtime.attention_kernels import KERNELS
from megatron_ampipe.runtime.merged import MergedAttention
from megatron_ampipe.runtime.varlen_kernels import VARLEN_KERNELS

IN_RINGS = "exact-pieces"
"""The kernel of a ring where none of the others returns the log-sum-exp of its scores."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """The chosen attention kernel.

    Attributes:
        name: ``te`` or a name in ``runtime.attention_kernels.KERNELS``.
        reason: Why each faster kernel cannot be used; empty if there is none.
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
    documents: bool = False,
    latent: bool = False,
    dropout: bool = False,
    window: bool = False,
    sinks: bool = False,
    ring: bool = False,
) -> KernelChoice:
    """Choose the kernel for all chunks of a layer.

    A layer built with Transformer Engine keeps TE's attention, except under context parallelism, where TE
    would start its own exchange of keys and values, and where documents share a sequence, whose bounds TE
    takes for whole sequences. A local layer, whose stock kernel materializes the scores
    of the whole sequence, gets the fastest available kernel that computes the same function.

    Args:
        local: The layer is built from Megatron's local modules, not Transformer Engine's.
        on_gpu: The layer runs on a GPU.
        dtype: Dtype of its parameters.
        head_size: Head size of queries and keys; needed on a GPU only.
        context_parallel: The sequence is split over ranks.
        documents: Rows attend to their own document only.
        latent: Latent attention: values may have a different head size than keys.
        dropout: Attention dropout is used.
        window: Sliding-window attention is used.
        sinks: The softmax has one more score (``--softmax-type``).
        ring: Rows attend to the keys of one context-parallel rank after another.
    """
    if ring:
        chosen = choose_kernel(
            local=local, on_gpu=on_gpu, dtype=dtype, head_size=head_size, context_parallel=True, latent=latent
        )
        return chosen if isinstance(KERNELS[chosen.name], MergedAttention) else replace(chosen, name=IN_RINGS)
    if not local and not context_parallel and not documents:
        return KernelChoice("te")
    features = {
        "latent attention": latent,
        "attention dropout": dropout,
        "sliding window": window,
        "attention sinks": sinks,
    }
    used = [name for name, is_used in features.items() if is_used]
    if not on_gpu:
        if not used and compat.has_cpu_flash():
            return KernelChoice("cpu-flash")
        return KernelChoice("sdpa", f"cpu-flash: {_unsupported(used) or 'this torch does not have it'}")
    if dtype not in (torch.float16, torch.bfloat16):
        return KernelChoice("sdpa", f"flash kernels: do not support {str(dtype).removeprefix('torch.')}")
    if used:
        # The public function of flash-attn supports dropout and windows.
        name = "flash-attn" if compat.has_flash_attn() and not latent and not sinks else "sdpa"
        return KernelChoice(name, f"merged flash kernels: {_unsupported(used)}")
    assert head_size is not None
    return _fastest_kernel(compat.current_gpu(), head_size, documents=documents)


def _unsupported(used: list[str]) -> str:
    return f"no support for {' or '.join(used)}" if used else ""


def _fastest_kernel(gpu: compat.Gpu, head_size: int, *, documents: bool) -> KernelChoice:
    """The fastest kernel that can be used."""
    reasons: list[str] = []
    for name, why_not in KERNELS_BY_SPEED.items():
        reason = why_not(gpu, head_size)
        if reason is None and documents and name not in VARLEN_KERNELS:
            reason = "one call for each document"
        if reason is None:
            return KernelChoice(name, "; ".join(reasons))
        reasons.append(f"{name}: {reason}")
    name = "flash-attn" if compat.has_flash_attn() and gpu.capability >= (8, 0) else "sdpa"
    return KernelChoice(name, "; ".join(reasons))


_HOPPER = (9, 0)
_MINIMUM_CUDNN = 91501
"""9.15.1; older versions gave NaN or wrong gradients for lengths that are not multiples of 128."""


def _why_not_flash_attn_3(gpu: compat.Gpu, head_size: int) -> str | None:
    if gpu.capability != _HOPPER:
        return "needs Hopper"
    if not compat.has_flash_attn_3():
        return "not installed"
    return _why_not_head_size(head_size, largest=192 if gpu.deterministic else 256)


def _why_not_cudnn(gpu: compat.Gpu, head_size: int) -> str | None:
    if gpu.capability != _HOPPER and gpu.capability[0] != 10:
        return "needs Hopper or Blackwell"
    if gpu.cudnn < _MINIMUM_CUDNN:
        return (
            f"cuDNN {_format_cudnn_version(gpu.cudnn)} is older than {_format_cudnn_version(_MINIMUM_CUDNN)}"
        )
    if gpu.deterministic:
        return "not deterministic"
    return _why_not_head_size(head_size, largest=128)


def _why_not_flash_attn_2(gpu: compat.Gpu, head_size: int) -> str | None:
    if not compat.has_flash_attn_internals():
        return f"needs flash-attn {compat.FLASH_ATTN_INTERNALS}"
    return _why_not_capability(gpu) or _why_not_head_size(head_size, largest=_largest_flash_2_head_size(gpu))


def _why_not_torch_flash_2(gpu: compat.Gpu, head_size: int) -> str | None:
    if not gpu.torch_flash:
        return "this torch was built without FlashAttention"
    return _why_not_capability(gpu) or _why_not_head_size(head_size, largest=_largest_flash_2_head_size(gpu))


def _why_not_capability(gpu: compat.Gpu) -> str | None:
    return None if gpu.capability >= (8, 0) else "needs Ampere or later"


def _largest_flash_2_head_size(gpu: compat.Gpu) -> int:
    """The backward kernel does not support all larger head sizes on devices with less shared memory."""
    return 256 if gpu.capability == (8, 0) or gpu.capability[0] in (9, 10) else 192


def _why_not_head_size(head_size: int, *, largest: int) -> str | None:
    if head_size % 8 == 0 and head_size <= largest:
        return None
    return f"head size {head_size} is not a multiple of 8 up to {largest}"


def _format_cudnn_version(cudnn: int) -> str:
    # Before 9.0 the major version was multiplied by 1000.
    major = 10000 if cudnn >= 90000 else 1000
    return f"{cudnn // major}.{cudnn % major // 100}.{cudnn % 100}"


KERNELS_BY_SPEED: dict[str, Callable[[compat.Gpu, int], str | None]] = {
    "flash-attn-3": _why_not_flash_attn_3,
    "cudnn": _why_not_cudnn,
    "flash-attn-2": _why_not_flash_attn_2,
    "torch-flash-2": _why_not_torch_flash_2,
}
"""The piece kernels, fastest first; each function returns why its kernel cannot be used, or None."""


def pinned_kernel(*, on_gpu: bool, dtype: torch.dtype, head_size: int) -> str:
    """The kernel for comparing local layers: its backend does not depend on the shape."""
    name = choose_kernel(local=True, on_gpu=on_gpu, dtype=dtype, head_size=head_size).name
    return "sdpa-efficient" if on_gpu and name == "sdpa" else name


def describe_kernel(name: str) -> str:
    """Which backend computes which part of a chunk's attention, for the start-up table."""
    if name == "te":
        return "te (Transformer Engine chooses)"
    if name == "sdpa":
        return "sdpa (torch chooses)"
    kernel = KERNELS[name]
    if isinstance(kernel, MergedAttention) and kernel.num_calls > 1:
        return f"{name} (own keys causal, earlier keys without a mask, merged)"
    return f"{name} (own and earlier keys at once)"
