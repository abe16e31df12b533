"""The peak memory of a pass: of all tensors on a CPU, and as torch's allocator counts it on a GPU.

On a CPU, every storage that an operation returns counts from then until it is freed, so the number is the
same on every machine; what a kernel allocates internally is not seen. Watching slows a pass down, so a pass
that is watched is not timed. Used in the ranks of ``ampipe bench``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.executors import Executor, RunCall
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.saved_tensors import is_host_memory
from megatron_ampipe.runtime.streams import Crossing
from megatron_ampipe.runtime.tape import Call, Tape


class TensorMeter:
    """Bytes of all storages that were allocated since :meth:`restart` and are still alive.

    Attributes:
        now: At present.
        peak: At most.
        at_peak: What was alive then: bytes, the stage and operation that made it, and its shape.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.where = threading.local()
        self.restart(())

    def restart(self, known: Iterable[Tensor]) -> None:
        """Reset; tensors in ``known`` are not counted."""
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._live: dict[int, tuple[int, str, list[int]]] = {}
        self.now = self.peak = 0
        self.at_peak: list[tuple[int, str, list[int]]] = []

    def see(self, tensor: Tensor, operation: str) -> None:
        """Count the storage of a tensor that an operation has returned."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        with self._lock:
            if key in self._known or key in self._live or not size or is_host_memory(tensor):
                return
            place = f"{getattr(self.where, 'stage', '')} {operation}"
            self._live[key] = (size, place, list(tensor.shape))
            weakref.finalize(storage, self._gone, key, self._live)
            self.now += size
            if self.now > self.peak:
                self.peak = self.now
                self.at_peak = list(self._live.values())

    def _gone(self, key: int, live: dict[int, tuple[int, str, list[int]]]) -> None:
        with self._lock:
            size, *_ = live.pop(key)
            if live is self._live:
                self.now -= size


class Watch(TorchDispatchMode):
    """Has a meter count all tensors that operations of this thread return."""

    def __init__(self, meter: TensorMeter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operation."""
        output = operation(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, Tensor):
                self._meter.see(tensor, str(operation))
        return output


class WatchedExecutor:
    """Runs stages as another executor does, and watches the threads of all lanes; see ``executors.Executor``.

    Args:
        executor: The other one, on a CPU.
        meter: Counts; the thread that computes is watched by whoever starts the pass.
    """

    host_waits = False
    threads = True

    def __init__(self, executor: Executor, meter: TensorMeter) -> None:
        self._executor, self._meter = executor, meter

    def execute(self, tape: Tape, run: RunCall, recorder: Recorder, crossing: Crossing | None = None) -> None:
        """Every stage once, as the other executor runs it."""
        computing = threading.get_ident()

        def watched(call: Call) -> Transfer | None:
            self._meter.where.stage = str(call.stage)
            # A mode is active in one thread only.
            if threading.get_ident() == computing:
                return run(call)
            with Watch(self._meter):
                return run(call)

        self._executor.execute(tape, watched, recorder, crossing)


def peak_bytes(
    run: Callable[[], None], *, passes: int, known: Iterable[Tensor], meter: TensorMeter | None
) -> int:
    """The most bytes that a pass holds at once, beyond what exists before it.

    Args:
        run: Runs the pass.
        passes: How often; the highest peak counts.
        known: What exists before. Gradients, which a pass makes, must not be there yet when ``run`` computes.
        meter: On a CPU, what the executor of the pass is watched with; None on a GPU.
    """
    known, found = list(known), []
    for _ in range(passes):
        if meter is None:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            found.append(torch.cuda.max_memory_allocated() - before)
            continue
        meter.restart(known)
        meter.where.stage = "outside stages"
        with Watch(meter):
            run()
        found.append(meter.peak)
    return max(found)
