"""Sequence parallelism by chunk: every tensor-parallel rank holds a part of every chunk.

Megatron gives each rank one part of the sequence. A chunk of consecutive rows then lives on one rank or two,
and a chunk of the same rows of every rank needs the keys of all others. So where layers share a schedule,
rows are exchanged once before the first layer and back after the last. Used by :mod:`.pipelined_block`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor

# R rows of the residual stream on one rank, B batch, D hidden size.


class ChunkSharding:
    """The exchange of rows for chunks of given lengths.

    Args:
        lengths: Rows of one rank in each chunk.
        group: The tensor-parallel ranks.
    """

    def __init__(self, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        ranks, rank, num_rows = group.size(), group.rank(), sum(lengths)
        self._group = group
        # By rank, which rows of the sequence it holds in chunks.
        held: list[list[int]] = [[] for _ in range(ranks)]
        for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
            for holder in range(ranks):
                first = start * ranks + holder * length
                held[holder] += range(first, first + length)
        own = range(rank * num_rows, (rank + 1) * num_rows)
        to = [[row - own.start for row in rows if row in own] for rows in held]
        self._sent = [len(rows) for rows in to]
        self._received = [
            sum(source * num_rows <= row < (source + 1) * num_rows for row in held[rank])
            for source in range(ranks)
        ]
        # Rows arrive in the order of the sequence, which is that of the chunks.
        order = torch.tensor([row for rows in to for row in rows])
        self._order, self._inverse = order, torch.argsort(order)

    def by_chunk(self, hidden: Tensor) -> Tensor:
        """``[R, B, D]``, a part of the sequence, to ``[R, B, D]``, a part of every chunk. Differentiable."""
        rows = hidden.index_select(0, self._order.to(hidden.device))
        moved: Tensor = all_to_all(self._group, rows, self._received, self._sent)
        return moved

    def by_sequence(self, hidden: Tensor) -> Tensor:
        """The inverse of :meth:`by_chunk`."""
        moved = all_to_all(self._group, hidden.contiguous(), self._sent, self._received)
        return moved.index_select(0, self._inverse.to(hidden.device))
