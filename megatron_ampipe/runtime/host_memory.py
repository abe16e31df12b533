"""Tensors that wait in host memory, and their copies in both directions.

On a GPU, host memory is pinned, and copies are asynchronous on the current stream. Without one, "host memory"
is other memory of the same host, so that the same copies run, on the thread that waits for the lane's
transfers; it is used again, and is not counted as memory of the device (:func:`is_host_memory`). Called by
:mod:`.steps` and :mod:`.inner_tensors`.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ampipe.runtime.collectives import Transfer

_ALIGNED = 64
"""Bytes: a copy begins where torch's allocator could begin, because kernels may depend on that."""


class HostCopies:
    """Copies of tensors in host memory, each piece of memory once. Stored once, and then loaded once.

    What :meth:`load` gives has the sizes and strides of what was stored, and shares memory likewise, so every
    operation computes the same with it.

    Args:
        tensors: What is copied, of one device; not to be written until the copy has ended.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = tensors[0].device
        self._views = [_View.of(tensor) for tensor in tensors]
        pieces: dict[int, list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            if tensor.numel():
                pieces[tensor.untyped_storage()._cdata].append(place)
        self._places, self._begins = list(pieces.values()), [0] * len(pieces)
        self._bytes: list[Tensor | _HostMemory] = []
        for number, places in enumerate(self._places):
            begin = min(self._views[place].begin for place in places) // _ALIGNED * _ALIGNED
            end = max(self._views[place].end for place in places)
            self._begins[number] = begin
            self._bytes.append(_bytes(tensors[places[0]], begin, end))

    def store(self, release: Callable[[], None]) -> Transfer:
        """Start to copy to host memory.

        Args:
            release: Called when the host may release the tensors.
        """
        sources = tuple(piece for piece in self._bytes if isinstance(piece, Tensor))
        targets = [_HostMemory(source) for source in sources]
        self._bytes = [*targets]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.bytes.copy_(source, non_blocking=True)
            release()

        return _started(copy, (), sources)

    def load(self) -> Transfer:
        """Start to copy back. The outputs are the tensors, in order."""
        sources = [piece for piece in self._bytes if isinstance(piece, _HostMemory)]
        self._bytes = []
        targets = tuple(
            torch.empty(len(source.bytes), dtype=torch.uint8, device=self._device) for source in sources
        )
        outputs: dict[int, Tensor] = {}
        for places, begin, target in zip(self._places, self._begins, targets, strict=True):
            for place in places:
                outputs[place] = self._views[place].within(target, begin)
        for place, view in enumerate(self._views):
            if place not in outputs:
                outputs[place] = torch.empty_strided(
                    view.size, view.stride, dtype=view.dtype, device=self._device
                )

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source.bytes, non_blocking=True)
            sources.clear()

        return _started(copy, tuple(outputs[place] for place in range(len(outputs))), targets)


def _started(
    copy: Callable[[], None], outputs: tuple[Tensor, ...], on_device: tuple[Tensor, ...]
) -> Transfer:
    """A copy as a transfer: on a GPU the stream orders it, on a CPU whoever waits for it copies."""
    if on_device and on_device[0].is_cuda:
        copy()
        return Transfer(outputs, uses=on_device)
    return Transfer(outputs, unpack=copy, uses=on_device)


@dataclass(frozen=True, slots=True)
class _View:
    """How a tensor lies in its storage; ``begin`` and ``end`` are bytes, ``end`` that after the last."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def of(cls, tensor: Tensor) -> _View:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.storage_offset() * tensor.element_size()
        return cls(
            tensor.dtype, tensor.shape, tensor.stride(), begin, begin + (last + 1) * tensor.element_size()
        )

    def within(self, piece: Tensor, begin: int) -> Tensor:
        """The same view of a copy of the storage's bytes from ``begin`` on."""
        own = piece[self.begin - begin : self.end - begin].view(self.dtype)
        return own.as_strided(self.size, self.stride)


def _bytes(tensor: Tensor, begin: int, end: int) -> Tensor:
    """These bytes of the tensor's storage."""
    width = tensor.element_size()
    # Another view of the storage may have a narrower dtype, and end within an element of this one.
    flat = tensor.detach().as_strided((-(-(end - begin) // width),), (1,), begin // width)
    return flat.view(torch.uint8)[: end - begin]


class _HostMemory:
    """Memory of the host for so many bytes, as long as this object exists.

    Attributes:
        bytes: ``uint8``, as many as ``source`` has.
    """

    def __init__(self, source: Tensor) -> None:
        count = len(source)
        if source.is_cuda:
            self.bytes = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            return
        # Pages are made when they are first written, so that a power of two wastes none.
        size = 1 << (count - 1).bit_length()
        try:
            memory = _free[size].pop()
        except IndexError:
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            _addresses.add(memory.data_ptr())
        self.bytes = memory[:count]
        weakref.finalize(self, _free[size].append, memory)


_free: dict[int, list[Tensor]] = defaultdict(list)
"""By size, what is not in use. Never given back to the system: the next pass needs as much."""
_addresses: set[int] = set()


def is_host_memory(tensor: Tensor) -> bool:
    """Whether the tensor lies in what stands for host memory in training without a GPU."""
    return tensor.untyped_storage().data_ptr() in _addresses
