"""The sums of the gradients of keys and values over all chunks that attend to them."""

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
        self.allocated: tuple[Tensor, ...] = ()
        """The buffers of the sums, if there are any yet."""

    def add(self, start: int, key: Tensor, value: Tensor, *, sequence: int | None = None) -> None:
        """Add the gradients of the rows from ``start`` on, ``[rows, B, G, ...]``; with ``sequence`` of this
        one of the micro-batch, ``[rows, 1, G, ...]``."""
        for total, part in zip(self.totals(), (key, value), strict=True):
            of_batch = total if sequence is None else total[:, sequence : sequence + 1]
            of_batch[start : start + part.shape[0]].add_(part)

    def totals(self) -> tuple[Tensor, ...]:
        """The sums so far, of keys and of values; later calls of :meth:`add` change these tensors."""
        if not self.allocated:
            self.allocated = tuple(
                torch.zeros(like.shape, dtype=sum_dtype(like), device=like.device) for like in self._like
            )
        return self.allocated

    def rounded(self, total: Tensor, index: int) -> Tensor:
        """A sum in the dtype of the keys (index 0) or values (1)."""
        return total.to(self._like[index].dtype)


def sum_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which several gradients of a tensor are summed: at least fp32."""
    return torch.float32 if tensor.element_size() < 4 else tensor.dtype
