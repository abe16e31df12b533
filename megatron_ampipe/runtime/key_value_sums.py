"""Accumulates the gradients of keys and values over all chunks that attend to them.

Called by :mod:`.steps`, and by attention kernels that can accumulate directly into it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# S keys, B batch, G key/value heads, C head size of keys, V of values.


class KeyValueSums:
    """The gradients of keys and values, summed in fp32 over all chunks that attend to them.

    Args:
        key: ``[S, B, G, C]``, all rows; gives shape and dtype.
        value: ``[S, B, G, V]``, likewise.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self._like = key, value
        self._totals: tuple[Tensor, ...] = ()
        self._lowest = key.shape[0]
        """Rows below this index have not been written yet."""

    def add(self, start: int, key: Tensor, value: Tensor) -> None:
        """Add the gradients of the rows from ``start`` on, each ``[rows, B, G, ...]``.

        Rows without an earlier contribution are overwritten, not added to: a backward pass that begins at the
        end of the sequence never zero-fills the buffers.
        """
        self._allocate()
        end = start + key.shape[0]
        first_added = min(end, max(start, self._lowest))
        for total, part in zip(self._totals, (key, value), strict=True):
            if end < self._lowest:
                total[end : self._lowest].zero_()
            if start < first_added:
                total[start:first_added].copy_(part[: first_added - start])
            if first_added < end:
                total[first_added:end].add_(part[first_added - start :])
        self._lowest = min(self._lowest, start)

    def add_to_sequence(self, sequence: int, start: int, key: Tensor, value: Tensor) -> None:
        """:meth:`add` for one sequence of the micro-batch: its gradients ``[rows, 1, G, ...]``."""
        self._allocate()
        self._zero_unwritten()
        end = start + key.shape[0]
        for total, part in zip(self._totals, (key, value), strict=True):
            total[start:end, sequence : sequence + 1].add_(part)

    def totals(self) -> tuple[Tensor, ...]:
        """The sums so far, of keys and of values; later calls of :meth:`add` change these tensors."""
        assert self._totals, "nothing has attended to these keys"
        self._zero_unwritten()
        return self._totals

    @property
    def allocated(self) -> tuple[Tensor, ...]:
        """The buffers of the sums, if there are any yet."""
        return self._totals

    def rounded(self, total: Tensor, index: int) -> Tensor:
        """A sum in the dtype of the keys (index 0) or values (1)."""
        dtype = self._like[index].dtype
        return total if total.dtype == dtype else total.to(dtype)

    def _allocate(self) -> None:
        if not self._totals:
            self._totals = tuple(
                torch.empty(like.shape, dtype=sum_dtype(like), device=like.device) for like in self._like
            )

    def _zero_unwritten(self) -> None:
        if self._lowest:
            for total in self._totals:
                total[: self._lowest].zero_()
            self._lowest = 0


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which several gradients of a tensor are summed: at least fp32."""
    return torch.float32 if tensor.element_size() < 4 else tensor.dtype
