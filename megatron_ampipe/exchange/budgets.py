"""Budgets of ``--ampipe-rows fixed``: how many rows a chunk may send, learned from the largest counts.

Counts stay on the device. The host reads them when budgets are learned, between two steps; and one flag in
each step, :meth:`FixedRows.overflow`, by which ``launch.fixed_rows`` knows whether to repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.collectives import copy_to_device
from megatron_ampipe.schedule.row_budget import Counts, RowBudget, next_budget

# P expert-parallel ranks.


class Slots(NamedTuple):
    """For every row of a padded buffer, which has a part for each rank: its rank, and its place there."""

    rank: Tensor
    place: Tensor
    starts: Tensor
    """``[P]``: where each part begins."""
    sizes: Tensor
    """``[P]``: rows of each part."""

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Slots:
        """The slots of a buffer with parts of these sizes."""
        rank = [index for index, size in enumerate(sizes) for _ in range(size)]
        place = [row for size in sizes for row in range(size)]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        columns = (rank, place, starts, list(sizes))
        return cls(*(copy_to_device(torch.tensor(column, dtype=torch.int64), device) for column in columns))


class ChunkRows:
    """What is known about the rows of one chunk of one layer; the same on all ranks of a group."""

    def __init__(self, rank: int, *, num_shares: int = 1) -> None:
        self._rank, self._num_shares = rank, num_shares
        self.budget: RowBudget | None = None
        """None until it is learned; the chunk then has exact rows."""
        self.version = 0
        """How often the budget was set."""
        self.limit: Tensor | None = None
        """The budget on the device, ``[P, P]`` int64."""
        self.peak: Tensor | None = None
        """``[P, P]`` int64, on the device: the largest counts of the current step."""
        self.window: Tensor | None = None
        """The same of the last steps, from which the budget is learned."""
        self.num_steps = 0
        """Steps that ran the chunk, until it has a budget."""
        self.runs_now = False
        """Whether the current step runs it; with a budget, a CUDA graph may do so without saying it."""
        self.sent: Slots | None = None
        """Of the rows that this rank sends. Made with the budget: a pass copies nothing to the device."""
        self.received: Slots | None = None
        """Of the rows that it receives, with those that it gathers from the ranks that share its experts."""

    def record(self, counts: Tensor) -> None:
        """Take over counts ``[P, P]`` of a micro-batch: rows of each rank for each rank."""
        self.runs_now = True
        if self.peak is None:
            self.peak = counts.clone()
        else:
            torch.maximum(self.peak, counts, out=self.peak)

    def learn(self, margin: float, *, may_shrink: bool) -> None:
        """Set the budget from the largest counts of the window (``next_budget``). The host waits for them.

        If it ``may_shrink``, a new window begins. The present budget stays if no step of the window ran the
        chunk.
        """
        if self.window is None:
            return
        counts: Counts = self.window.tolist()
        if self.budget is not None and not any(map(any, counts)):
            return
        following = next_budget(self.budget, counts, margin=margin, may_shrink=may_shrink)
        if may_shrink:
            self.window.zero_()
        if following is not self.budget:
            self.use(following, self.window.device)

    def use(self, budget: RowBudget, device: torch.device) -> None:
        """Set the budget, and make its constants."""
        self.budget = budget
        self.version += 1
        self.limit = copy_to_device(torch.tensor(budget.rows), device)
        self._make_slots(budget, device)

    def _make_slots(self, budget: RowBudget, device: torch.device) -> None:
        self.sent = Slots.of(budget.sent_by(self._rank), device)
        self.received = Slots.of(budget.received_by(self._rank) * self._num_shares, device)


class ReceivedRows(ChunkRows):
    """The rows that each rank receives of one chunk, whoever sends them: budget and counts are ``[1, P]``.

    Of a transport that sends the rows that there are, and whose budget is the size of what is received.
    A rank knows its own count; budgets are learned from those of all ranks of the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank())
        self._group = group

    @property
    def own_budget(self) -> int | None:
        """How many rows this rank can receive; None without a budget."""
        return None if self.budget is None else self.budget.rows[0][self._rank]

    def record_own(self, count: int | Tensor, device: torch.device) -> None:
        """Take over how many rows this rank has received of a micro-batch, a number or ``[1]`` int64."""
        self.runs_now = True
        if self.peak is None:
            self.peak = torch.zeros((1, self._group.size()), dtype=torch.int64, device=device)
        own = self.peak[0, self._rank : self._rank + 1]
        if isinstance(count, int):
            own.clamp_(min=count)
        else:
            torch.maximum(own, count, out=own)

    def learn(self, margin: float, *, may_shrink: bool) -> None:
        """As in ``ChunkRows``; all ranks of the group call it together."""
        if self.window is not None:
            dist.all_reduce(self.window, dist.ReduceOp.MAX, group=self._group)
        super().learn(margin, may_shrink=may_shrink)

    def _make_slots(self, budget: RowBudget, device: torch.device) -> None:
        """None: the transport sorts the rows."""


class FixedRows:
    """The chunks of all layers of a process that run with ``--ampipe-rows fixed``."""

    def __init__(self) -> None:
        self.is_active = False
        """Whether passes use budgets: only while somebody will ask for :meth:`overflow`."""
        self.is_watched = False
        """Whether somebody does that in training steps."""
        self.num_steps = self.num_repeated = 0
        """Training steps with budgets, and those that were repeated with exact rows."""
        self._chunks: list[ChunkRows] = []

    def new_chunk(self, rank: int, *, num_shares: int = 1) -> ChunkRows:
        """Add a chunk of a layer.

        ``rank`` is this rank's in its expert-parallel group; ``num_shares`` ranks share an expert.
        """
        chunk = ChunkRows(rank, num_shares=num_shares)
        self.add(chunk)
        return chunk

    def add(self, chunk: ChunkRows) -> None:
        """Add a chunk of a layer; in one order on all ranks of its group."""
        self._chunks.append(chunk)

    @property
    def budgets(self) -> list[RowBudget]:
        """The budgets that are learned."""
        return [chunk.budget for chunk in self._chunks if chunk.budget is not None]

    def begin_step(self) -> None:
        """Forget the counts of the current step."""
        for chunk in self._chunks:
            chunk.runs_now = False
            if chunk.peak is not None:
                chunk.peak.zero_()

    def overflow(self, device: torch.device) -> Tensor:
        """``[1]`` int32 on ``device``: 1 if any count of the current step exceeds its budget, else 0."""
        peaks, limits = [], []
        for chunk in self._chunks:
            if chunk.peak is not None and chunk.limit is not None:
                peaks.append(chunk.peak)
                limits.append(chunk.limit)
        if not peaks:
            return torch.zeros(1, dtype=torch.int32, device=device)
        return (torch.stack(peaks) > torch.stack(limits)).any().view(1).to(torch.int32)

    def end_step(self) -> None:
        """Take the counts of the current step over into the window from which budgets are learned."""
        for chunk in self._chunks:
            if chunk.peak is None:
                continue
            chunk.num_steps += chunk.runs_now
            if chunk.window is None:
                chunk.window = chunk.peak.clone()
            else:
                torch.maximum(chunk.window, chunk.peak, out=chunk.window)

    def learn(self, margin: float, *, may_shrink: bool = True) -> None:
        """Set the budget of every chunk, see :meth:`ChunkRows.learn`; only between two steps."""
        for chunk in self._chunks:
            chunk.learn(margin, may_shrink=may_shrink)

    def learn_first(self, margin: float, *, warm_up: int) -> None:
        """Set the first budget of the chunks that have run in so many steps with exact rows.

        Each number of chunks that is tried has other chunks.
        """
        for chunk in self._chunks:
            if chunk.budget is None and chunk.num_steps >= warm_up:
                chunk.learn(margin, may_shrink=False)

    def learn_again(self, margin: float, *, may_shrink: bool) -> None:
        """Set the budget of every chunk that has one."""
        for chunk in self._chunks:
            if chunk.budget is not None:
                chunk.learn(margin, may_shrink=may_shrink)
