"""Where a sequence is cut.

A chunk names its rows twice: as rows of the residual stream that this rank holds, and as rows of the
queries that attention sees. The two are the same unless sequence parallelism shards the residual
stream. Pure arithmetic; called by ``layers`` once per sequence length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ampipe.errors import BadInput


@dataclass(frozen=True, slots=True)
class Span:
    """A run of rows that is contiguous in local memory and in the whole sequence.

    Attributes:
        local_start: First row in the local tensor.
        length: Number of rows, at least 1.
        global_start: Position of the first row in the whole sequence; a causal query of the span's
            last row sees the keys ``[0, global_start + length)``.
    """

    local_start: int
    length: int
    global_start: int

    @property
    def local_end(self) -> int:
        """One past the last row in the local tensor."""
        return self.local_start + self.length

    @property
    def global_end(self) -> int:
        """One past the last row in the whole sequence."""
        return self.global_start + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """One part of the sequence.

    Attributes:
        hidden: Rows of the local residual stream.
        queries: Rows of the local query tensor.
    """

    hidden: tuple[Span, ...]
    queries: tuple[Span, ...]

    @property
    def num_keys(self) -> int:
        """How many keys, from the start of the sequence, any query of the chunk can see."""
        return max(span.global_end for span in self.queries)

    @classmethod
    def joined(cls, chunks: Sequence[Chunk]) -> Chunk:
        """All rows of several chunks as one, in memory order and in as few spans as possible."""
        return cls(
            hidden=_join([span for chunk in chunks for span in chunk.hidden]),
            queries=_join([span for chunk in chunks for span in chunk.queries]),
        )


def _join(spans: list[Span]) -> tuple[Span, ...]:
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.local_start):
        last = joined[-1] if joined else None
        if last and last.local_end == span.local_start and last.global_end == span.global_start:
            joined[-1] = Span(last.local_start, last.length + span.length, last.global_start)
        else:
            joined.append(span)
    return tuple(joined)


def chunk_sequence(sequence_length: int, *, degree: int) -> tuple[Chunk, ...]:
    """Cut a sequence into ``degree`` chunks whose lengths differ by at most one row, longer ones first.

    Args:
        sequence_length: Rows of the sequence.
        degree: Number of chunks.

    Raises:
        BadInput: when some chunk would be empty.
    """
    if not 1 <= degree <= sequence_length:
        raise BadInput(
            "--ampipe-degree",
            degree,
            rule=f"must lie between 1 and the sequence length ({sequence_length})",
            remedy=f"Use --ampipe-degree {min(4, sequence_length)}.",
        )
    base, extra = divmod(sequence_length, degree)
    chunks = []
    start = 0
    for index in range(degree):
        span = Span(start, base + (index < extra), start)
        chunks.append(Chunk(hidden=(span,), queries=(span,)))
        start = span.local_end
    return tuple(chunks)
