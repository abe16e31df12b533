"""An executor that wraps another one and makes errors in memory lifetime and lane order visible as NaN.

* Receive buffers of a collective are filled with NaN until the data arrive.
* Send and receive buffers are filled with NaN once the last reference is gone: on a GPU by the stream that
owns
  the memory, before the next stage on that stream. From then on torch's allocator could give the memory to
  that stage, and a reader on another stream without a wait would read wrong data; here it reads NaN. On a CPU
  the memory could be given to any thread, so the next stage of any lane fills it.
* Computation is delayed before and after its kernels, and transfers take some time.

Uses only the protocol of executors, on both devices. Whether memory is still referenced is determined by the
reference count of its storage, which includes tensors, views and what autograd has saved. :mod:`tests.stress`
builds the layers; the tests insert faults to show that they are detected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.tools.measuring.emulation import mirror

_NO_COUNT = -(2**40)
"""Used instead of NaN for integers; as a number of rows it cannot be allocated."""


@dataclass(frozen=True, slots=True)
class _Watched:
    """Memory that crosses lanes; ``alias`` keeps it, and ``stream`` (None on a CPU) owns it."""

    alias: Tensor
    stream: torch.cuda.Stream | None


class PoisoningExecutor:
    """See the module's docstring.

    Args:
        inner: The executor that runs the stages.
        delay: Keeps the calling lane busy, on the device or by sleeping.
        travel: Likewise, for the duration of a transfer.
    """

    def __init__(self, inner: Any, *, delay: Callable[[], object], travel: Callable[[], object]) -> None:
        self._inner, self._delay, self._travel = inner, delay, travel
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self.filled = 0
        """How many times released memory has been filled."""

    def __getattr__(self, name: str) -> Any:
        """All other attributes are those of the inner executor."""
        return getattr(self._inner, name)

    def execute(self, tape: Any, run_call: Any, *rest: Any) -> None:
        """See ``runtime.executors.Executor``."""
        compute = _stream()

        def run(call: Any) -> Transfer | None:
            self._fill_released()
            if call.stage.is_communication:
                with _Allocations() as made:
                    transfer = run_call(call)
                here = _stream()
                for tensor in (*made.tensors, *transfer.outputs):
                    self._watch(tensor, here if made.holds(tensor) else compute)
                return transfer
            self._delay()
            run_call(call)
            self._delay()
            return None

        with mirrored(before=self._before_exchange(compute), travel=self._travel):
            self._inner.execute(tape, run, *rest)

    def _before_exchange(self, compute: torch.cuda.Stream | None) -> Callable[[Tensor, Tensor], None]:
        def prepare(output: Tensor, input: Tensor) -> None:
            _poison(output)
            # Buffers that the stage allocates on the lane itself are watched once the stage has ended.
            if not _Allocations.now_holds(input):
                self._watch(input, compute)

        return prepare

    def _watch(self, tensor: Tensor, stream: torch.cuda.Stream | None) -> None:
        on_device = tensor.is_cuda == (stream is not None)
        if on_device and tensor.numel():
            with self._lock:
                self._watched.setdefault(_key(tensor), _Watched(_memory_of(tensor), stream))

    def _fill_released(self) -> None:
        """Fill the memory that the allocator could now give to the stream of the next stage."""
        here = _stream()
        with self._lock:
            for key, watched in list(self._watched.items()):
                if watched.stream == here and _references(watched.alias) == _OURS_ALONE:
                    _poison(watched.alias)
                    self.filled += 1
                    del self._watched[key]


@contextmanager
def mirrored(
    *,
    before: Callable[[Tensor, Tensor], object] = lambda output, input: None,
    travel: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """All-to-alls with pretended ranks (``tools.measuring.emulation``), of stock layers and of AMPipe's.

    Args:
        before: Called with output and input when an exchange starts.
        travel: Keeps the lane busy before the data arrive.
    """

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> _Travelling | None:
        before(output, input)
        splits = output_split_sizes, input_split_sizes
        handle = _Travelling(travel, lambda: mirror(output, input, *splits, group=group))
        if async_op:
            return handle
        handle.wait()
        return None

    original, dist.all_to_all_single = dist.all_to_all_single, all_to_all_single
    try:
        yield
    finally:
        dist.all_to_all_single = original


class _Travelling:
    """The handle of an exchange, which is delayed at the first wait and complete after it."""

    def __init__(self, *works: Callable[[], object]) -> None:
        self._works = works

    def wait(self) -> bool:
        works, self._works = self._works, ()
        for work in works:
            work()
        return True


class _Allocations(TorchDispatchMode):
    """Records the tensors that operations in this context allocate; separate for each thread."""

    _active = threading.local()

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._keys: set[int] = set()

    def __enter__(self) -> _Allocations:
        self._active.mode = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._active.mode = None
        super().__exit__(*error)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {_key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and _key(leaf) not in given | self._keys:
                self._keys.add(_key(leaf))
                self.tensors.append(leaf)
        return result

    def holds(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor`` was allocated here."""
        return _key(tensor) in self._keys

    @classmethod
    def now_holds(cls, tensor: Tensor) -> bool:
        """Likewise, for the context that is active in this thread."""
        mode = getattr(cls._active, "mode", None)
        return mode is not None and mode.holds(tensor)


def _stream() -> torch.cuda.Stream | None:
    """The current stream; None on a CPU, where memory may be given to any thread."""
    return torch.cuda.current_stream() if torch.cuda.is_initialized() else None


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _references(tensor: Tensor) -> int:
    """The number of references to the memory, in torch and Python."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _references_of_an_alias() -> int:
    tensor = torch.empty(1)
    alias = _memory_of(tensor)
    del tensor
    return _references(alias)


def _memory_of(tensor: Tensor) -> Tensor:
    """A tensor over the whole storage; not a view, so autograd does not notice changes."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


_OURS_ALONE = _references_of_an_alias()


@torch.no_grad()
def _poison(tensor: Tensor) -> None:
    """Fill the whole storage of a tensor, as if the allocator had reused it."""
    memory = _memory_of(tensor)
    if memory.is_floating_point():
        memory.fill_(float("nan"))
    elif memory.dtype == torch.int64:
        memory.fill_(_NO_COUNT)
