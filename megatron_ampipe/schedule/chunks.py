"""Splits a sequence into chunks, and the rows of a chunk into documents. Pure arithmetic.

A chunk is described twice: by its rows of this rank's residual stream, and by its query rows in attention.
The two are the same unless sequence parallelism shards the residual stream.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ampipe.errors import BadInput

TILE_ROWS = 128
"""Rows of a tile in attention kernels on GPUs, where an incomplete tile costs as much as a whole one."""
ALIGNED_TILES = 4
"""Chunks end on tile boundaries if the shortest chunk has at least this number of tiles."""


@dataclass(frozen=True, slots=True)
class Span:
    """A range of rows that is contiguous in local memory and in the whole sequence.

    A causal query of the last row attends to the keys ``[0, global_end)``.
    """

    local_start: int
    """First row in the local tensor."""
    length: int
    global_start: int
    """Position of the first row in the whole sequence."""

    @property
    def local_end(self) -> int:
        """One past the last row."""
        return self.local_start + self.length

    @property
    def global_end(self) -> int:
        """One past the last row."""
        return self.global_start + self.length


@dataclass(frozen=True, slots=True)
class Chunk:
    """One part of the sequence."""

    hidden: tuple[Span, ...]
    """Spans of the local residual stream."""
    queries: tuple[Span, ...]
    """Spans of the local query tensor."""

    @property
    def num_keys(self) -> int:
        """How many keys, from the start of the sequence, the queries of the chunk can attend to."""
        return max(span.global_end for span in self.queries)

    def seeing(self, num_keys: int) -> Chunk:
        """The same rows, of which each span can attend to ``num_keys`` keys."""
        queries = tuple(replace(span, global_start=num_keys - span.length) for span in self.queries)
        return Chunk(self.hidden, queries)

    @classmethod
    def joined(cls, chunks: Sequence[Chunk]) -> Chunk:
        """Join several chunks into one, in memory order and with as few spans as possible."""
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


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Which rows of the whole sequence this rank holds."""

    tensor_ranks: int = 1
    """Number of ranks over which sequence parallelism shards the residual stream, or 1."""
    tensor_rank: int = 0
    context_ranks: int = 1
    """Number of context-parallel ranks. Rank ``r`` holds two slices of the sequence, the ``r``-th from the
    front and the ``r``-th from the end (Megatron's zigzag)."""
    context_rank: int = 0
    by_chunk: bool = False
    """Whether each chunk, instead of the whole sequence, is sharded over the tensor-parallel ranks: each rank
    holds consecutive rows of every chunk. Only without context parallelism."""

    def spans(self, first: int, length: int, *, sequence_length: int) -> tuple[Span, ...]:
        """The spans of ``length`` query rows of this rank, from local row ``first`` on."""
        if self.context_ranks == 1:
            return (Span(first, length, first),)
        half = sequence_length // (2 * self.context_ranks)
        last_slice = 2 * self.context_ranks - 1 - self.context_rank
        spans = []
        for slice_start, global_start in ((0, self.context_rank * half), (half, last_slice * half)):
            start, end = max(first, slice_start), min(first + length, slice_start + half)
            if start < end:
                spans.append(Span(start, end - start, global_start + start - slice_start))
        return tuple(spans)


def chunk_sequence(
    sequence_length: int,
    *,
    degree: int,
    shares: Sequence[float] | None = None,
    layout: SequenceLayout | None = None,
) -> tuple[Chunk, ...]:
    """Split a sequence into ``degree`` chunks.

    Without shares, lengths differ by at most one unit (:func:`row_unit`), with longer chunks first, and the
    last chunk also gets the remaining rows. With shares, ends are rounded to the nearest unit.

    A chunk holds the same rows of every tensor-parallel rank's shard, to which the output projection scatters
    them. With ``layout.by_chunk`` a chunk consists of consecutive rows of the sequence.

    Args:
        sequence_length: Rows of the whole sequence.
        degree: Number of chunks.
        shares: The share of each chunk in the sequence, with a sum of 1; None for equal chunks.
        layout: The rows of this rank; the whole sequence if None.

    Raises:
        BadInput: a chunk would be empty, or the sequence cannot be split evenly over the ranks.
    """
    layout = layout or SequenceLayout()
    ranks = layout.tensor_ranks
    slices = ranks * layout.context_ranks * (2 if layout.context_ranks > 1 else 1)
    if sequence_length % slices:
        rule = f"must be a multiple of {slices} for this tensor and context parallelism"
        remedy = f"Use --seq-length {-(-sequence_length // slices) * slices}."
        raise BadInput("--seq-length", sequence_length, rule=rule, remedy=remedy)
    num_rows = sequence_length // (ranks * layout.context_ranks)
    if not 1 <= degree <= num_rows:
        rule = f"must be between 1 and the number of rows of the sequence on one rank ({num_rows})"
        raise BadInput(
            "--ampipe-degree", degree, rule=rule, remedy=f"Use --ampipe-degree {min(2, num_rows)}."
        )
    lengths = even_chunks(num_rows, degree) if shares is None else _shared_out(num_rows, shares)
    return cut(lengths, layout, sequence_length=sequence_length)


def cut(lengths: Sequence[int], layout: SequenceLayout, *, sequence_length: int) -> tuple[Chunk, ...]:
    """The chunks with these lengths, in rows of the residual stream of a rank."""
    ranks, num_rows, chunks = layout.tensor_ranks, sum(lengths), []
    for start, length in zip(itertools.accumulate(lengths, initial=0), lengths, strict=False):
        if layout.by_chunk:
            first = start * ranks
            own = Span(start, length, first + layout.tensor_rank * length)
            chunks.append(Chunk(hidden=(own,), queries=(Span(first, length * ranks, first),)))
            continue
        # The gathered queries are the concatenated shards of the tensor-parallel ranks.
        shards = [
            layout.spans(rank * num_rows + start, length, sequence_length=sequence_length)
            for rank in range(ranks)
        ]
        shift = layout.tensor_rank * num_rows
        hidden = (replace(span, local_start=span.local_start - shift) for span in shards[layout.tensor_rank])
        chunks.append(Chunk(tuple(hidden), tuple(itertools.chain.from_iterable(shards))))
    return tuple(chunks)


def have_whole_tiles(lengths: Sequence[int], tile: int) -> bool:
    """Whether chunks of these lengths consist of whole tiles of ``tile`` rows; true for a single chunk."""
    return len(lengths) == 1 or not any(length % tile for length in lengths)


def require_whole_tiles(chunks: Sequence[Chunk], tile: int) -> None:
    """Check that chunks consist of whole FP8 tiles, see ``features.rows_of_tile``.

    Raises:
        BadInput: a chunk does not; names the largest smaller degree at which equal chunks do.
    """
    lengths = [sum(span.length for span in chunk.hidden) for chunk in chunks]
    if have_whole_tiles(lengths, tile):
        return
    rows, degree = sum(lengths), len(lengths)
    fitting = [number for number in range(2, degree) if have_whole_tiles(even_chunks(rows, number), tile)]
    raise BadInput(
        "--ampipe-degree",
        degree,
        rule=f"with this --fp8-recipe, chunks must have multiples of {tile} rows, and they have "
        f"{' '.join(map(str, lengths))} of the {rows} of a rank",
        remedy=f"Use --ampipe-degree {max(fitting)} without --ampipe-chunks."
        if fitting
        else "Use --ampipe-degree 1, a longer sequence, or a larger --micro-batch-size.",
    )


def row_unit(num_rows: int, degree: int) -> int:
    """The number of rows of a rank to whose multiples the ends of chunks are rounded.

    A tile if each chunk has at least :data:`ALIGNED_TILES` tiles, so that rounding changes an equal chunk by
    at most a quarter; else 1.
    """
    return TILE_ROWS if num_rows // TILE_ROWS // degree >= ALIGNED_TILES else 1


def even_chunks(num_rows: int, degree: int) -> tuple[int, ...]:
    """Rows of each of ``degree`` chunks without shares; see :func:`chunk_sequence`."""
    unit = row_unit(num_rows, degree)
    units, rest = divmod(num_rows, unit)
    base, extra = divmod(units, degree)
    lengths = [unit * (base + (index < extra)) for index in range(degree)]
    lengths[-1] += rest
    return tuple(lengths)


def _shared_out(num_rows: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Rows of each chunk with these shares."""
    lengths = _nearest(num_rows, shares, 1)
    shortest = min(lengths)
    if shortest < 1:
        rule = f"chunk {lengths.index(shortest)} would have none of the {num_rows} rows of a rank"
        remedy = f"Give every chunk a share of at least {math.ceil(1e6 / num_rows) / 1e6:.6g}."
        text = ",".join(f"{share:.6g}" for share in shares)
        raise BadInput("--ampipe-chunks", text, rule=rule, remedy=remedy)
    return _nearest(num_rows, shares, TILE_ROWS) if shortest >= ALIGNED_TILES * TILE_ROWS else lengths


def _nearest(num_rows: int, shares: Sequence[float], unit: int) -> tuple[int, ...]:
    """Lengths of the chunks, with all ends but the last rounded to the nearest multiple of ``unit``."""
    ends = [unit * math.floor(share * num_rows / unit + 0.5) for share in itertools.accumulate(shares)]
    return tuple(end - start for start, end in itertools.pairwise([0, *ends[:-1], num_rows]))


@dataclass(frozen=True, slots=True)
class DocumentRows:
    """Consecutive query rows of a chunk that belong to one document, and the keys that they see.

    Attributes:
        sequence: Index of the sequence in the micro-batch.
        num_rows: Number of query rows.
        first_key: First row of the document, counted in the sequence.
        last_key: One past the last key that the last row sees, which is the row itself.
    """

    sequence: int
    num_rows: int
    first_key: int
    last_key: int

    @property
    def num_keys(self) -> int:
        """Number of keys that the last row sees."""
        return self.last_key - self.first_key

    @property
    def span(self) -> Span:
        """The rows as a span of a sequence that consists of this document alone."""
        return Span(0, self.num_rows, self.num_keys - self.num_rows)


@dataclass(frozen=True)
class Documents:
    """Where the documents of a micro-batch begin.

    Attributes:
        starts: For each sequence of the micro-batch, the first row of each of its documents, ascending; the
            first one is 0.
        num_rows: Rows of a sequence.
        own_positions: Whether positions of the rotary embedding start at 0 in each document (packed
            documents). Otherwise they count in the sequence (documents separated by the data loader's mask).
        context_ranks: Number of context-parallel ranks that share each document: rank ``r`` holds the slices
            ``r`` and ``2 * ranks - 1 - r`` of every document, one document after another. 1 if a rank holds
            slices of the sequence, as :class:`SequenceLayout` says.
        context_rank: This rank among them.
    """

    starts: tuple[tuple[int, ...], ...]
    num_rows: int
    own_positions: bool
    context_ranks: int = 1
    context_rank: int = 0

    def __post_init__(self) -> None:
        for starts in self.starts:
            assert starts == tuple(sorted({0, *starts})), f"the documents begin at {starts}"
        assert self.context_ranks == 1 or len(self.starts) == 1, "ranks share the documents of one sequence"

    def divided(self, chunk: Chunk) -> Chunk:
        """The chunk with the same rows of this rank, of documents that ranks share."""
        queries = [self.spans_between(span.local_start, span.local_end) for span in chunk.queries]
        return Chunk(chunk.hidden, tuple(itertools.chain.from_iterable(queries)))

    def spans_between(self, first: int, last: int) -> tuple[Span, ...]:
        """The spans of a rank's rows from ``first`` on, up to ``last``, of documents that ranks share."""
        spans = []
        for part in self._slices_of(self.context_rank):
            start, end = max(first, part.local_start), min(last, part.local_end)
            if start < end:
                spans.append(Span(start, end - start, part.global_start + start - part.local_start))
        return tuple(spans)

    def order_of_ranks(self) -> list[int]:
        """For each row of the sequence, its place among the rows of all ranks, one rank after another."""
        places = [0] * self.num_rows
        rows_of_rank = self.num_rows // self.context_ranks
        for rank in range(self.context_ranks):
            for part in self._slices_of(rank):
                first = rank * rows_of_rank + part.local_start
                places[part.global_start : part.global_end] = range(first, first + part.length)
        return places

    @functools.lru_cache(maxsize=256)  # noqa: B019  Every chunk and every layer asks for the same slices.
    def _slices_of(self, rank: int) -> tuple[Span, ...]:
        """The two slices that a rank holds of each document."""
        ranks, slices = self.context_ranks, []
        for start, end in itertools.pairwise((*self.starts[0], self.num_rows)):
            length = (end - start) // (2 * ranks)
            for place, index in enumerate((rank, 2 * ranks - 1 - rank)):
                local_start = start // ranks + place * length
                slices.append(Span(local_start, length, start + index * length))
        return tuple(slices)

    @functools.lru_cache(maxsize=256)  # noqa: B019  Every layer asks for the same chunks.
    def rows_of(self, spans: tuple[Span, ...]) -> tuple[DocumentRows, ...]:
        """The query rows of a chunk, document by document: by sequence, then in the order of the spans."""
        documents = []
        for sequence, starts in enumerate(self.starts):
            for span in spans:
                first = bisect.bisect_right(starts, span.global_start) - 1
                last = bisect.bisect_left(starts, span.global_end)
                # The end of a document is the start of the next one.
                bounds = (*starts[first:last], span.global_end)
                for start, end in itertools.pairwise(bounds):
                    num_rows = end - max(start, span.global_start)
                    documents.append(DocumentRows(sequence, num_rows, start, end))
        return tuple(documents)
