"""The all-to-all of one chunk with fixed rows: split sizes from a budget, counts that stay on the device.

With ``--ampipe-rows fixed`` a rank sends as many rows to another rank as their *budget* says, whatever the
router has chosen. Rows after the counted ones are padding. All index arithmetic has sizes that are known
before the batch, and the host reads nothing. Padding is never read or multiplied by zero, so that
NaN in it reaches no result.

Rows that do not fit are not sent. Every rank of the group knows all counts, so each sees that
(:attr:`.ChunkRows.peak`). ``launch.fixed_rows`` asks after the passes of a step, and repeats it with exact
rows.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.exchange.budgets import ChunkRows, FixedRows
from megatron_ampipe.exchange.packing import AllToAllChunk
from megatron_ampipe.exchange.transports import ALL_TO_ALL, RowTransport, all_gather
from megatron_ampipe.schedule.row_budget import RowBudget

# T tokens of a chunk, D hidden size, E experts, P expert-parallel ranks, L experts of a rank, M rows that are
# sent with padding, R rows that arrive with padding, Q rows sorted by expert with padding, S ranks that share
# an expert.

PADDING: float | None = None
"""What padding is filled with; None leaves there what there is. No result depends on it; tests set NaN."""


class ExpertOffsets(NamedTuple):
    """Where the rows of each local expert end; in place of their numbers on the host."""

    ends: Tensor
    """``[L]`` int32 on the device: multiples of the tile, up to which an expert's rows are filled with zeros.
    Rows after the last are padding."""


class FixedSplits(NamedTuple):
    """The transport of a chunk, and its counts on the device."""

    transport: RowTransport
    counts: Tensor
    """``[P * S, E]`` int64: rows of each rank for each expert."""


class _Order(NamedTuple):
    """An order of rows, taken from another order of them."""

    source: Tensor
    """``[N]``: the row of the other order at each place; any where there is none."""
    is_padding: Tensor | None
    """``[N]`` bool: whether there is none; None if the row of ``source`` stays there."""
    filler: float = 0.0
    """With what these places are filled otherwise."""


class _Arrival(NamedTuple):
    """The received rows in the order by expert (``Q``), and back in that of their arrival (``R``)."""

    by_expert: _Order
    received: _Order


class BudgetedChunk(ABC):
    """A dispatcher whose chunks can have a budget; a base class that stands before the dispatcher's.

    :meth:`of_chunk` makes the dispatcher of a chunk, in place of a copy.
    """

    _fixed_rows: FixedRows
    _known: dict[tuple[int, int], ChunkRows]
    _rows: ChunkRows
    _budget: RowBudget | None = None
    _tile = 1

    def share(self, fixed_rows: FixedRows, *, tile: int = 1) -> None:
        """Use the state of the process; called once.

        ``tile``: The products need numbers of rows that are multiples of it, of all rows too.
        """
        self._fixed_rows, self._known, self._tile = fixed_rows, {}, tile

    def of_chunk(self, chunk: int, num_chunks: int) -> Self:
        """The dispatcher of a chunk in one pass."""
        state = self._fixed_rows
        if not state.is_watched and torch.is_grad_enabled():
            rule = (
                "the training does not run Megatron's train_step, which is repeated if a budget is exceeded"
            )
            remedy = "Train through megatron.training.pretrain, or use --ampipe-rows exact."
            raise SETTING["rows"].refuse("fixed", rule, remedy)
        copied = copy.copy(self)
        key = num_chunks, chunk
        if key not in self._known:
            self._known[key] = self._new_rows()
        copied._rows = self._known[key]
        copied._budget = copied._rows.budget if state.is_active else None
        return copied

    @abstractmethod
    def _new_rows(self) -> ChunkRows:
        """Add a chunk of this layer to the state of the process."""

    def budget_version(self, num_chunks: int) -> int | None:
        """A number that grows when a budget of the chunks changes; None if a pass now has exact rows."""
        chunks = [self._known.get((num_chunks, chunk)) for chunk in range(num_chunks)]
        known = [chunk for chunk in chunks if chunk is not None and chunk.budget is not None]
        if not self._fixed_rows.is_active or len(known) < num_chunks:
            return None
        return sum(chunk.version for chunk in known)

    @abstractmethod
    def take_splits(self, first: Self) -> None:
        """Use the budget and the counts of the first run of the chunk, in its recompute."""


class FixedRowsChunk(BudgetedChunk, AllToAllChunk):
    """The all-to-all dispatcher of one chunk, with fixed rows where the chunk has a budget."""

    _fixed_splits: FixedSplits | None = None
    _counts: Tensor

    def _new_rows(self) -> ChunkRows:
        return self._fixed_rows.new_chunk(self._rank, num_shares=self._num_shares)

    def take_splits(self, first: Self) -> None:
        """See ``BudgetedChunk``."""
        self.splits, self._fixed_splits, self._budget = first.splits, first._fixed_splits, first._budget
        self._counts = first._counts

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As in ``AllToAllChunk``, with ``M`` rows: for each rank those of its experts, then padding."""
        if self._budget is None:
            return super().dispatch_preprocess(hidden_states, routing_map, probs)
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map
        per_expert = routing_map.sum(dim=0)
        if self._fixed_splits is None:
            self.counts = per_expert
        num_tokens, num_experts = routing_map.shape
        slots = self._rows.sent
        assert slots is not None
        per_rank = per_expert.view(self._num_ranks, self._num_local).sum(dim=1)
        is_padding = slots.place >= per_rank[slots.rank]
        begins = per_rank.cumsum(dim=0) - per_rank
        copies = torch.where(is_padding, 0, begins[slots.rank] + slots.place)
        # A stable sort puts marked entries first, by expert and then by token.
        marks = routing_map.T.reshape(-1).to(torch.uint8).argsort(stable=True, descending=True)[copies]
        token = marks % num_tokens
        chosen = token * num_experts + marks // num_tokens
        self._token = torch.where(is_padding, num_tokens, token)
        chosen = torch.where(is_padding, num_tokens * num_experts, chosen)
        return self.tokens_again(hidden_states), _rows_of(probs.reshape(-1), chosen)

    def tokens_again(self, hidden_states: Tensor) -> Tensor:
        """As in ``AllToAllChunk``."""
        if self._budget is None:
            return super().tokens_again(hidden_states)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        return _rows_of(tokens, self._token)

    def set_counts(self, gathered: Tensor) -> None:
        """Set the counts of all ranks; with a budget nobody waits for them on the host."""
        self._counts = gathered.view(self._num_ranks * self._num_shares, -1)
        if self._budget is None:
            super().set_counts(gathered)

    def transport(self) -> RowTransport:
        """As in ``AllToAllChunk``; with a budget its rows are known before the counts."""
        if self._budget is None:
            return super().transport()
        if self._fixed_splits is None:
            rank = self._group.rank()
            sent, received = self._budget.sent_by(rank), self._budget.received_by(rank)
            transport = RowTransport(ALL_TO_ALL, sent, received, self._group)
            self._fixed_splits = FixedSplits(transport, self._counts)
        return self._fixed_splits.transport

    @property
    def num_spare(self) -> int:
        """As in ``AllToAllChunk``; padding is sent."""
        return super().num_spare if self._budget is None else 0

    def gather(self) -> RowTransport:
        """As in ``AllToAllChunk``; all ranks that share an expert receive as many rows."""
        if self._budget is None:
            return super().gather()
        return all_gather(sum(self._budget.received_by(self._rank)), self._share_group)

    def dispatch_postprocess(  # type: ignore[override]  # the stage of the experts knows both
        self, rows: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor | ExpertOffsets, Tensor]:
        """As in ``AllToAllChunk``, with padding after the rows of all experts and offsets on the device."""
        num_ranks, num_shares = self._num_ranks, self._num_shares
        to_ranks = self._counts.view(num_ranks, num_shares, num_ranks, self._num_local).sum(dim=3)
        # Ranks that share an expert have one budget, so that they gather equal numbers of rows.
        self._rows.record(to_ranks.amax(dim=1))
        if self._budget is None:
            return super().dispatch_postprocess(rows, probs)
        arrival, ends = self._sort()
        self._arrival = arrival
        by_expert, received = arrival
        tokens = reorder(rows, by_expert, back=received)
        return tokens, ExpertOffsets(ends), reorder(probs, by_expert, back=received)

    def _sort(self) -> tuple[_Arrival, Tensor]:
        """The order by expert and then by sender, as Megatron's; and where each expert's rows end."""
        slots = self._rows.received
        assert slots is not None
        num_rows = len(slots.rank)
        # [S * P, L]: where the rows of each expert end in the part of a sender, in the order of arrival. What
        # does not fit is not there.
        to_here = self._counts[:, self._experts]
        if self._num_shares > 1:
            to_here = to_here.view(self._num_ranks, self._num_shares, -1).transpose(0, 1).flatten(0, 1)
        part_ends = torch.minimum(to_here.cumsum(dim=1), slots.sizes.unsqueeze(1))
        sizes = part_ends.diff(dim=1, prepend=torch.zeros_like(part_ends[:, :1]))
        begins = slots.starts.unsqueeze(1) + part_ends - sizes
        # Pieces in the order by expert, [L, S * P]; with tiles each expert has one more, which is no row.
        sizes, begins = sizes.T, begins.T
        num_sorted, num_pieces = num_rows, sizes.shape[1]
        if self._tile > 1:
            filled = (-sizes.sum(dim=1, keepdim=True)).remainder(self._tile)
            sizes = torch.cat([sizes, filled], dim=1)
            begins = torch.cat([begins, torch.zeros_like(filled)], dim=1)
            num_sorted = self._num_filled(num_rows)
        piece_sizes, piece_begins = sizes.reshape(-1), begins.reshape(-1)
        piece_ends = piece_sizes.cumsum(dim=0)
        sorted_places = torch.arange(num_sorted, device=slots.rank.device)
        pads_sorted = sorted_places >= piece_ends[-1]
        piece = torch.searchsorted(piece_ends, sorted_places, right=True).clamp(max=len(piece_ends) - 1)
        if self._tile > 1:
            pads_sorted = pads_sorted | (piece % (num_pieces + 1) == num_pieces)
        source = piece_begins[piece] + sorted_places - (piece_ends - piece_sizes)[piece]
        source = torch.where(pads_sorted, num_rows, source)
        # Padding goes to one more row, which is cut off.
        place = torch.zeros(num_rows + 1, dtype=torch.int64, device=slots.rank.device)
        place = place.scatter(0, source, sorted_places)[:num_rows]
        source = torch.where(pads_sorted, 0, source)
        ends = piece_ends.view(self._num_local, -1)[:, -1]
        # Grouped products require a stride of 1, of a single offset too.
        ends = ends.to(torch.int32, memory_format=torch.contiguous_format)
        received, by_expert = _Order(place, None), _Order(source, None)
        if PADDING is not None:
            received = _Order(place, slots.place >= part_ends[slots.rank, -1], PADDING)
            by_expert = _Order(source, pads_sorted, PADDING)
        if self._tile > 1:
            # Products read the zeros of a tile, and nothing after the last one.
            by_expert = _Order(source, pads_sorted)
        return _Arrival(by_expert, received), ends

    def _num_filled(self, num_rows: int) -> int:
        """The number of sorted rows: of tiles that are enough for ``num_rows``, whoever's they are."""
        most = num_rows + self._num_local * (self._tile - 1)
        return -(-most // self._tile) * self._tile

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As in ``AllToAllChunk``."""
        if self._budget is None:
            return super().combine_preprocess(hidden_states)
        by_expert, received = self._arrival
        return reorder(hidden_states, received, back=by_expert)

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """As in ``AllToAllChunk``."""
        if self._budget is None:
            return super().combine_postprocess(rows)
        num_tokens = self.hidden_shape[:-1].numel()
        sums: Tensor = _Sums.apply(rows, self._token, num_tokens)
        return sums.view(self.hidden_shape)


def reorder(rows: Tensor, order: _Order, *, back: _Order) -> Tensor:
    """The rows ``[M, ...]`` in an order ``[N, ...]``, which ``back`` inverts. Differentiable."""
    ordered: Tensor = _Reorder.apply(rows, order, back)
    return ordered


class _Context(Protocol):
    """What a node saves."""

    filler: float
    num_entries: int

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _Reorder(torch.autograd.Function):
    """Selects rows in an order that has an inverse, so that its backward selects too and adds nothing."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, order: _Order, back: _Order) -> Tensor:
        """The rows in ``order``."""
        source, is_padding, ctx.filler = back
        ctx.save_for_backward(source, *([] if is_padding is None else [is_padding]))
        return _reordered(rows, order)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The other order."""
        source, *padding = ctx.saved_tensors
        order = _Order(source, padding[0] if padding else None, ctx.filler)
        return _reordered(gradient, order), None, None


# Entries of which rows are made: tokens [T, D], or probabilities [T * E]. For padding, the number of a row's
# entry is that of all entries: padding is added to one entry more, which is cut off.


def _rows_of(entries: Tensor, entry: Tensor) -> Tensor:
    """The entry of each row, ``[M, ...]``; padding has any. Differentiable."""
    rows: Tensor = _Rows.apply(entries, entry)
    return rows


class _Rows(torch.autograd.Function):
    """Selects entries. Unlike in ``index_select`` of torch, the gradients of padding are added to none."""

    @staticmethod
    def forward(ctx: _Context, entries: Tensor, entry: Tensor) -> Tensor:
        """See :func:`_rows_of`."""
        ctx.num_entries = len(entries)
        ctx.save_for_backward(entry)
        return _selected(entries, entry)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of the gradients of its rows for each entry."""
        (entry,) = ctx.saved_tensors
        return _summed(gradient, entry, ctx.num_entries), None


class _Sums(torch.autograd.Function):
    """Adds the rows of each token. Unlike in ``index_add`` of torch, no rows are saved."""

    @staticmethod
    def forward(ctx: _Context, rows: Tensor, token: Tensor, num_tokens: int) -> Tensor:
        """``[M, D]`` to ``[T, D]``."""
        ctx.save_for_backward(token)
        return _summed(rows, token, num_tokens)

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of its token for each row."""
        (token,) = ctx.saved_tensors
        return _selected(gradient, token), None, None


def _selected(entries: Tensor, entry: Tensor) -> Tensor:
    rows = entries.index_select(0, entry.clamp(max=len(entries) - 1))
    return rows if PADDING is None else _filled(rows, entry == len(entries), PADDING)


def _summed(rows: Tensor, entry: Tensor, num_entries: int) -> Tensor:
    return rows.new_zeros((num_entries + 1, *rows.shape[1:])).index_add_(0, entry, rows)[:num_entries]


def _reordered(rows: Tensor, order: _Order) -> Tensor:
    ordered = rows.index_select(0, order.source)
    return ordered if order.is_padding is None else _filled(ordered, order.is_padding, order.filler)


def _filled(rows: Tensor, is_padding: Tensor, filler: float) -> Tensor:
    """Fill padding in ``[R, ...]`` in place."""
    return rows.masked_fill_(is_padding.view(-1, *[1] * (rows.dim() - 1)), filler)
