"""The host platform: runs Megatron's training loop on a machine without a GPU, over gloo.

Megatron calls CUDA in many places that do not depend on a GPU: streams, events, ``device="cuda"``, the random
state of the device. :func:`install` replaces these calls, so that the same Megatron code runs on the CPU. It
changes no arithmetic; its purpose is that tests, examples and CI need no GPU. One replacement makes Megatron
faster: the all-to-all, because AMPipe uses it too and is compared with Megatron. It refuses to load if there
is a GPU, and comes *before* Megatron is imported:

    from megatron_ampipe.launch import host
    host.install()
    torch.distributed.init_process_group("gloo")
"""

import logging
import sys
import warnings
from typing import Any

from megatron_ampipe.errors import EnvironmentMissing
from megatron_ampipe.launch.host.host_flags import Adjustment, adjust

__all__ = ["Adjustment", "adjust", "gpu_available", "install", "installed"]

_installed = False


def gpu_available() -> bool:
    """Whether torch finds a usable GPU; the host platform is for machines where this is False."""
    import torch

    return torch.cuda.is_available()


def installed() -> bool:
    """Whether :func:`install` has run in this process."""
    return _installed


def install() -> None:
    """Install the replacements; a second call does nothing.

    Raises:
        EnvironmentMissing: A GPU is present, or Megatron was imported before this call.
    """
    global _installed
    if _installed:
        return
    if gpu_available():
        raise EnvironmentMissing(
            "The host platform replaces a missing GPU, but this machine has one. "
            "Run without it, or hide the GPU with CUDA_VISIBLE_DEVICES=''."
        )
    if "megatron.core" in sys.modules:
        raise EnvironmentMissing(
            "The host platform must be installed before megatron.core is imported, because the import binds "
            "names of torch.compile and torch.cuda. Call megatron_ampipe.launch.host.install() first."
        )
    from megatron_ampipe.launch.host import all_to_all, torch_calls

    torch_calls.install()
    all_to_all.install()
    _import_megatron()
    from megatron_ampipe.launch.host.megatron import install as replace_in_megatron

    replace_in_megatron()
    _installed = True


def _import_megatron() -> None:
    import torch

    def run_eagerly(function: Any = None, **_options: object) -> Any:
        return function if function is not None else run_eagerly

    # The jit_fuser decorator binds torch.compile while megatron.core is imported, and the routing functions
    # are compiled where they are defined. On a CPU that costs a C++ compilation per shape, without a benefit.
    compile_, torch.compile = torch.compile, run_eagerly
    # Hides "No CUDA runtime is found" of the extension loader, which recompute imports.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            # Hides "Apex / Transformer Engine is not installed", once per module: both need a GPU.
            warnings.simplefilter("ignore", category=UserWarning)
            import megatron.training.training
    finally:
        torch.compile = compile_
