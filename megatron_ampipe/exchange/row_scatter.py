"""Rows of attention over tensor-parallel ranks, as stages: gathered before the projection of queries and
scattered after that of outputs. Megatron's linear layers do both inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.exchange.transports import all_gather, exchange_chunks
from megatron_ampipe.runtime.collectives import Transfer

# R rows of the residual stream of one rank, P ranks.


class RegatheredRows:
    """Rows of all ranks that the graph of a stage does not keep: as in Megatron, a rank keeps what it owns.

    Attributes:
        owned: ``[R, B, D]``, until they are gathered once more.
        gathered: ``[P * R, B, D]``, once more, for the backward of the stage.
    """

    def __init__(self, owned: Tensor) -> None:
        self.owned: Tensor | None = owned
        self.gathered: Tensor | None = None
        self._num_saved = 0

    @contextmanager
    def dropped(self, gathered: Tensor) -> Iterator[None]:
        """Within it, what a graph saves of these rows is a place without them."""
        memory = gathered.untyped_storage()._cdata

        def drop(saved: Tensor) -> Any:
            if saved.untyped_storage()._cdata != memory:
                return saved
            self._num_saved += 1
            return saved.shape, saved.stride(), saved.storage_offset()

        with torch.autograd.graph.saved_tensors_hooks(drop, self._give_back):
            yield

    def _give_back(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        assert self.gathered is not None, "a stage is differentiated before its rows are gathered again"
        rows = self.gathered.as_strided(*saved)
        self._num_saved -= 1
        if not self._num_saved:
            self.gathered = None
        return rows


class RowTransfers:
    """The transfers of rows of one pass of one micro-batch through a block.

    Args:
        group: The ranks, in a group that no other lane uses (``lane_group``).
        keeps: What was gathered needs no second gather in the backward pass.
    """

    def __init__(self, group: dist.ProcessGroup, *, keeps: bool) -> None:
        self._group, self._keeps = group, keeps
        self._regathered: dict[int | None, RegatheredRows] = {}

    def exchange(self, tensors: Sequence[Sequence[Tensor]], *, scatter: bool) -> Transfer:
        """Start the gather of each chunk's ``[R, B, D]`` to ``[P * R, B, D]``, or the reduce-scatter back."""
        ranks = self._group.size() if scatter else 1
        transports = [all_gather(rows.shape[0] // ranks, self._group) for (rows,) in tensors]
        return exchange_chunks(transports, tensors, combine=scatter)

    def gather(self, chunks: Sequence[int | None], tensors: Sequence[Sequence[Tensor]]) -> Transfer:
        """Of each chunk ``[R, B, D]`` to ``[P * R, B, D]``."""
        if not self._keeps:
            for chunk, (owned,) in zip(chunks, tensors, strict=True):
                self._regathered[chunk] = RegatheredRows(owned)
        return self.exchange(tensors, scatter=False)

    def regather(self, chunks: Sequence[int | None]) -> Transfer:
        """The same once more, for the graph of the stage that ran within :meth:`dropped`."""
        regathered = [self._regathered.pop(chunk) for chunk in chunks]
        owned = [rows.owned for rows in regathered]
        transfer = self.exchange([[part] for part in owned], scatter=False)
        for rows, gathered in zip(regathered, transfer.outputs, strict=True):
            rows.owned, rows.gathered = None, gathered
        return replace(transfer, outputs=(), uses=(*owned, *transfer.uses, *transfer.outputs))

    def dropped(self, chunk: int | None, gathered: Tensor) -> AbstractContextManager[None]:
        """Within it, no graph keeps what was gathered of a chunk, unless it is to be kept."""
        return nullcontext() if self._keeps else self._regathered[chunk].dropped(gathered)
