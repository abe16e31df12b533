"""Copies of device tensors in host memory.

On a GPU, host memory is pinned, and copies run on the current stream. On a CPU, separate memory stands for
it, which does not count as device memory (:func:`is_host_memory`).
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ampipe.runtime.collectives import Transfer

_ALIGNED = 64
"""Alignment of copies in bytes, as of torch's allocator, because the choice of a kernel can depend on it."""


class HostCopies:
    """Copies device tensors to host memory with :meth:`store`, and back with :meth:`load`, once each.

    Memory that tensors share is copied once. Loaded tensors have the sizes, strides and sharing of the stored
    ones, so every operation computes the same with them.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._device = tensors[0].device
        by_storage: dict[int, list[int]] = defaultdict(list)
        for place, tensor in enumerate(tensors):
            by_storage[tensor.untyped_storage()._cdata].append(place)
        self._pieces: list[Tensor | _HostMemory] = []
        # For each tensor: index of its piece, dtype, offset, size, strides.
        self._views: dict[int, tuple[int, torch.dtype, int, torch.Size, tuple[int, ...]]] = {}
        for places in by_storage.values():
            ranges = [_bytes_of(tensors[place]) for place in places]
            begin = min(first for first, _ in ranges) // _ALIGNED * _ALIGNED
            for place, (first, _) in zip(places, ranges, strict=True):
                tensor = tensors[place]
                offset = (first - begin) // tensor.element_size()
                self._views[place] = len(self._pieces), tensor.dtype, offset, tensor.shape, tensor.stride()
            flat = torch.empty(0, dtype=torch.uint8, device=self._device)
            flat.set_(tensors[places[0]].untyped_storage())
            self._pieces.append(flat[begin : max(last for _, last in ranges)])

    def store(self, release: Callable[[], None] = lambda: None) -> Transfer:
        """Start to copy to the host; ``release`` is called when the host may release the tensors."""
        sources = tuple(piece for piece in self._pieces if isinstance(piece, Tensor))
        targets = [_HostMemory(source) for source in sources]
        self._pieces = [*targets]

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                for block, part in zip(target.blocks, target.parts_of(source), strict=True):
                    block.copy_(part, non_blocking=True)
            release()

        return _started(copy, (), sources)

    def load(self) -> Transfer:
        """Start to copy back. The outputs of the transfer are the tensors, in order."""
        sources = [piece for piece in self._pieces if isinstance(piece, _HostMemory)]
        self._pieces = []
        targets = tuple(
            torch.empty(source.num_bytes, dtype=torch.uint8, device=self._device) for source in sources
        )
        outputs = tuple(
            torch.empty(0, dtype=dtype, device=self._device).set_(
                targets[piece].untyped_storage(), offset, size, stride
            )
            for _, (piece, dtype, offset, size, stride) in sorted(self._views.items())
        )

        def copy() -> None:
            for target, source in zip(targets, sources, strict=True):
                for block, part in zip(source.blocks, source.parts_of(target), strict=True):
                    part.copy_(block, non_blocking=True)
            sources.clear()

        return _started(copy, outputs, targets)


def _started(
    copy: Callable[[], None], outputs: tuple[Tensor, ...], on_device: tuple[Tensor, ...]
) -> Transfer:
    """A copy as a transfer: issued now on a GPU's stream; on a CPU, done by the thread that waits for it."""
    if on_device and on_device[0].is_cuda:
        copy()
        return Transfer(outputs, uses=on_device)
    return Transfer(outputs, unpack=copy, uses=on_device)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    """The range of bytes of a tensor in its storage."""
    width, count = tensor.element_size(), 0
    if tensor.numel():
        count = 1 + sum(
            (size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
    first = int(tensor.storage_offset()) * width
    return first, first + count * width


def block_sizes(num_bytes: int) -> list[int]:
    """The sizes of the blocks of host memory for so many bytes: up to four powers of two, largest first.

    torch rounds each block of pinned memory up to a power of two. One block would be up to twice as large as
    what it holds; all of these together are larger by less than an eighth, or than :data:`SMALLEST_BLOCK`.
    """
    if num_bytes <= SMALLEST_BLOCK:
        return [1 << (num_bytes - 1).bit_length()] if num_bytes else []
    unit = max(1 << (num_bytes.bit_length() - 4), SMALLEST_BLOCK)
    # At most 16: four binary digits, rounded up.
    num_units = -(-num_bytes // unit)
    digits = range(num_units.bit_length() - 1, -1, -1)
    return [unit << digit for digit in digits if num_units >> digit & 1]


SMALLEST_BLOCK = 1 << 16
"""Bytes. Smaller blocks would save less than the call that copies them costs."""


class _HostMemory:
    """Host memory for the bytes of ``source``, reserved while this object exists."""

    def __init__(self, source: Tensor) -> None:
        self.num_bytes = len(source)
        self.blocks: list[Tensor] = []
        """What is used of each block, in order."""
        left = self.num_bytes
        for size in block_sizes(self.num_bytes):
            self.blocks.append(self._block(size, pinned=source.is_cuda)[:left])
            left -= size

    def parts_of(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The parts of a tensor of as many bytes that belong into each block."""
        parts: tuple[Tensor, ...] = tensor.split([len(block) for block in self.blocks])
        return parts

    def _block(self, size: int, *, pinned: bool) -> Tensor:
        if pinned:
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        try:
            memory = _free[size].pop()
        except IndexError:
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            _addresses.add(memory.data_ptr())
        weakref.finalize(self, _free[size].append, memory)
        return memory


_free: dict[int, list[Tensor]] = defaultdict(list)
"""Unused host memory by size. Never returned to the system, because the next pass needs as much."""
_addresses: set[int] = set()


def is_host_memory(tensor: Tensor) -> bool:
    """Whether a tensor is in the memory that stands for host memory in training without a GPU."""
    return tensor.untyped_storage().data_ptr() in _addresses
