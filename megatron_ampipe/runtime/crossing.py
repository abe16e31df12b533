"""What several streams use of one block call, as far as the block itself knows: the tensors that travel.

torch's caching allocator may hand memory that the host has released to the next allocation on the stream
that made it, whatever other streams still do with it. Most tensors stay on one stream. Those that a
collective reads or writes do not, and :class:`Crossing` names them, stage by stage, to the executor, which
keeps them for as long as it must (:mod:`.stream_order` states the rule). Called by :mod:`.block_call` where
the executor has streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef


class Crossing:
    """The memory of one forward pass and its backward that a collective has touched.

    Known by storage, so that views and what a stage hands on unchanged are found as well. Weak references
    keep no memory: what the graph of a stage has not saved is freed as soon as nobody uses it.
    """

    def __init__(self) -> None:
        self._travelled: dict[int, StorageWeakRef] = {}
        self._used: list[UntypedStorage] = []

    def travel(self, tensors: Iterable[Tensor]) -> None:
        """The stage at hand is a collective that reads or writes these."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._travelled[storage._cdata] = StorageWeakRef(storage)
            self._used.append(storage)

    def use(self, tensors: Iterable[Tensor | None]) -> tuple[StorageWeakRef, ...]:
        """The stage at hand computes with these.

        Returns:
            Those that have travelled, for :meth:`use_again`.
        """
        found = []
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            reference = self._travelled.get(storage._cdata)
            if reference is not None:
                self._used.append(storage)
                found.append(reference)
        return tuple(found)

    def use_again(self, references: Sequence[StorageWeakRef]) -> None:
        """The stage at hand differentiates what used these, and releases what its graph has kept."""
        for reference in references:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None:
                self._used.append(storage)

    def take(self) -> list[UntypedStorage]:
        """What the stage at hand has used so far; the executor asks when the stage is issued."""
        used, self._used = self._used, []
        return used
