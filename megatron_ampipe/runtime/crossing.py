"""Finds the memory of a block call that several CUDA streams use: the tensors of its collectives.

When the host releases a tensor, torch's caching allocator may reuse its memory for the next allocation on the
stream that allocated it, even if other streams are still using it. Most tensors stay on one stream. The
inputs and outputs of collectives do not. :class:`Crossing` reports them, stage by stage, to the executor,
which keeps them as long as necessary (:mod:`.stream_order` states the rule). Called by :mod:`.steps` if
the executor uses streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef


class Crossing:
    """The memory that collectives have read or written in one forward pass and its backward.

    Identified by storage, so that views and tensors that a stage passes on unchanged are found as well. The
    references are weak: a tensor that no stage's graph has saved is freed after its last use.
    """

    def __init__(self) -> None:
        self._communicated: dict[int, StorageWeakRef] = {}
        self._used: list[UntypedStorage] = []

    def note_transfer(self, tensors: Iterable[Tensor]) -> None:
        """Record that the current stage is a collective that reads or writes these tensors."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._communicated[storage._cdata] = StorageWeakRef(storage)
            self._used.append(storage)

    def note_use(self, tensors: Iterable[Tensor | None]) -> tuple[StorageWeakRef, ...]:
        """Record that the current stage computes with these tensors.

        Returns:
            References to those that a collective has used, for :meth:`note_backward`.
        """
        found = []
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            reference = self._communicated.get(storage._cdata)
            if reference is not None:
                self._used.append(storage)
                found.append(reference)
        return tuple(found)

    def note_backward(self, references: Sequence[StorageWeakRef]) -> None:
        """Record that the current stage runs the backward of a stage that used these, releasing its graph."""
        for reference in references:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                self._used.append(storage)

    def take(self) -> list[UntypedStorage]:
        """Return and forget what the current stage has used; the executor calls this once per stage."""
        used, self._used = self._used, []
        return used
