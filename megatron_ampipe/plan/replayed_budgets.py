"""What ``--ampipe-rows fixed`` would have done in a recorded training: steps repeated, and rows sent.

Budgets are learned from the recorded iterations as a training learns them from its steps. A record has one
micro-batch of an iteration, and a step exceeds a budget if any of its micro-batches does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ampipe.plan.recorded_routing import LayerRouting, RecordedRouting, RoutingRecord
from megatron_ampipe.schedule.row_budget import (
    WARM_UP,
    WINDOW,
    Counts,
    Margin,
    RowBudget,
    next_budget,
)

# P ranks that share the experts, R ranks of the recording.


@dataclass(frozen=True, slots=True)
class ReplayedBudgets:
    """What budgets would have done.

    Attributes:
        num_steps: Iterations with budgets.
        num_repeated: Those of them that exceed one.
        padding: Rows of budgets over the routed rows.
        num_changes: After how many steps a budget is another one; CUDA graphs are then captured again.
    """

    num_steps: int
    num_repeated: int
    padding: float
    num_changes: int


class _Chunk:
    """A chunk of a layer: the largest counts of a window, and the budget."""

    def __init__(self) -> None:
        self.budget: RowBudget | None = None
        self.counts: Counts = ()
        """Of the present iteration."""
        self._largest: list[list[int]] = []

    def count(self, counts: Counts) -> None:
        """Take the counts of an iteration."""
        self.counts = counts
        if not self._largest:
            self._largest = [list(row) for row in counts]
            return
        for row, new in zip(self._largest, counts, strict=True):
            row[:] = map(max, row, new)

    def exceeds(self) -> bool:
        """Whether a count is above the budget."""
        assert self.budget is not None
        return any(
            count > number
            for row, numbers in zip(self.counts, self.budget.rows, strict=True)
            for count, number in zip(row, numbers, strict=True)
        )

    def learn(self, factor: float, *, may_shrink: bool) -> bool:
        """Learn a budget; returns whether it is another one. If it may shrink, a new window begins."""
        before = self.budget
        self.budget = next_budget(before, self._largest, margin=factor, may_shrink=may_shrink)
        if may_shrink:
            self._largest = []
        return self.budget is not before


def replay(routing: RecordedRouting, *, ranks: int, margin: float, joins_sources: bool) -> ReplayedBudgets:
    """Learn and use budgets in the recorded iterations that have the chunks of the last one.

    Args:
        routing: The recording.
        ranks: P, ranks between which the experts are divided in order.
        margin: ``--ampipe-rows-margin``.
        joins_sources: Whether a budget is one number for each receiving rank, as with HybridEP, and not one
            for each pair of ranks.
    """
    records = [record for record in routing.records if record.tokens == routing.records[-1].tokens]
    factor = Margin(margin)
    chunks: list[_Chunk] = []
    num_steps = num_repeated = num_changes = sent = routed = in_window = 0
    for number, record in enumerate(records):
        all_counts = list(_counts_of(record, ranks, joins_sources=joins_sources))
        chunks = chunks or [_Chunk() for _ in all_counts]
        for chunk, counts in zip(chunks, all_counts, strict=True):
            chunk.count(counts)
        is_repeated = False
        if number >= WARM_UP:
            num_steps += 1
            is_repeated = any(chunk.exceeds() for chunk in chunks)
            sent += sum(sum(map(sum, chunk.budget.rows)) for chunk in chunks if chunk.budget is not None)
            routed += sum(sum(map(sum, chunk.counts)) for chunk in chunks)
        if is_repeated:
            num_repeated += 1
            factor.after_repeat()
        in_window += 1
        is_full = in_window >= WINDOW
        if is_full:
            in_window = 0
            factor.after_window()
        if is_full or is_repeated or number == WARM_UP - 1:
            changed = [chunk.learn(factor.factor, may_shrink=is_full) for chunk in chunks]
            num_changes += any(changed) and number >= WARM_UP
    return ReplayedBudgets(num_steps, num_repeated, sent / routed if routed else 1.0, num_changes)


def _counts_of(record: RoutingRecord, ranks: int, *, joins_sources: bool) -> Iterator[Counts]:
    """The counts of every chunk of every layer, ``[R][P]``, or ``[1][P]`` where sources are joined."""
    for layer in record.layers:
        for chunk in range(len(record.tokens)):
            rows = [_rows_to(layer, part, chunk, ranks) for part in range(record.num_parts)]
            size = len(rows) if joins_sources else record.batch
            yield [_added(parts) for parts in itertools.batched(rows, size)]


def _rows_to(layer: LayerRouting, part: int, chunk: int, ranks: int) -> list[int]:
    """Rows of a part for each rank."""
    per_expert = layer.counts[part][chunk]
    return [sum(experts) for experts in itertools.batched(per_expert, len(per_expert) // ranks)]


def _added(rows: Sequence[Sequence[int]]) -> list[int]:
    """The sum of each column."""
    return [sum(column) for column in zip(*rows, strict=True)]
