"""Memory around CUDA graphs: static tensors to which inputs are copied, and tensors that own no memory."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor


class StaticInputs:
    """Static tensors for the inputs of the graphs of a set. Graphs share those that no graph keeps.

    An input is copied right before a replay, so without a reference from what the graph has left nobody needs
    it afterwards. Calls get another tensor of the same memory, which counts as a reference while it lives.
    """

    def __init__(self) -> None:
        self._free: defaultdict[tuple[object, ...], list[Tensor]] = defaultdict(list)
        self._taken: list[tuple[Tensor, int]] = []

    def take(self, like: Tensor) -> Tensor:
        """Get a static tensor that no other input of the same graph uses."""
        free = self._free[like.shape, like.dtype, like.device]
        static = free.pop() if free else torch.empty(like.shape, dtype=like.dtype, device=like.device)
        self._taken.append((static, _references(static)))
        return static

    def give_back(self) -> None:
        """After the capture of a graph, let other graphs use its inputs, except those that are still used."""
        for static, references in self._taken:
            if _references(static) == references:
                self._free[static.shape, static.dtype, static.device].append(static)
        self._taken.clear()


def _references(tensor: Tensor) -> int:
    """How many tensors share the memory of a tensor."""
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return count


def without_memory(tensor: Tensor) -> Tensor:
    """A tensor at the same address that does not own the memory."""
    memory = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), memory.device, memory.nbytes()
    )
    with torch.no_grad():
        return tensor.new_empty(0).set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())
