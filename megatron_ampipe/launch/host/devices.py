"""Maps the CUDA devices that Megatron passes to torch to the CPU.

Wraps the torch functions that take a device. A ``TorchFunctionMode`` is active in one thread only, so it
would miss data loader and checkpoint threads, and it slows down every torch call, which would distort
measurements on the host platform. Called by :func:`megatron_ampipe.launch.host.install`.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

# Functions that take `device=`; Megatron passes "cuda", a torch.device, or torch.cuda.current_device().
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "scalar_tensor",
    "tensor", "zeros", "zeros_like",
)  # fmt: skip
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

_CPU = torch.device("cpu")


def to_host(device: Any) -> Any:
    """The device to use instead of ``device``; anything that is not a CUDA device is returned unchanged."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    # An int is the index of an accelerator.
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


def _with_host_device(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = to_host(kwargs["device"])
        # torch refuses to pin memory if there is no accelerator.
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_host


def _install_tensor_methods() -> None:
    tensor_to, tensor_type = torch.Tensor.to, torch.Tensor.type

    @functools.wraps(tensor_to)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (to_host(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = to_host(kwargs["device"])
        return tensor_to(self, *args, **kwargs)

    @functools.wraps(tensor_type)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = tensor_type(self, *args, **kwargs)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.to = to
    # clip_grads and both mixed-precision optimizers accept only 'torch.cuda.FloatTensor' and the like.
    torch.Tensor.type = type_
    # Batches, checkpoint shards, loss scalers.
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    # get_model moves the module to the GPU.
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    # MTP, shared experts and the 1F1B overlap mark tensors as used by a stream.
    torch.Tensor.record_stream = lambda self, _stream: None
    # Host buffers of the optimizer and of asynchronous checkpoints.
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self


def install() -> None:
    """Wrap the functions of torch and of ``torch.Tensor`` that take a device."""
    # `with torch.device(...)` recognises factory functions by identity and caches their list on first use.
    # The list must hold torch's original functions, which the wrappers below call.
    with torch.device("cpu"):
        torch.empty(0)
    for name in FACTORIES:
        setattr(torch, name, _with_host_device(getattr(torch, name)))
    for name in TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _with_host_device(getattr(torch.Tensor, name)))
    _install_tensor_methods()
