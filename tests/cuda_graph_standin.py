"""A stand-in for CUDA graphs on a CPU: what is captured is recorded operation by operation.

As on a GPU, a capture computes nothing that lasts: memory from before is afterwards as it was, and what was
made is full of NaN until the first replay, which runs the same operations on the same memory. What a GPU
would refuse to capture, because the host reads a result or sends data, is refused. A capture does not see
what other threads do meanwhile.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from megatron_ampipe.attention import backends
from megatron_ampipe.runtime import graphs

READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::_unique2",
}  # fmt: skip
"""Operations for which the host waits for the device."""
_SENDS = {"aten::lift_fresh"}
"""Operations with which the host sends data that it has made."""
CAPTURED: list["RecordedGraph"] = []
REPLAYS: list["RecordedGraph"] = []
"""Every replay so far."""


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Recorder(TorchDispatchMode):
    def __init__(self, graph: "RecordedGraph") -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._graph.record(operation, args, kwargs or {})


class RecordedGraph:
    """In place of ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._made: dict[int, Tensor] = {}
        """By storage, memory that the capture has made."""
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        """By storage, memory from before that it has changed, with its contents."""
        self._recorder: _Recorder | None = None
        self.pool: Any = None
        self.generators: list[torch.Generator] = []

    def register_generator_state(self, generator: torch.Generator) -> None:
        """As in torch."""
        assert self._recorder is None and not self._calls, "before the capture"
        self.generators.append(generator)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """As in torch."""
        assert capture_error_mode == "thread_local", "other threads issue transfers meanwhile"
        assert self._recorder is None and not self._calls, "a second capture"
        self.pool, self._recorder = pool, _Recorder(self)
        CAPTURED.append(self)
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """As in torch."""
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)
        self._recorder = None
        with _disable_current_modes():
            for memory, contents in self._before.values():
                memory.copy_(contents)
            self._poison()

    def record(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and keep it."""
        name, schema = operation._schema.name, operation._schema
        assert name not in READS | _SENDS, f"{name}: not permitted when a stream is capturing"
        assert not name.startswith("c10d::"), f"{name}: of another lane"
        # Attention has the tag because it can drop values, which is refused at start-up.
        draws = torch.Tag.nondeterministic_seeded in operation.tags and "scaled_dot_product" not in name
        assert not draws, f"{name}: a replay would draw other numbers"
        given: list[Tensor] = []
        tree_map_only(Tensor, given.append, (args, kwargs))
        for place, argument in enumerate(schema.arguments):
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write:
                tree_map_only(Tensor, self._keep_before, value)
        known = {_storage(one) for one in given}
        result = operation(*args, **kwargs)
        made: list[Tensor] = []
        tree_map_only(Tensor, made.append, result)
        fresh = [one for one in made if _storage(one) not in known]
        for one in fresh:
            self._made.setdefault(_storage(one), one.detach())
        is_view = bool(made) and not fresh and not schema.is_mutable
        if not is_view and "empty" not in name:
            # Through other tensors of the same memory: a replay does not count as a change for autograd.
            call = args, kwargs, result if fresh else None
            self._calls.append((operation, *tree_map_only(Tensor, _borrowed, call)))
        return result

    def _keep_before(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key not in self._made and key not in self._before:
            with _disable_current_modes():
                whole = _whole(tensor)
                self._before[key] = whole, whole.clone()

    def _poison(self, *, unused: bool = False) -> None:
        """Overwrite what was made, or of it what only this graph refers to."""
        for tensor in self._made.values():
            if unused and torch._C._storage_Use_Count(_storage(tensor)) > _OF_ONE:
                continue
            if tensor.dtype.itemsize > 1:
                value = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
                _whole(tensor).fill_(value)

    def replay(self) -> None:
        """As in torch. Graphs of one pool share memory to which nobody refers: it is lost for the others."""
        REPLAYS.append(self)
        with torch.no_grad(), _disable_current_modes():
            for other in CAPTURED:
                if other.pool == self.pool:
                    other._poison(unused=other is not self)
            for operation, args, kwargs, results in self._calls:
                computed = operation(*args, **kwargs)
                if results is None:
                    continue
                for kept, value in zip(tree_leaves(results), tree_leaves(computed), strict=True):
                    if isinstance(kept, Tensor) and kept.data_ptr() != value.data_ptr():
                        kept.copy_(value)


def _whole(tensor: Tensor) -> Tensor:
    """All of the memory of which a tensor may be a part."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _borrowed(tensor: Tensor) -> Tensor:
    """The same memory, without a reference to it."""
    memory = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), _CPU, memory.nbytes())
    found = torch.empty(0, dtype=tensor.dtype)
    return found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]


_CPU = torch.device("cpu")
_OF_ONE = 2
"""References to memory that one tensor has: its own, and that of the call that counts."""


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Within it, graphs are recorded; the host platform must be installed."""
    pools = iter(range(1, 1 << 30))
    REPLAYS.clear()
    CAPTURED.clear()
    graphs._pool.cache_clear()
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", RecordedGraph),
        mock.patch.object(torch.cuda, "graph_pool_handle", lambda: (0, next(pools))),
        mock.patch.object(backends, "causal_lower_right", _causal_lower_right),
    ):
        yield


def _causal_lower_right(*sizes: int) -> Tensor:
    # torch cannot make this subclass in a dispatch mode.
    with _disable_current_modes():
        return causal_lower_right(*sizes)
