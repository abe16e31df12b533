"""Replacements for the ``torch.cuda`` calls that Megatron makes even without a GPU.

Not an emulation: streams and events do not order anything, because on the CPU every operation has finished
when its call returns. ``torch.cuda.is_available()`` is not replaced and still returns False, so torch itself
never takes a CUDA path. Called by :func:`megatron_ampipe.launch.host.install`.
"""

import contextlib
import os
import resource
import types
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch


class HostStream:
    """A stream that is always idle: CPU work has finished when the call that started it returns."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def wait_stream(self, _stream: "HostStream") -> None: ...

    def wait_event(self, _event: "HostEvent") -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: "HostEvent | None" = None) -> "HostEvent":
        return event if event is not None else HostEvent()

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class HostEvent:
    """An event that has always completed."""

    def __init__(self, *_args: object, **_kwargs: object) -> None: ...

    def record(self, _stream: HostStream | None = None) -> None: ...

    def wait(self, _stream: HostStream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: "HostEvent") -> float:
        return 0.0


_current_stream = HostStream()


@contextlib.contextmanager
def _stream_context(_stream: HostStream | None) -> Iterator[None]:
    yield


def _resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def _peak_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _memory_stats(*_args: object, **_kwargs: object) -> dict[str, int]:
    stats: dict[str, int] = defaultdict(int)
    for kind in ("allocated", "reserved"):
        stats[f"{kind}_bytes.all.current"] = _resident_bytes()
        stats[f"{kind}_bytes.all.peak"] = _peak_resident_bytes()
    return stats


def _total_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()


def _device_properties(*_args: object, **_kwargs: object) -> types.SimpleNamespace:
    # Compute capability 10, because for lower ones Megatron's argument validation requires
    # CUDA_DEVICE_MAX_CONNECTIONS=1, which orders work in a GPU's hardware queues.
    return types.SimpleNamespace(
        name="cpu", major=10, minor=0, total_memory=_total_memory_bytes(), multi_processor_count=1
    )


def _no_op() -> Callable[..., None]:
    """A new function that does nothing.

    torch.compile keeps one rule per function object, so no two names in torch may share a function.
    """
    return lambda *_args, **_kwargs: None


def install() -> None:
    """Replace the functions and classes of ``torch.cuda`` that Megatron uses."""
    replacements = {
        # MoEAlltoAllTokenDispatcher, DDP buckets, shared experts, get_model.
        "Stream": HostStream,
        "Event": HostEvent,
        "stream": _stream_context,
        "current_stream": lambda *_args: _current_stream,
        "default_stream": lambda *_args: _current_stream,
        "set_stream": _no_op(),
        # Timers, p2p communication, checkpointing.
        "synchronize": _no_op(),
        # The `device=` argument of nearly every buffer that Megatron allocates.
        "current_device": lambda: torch.device("cpu"),
        "set_device": _no_op(),
        # _initialize_distributed and _set_random_seed skip model-parallel set-up when this is 0.
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        # Argument checks and log lines.
        "get_device_properties": _device_properties,
        "get_device_capability": lambda *_args: (10, 0),
        "get_device_name": lambda *_args: "cpu",
        # report_memory and the memory lines of the training log: memory of the process.
        "memory_allocated": lambda *_args: _resident_bytes(),
        "memory_reserved": lambda *_args: _resident_bytes(),
        "max_memory_allocated": lambda *_args: _peak_resident_bytes(),
        "max_memory_reserved": lambda *_args: _peak_resident_bytes(),
        "device_memory_used": lambda *_args: _resident_bytes(),
        "mem_get_info": lambda *_args: (
            os.sysconf("SC_AVPHYS_PAGES") * resource.getpagesize(),
            _total_memory_bytes(),
        ),
        "memory_stats": _memory_stats,
        "empty_cache": _no_op(),
        "reset_peak_memory_stats": _no_op(),
        # Recompute and the optimizer step check this before they set random states.
        "is_current_stream_capturing": lambda: False,
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    # nvtx_range_push and nvtx_range_pop of megatron.core.utils.
    torch.cuda.nvtx.range_push = _no_op()
    torch.cuda.nvtx.range_pop = _no_op()
