"""HybridEP's exchange of one chunk with fixed rows: a budget of received rows, counts on the device.

HybridEP sends the rows that there are, and sorts them by expert into memory of a given number of rows. So a
budget costs no bytes on the wire, and each rank has one number of rows for each chunk. With it, the host does
not wait. Rows after the last are not written. A rank drops rows that do not fit, the last ones, and a flag of
its handle says so; no other rank sees that.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from megatron_ampipe.exchange.budgets import ChunkRows, ReceivedRows
from megatron_ampipe.exchange.fixed_rows import BudgetedChunk, ExpertOffsets
from megatron_ampipe.exchange.flex import FlexChunk, FlexTransport, HybridEPTransport


class FixedHybridEPChunk(BudgetedChunk, FlexChunk):
    """HybridEP's dispatcher of one chunk, with fixed rows where the chunk has a budget."""

    def _new_rows(self) -> ChunkRows:
        rows = ReceivedRows(self.counts_group)
        self._fixed_rows.add(rows)
        return rows

    def take_splits(self, first: Self) -> None:
        """See ``BudgetedChunk``; HybridEP counts again in the call that sends."""
        self._budget = first._budget

    def budget_version(self, num_chunks: int) -> int | None:
        """As in ``BudgetedChunk``; it also grows when HybridEP has made its memory anew for longer chunks."""
        version = super().budget_version(num_chunks)
        return None if version is None else version + HybridEPTransport.num_growths

    def transport(self) -> FlexTransport:
        """As in ``FlexChunk``; with a budget its rows are known before the counts."""
        if self._transport is None and self._budget is not None:
            budget = self._budget.received_by(self.counts_group.rank())
            self._transport = HybridEPTransport(self._comm_manager, num_rows=sum(budget))
        return super().transport()

    def dispatch_postprocess(  # type: ignore[override]  # the stage of the experts knows both
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | ExpertOffsets, Tensor]:
        """As in ``FlexChunk``, with anything after the rows of all experts and offsets on the device."""
        transport, rows = self.transport(), self._rows
        assert isinstance(transport, HybridEPTransport) and isinstance(rows, ReceivedRows)
        if self._budget is None:
            rows.record_own(len(hidden_states), hidden_states.device)
            output, counts, output_probs = super().dispatch_postprocess(hidden_states, probs)
            return output, counts, output_probs
        ends = transport.tokens_per_expert.cumsum(dim=0)
        # Counts are those of the rows that fitted.
        too_many = len(hidden_states) + 1
        rows.record_own(torch.where(transport.overflow != 0, too_many, ends[-1:]), ends.device)
        return hidden_states, ExpertOffsets(ends.to(torch.int32)), probs
