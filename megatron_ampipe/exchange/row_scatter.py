"""Rows of attention over tensor-parallel ranks, gathered before the projection of queries and scattered after
that of outputs.

With tensor parallelism, every rank computes the heads that it has, for the rows of all ranks. With sequence
parallelism, a rank keeps the rows that it owns. Megatron's linear layers gather and scatter inside; here that
is done in stages (:data:`~megatron_ampipe.schedule.kinds.GATHER_ROWS` and ``SCATTER_ROWS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.exchange.transports import all_gather, exchange_chunks
from megatron_ampipe.runtime.collectives import Transfer

# R rows of the residual stream of one rank, P ranks.


class RegatheredRows:
    """Rows of all ranks that the graph of a stage does not keep: as in Megatron, a rank keeps what it owns.

    Args:
        owned: ``[R, B, D]``.

    Attributes:
        gathered: ``[P * R, B, D]``, once more, for the backward of the stage.
    """

    def __init__(self, owned: Tensor) -> None:
        self._owned: Tensor | None = owned
        self.gathered: Tensor | None = None
        self._num_saved = 0

    def take_owned(self) -> Tensor:
        """The rows to gather once more; forgets them."""
        owned, self._owned = self._owned, None
        assert owned is not None, "rows are gathered a third time"
        return owned

    @contextmanager
    def dropped(self, gathered: Tensor) -> Iterator[None]:
        """Within it, what a graph saves of these rows is a place without them."""
        memory = gathered.untyped_storage()._cdata

        def drop(saved: Tensor) -> Any:
            if saved.untyped_storage()._cdata != memory:
                return saved
            self._num_saved += 1
            return partial(
                torch.as_strided,
                size=saved.shape,
                stride=saved.stride(),
                storage_offset=saved.storage_offset(),
            )

        with torch.autograd.graph.saved_tensors_hooks(drop, self._give_back):
            yield

    def _give_back(self, saved: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        gathered = self.gathered
        assert gathered is not None, "a stage is differentiated before its rows are gathered again"
        self._num_saved -= 1
        if not self._num_saved:
            self.gathered = None
        return saved(gathered)


class RowTransfers:
    """The transfers of rows of one pass of one micro-batch through a block.

    Args:
        group: The ranks, in a group that no other lane uses (``lane_group``).
        gathers: What attention is given is gathered as a stage as well.
        keeps: What was gathered needs no second gather in the backward pass.

    Attributes:
        gathers: As given.
    """

    def __init__(self, group: dist.ProcessGroup, *, gathers: bool, keeps: bool) -> None:
        self.gathers, self._group, self._keeps = gathers, group, keeps
        self._regathered: dict[int | None, RegatheredRows] = {}

    def again(self) -> RowTransfers:
        """Those of a second run of the forward pass."""
        return RowTransfers(self._group, gathers=self.gathers, keeps=self._keeps)

    def exchange(
        self, tensors: Sequence[Sequence[Tensor]], num_rows: Sequence[int], *, scatter: bool
    ) -> Transfer:
        """Start the gather of some chunks, of each one tensor: ``[R, B, D]`` to ``[P * R, B, D]``.

        Args:
            tensors: Of each chunk.
            num_rows: R of each chunk.
            scatter: The reverse, a reduce-scatter: each is the adjoint of the other.
        """
        transports = [all_gather(rows, self._group) for rows in num_rows]
        return exchange_chunks(transports, tensors, combine=scatter)

    def gather(
        self, chunks: Sequence[int | None], tensors: Sequence[Sequence[Tensor]], num_rows: Sequence[int]
    ) -> Transfer:
        """Of each chunk ``[R, B, D]`` to ``[P * R, B, D]``."""
        if not self._keeps:
            for chunk, (owned,) in zip(chunks, tensors, strict=True):
                self._regathered[chunk] = RegatheredRows(owned)
        return self.exchange(tensors, num_rows, scatter=False)

    def regather(self, chunks: Sequence[int | None], num_rows: Sequence[int]) -> Transfer:
        """The same once more, for the graph of the stage that ran within :meth:`dropped`."""
        regathered = [self._regathered.pop(chunk) for chunk in chunks]
        owned = [one.take_owned() for one in regathered]
        transfer = self.exchange([[rows] for rows in owned], num_rows, scatter=False)
        for one, gathered in zip(regathered, transfer.outputs, strict=True):
            one.gathered = gathered
        return replace(transfer, outputs=(), uses=(*owned, *transfer.uses, *transfer.outputs))

    def dropped(self, chunk: int | None, gathered: Tensor) -> AbstractContextManager[None]:
        """Within it, no graph keeps what was gathered of a chunk, unless it is to be kept."""
        return nullcontext() if self._keeps else self._regathered[chunk].dropped(gathered)
