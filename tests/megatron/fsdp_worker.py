"""A rank of pretraining with Megatron-FSDP on a CPU: its devices and device meshes are replaced."""

import os
import sys
from typing import Any

from megatron_ampipe.launch import host
from megatron_ampipe.launch.pretrain import main

FLAG = "--use-megatron-fsdp"


class _Torch:
    """The module torch, whose CUDA devices are the CPU."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    def device(self, name: Any = "cpu", *index: int) -> Any:
        import torch

        return torch.device("cpu")


def install() -> None:
    """Replace them, after the host platform."""
    host.install()
    host.GPU_ONLY_FLAGS = tuple(flag for flag in host.GPU_ONLY_FLAGS if flag != FLAG)
    import megatron.core.distributed.fsdp.mcore_fsdp_adapter as adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp, param_and_grad_buffer
    from torch.distributed.device_mesh import DeviceMesh

    for module in (adapter, megatron_fsdp, param_and_grad_buffer):
        module.torch = _Torch()
    make_mesh = DeviceMesh.__init__

    def make_mesh_of_cpus(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        make_mesh(mesh, "cpu", *args, **kwargs)

    DeviceMesh.__init__ = make_mesh_of_cpus


if __name__ == "__main__":
    # Megatron's rule for it.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    install()
    sys.exit(main(sys.argv[1:]))
