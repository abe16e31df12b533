"""A stand-in for CUDA graphs on a CPU: what is captured is recorded operation by operation.

As on a GPU, a capture computes nothing that lasts: memory from before is afterwards as it was, and what was
made is full of NaN until the first replay, which runs the same operations on the same memory. What a GPU
would refuse to capture, because the host reads a result or sends data, is refused. A captured collective
sends nothing; every replay runs it, and waits for it. A capture does not see what other threads do meanwhile.

Captured tensors are in the memory of a pool, as torch's allocator places them: memory that nobody refers to
is given to the next tensor of any capture in the same pool, also to one of the capture in which its last
reader is. A replay writes all memory of its capture again, whoever has it now, and finds what earlier replays
have left in memory that somebody referred to when the capture began.
"""

import bisect
import contextlib
import functools
import itertools
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_ampipe.attention import backends

READS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero",
    "aten::_unique2",
}  # fmt: skip
"""Operations for which the host waits for the device."""
_COLLECTIVES = {
    "c10d::alltoall_base_", "c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allreduce_",
    "c10d::recv_", "c10d::send",
}  # fmt: skip
"""What can be captured of other ranks' data. The last two are an all-to-all of the host platform."""
_LIBRARIES = ("deep_ep_standin::",)
"""Operations that send and receive inside. They write into tensors that they are given."""
_SENDS = {"aten::lift_fresh"}
"""Operations with which the host sends data that it has made."""
CAPTURED: weakref.WeakSet["RecordedGraph"] = weakref.WeakSet()
"""The graphs that have not been freed."""
REPLAYS: list[object] = []
"""The pool of the graph of every replay so far."""


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@dataclass
class Block:
    """A block of a pool, which one tensor after another is in."""

    memory: Tensor
    """Its bytes."""
    num_bytes: int
    tensor: Tensor | None = None
    """The last tensor in it."""
    num_tensors: int = 0
    _storage: int = 0
    """Of the last tensor."""

    @property
    def is_free(self) -> bool:
        """Whether nobody refers to the last tensor."""
        return self.tensor is None or torch._C._storage_Use_Count(self._storage) <= _OF_ONE

    def give_to(self, tensor: Tensor) -> None:
        """From now on this tensor is in it."""
        self.tensor, self._storage = tensor, _storage(tensor)
        self.num_tensors += 1


@dataclass
class Pool:
    """The memory that captures share."""

    blocks: list[Block] = field(default_factory=list)
    """Small ones first."""
    addresses: set[int] = field(default_factory=set)
    """Of all blocks."""

    def block(self, num_bytes: int) -> Block:
        """The smallest free block that is large enough, or a new one."""
        size = -(-num_bytes // _ROUNDED_TO) * _ROUNDED_TO
        first = bisect.bisect_left(self.blocks, size, key=_num_bytes)
        for block in itertools.islice(self.blocks, first, None):
            if block.is_free:
                return block
        block = Block(torch.empty(size, dtype=torch.uint8), size)
        bisect.insort_right(self.blocks, block, key=_num_bytes)
        self.addresses.add(block.memory.data_ptr())
        return block


_num_bytes = operator.attrgetter("num_bytes")
POOLS: defaultdict[object, Pool] = defaultdict(Pool)
"""Kept until the end, because tensors are in them whose graphs have been freed."""
_ROUNDED_TO = 512
"""Bytes, as in torch's allocator."""


def num_reused() -> int:
    """How many captured tensors were given memory that an earlier one no longer used."""
    return sum(block.num_tensors - 1 for pool in POOLS.values() for block in pool.blocks)


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
        """By storage, memory from before that it has changed, with its contents; only during the capture."""
        self._left: dict[int, tuple[Block, Tensor | None]] = {}
        """The blocks of the pool that were in use when the capture began; and, during the capture, the
        contents of those that it has given to other tensors."""
        self._read: dict[int, StorageWeakRef] = {}
        """By storage, memory from before that it uses; without the pool's, which is not given back."""
        self._recorder: _Recorder | None = None
        self.pool: Any = None
        self.generators: list[torch.Generator] = []
        self._states: dict[torch.Generator, Tensor] = {}
        """Before the capture."""

    @property
    def is_capturing(self) -> bool:
        """Whether its capture has begun and not ended."""
        return self._recorder is not None

    def register_generator_state(self, generator: torch.Generator) -> None:
        """As in torch."""
        assert self._recorder is None and not self._calls, "before the capture"
        self.generators.append(generator)

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """As in torch."""
        assert capture_error_mode == "thread_local", "other threads issue transfers meanwhile"
        assert self._recorder is None and not self._calls, "a second capture"
        self.pool, self._recorder = pool, _Recorder(self)
        CAPTURED.add(self)
        self._states = {generator: generator.get_state() for generator in self.generators}
        self._left = {id(block): (block, None) for block in POOLS[pool].blocks if not block.is_free}
        self._recorder.__enter__()

    def capture_end(self) -> None:
        """As in torch."""
        assert self._recorder is not None
        self._recorder.__exit__(None, None, None)
        self._recorder = None
        with _disable_current_modes():
            for memory, contents in self._before.values():
                memory.copy_(contents)
            self._before.clear()
            for generator, state in self._states.items():
                generator.set_state(state)
            for tensor in self._made.values():
                _poison(tensor)
            for key, (block, contents) in self._left.items():
                if contents is not None:
                    block.memory.copy_(contents)
                    self._left[key] = block, None

    def record(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation and keep it."""
        name, schema = operation._schema.name, operation._schema
        assert name not in READS | _SENDS, f"{name}: not permitted when a stream is capturing"
        if name.startswith("c10d::"):
            return self._record_collective(operation, args, kwargs)
        if name.startswith(_LIBRARIES):
            return self._record_library_call(operation, args)
        # Attention has the tag because it can drop values, which runs without a graph.
        draws = torch.Tag.nondeterministic_seeded in operation.tags and "scaled_dot_product" not in name
        if draws:
            assert FORKED and FORKED[-1] in self.generators, f"{name}: a replay would draw the same numbers"
            kwargs = kwargs | {"generator": FORKED[-1]}
        given = _tensors((args, kwargs))
        for place, argument in _written(operation):
            for one in _tensors(args[place] if place < len(args) else kwargs.get(argument)):
                self._keep_before(one)
        known = {_storage(one) for one in given}
        self._note_read(given)
        result = operation(*args, **kwargs)
        made = _tensors(result)
        fresh = [one for one in made if _storage(one) not in known]
        result = self._in_pool(result, fresh)
        is_view = bool(made) and not fresh and not schema.is_mutable
        if "empty" in name:
            self._calls += [(_poison, (_borrowed(one),), {}, None) for one in _tensors(result)]
        elif not is_view:
            # Through other tensors of the same memory: a replay does not count as a change for autograd.
            results = [_borrowed(one) for one in _tensors(result)] if fresh else None
            self._calls.append((operation, *_mapped((args, kwargs), _borrowed), results))
        return result

    def _record_collective(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Keep a collective, which sends nothing now; what it will receive is full of NaN."""
        name = operation._schema.name
        assert name in _COLLECTIVES, f"{name}: no such collective is captured"
        received = [] if name == "c10d::send" else _tensors(args[0])
        for one in received:
            self._keep_before(one)
        self._note_read(_tensors((args, kwargs)))
        with _disable_current_modes():
            for one in received:
                _poison(one)
        start = functools.partial(_start, operation)
        self._calls.append((start, *_mapped((args, kwargs), _borrowed), None))
        work = FakeWork().boxed()
        return work if len(operation._schema.returns) == 1 else (args[0], work)

    def _record_library_call(self, operation: Any, args: Any) -> None:
        """Keep a call that communicates; now it does nothing, and what it will write is full of NaN."""
        for argument, value in zip(operation._schema.arguments, args, strict=True):
            if isinstance(value, Tensor) and argument.alias_info is not None:
                assert argument.alias_info.is_write
                self._keep_before(value)
                with _disable_current_modes():
                    _poison(value)
        self._note_read(_tensors(args))
        self._calls.append((operation, _mapped(args, _borrowed), {}, None))

    def _note_read(self, tensors: list[Tensor]) -> None:
        of_pool = POOLS[self.pool].addresses
        for tensor in tensors:
            if tensor.untyped_storage().data_ptr() in of_pool:
                # Others may have it by the time of a replay, as the poison shows, or the values.
                continue
            # Without contents it has no memory in the pool, and nobody reads it.
            if _storage(tensor) not in self._made and tensor.untyped_storage().nbytes():
                self._read.setdefault(_storage(tensor), StorageWeakRef(tensor.untyped_storage()))

    def _keep_before(self, tensor: Tensor) -> None:
        key = _storage(tensor)
        if key not in self._made and key not in self._before:
            with _disable_current_modes():
                whole = _whole(tensor)
                self._before[key] = whole, whole.clone()

    def _in_pool(self, result: Any, fresh: list[Tensor]) -> Any:
        """The result of an operation, with the new tensors in it moved to memory of the pool."""
        storages: dict[int, torch.UntypedStorage] = {}
        placed: dict[int, Tensor] = {}
        for one in fresh:
            memory = one.untyped_storage()
            if not memory.nbytes():
                continue
            is_first = _storage(one) not in storages
            if is_first:
                with _disable_current_modes():
                    block = POOLS[self.pool].block(memory.nbytes())
                    if id(block) in self._left and self._left[id(block)][1] is None:
                        self._left[id(block)] = block, block.memory.clone()
                    block.memory[: memory.nbytes()] = torch.empty(0, dtype=torch.uint8).set_(memory)
                storages[_storage(one)] = _storage_at(block.memory.data_ptr(), memory.nbytes())
            layout = one.storage_offset(), one.size(), one.stride()
            moved: Tensor = one.new_empty(0).set_(storages[_storage(one)], *layout)
            placed[id(one)] = moved
            if is_first:
                kept = moved.detach()
                self._made[_storage(moved)] = kept
                block.give_to(kept)
        return _mapped(result, lambda tensor: placed.get(id(tensor), tensor))

    def replay(self) -> None:
        """As in torch. What nobody refers to in the pool is lost, and whatever is in memory of this graph."""
        REPLAYS.append(self.pool)
        assert not any(memory.expired() for memory in self._read.values()), "memory that it reads was freed"
        with torch.no_grad(), _disable_current_modes():
            for block in POOLS[self.pool].blocks:
                if block.tensor is not None and block.is_free and id(block) not in self._left:
                    _poison(block.tensor)
            pending: list[Work] = []
            for operation, args, kwargs, results in self._calls:
                if isinstance(operation, functools.partial):
                    pending.append(operation(*args, **kwargs))
                    continue
                while pending:
                    pending.pop().wait()
                computed = operation(*args, **kwargs)
                if results is None:
                    continue
                for kept, value in zip(results, _tensors(computed), strict=True):
                    if kept.data_ptr() != value.data_ptr():
                        kept.copy_(value)
            for work in pending:
                work.wait()


def _start(operation: Any, *args: Any, **kwargs: Any) -> Work:
    """Start a collective."""
    result = operation(*args, **kwargs)
    return Work.unbox(result[-1] if isinstance(result, tuple) else result)


@functools.cache
def _written(operation: Any) -> list[tuple[int, str]]:
    """The arguments that an operation writes to: place and name."""
    arguments = enumerate(operation._schema.arguments)
    return [(place, one.name) for place, one in arguments if one.alias_info and one.alias_info.is_write]


# For what operations are given and return. torch's functions for trees take several times as long.


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        assert type(value) in (list, tuple), type(value)
        return type(value)([_mapped(one, change) for one in value])
    if isinstance(value, dict):
        return {key: _mapped(one, change) for key, one in value.items()}
    return value


def _poison(tensor: Tensor) -> None:
    """Overwrite the memory of a tensor."""
    if tensor.dtype.itemsize > 1:
        value = float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min
        _whole(tensor).fill_(value)


def _whole(tensor: Tensor) -> Tensor:
    """All of the memory of which a tensor may be a part."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]


def _borrowed(tensor: Tensor) -> Tensor:
    """The same memory, without a reference to it."""
    memory = tensor.untyped_storage()
    storage = _storage_at(memory.data_ptr(), memory.nbytes())
    found = torch.empty(0, dtype=tensor.dtype)
    return found.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]


def _storage_at(address: int, num_bytes: int) -> torch.UntypedStorage:
    """A storage that does not own its memory."""
    return torch._C._construct_storage_from_data_pointer(address, _CPU, num_bytes)


_CPU = torch.device("cpu")
_OF_ONE = 2
"""References to memory that one tensor has: its own, and that of the call that counts."""


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Within it, graphs are recorded; the host platform must be installed."""
    pools = iter(range(1, 1 << 30))
    REPLAYS.clear()
    CAPTURED.clear()
    POOLS.clear()
    with (
        mock.patch.object(torch.cuda, "CUDAGraph", RecordedGraph),
        mock.patch.object(torch.cuda, "graph_pool_handle", lambda: (0, next(pools))),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", _is_capturing),
        mock.patch.object(backends, "causal_lower_right", _causal_lower_right),
    ):
        yield


@contextlib.contextmanager
def of_megatron() -> Iterator[None]:
    """Within it, and within :func:`stand_ins`, Megatron's ``--cuda-graph-impl local`` works, too.

    Random states are not captured, so layers must draw nothing.
    """
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import cuda_graphs

    tracker = random.CudaRNGStatesTracker()
    # Its states would be those of a device.
    tracker.use_cudagraphable_rng = True
    generators = tuple(torch.Generator() for _ in range(torch.cuda.device_count()))
    begin, end = "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool"
    with (
        mock.patch.object(torch.cuda, "graph", _Captured),
        mock.patch.object(torch.cuda, "default_generators", generators),
        # Inputs of graphs are memory outside of the pool.
        mock.patch.object(torch._C, begin, lambda *_: None),
        mock.patch.object(torch._C, end, lambda *_: None),
        mock.patch.object(random, "_CUDA_RNG_STATE_TRACKER", tracker),
        mock.patch.object(cuda_graphs, "_ensure_generator_state_is_cudagraph_safe", lambda state: state),
    ):
        yield


class _Captured:
    """In place of ``torch.cuda.graph``."""

    def __init__(self, graph: RecordedGraph, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._graph, self._pool = graph, pool

    def __enter__(self) -> None:
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def __exit__(self, *_: object) -> None:
        self._graph.capture_end()
        # Before the next capture, Megatron runs functions that read indices which this one has made. What a
        # device has there is any number; the stand-in's would be out of bounds.
        self._graph.replay()


FORKED: list[torch.Generator] = []
"""The generators of which operations draw at present, the last one first."""


class GraphSafeTracker:
    """In place of Transformer Engine's tracker of random states: operations draw from a generator of it.

    A graph in which the generator is registered draws from it in every replay, and not when it is captured.
    """

    def __init__(self) -> None:
        self.generator = torch.Generator()

    @contextlib.contextmanager
    def fork(self, _name: str = "") -> Iterator[None]:
        """As in Transformer Engine."""
        before = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        FORKED.append(self.generator)
        try:
            yield
        finally:
            FORKED.pop()
            if not _is_capturing():
                self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def _is_capturing() -> bool:
    return any(graph.is_capturing for graph in CAPTURED)


def _causal_lower_right(*sizes: int) -> Tensor:
    # torch cannot make this subclass in a dispatch mode.
    with _disable_current_modes():
        return causal_lower_right(*sizes)
