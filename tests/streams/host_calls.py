"""Calls of torch that make, move and read tensors, as with CUDA: a tensor is on the host or on the device.

On a CPU all tensors are in one memory. Here, what is made without a device is on the host, and what is made
on ``cuda`` on the modelled device; ``Tensor.device`` and ``is_cuda`` say which. A copy between both waits for
the current stream, unless it is non-blocking and its memory on the host is pinned.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from megatron_ampipe.launch.host.torch_calls import FACTORIES, TENSOR_FACTORIES
from tests.streams.model import DEVICE
from tests.streams.tracker import Tracker

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda", 0)


def replacements(tracker: Tracker) -> Iterator[tuple[Any, str, Any]]:
    """Each object, the name of its attribute, and what is in its place on the modelled device."""
    for name in FACTORIES:
        yield torch, name, _placing(getattr(torch, name), tracker)
    for name in TENSOR_FACTORIES:
        yield Tensor, name, _placing(getattr(Tensor, name), tracker)
    for name in ("from_numpy", "get_rng_state"):
        yield torch, name, _placing(getattr(torch, name), tracker)
    yield Tensor, "to", _moving(Tensor.to, tracker)
    yield Tensor, "cuda", lambda tensor, *_, **options: _moved(tensor, tensor, _CUDA, tracker, **options)
    yield Tensor, "cpu", lambda tensor, *_, **options: _moved(tensor, tensor, _CPU, tracker, **options)
    yield Tensor, "pin_memory", functools.partialmethod(_pinned, tracker)
    for name in ("tolist", "numpy"):
        yield Tensor, name, _reading(getattr(Tensor, name), tracker)
    yield Tensor, "is_cuda", property(lambda tensor: not tracker.is_host(tensor))
    yield Tensor, "device", property(lambda tensor: _CPU if tracker.is_host(tensor) else _CUDA)
    yield Tensor, "expand_as", _noting_stream(Tensor.expand_as)
    yield torch.cuda, "current_device", lambda: 0


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # An int is the index of an accelerator.
    return device.startswith("cuda") if isinstance(device, str) else isinstance(device, int)


def _placing(make: Callable[..., Tensor], tracker: Tracker) -> Callable[..., Tensor]:
    """A function that makes a tensor where it is told; without a device, on the host or next to another."""
    name = make.__name__
    is_copy = name in ("tensor", "as_tensor", "new_tensor")

    @functools.wraps(make)
    def placed(*args: Any, **kwargs: Any) -> Tensor:
        device, is_pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if name == "as_tensor" and isinstance(args[0], Tensor):
            target = args[0].device if device is None else device
            return args[0].to(target, kwargs.get("dtype", args[0].dtype))
        if device is None and (name.endswith("_like") or name in TENSOR_FACTORIES):
            device = args[0].device
        with tracker.placing(on_device=_is_cuda(device)):
            made = make(*args, **kwargs)
        tracker.note_made(made, name, on_device=_is_cuda(device), is_pinned=is_pinned)
        if is_copy and _is_cuda(device):
            tracker.wait(f"torch.{name}")
        return made

    return placed


def _moving(to: Callable[..., Tensor], tracker: Tracker) -> Callable[..., Tensor]:
    @functools.wraps(to)
    def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device", args[0] if args else None)
        if isinstance(target, Tensor):
            target = target.device
        converted = to(tensor, *args, **kwargs)
        if not isinstance(target, (str, int, torch.device)):
            return converted
        non_blocking = kwargs.get("non_blocking", False)
        return _moved(tensor, converted, target, tracker, non_blocking=non_blocking)

    return moved


def _moved(
    tensor: Tensor, converted: Tensor, device: Any, tracker: Tracker, *, non_blocking: bool = False
) -> Tensor:
    """``converted``, which is ``tensor`` or has its values, on a device."""
    if _is_cuda(device) != tracker.is_host(tensor):
        return converted
    # torch gets pinned memory for a non-blocking copy to the host.
    is_pinned = non_blocking and (not _is_cuda(device) or tracker.is_pinned(converted))
    with tracker.placing(on_device=_is_cuda(device), copies=True):
        copy = converted.clone()
    tracker.note_made(copy, "Tensor.to", on_device=_is_cuda(device), is_pinned=is_pinned)
    if not is_pinned:
        tracker.wait("Tensor.to")
    return copy


def _pinned(tensor: Tensor, tracker: Tracker) -> Tensor:
    """A copy of a tensor of the host in pinned memory; itself if it is there."""
    assert tracker.is_host(tensor), "only memory of the host can be pinned"
    if tracker.is_pinned(tensor):
        return tensor
    copy = tensor.clone()
    tracker.note_made(copy, "pin_memory", on_device=False, is_pinned=True)
    return copy


def _reading(read: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
    @functools.wraps(read)
    def reads(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tracker.is_host(tensor):
            tracker.note_read(tensor, f"Tensor.{read.__name__}")
        else:
            assert read.__name__ != "numpy", "a tensor of the device has no numpy array"
            tracker.wait(f"Tensor.{read.__name__}")
        return read(tensor, *args, **kwargs)

    return reads


def _noting_stream(expand_as: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """How data parallelism gets the accumulation node of a parameter, which belongs to the current stream."""

    @functools.wraps(expand_as)
    def expanded(tensor: Tensor, other: Tensor) -> Tensor:
        result = expand_as(tensor, other)
        if tensor.is_leaf and tensor.requires_grad:
            get_gradient_edge(tensor).node.metadata.setdefault("stream", DEVICE.current)
        return result

    return expanded
