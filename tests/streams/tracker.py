"""Tracks every tensor that a block uses, and reports accesses that streams and events do not order (races).

A storage belongs to the stream that was current when it was allocated. Once the host has released it, torch's
caching allocator may reuse its memory for the next allocation on that stream, so all accesses by other
streams must be ordered before. Reads and writes by several streams must be ordered as well. The accesses of
an operation follow from its schema, so new stages need no change here.

Temporaries inside kernels and inside NCCL are not tracked, because they do not exist in a CPU run.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.streams.model import DEVICE, HOST, ModelStream, Stamp

_MAKES_ONLY = ("aten::empty", "aten::new_empty")
"""Prefixes of operations that neither allocate nor access memory."""
_ALIASES = ("aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::set_")
"""Operations that return a view although their schema does not say so."""
_WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
    "aten::is_nonzero", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount",
}  # fmt: skip
"""Operations whose result, or its size, the host reads: on a GPU this synchronizes with the device."""
_INDEX = ("aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_")


@dataclass(slots=True)
class Memory:
    """One storage, with the last accesses of each stream."""

    owner: ModelStream | None
    """The stream that allocated it; None for host memory."""
    made_by: str
    """The operation and stage that allocated it, for reports."""
    is_pinned: bool = False
    """Host memory of which copies need no wait of the host. When it is released, torch's allocator of such
    memory gives it to nobody before the streams that copy it have done so."""
    writes: dict[int, Stamp] = field(default_factory=dict)
    reads: dict[int, Stamp] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)


class Tracker(TorchDispatchMode):
    """Reports races, one line each; see the module's docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.races: dict[str, None] = {}
        self._memory: dict[int, Memory] = {}
        self._freed: list[Memory] = []
        self._places: bool | None = None
        """Whether what is made now is on the device, if a call says so."""
        self._copies = False
        """Whether an operation copies between host and device."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation._schema.name
        reads, writes, seen = _accesses(operation, args, kwargs)
        inputs = [tensor for tensor in (*reads, *writes, *seen) if isinstance(tensor, Tensor)]
        if inputs:
            # Numbers that torch makes tensors of are nowhere, nor are empty tensors.
            placed = [
                tensor for tensor in inputs if (tensor.dim() and tensor.numel()) or self._is_known(tensor)
            ]
            on_host = bool(placed) and not self._copies and all(map(self.is_host, placed))
        else:
            on_host = self._places is False
        waits = name in _WAITS or self._waits_for_operands(name, args, kwargs)
        output = operation(*args, **kwargs)
        made = [tensor for tensor in _tensors(output) if tensor.untyped_storage()._cdata not in self._memory]
        made = [tensor for tensor in made if not any(_same(tensor, other) for other in inputs)]
        if not (made or reads or writes):
            return output
        where = f"{DEVICE.stage or 'between blocks'}: {name.removeprefix('aten::')}"
        if on_host:
            for tensor in reads:
                self._on_host(tensor, where, writes=False)
            for tensor in writes:
                self._on_host(tensor, where, writes=True)
            for tensor in made:
                self.make(tensor, where, owner=None)
            return output
        stream = DEVICE.current
        DEVICE.note("operation")
        makes_on_host = self._copies and not self._places
        if made and not makes_on_host:
            self._allocate(stream, where)
        stamp = stream.launch()
        for tensor in reads:
            self._access(tensor, stream, stamp, where, writes=False)
        for tensor in writes:
            self._access(tensor, stream, stamp, where, writes=True)
        for tensor in made:
            memory = self.make(tensor, where, owner=None if makes_on_host else stream)
            if memory is not None and not name.startswith(_MAKES_ONLY):
                memory.writes[stream.number] = stamp
                memory.last[stream.number] = where
        if waits:
            self.wait(name.removeprefix("aten::"))
        return output

    @contextlib.contextmanager
    def placing(self, *, on_device: bool, copies: bool = False) -> Iterator[None]:
        """Within it, new tensors are on the device, or not; with ``copies``, those of the other place."""
        before = self._places, self._copies
        self._places, self._copies = on_device, copies
        try:
            yield
        finally:
            self._places, self._copies = before

    def note_made(self, tensor: Tensor, call: str, *, on_device: bool, is_pinned: bool) -> None:
        """Record where a tensor is that a call has made, perhaps without an operation."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is None:
            owner = DEVICE.current if on_device else None
            memory = self.make(tensor, f"{DEVICE.stage or 'between blocks'}: {call}", owner=owner)
        if is_pinned:
            DEVICE.note("pinned memory")
        if memory is not None:
            memory.is_pinned = is_pinned

    def note_read(self, tensor: Tensor, call: str) -> None:
        """Record that the host reads a tensor of the host."""
        self._on_host(tensor, f"{DEVICE.stage or 'between blocks'}: {call}", writes=False)

    def wait(self, call: str) -> None:
        """The host waits for the current stream."""
        HOST.waits_for(DEVICE.current.clock, call)

    def is_host(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the host."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        return memory is not None and memory.owner is None

    def _is_known(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._memory

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned memory of the host."""
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        return memory is not None and memory.is_pinned

    def make(self, tensor: Tensor, where: str, *, owner: ModelStream | None) -> Memory | None:
        """Record a new storage."""
        storage = tensor.untyped_storage()
        if not storage.nbytes():
            return None
        key = storage._cdata
        memory = self._memory[key] = Memory(owner, where)
        weakref.finalize(storage, self._gone, key)
        return memory

    def differentiate(self, *args: Any, **kwargs: Any) -> Sequence[Tensor | None]:
        """Call the engine as a stage does, and check for gradients at accumulation nodes of another stream.

        The engine then records an event, has that stream wait for it, and calls ``record_stream``: when the
        memory is released no longer follows from the order of the stages.
        """
        gradients: Sequence[Tensor | None] = _engine_run_backward(*args, **kwargs)
        inputs = args[4]
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if gradient is not None and isinstance(tensor, Tensor):
                stream = get_gradient_edge(tensor).node.metadata.get("stream", DEVICE.current)
                if stream is not DEVICE.current:
                    self._report(
                        f"{DEVICE.stage}: a gradient on {DEVICE.current.name} is accumulated on "
                        f"{stream.name}, and released when that is done"
                    )
        return gradients

    def _gone(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is not None and memory.owner is not None:
            foreign = (memory.reads.keys() | memory.writes.keys()) - {memory.owner.number}
            if foreign:
                self._freed.append(memory)

    def _allocate(self, stream: ModelStream, where: str) -> None:
        """Check an allocation: it may reuse any released memory of this stream."""
        kept = []
        for memory in self._freed:
            if memory.owner is not stream:
                kept.append(memory)
                continue
            for stamp in (*memory.reads.values(), *memory.writes.values()):
                if not stream.is_after(stamp):
                    self._report(
                        f"memory allocated by {memory.made_by} was released and may be reused by {where} on "
                        f"{stream.name}, which is not ordered after {memory.last[stamp.stream]}"
                    )
                    kept.append(memory)
                    break
        self._freed = kept

    def _access(self, tensor: Tensor, stream: ModelStream, stamp: Stamp, where: str, *, writes: bool) -> None:
        memory = self._known(tensor)
        if memory is None:
            return
        before = [*memory.writes.values(), *(memory.reads.values() if writes else ())]
        for earlier in before:
            if earlier.stream != stream.number and not stream.is_after(earlier):
                self._report(
                    f"{where} on {stream.name} {'writes' if writes else 'reads'} what "
                    f"{memory.last[earlier.stream]} has used, and is not ordered after it"
                )
        (memory.writes if writes else memory.reads)[stream.number] = stamp
        memory.last[stream.number] = where

    def _waits_for_operands(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the host waits because of what an operation of the device is given."""
        if name == "aten::copy_":
            on_host = [tensor for tensor in args[:2] if self.is_host(tensor)]
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            is_pinned = all(self.is_pinned(tensor) for tensor in on_host)
            return len(on_host) == 1 and not (non_blocking and is_pinned)
        if name == "aten::repeat_interleave":
            return kwargs.get("output_size") is None
        # The number of rows is read, or indices are copied to the device.
        return name in _INDEX and any(
            tensor.dtype in (torch.bool, torch.uint8) or self.is_host(tensor) for tensor in _tensors(args[1])
        )

    def _on_host(self, tensor: Tensor, where: str, *, writes: bool) -> None:
        """Record that the host reads or writes host memory."""
        memory = self._known(tensor)
        if memory is None:
            return
        for done, accesses in (("to", memory.writes), ("from", memory.reads if writes else {})):
            for earlier in accesses.values():
                if HOST.clock[earlier.stream] < earlier.position:
                    verb = "writes" if writes else "reads"
                    self._report(f"{where}: the host {verb} memory that is still being copied {done}")

    def _known(self, tensor: Tensor) -> Memory | None:
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        # Allocated before tracking started: parameters and inputs, complete long ago.
        return memory or self.make(tensor, "earlier code", owner=DEVICE.default)

    def _report(self, race: str) -> None:
        self.races[race] = None


def _accesses(
    operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, those that it writes, and those that it only makes a view of."""
    found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for index, (name, which) in enumerate(_arguments(operation)):
        value = args[index] if index < len(args) else kwargs.get(name)
        found[which].extend(_tensors(value))
    return found


@functools.cache
def _arguments(operation: Any) -> tuple[tuple[str, int], ...]:
    """The name of each argument, and whether the operation reads it (0), writes it (1) or neither (2)."""
    schema = operation._schema
    untouched = schema.name.startswith(_ALIASES + _MAKES_ONLY)

    def access(alias: Any) -> int:
        if untouched or (alias is not None and not alias.is_write):
            return 2
        return 0 if alias is None else 1

    return tuple((argument.name, access(argument.alias_info)) for argument in schema.arguments)


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _same(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
