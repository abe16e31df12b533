"""The host platform: Megatron's own training loop on a machine without a GPU, over gloo.

Megatron calls CUDA in many places where it needs no GPU: streams, events, ``device="cuda"``, the random
state of the device. :func:`install` puts a stand-in behind each of those calls, so that the same Megatron
code runs on the CPU. It changes no arithmetic and makes nothing faster; it exists so that correctness,
examples and CI need no GPU. It refuses to load where there is one.

Called by the training entry points and by tests, *before* Megatron is imported:

    from megatron_ampipe.launch import host
    host.install()
    torch.distributed.init_process_group("gloo")

One module per kind of call: :mod:`.cuda` (``torch.cuda.*``), :mod:`.devices` (device literals),
:mod:`.random` (the random state), :mod:`.megatron` (Megatron's own names), :mod:`.norm` (the norm of the
local layers), :mod:`.host_flags` (the flags that Megatron needs here).
"""

import sys

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.launch.host.host_flags import Adjustment, adjust

__all__ = ["Adjustment", "adjust", "gpu_available", "install", "installed"]

_installed = False


def gpu_available() -> bool:
    """Whether torch sees a usable GPU; the host platform is for machines where this is False."""
    import torch

    return torch.cuda.is_available()


def installed() -> bool:
    """Whether :func:`install` has run in this process."""
    return _installed


def install() -> None:
    """Put the stand-ins in place; a second call does nothing.

    Raises:
        EnvironmentMissing: A GPU is present, or Megatron was imported before this call.
    """
    global _installed
    if _installed:
        return
    if gpu_available():
        raise EnvironmentMissing(
            "The host platform stands in for a missing GPU, and this machine has one. "
            "Run without it, or hide the GPU with CUDA_VISIBLE_DEVICES=''."
        )
    if "megatron.core" in sys.modules:
        raise EnvironmentMissing(
            "The host platform was installed after megatron.core was imported, which has already bound "
            "torch.compile and torch.cuda names. Call megatron_ampipe.launch.host.install() first."
        )
    from megatron_ampipe.launch.host import cuda, devices, random

    cuda.install()
    devices.install()
    random.install()

    # Imports Megatron, so everything above has to be in place.
    from megatron_ampipe.launch.host import megatron

    megatron.install()
    _installed = True
