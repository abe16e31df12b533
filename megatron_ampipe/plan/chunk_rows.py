"""The rows of each chunk, and the number of query-key pairs that its attention computes. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import SequenceLayout, Span


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one chunk.

    Attributes:
        hidden: Rows of the residual stream of one rank.
        pairs: Unmasked query-key pairs of the chunk's query rows, on the rank with the most pairs.
        keys: Number of keys that at least one of these queries attends to.
        merged: Query rows that also attend to keys of earlier chunks.
    """

    hidden: int
    pairs: int
    keys: int
    merged: int


def chunk_rows(
    workload: Workload, lengths: Sequence[int], *, shares_schedule: bool = False
) -> tuple[Rows, ...]:
    """The rows, and the sizes of the attention, of each chunk.

    Args:
        workload: The block.
        lengths: Rows of the residual stream of one rank in each chunk.
        shares_schedule: Layers share the schedule: every tensor-parallel rank holds a part of every chunk.
    """
    assert sum(lengths) == workload.rows and min(lengths) > 0, lengths
    found = []
    start = 0
    for length in lengths:
        found.append(_rows(workload, start, length, shares_schedule=shares_schedule))
        start += length
    return tuple(found)


def _rows(workload: Workload, start: int, length: int, *, shares_schedule: bool) -> Rows:
    # With zigzag slices, the first or the last context-parallel rank has the most pairs of a chunk.
    last = workload.context - 1
    by_rank = []
    shards, width = (1, workload.tensor) if shares_schedule else (workload.tensor, 1)
    for rank in {0, last}:
        layout = SequenceLayout(tensor_ranks=shards, context_ranks=workload.context, context_rank=rank)
        by_rank.append(
            [
                span
                for shard in range(shards)
                for span in layout.spans(
                    shard * workload.rows + start * width,
                    length * width,
                    sequence_length=workload.sequence_length,
                )
            ]
        )
    heaviest = max(by_rank, key=lambda spans: sum(_pairs(span, workload.window) for span in spans))
    return Rows(
        hidden=length,
        pairs=sum(_pairs(span, workload.window) for span in heaviest),
        keys=max(span.global_end for span in heaviest),
        merged=sum(span.length for span in heaviest if span.global_start),
    )


def _pairs(span: Span, window: int | None) -> int:
    """Query-key pairs of a span: row ``i`` attends to itself and to the earlier keys within the window."""

    def up_to(end: int) -> int:
        """Over the rows ``[0, end)``."""
        if window is None or end <= window + 1:
            return end * (end + 1) // 2
        return (window + 1) * (window + 2) // 2 + (end - window - 1) * (window + 1)

    return up_to(span.global_end) - up_to(span.global_start)
