"""Documents that share a sequence: a row attends to the earlier rows of the same document only.

Pure arithmetic on the rows of the sequence, as :mod:`.chunks`. ``layers`` reads the documents of a
micro-batch from what Megatron passes to a layer, and ``runtime`` attends document by document.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ampipe.schedule.chunks import Span


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """Consecutive query rows of a chunk that belong to one document, and the keys that they see.

    Attributes:
        sequence: Index of the sequence in the micro-batch.
        first_row: First row in the query tensor of the chunk.
        last_row: One past the last row.
        first_key: First row of the document, counted in the sequence.
        last_key: One past the last key that the last row sees: its own.
    """

    sequence: int
    first_row: int
    last_row: int
    first_key: int
    last_key: int

    @property
    def num_rows(self) -> int:
        """How many query rows."""
        return self.last_row - self.first_row

    @property
    def num_keys(self) -> int:
        """How many keys the last row sees."""
        return self.last_key - self.first_key

    @property
    def span(self) -> Span:
        """The rows as a span of a sequence that consists of this document alone."""
        return Span(0, self.num_rows, self.num_keys - self.num_rows)


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch begin.

    Attributes:
        starts: For each sequence of the micro-batch the first row of each of its documents, ascending; the
            first one is 0.
        num_rows: Rows of a sequence.
        own_positions: The rotary embedding counts the rows of each document from 0, not those of the
            sequence.
    """

    starts: tuple[tuple[int, ...], ...]
    num_rows: int
    own_positions: bool

    def __post_init__(self) -> None:
        for starts in self.starts:
            ends = (*starts[1:], self.num_rows)
            assert starts[0] == 0, "the first document begins with the sequence"
            assert all(start < end for start, end in zip(starts, ends, strict=True)), "an empty document"

    @property
    def masked(self) -> bool:
        """Whether a mask of the data loader separates them; otherwise they are packed."""
        return not self.own_positions

    @property
    def num_sequences(self) -> int:
        """How many sequences the micro-batch has."""
        return len(self.starts)

    @cached_property
    def _rows(self) -> dict[tuple[Span, ...], tuple[DocumentRows, ...]]:
        """What :meth:`rows_of` has returned: every layer asks for the same chunks."""
        return {}

    def rows_of(self, spans: tuple[Span, ...]) -> tuple[DocumentRows, ...]:
        """The query rows of a chunk, document by document: by sequence, then in the order of the spans."""
        if spans not in self._rows:
            self._rows[spans] = self._cut(spans)
        return self._rows[spans]

    def _cut(self, spans: Sequence[Span]) -> tuple[DocumentRows, ...]:
        found = []
        for sequence, starts in enumerate(self.starts):
            row = 0
            for span in spans:
                first = bisect.bisect_right(starts, span.global_start) - 1
                last = bisect.bisect_left(starts, span.global_end)
                # The end of a document is the start of the next one.
                bounds = (*starts[first:last], span.global_end)
                for start, end in itertools.pairwise(bounds):
                    length = end - max(start, span.global_start)
                    found.append(DocumentRows(sequence, row, row + length, start, end))
                    row += length
        return tuple(found)
