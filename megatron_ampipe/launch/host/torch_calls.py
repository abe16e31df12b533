"""Replacements for torch calls that need a GPU (``torch.cuda.*``, ``device=``, the random state), and for
gloo's all-to-all, which wastes the link.

Streams and events do nothing, because on the CPU every operation has finished when its call returns.
``torch.cuda.is_available()`` is not replaced and still returns False, so torch itself never takes a CUDA
path.
"""

import contextlib
import functools
import logging
import os
import types
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.utils.data.dataloader as dataloader
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_ampipe.runtime.collectives import Transfer, send_receive

# Functions that take `device=`; Megatron passes "cuda", a torch.device, or torch.cuda.current_device().
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "scalar_tensor",
    "tensor", "zeros", "zeros_like",
)  # fmt: skip
TENSOR_FACTORIES = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")

_CPU = torch.device("cpu")


def _always[Value](value: Value) -> Callable[..., Value]:
    """A new function that returns ``value``; new each time, as torch.compile has one rule per function."""
    return lambda *_args, **_kwargs: value


class HostEvent:
    """An event that has always completed."""

    __init__ = record = wait = synchronize = _always(None)
    query = _always(True)
    elapsed_time = _always(0.0)


class HostStream:
    """A stream that is always idle: CPU work has finished when the call that started it returns."""

    cuda_stream = 0
    device = _CPU
    __init__ = wait_stream = wait_event = synchronize = _always(None)
    query = _always(True)
    priority_range = staticmethod(_always((0, 0)))

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        return event if event is not None else HostEvent()


def _itself[Value](value: Value, *_args: object, **_kwargs: object) -> Value:
    """A method that returns the object it is called on."""
    return value


def get_rng_state(*_args: object, **_kwargs: object) -> torch.Tensor:
    """A copy of the device's random state: the CPU generator takes the place of the GPU's."""
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, *_args: object, **_kwargs: object) -> None:
    """Set the device's random state."""
    torch.set_rng_state(new_state)


def install() -> None:
    """Install all replacements."""
    _install_cuda()
    _install_devices()
    install_all_to_all()
    _keep_device_state_over_iterator()
    # The tracker's fork() warns if the CPU state changes inside it, as it always does here.
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


_exchanges = False
"""Whether the all-to-all is replaced. gloo sends large messages in one direction of a link at a time, which
takes up to twice as long. Both Megatron's layers and AMPipe's use the replacement."""


def install_all_to_all() -> None:
    """Replace ``torch.distributed.all_to_all_single``, which all callers look up at each call."""
    global _exchanges
    if not _exchanges:
        _exchanges = True
        dist.all_to_all_single = _all_to_all_single  # type: ignore[assignment]


@torch.no_grad()
def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Transfer | None:
    """As ``torch.distributed.all_to_all_single``. Split sizes of sender and receiver must agree."""
    group = group or dist.group.WORLD
    assert group is not None
    sent, received = (
        tensor.tensor_split(group.size()) if splits is None else tensor.split_with_sizes(list(splits))
        for tensor, splits in ((input, input_split_sizes), (output, output_split_sizes))
    )
    handle = Transfer((), tuple(send_receive(sent, received, group)))
    if async_op:
        return handle
    handle.wait()
    return None


def _install_cuda() -> None:
    current_stream = HostStream()
    replacements = {
        # MoEAlltoAllTokenDispatcher, DDP buckets, shared experts, get_model.
        "Stream": HostStream,
        "Event": HostEvent,
        "stream": lambda _stream: contextlib.nullcontext(),
        "current_stream": _always(current_stream),
        "default_stream": _always(current_stream),
        "set_stream": _always(None),
        # Timers, p2p communication, checkpointing.
        "synchronize": _always(None),
        # The `device=` argument of nearly every buffer that Megatron allocates.
        "current_device": _always(_CPU),
        "set_device": _always(None),
        # _initialize_distributed and _set_random_seed skip model-parallel set-up when this is 0.
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        # Argument checks and log lines. For a lower compute capability, Megatron requires
        # CUDA_DEVICE_MAX_CONNECTIONS=1.
        "get_device_properties": _always(types.SimpleNamespace(name="cpu", major=10, minor=0)),
        "get_device_capability": _always((10, 0)),
        "get_device_name": _always("cpu"),
        # report_memory and the memory lines of the training log.
        "device_memory_used": _always(0),
        "memory_stats": lambda *_args: defaultdict(int),
        "reset_peak_memory_stats": _always(None),
        # Recompute and the optimizer step check this before they set random states.
        "is_current_stream_capturing": _always(False),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    random_state = {
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed)),
    }
    for namespace in (torch.cuda, torch.cuda.random):
        for name, replacement in random_state.items():
            setattr(namespace, name, replacement)
    # nvtx_range_push and nvtx_range_pop of megatron.core.utils.
    torch.cuda.nvtx.range_push = _always(None)
    torch.cuda.nvtx.range_pop = _always(None)


def _to_host(device: object) -> object:
    """The host device that replaces ``device``."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    # An int is the index of an accelerator.
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


def _with_host_device[Output](function: Callable[..., Output]) -> Callable[..., Output]:
    """Wrap a function to use the host as device; a ``TorchFunctionMode`` would miss other threads."""

    @functools.wraps(function)
    def on_host(*args: object, **kwargs: object) -> Output:
        if "device" in kwargs:
            kwargs["device"] = _to_host(kwargs["device"])
        # torch refuses to pin memory if there is no accelerator.
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return on_host


def _install_devices() -> None:
    # `with torch.device(...)` recognises factory functions by identity and caches their list on first use.
    # The list must hold torch's original functions, which the wrappers below call.
    with torch.device("cpu"):
        torch.empty(0)
    for name in FACTORIES:
        setattr(torch, name, _with_host_device(getattr(torch, name)))
    for name in TENSOR_FACTORIES:
        setattr(torch.Tensor, name, _with_host_device(getattr(torch.Tensor, name)))
    tensor_to: Callable[..., Tensor] = _with_host_device(Tensor.to)
    tensor_type: Callable[..., object] = Tensor.type

    @functools.wraps(tensor_to)
    def to(self: Tensor, *args: object, **kwargs: object) -> Tensor:
        return tensor_to(self, *map(_to_host, args[:1]), *args[1:], **kwargs)

    @functools.wraps(tensor_type)
    def type_(self: Tensor, *args: object, **kwargs: object) -> object:
        converted = tensor_type(self, *args, **kwargs)
        return converted.replace("torch.", "torch.cuda.", 1) if isinstance(converted, str) else converted

    methods = {
        "to": to,
        # clip_grads and both mixed-precision optimizers accept only 'torch.cuda.FloatTensor' and the like.
        "type": type_,
        # Batches, checkpoint shards, loss scalers.
        "cuda": _itself,
        # MTP, shared experts and the 1F1B overlap mark tensors as used by a stream.
        "record_stream": _always(None),
        # Host buffers of the optimizer and of asynchronous checkpoints.
        "pin_memory": _itself,
    }
    for name, method in methods.items():
        setattr(Tensor, name, method)
    # get_model moves the module to the GPU.
    torch.nn.Module.cuda = _itself  # type: ignore[assignment, method-assign]


def _keep_device_state_over_iterator() -> None:
    """Make DataLoader iterators leave the random state unchanged.

    An iterator draws a seed when it is created, and only some ranks have a DataLoader; a resumed run creates
    its iterators after it has restored the state.
    """
    create = dataloader._BaseDataLoaderIter.__init__

    @functools.wraps(create)
    def create_on_host(
        self: dataloader._BaseDataLoaderIter, loader: DataLoader[object], *args: object, **kwargs: object
    ) -> None:
        state = torch.get_rng_state()
        # Megatron requests pinned memory; torch warns about that if there is no accelerator.
        loader.pin_memory = False
        create(self, loader, *args, **kwargs)
        torch.set_rng_state(state)

    dataloader._BaseDataLoaderIter.__init__ = create_on_host  # type: ignore[method-assign]
