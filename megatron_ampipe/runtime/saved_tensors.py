"""Saved activations that do not stay on the device between forward and backward: recompute and offload.

MPipeMoE, section III-D, restores the saved activations of an expert (T_M) by recomputing them, or by copying
them to host memory and back. On a GPU, host memory is pinned, and copies run on the current stream. On a CPU,
separate memory stands for it, which does not count as device memory (:func:`is_host_memory`).
"""

from __future__ import annotations

import dataclasses
import mmap
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.segment import with_history

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


LinearOutput = tuple[Tensor, Tensor | None]
"""What Megatron's linear layers return: an output, and a bias that the layer itself has not added."""


class InnerTensors:
    """The saved activations of one stage of one chunk, which are dropped and rebuilt by a second run.

    Unlike torch's checkpoint, the second run skips the last linear layer, because the backward does not need
    its output. Tensors are matched by the order in which operations save them, so both runs must be the same
    up to there. Between a *down* layer and the next *up* layer only the input of the down layer is dropped,
    because a second run does not repeat the operations there.

    With ``copied``, tensors stay until :meth:`store` and come back with :meth:`load`. Nothing runs again,
    except the sorting of redispatched tokens.

    Args:
        kept: Tensors that are never dropped: the parameters of the stage.
        copied: Copy tensors to host memory instead of recomputing them.
        resorted: With ``copied``, tokens sorted by expert are not copied: they are redispatched and sorted.
    """

    def __init__(self, kept: Collection[Tensor], *, copied: bool = False, resorted: bool = False) -> None:
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in kept)
        self._places: deque[_Place] = deque()
        self._drops, self._runs_again = True, False
        self._input: Tensor | None = None
        self._copied, self._resorted = copied, resorted
        self._copies: HostCopies | None = None
        self._token_places: list[_Place] = []

    @contextmanager
    def dropped(self) -> Iterator[None]:
        """A context for the first run, whose saved tensors are dropped."""
        with torch.autograd.graph.saved_tensors_hooks(self._drop, self._unpack):
            yield
        self._input = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context for the second run, whose saved tensors replace the dropped ones."""
        self._drops, self._runs_again = True, True
        if self._copied:
            with torch.no_grad():
                yield
            return
        hooks = torch.autograd.graph.saved_tensors_hooks(self._restore, self._unpack)
        with torch.enable_grad(), hooks:
            yield
        assert not self._places, f"a second run saved {len(self._places)} tensors less than the first"

    def store(self) -> Transfer:
        """Start to copy the tensors to host memory, after the first run."""
        tensors = [place.tensor for place in self._places if place.tensor is not None]
        assert len(tensors) == len(self._places), "tensors are stored that were not copied"
        self._copies = HostCopies(tensors)

        def release() -> None:
            for place in self._places:
                place.tensor = None

        return self._copies.store(release)

    def load(self) -> Transfer:
        """Start to copy the tensors back."""
        assert self._copies is not None, "tensors are loaded that were not stored"
        transfer, self._copies = self._copies.load(), None
        for tensor in transfer.outputs:
            self._places.popleft().tensor = tensor
        return dataclasses.replace(transfer, outputs=())

    def sorted(self, tokens: Tensor) -> None:
        """Called in both runs with the tokens ``[T, D]``, sorted by expert."""
        if not self._resorted:
            return
        if not self._runs_again:
            self._input = tokens
            return
        while self._token_places:
            self._token_places.pop().fill_from(tokens)

    def up[**P](self, product: Callable[P, LinearOutput], *args: P.args, **kwargs: P.kwargs) -> LinearOutput:
        """Run the first linear layer of an expert."""
        self._drops = True
        return product(*args, **kwargs)

    def down[**P](
        self,
        product: Callable[Concatenate[Tensor, P], LinearOutput],
        tokens: Tensor,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> LinearOutput:
        """Run the last linear layer of an expert on ``tokens [T, F]``; the second run only restores these.

        It then returns ``([T, 0], None)`` in place of an output and a bias.
        """
        self._drops = False
        if self._runs_again:
            while self._places and self._places[0].offset_in_input is not None:
                self._places.popleft().fill_from(tokens)
            return tokens.new_empty((*tokens.shape[:-1], 0)), None
        if self._copied:
            return product(tokens, *args, **kwargs)
        self._input = tokens
        try:
            return product(tokens, *args, **kwargs)
        finally:
            self._input = None

    def _drop(self, tensor: Tensor) -> Tensor | _Place:
        source = self._input
        if source is not None and tensor.untyped_storage()._cdata == source.untyped_storage()._cdata:
            place = _Place(tensor, int(tensor.storage_offset() - source.storage_offset()))
            (self._token_places if self._copied else self._places).append(place)
            return place
        if tensor.untyped_storage()._cdata in self._kept or not (self._drops or self._copied):
            return tensor
        place = _Place(tensor, None)
        if self._copied:
            place.tensor = tensor.detach()
        self._places.append(place)
        return place

    def _restore(self, tensor: Tensor) -> None:
        if not self._drops or tensor.untyped_storage()._cdata in self._kept:
            return
        place = self._places.popleft()
        saved, expected = (tensor.shape, tensor.dtype), (place.size, place.dtype)
        assert saved == expected, f"a second run saved {saved} in place of {expected}"
        place.tensor = tensor.detach()

    def _unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        assert packed.tensor is not None, "the backward of a stage runs before its tensors are restored"
        return packed.tensor


class ActivationTensors(InnerTensors):
    """Drops what the operations between the linear layers save; recomputes it when the graph first needs it.

    As Megatron's ``moe_act``, whose checkpoint calls ``backward`` and so fails under ``torch.autograd.grad``.

    Args:
        kept: See :class:`InnerTensors`.
        stage: Runs the linear layers with this object, on inputs without a graph.
    """

    def __init__(self, kept: Collection[Tensor], stage: Callable[[InnerTensors], object]) -> None:
        super().__init__(kept)
        self._stage, self._results = stage, list[LinearOutput]()
        self._next_results: Iterator[LinearOutput] = iter(())
        # Tensors saved before the first linear layer are not dropped.
        self._drops = False

    def up[**P](self, product: Callable[P, LinearOutput], *args: P.args, **kwargs: P.kwargs) -> LinearOutput:
        """Run the first linear layer of an expert; the second run reuses the output of the first run."""
        if self._runs_again:
            first_output, bias = next(self._next_results)
            self._drops = True
            (output,) = with_history([first_output])
            return output, bias
        self._drops = False
        output, bias = product(*args, **kwargs)
        self._kept |= {output.untyped_storage()._cdata}
        self._results.append((output.detach(), bias))
        self._drops = True
        return output, bias

    def _unpack(self, packed: Tensor | _Place) -> Tensor:
        if isinstance(packed, _Place) and packed.tensor is None:
            with self.restored():
                self._drops, self._next_results = False, iter(self._results)
                self._stage(self)
            # Not earlier: new tensors could get the addresses of tensors in ``_kept``.
            self._results, self._next_results = [], iter(())
        return super()._unpack(packed)


class _Place:
    """Stands in the graph for a saved tensor, perhaps a part of another one. Freed with the graph."""

    __slots__ = ("dtype", "offset_in_input", "size", "stride", "tensor")

    def __init__(self, tensor: Tensor, offset_in_input: int | None) -> None:
        self.size, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.offset_in_input = offset_in_input
        self.tensor: Tensor | None = None

    def part_of(self, source: Tensor) -> Tensor:
        """The tensor as a view of ``source``, the tensor whose memory it shared."""
        assert self.offset_in_input is not None
        start = source.storage_offset() + self.offset_in_input
        return source.detach().as_strided(self.size, self.stride, start)

    def fill_from(self, source: Tensor) -> None:
        self.tensor = self.part_of(source)


class DroppedOutput:
    """The output of a module that no graph keeps: the backward pass runs the module again.

    As Megatron's checkpoints that discard their output, which fail under ``torch.autograd.grad``. Gradients
    of the output go through the graph of the second run.

    Args:
        module: A module that works row by row and draws no random numbers.
    """

    def __init__(self, module: Module) -> None:
        self.module = module
        self._parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self._rows: Tensor | None = None
        self._second_run: tuple[Tensor, Tensor] | None = None

    def compute(self, rows: Tensor) -> Tensor:
        """Run the module on ``[R, B, D]``, differentiably. Call it once."""
        self._rows = rows.detach()
        output: Tensor = _ComputeWithoutGraph.apply(self, rows, *self._parameters)
        return output

    def recompute(self) -> Tensor:
        """The output of :meth:`compute` again, in the backward pass."""
        return self._graph()[1].detach()

    def differentiate(self, gradient: Tensor) -> Sequence[Tensor | None]:
        """The gradients of the rows and the parameters from that of the output. Call it once."""
        rows, output = self._graph()
        self._rows = self._second_run = None
        return torch.autograd.grad(output, (rows, *self._parameters), gradient)

    def _graph(self) -> tuple[Tensor, Tensor]:
        if self._second_run is None:
            assert self._rows is not None, "an output is needed before it is computed, or after its backward"
            with torch.enable_grad():
                (rows,) = with_history([self._rows])
                self._second_run = rows, self.module(rows)
        return self._second_run


class _ComputeContext(Protocol):
    """What a node of :class:`_ComputeWithoutGraph` saves."""

    dropped: DroppedOutput


class _ComputeWithoutGraph(torch.autograd.Function):
    """Runs the module of a :class:`DroppedOutput`. Parameters are arguments so that they get gradients."""

    @staticmethod
    def forward(ctx: _ComputeContext, dropped: DroppedOutput, rows: Tensor, *parameters: Tensor) -> Tensor:
        ctx.dropped = dropped
        output: Tensor = dropped.module(rows)
        return output

    @staticmethod
    def backward(ctx: _ComputeContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.dropped.differentiate(gradient)


@contextmanager
def recomputed(tensor: Tensor, recompute: Callable[[], Tensor]) -> Iterator[None]:
    """A context in which no graph saves ``tensor``; backward gets it from ``recompute()``, in its layout.

    So a rank saves only its own part of gathered rows, or only the input of a norm, as in Megatron.
    """
    # The graph keeps the hooks, which must not refer to the tensor.
    memory, begin = tensor.untyped_storage()._cdata, tensor.storage_offset()

    def drop(saved: Tensor) -> Tensor | _Place:
        is_kept = saved.untyped_storage()._cdata != memory
        return saved if is_kept else _Place(saved, int(saved.storage_offset() - begin))

    def unpack(packed: Tensor | _Place) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.part_of(recompute())

    with torch.autograd.graph.saved_tensors_hooks(drop, unpack):
        yield
