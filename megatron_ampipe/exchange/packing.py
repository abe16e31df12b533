"""Packs the tokens of one chunk into the rows that are sent, and sorts received rows by expert.

These classes replace Megatron's token dispatchers and have the same method names. They use Megatron's
permutations; the collectives are stages of the schedule. Megatron's dispatcher sends a token ``K`` times.
With ``dedup_copies`` (``--ampipe-exchange ranks`` and ``nodes``), a row is sent once to every rank, or node,
that has an expert of the token, with the probabilities of the experts there. The rank of the experts copies
it for them, adds their weighted outputs, and returns one row. Gradients are sent the same way.

Each chunk in flight has a copy of the layer's object, whose attributes hold the state of the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_ampipe.exchange.hops import (
    NOT_ROUTED,
    SortHop,
    SumHop,
    copies_for,
    destination_mask,
    transpose_splits,
)
from megatron_ampipe.exchange.transports import ALL_TO_ALL, UNEQUAL_GATHER, RowTransport, all_gather
from megatron_ampipe.runtime.collectives import HostCopy, copy_to_device
from megatron_ampipe.runtime.groups import GroupRequest, made_group

# T tokens of a chunk, D hidden size, E experts, P expert-parallel ranks, L experts of a rank, N nodes,
# S ranks that share an expert, M rows that are prepared, R rows that arrive.


class Permutation:
    """Sorts rows of tokens by destination, and back: Megatron's ``permute`` and ``unpermute``.

    ``routing_map [T, places]`` bool has the destinations of each token. ``num_rows`` rows are allocated:
    those of the first place, those of the second, ..., then spare rows. Fused kernels need at least one row.
    """

    def __init__(self, routing_map: Tensor, num_rows: int, *, fused: bool) -> None:
        self.num_rows, self._routing_map, self._fused = num_rows, routing_map, fused

    def rows(self, tokens: Tensor, probs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Permute ``[T, D]`` to ``[num_rows, D]``, and probabilities ``[T, places]``, if any, likewise."""
        self._shape = tokens.shape
        fused = self._fused and self.num_rows > 0
        rows, row_probs, self._mapping, *_ = permute(
            tokens, self._routing_map, probs=probs, num_out_tokens=self.num_rows, fused=fused
        )
        return rows, row_probs

    def sums(self, rows: Tensor) -> Tensor:
        """Unpermute and add the rows of each token, to ``[T, D]``; ``rows`` are the first, maybe none."""
        fused, mapping = self._fused and rows.shape[0] > 0, self._mapping
        if not fused:
            # The mapping of a fused kernel has several columns; this path is then taken without rows only.
            mapping = mapping[: rows.shape[0]].flatten().long()
        tokens: Tensor = unpermute(
            rows, mapping, restore_shape=self._shape, routing_map=self._routing_map, fused=fused
        )
        return tokens


IntArray = npt.NDArray[np.int64]
Pieces = list[list[int]] | Tensor
"""Numbers of rows ``[A][B]``, or ``[A, B]`` on the device if a fused kernel sorts rows there."""


class HostSplits(NamedTuple):
    """The exchanged counts of a chunk, on the host, and the transports that follow from them."""

    num_prepared: int
    """``M``, the number of rows that are allocated."""
    num_spare: int
    """Number of these rows that are not sent, which are the last ones."""
    transport: RowTransport
    """The exchange between expert-parallel ranks, or the first of two hops."""
    hop: SortHop | SumHop | None
    gather: RowTransport | None
    """The gather between the ranks that share an expert, if there are several."""
    tokens_per_expert: Tensor
    """``[L]`` int64."""
    pieces: tuple[Pieces, Pieces] | None
    """Numbers of rows from each source for each local expert, ``[P * S][L]`` in the order of arrival, and
    ``[L][P * S]``. None if rows need no sorting by expert."""


class AllToAllChunk:
    """The all-to-all dispatcher of one chunk: sends a token only to the ranks of its experts.

    The first four parameters are those of Megatron's dispatchers. ``dedup_copies``: a token is sent once to
    each place, which is a node with two hops, else a rank. ``nodes`` are the groups of two hops
    (:func:`.hops.node_groups`). ``has_fixed_choices``: the router gives every token ``topk`` experts.

    :attr:`counts` are ``[E]`` int64, this rank's tokens per expert; with ``dedup_copies``, the rows per node
    (with two hops) and per rank follow.
    """

    splits: HostSplits | None = None
    """Set by :meth:`transport`; a recompute of the chunk gets the one of the first run."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        dedup_copies: bool = False,
        nodes: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        has_fixed_choices: bool = True,
    ) -> None:
        self._config, self._fused = config, config.moe_permute_fusion
        self._experts = slice(local_expert_indices[0], local_expert_indices[-1] + 1)
        self._num_local = num_local_experts
        self._group, self._nodes = pg_collection.ep, nodes
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        # The ranks that share an expert.
        self._share_group = pg_collection.expt_tp
        self._share, self._num_shares = self._share_group.rank(), self._share_group.size()
        self._num_destinations = nodes[0].size() if nodes else self._num_ranks
        self._dedup_copies, self._has_fixed_choices = dedup_copies, has_fixed_choices
        self._max_rows_per_token = min(
            config.moe_router_topk, self._num_destinations if dedup_copies else config.num_moe_experts
        )
        self.counts_group = pg_collection.tp_ep
        """The ranks that exchange :attr:`counts`."""

    def __copy__(self) -> AllToAllChunk:
        # Faster than copy.copy: the host makes a copy for every chunk of every pass.
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Permute and count the rows to send of ``[rows, B, D]``; map and probabilities are ``[T, E]``.

        Returns ``[M, D]``, sorted by expert (or place) and then by token, followed by spare rows; and their
        probabilities ``[M]``. With ``dedup_copies``, probabilities are ``[M, experts of the place]``, minus
        infinity for an expert that does not get the token.
        """
        self.hidden_shape, self.routing_map = hidden_states.shape, routing_map
        to_destinations = (
            destination_mask(routing_map, self._num_destinations) if self._dedup_copies else routing_map
        )
        num_tokens, num_destinations = to_destinations.shape
        if self.splits is not None:
            num_rows = self.splits.num_prepared
        else:
            self.counts = by_place = to_destinations.sum(dim=0)
            if self._dedup_copies:
                to_ranks = [destination_mask(routing_map, self._num_ranks).sum(dim=0)] if self._nodes else []
                self.counts = torch.cat([routing_map.sum(dim=0), by_place, *to_ranks])
            num_rows = num_tokens * self._max_rows_per_token
            if not self._has_fixed_choices:
                # The host waits for the device here.
                num_rows = int(by_place.sum())
        self._packed = Permutation(to_destinations, num_rows, fused=self._fused)
        if not self._dedup_copies:
            return self._packed.rows(hidden_states.view(-1, hidden_states.shape[-1]), probs)
        _, chosen = copies_for(to_destinations, num_rows)
        place_probs = probs.masked_fill(~routing_map, NOT_ROUTED).view(num_tokens * num_destinations, -1)
        return self.tokens_again(hidden_states), place_probs.index_select(0, chosen)

    def tokens_again(self, hidden_states: Tensor) -> Tensor:
        """Permute ``[rows, B, D]`` again to the rows ``[M, D]`` of :meth:`dispatch_preprocess`."""
        return self._packed.rows(hidden_states.view(-1, hidden_states.shape[-1]))[0]

    def set_counts(self, gathered: Tensor) -> None:
        """Set the counts of all ranks, in rank order; :meth:`transport` waits for them on the host."""
        self._gathered = HostCopy(gathered)

    def transport(self) -> RowTransport:
        """The token exchange of the chunk, or the first of its two hops.

        The first call blocks the host until the counts of all ranks have arrived, and sets :attr:`splits`:
        the only wait of the host in a layer.
        """
        if self.splits is None:
            self.splits = self._read(self._gathered)
            del self._gathered
        return self.splits.transport

    def gather(self) -> RowTransport:
        """The gather between the ranks that share an expert; valid after :meth:`transport`."""
        assert self.splits is not None and self.splits.gather is not None
        return self.splits.gather

    @property
    def num_spare(self) -> int:
        """See :attr:`HostSplits.num_spare`; valid after :meth:`transport`."""
        assert self.splits is not None
        return self.splits.num_spare

    def _read(self, gathered: HostCopy) -> HostSplits:
        """The part of ``MoEAlltoAllTokenDispatcher.preprocess`` after the exchange of counts, on the host."""
        num_ranks, num_shares = self._num_ranks, self._num_shares
        num_experts = self._config.num_moe_experts
        # Numbers of rows: [P, S, E], [P, S, P] and [P, S, L]. The first two axes are the sending rank.
        counts = gathered.wait().numpy().reshape(num_ranks, num_shares, -1)
        to_experts = counts[:, :, :num_experts]
        if self._dedup_copies:
            # A token counts once for each rank, which the counts of experts do not show.
            to_ranks = counts[:, :, -num_ranks:]
        else:
            to_ranks = to_experts.reshape(num_ranks, num_shares, num_ranks, -1).sum(3)
        for_local_experts = to_experts[:, :, self._experts]
        hop: SortHop | SumHop | None = None
        if self._nodes is None:
            # [P from, P to], of the ranks that have the same share of their experts as this rank.
            rows = to_ranks[:, self._share]
            sent, arriving = rows[self._rank].tolist(), rows[:, self._rank].tolist()
            transport = RowTransport(ALL_TO_ALL, sent, arriving, self._group)
        else:
            transport, hop = self._two_hops(to_ranks, counts[:, :, num_experts:-num_ranks], *self._nodes)
            for_local_experts = self._in_order_of_two_hops(for_local_experts)
        # [P * S, L]
        by_source = for_local_experts.reshape(-1, self._num_local)
        gather: RowTransport | None = None
        if self._num_shares > 1:
            gather = self._gather_of_shares(to_ranks)
        pieces: tuple[Pieces, Pieces] | None = None
        if self._num_local > 1 and not self._dedup_copies:
            pieces = self._pieces(by_source, gathered)
        return HostSplits(
            num_prepared=self._packed.num_rows,
            num_spare=self._packed.num_rows - sum(transport.input_splits),
            transport=transport,
            hop=hop,
            gather=gather,
            tokens_per_expert=torch.from_numpy(by_source.sum(0)),
            pieces=pieces,
        )

    def _two_hops(
        self,
        to_ranks: IntArray,
        to_nodes: IntArray,
        between_nodes: dist.ProcessGroup,
        within_node: dist.ProcessGroup,
    ) -> tuple[RowTransport, SortHop | SumHop]:
        """The transport to the rank with this rank's place in every node, and the hop within the node.

        ``to_ranks [P, S, P]`` and ``to_nodes [P, S, N]`` count rows by the rank that sends them; the latter
        are read only with ``dedup_copies``.
        """
        node, num_nodes = between_nodes.rank(), between_nodes.size()
        place, num_places = within_node.rank(), within_node.size()
        # [node from, place from, node to, place to]
        rows = to_ranks[:, self._share].reshape(num_nodes, num_places, num_nodes, num_places)
        # [node from, place from, node to]
        if self._dedup_copies:
            rows_to_nodes = to_nodes[:, self._share].reshape(num_nodes, num_places, num_nodes)
        else:
            rows_to_nodes = rows.sum(3)
        sent = rows_to_nodes[node, place].tolist()
        arriving = rows_to_nodes[:, place, node].tolist()
        transport = RowTransport(ALL_TO_ALL, sent, arriving, between_nodes)
        # [place from], of all nodes.
        received_within_node = rows[:, :, node, place].sum(0).tolist()
        # [node from, place to], of what this rank passes on.
        passed_on = rows[:, place, node]
        if self._dedup_copies:
            return transport, SumHop(passed_on.sum(0).tolist(), received_within_node, within_node)
        return transport, SortHop(passed_on.tolist(), received_within_node, within_node)

    def _in_order_of_two_hops(self, for_local_experts: IntArray) -> IntArray:
        """Reorder ``[P, S, L]``, by source, into the order in which rows arrive: by place, then by node."""
        assert self._nodes is not None
        num_nodes, num_places = self._nodes[0].size(), self._nodes[1].size()
        by_node = for_local_experts.reshape(num_nodes, num_places, *for_local_experts.shape[1:])
        return by_node.swapaxes(0, 1)

    def _gather_of_shares(self, to_ranks: IntArray) -> RowTransport:
        """The gather of the rows that the ranks that share an expert have received, from ``[P, S, P]``."""
        received_by_share = to_ranks[:, :, self._rank].sum(0).tolist()
        own = received_by_share[self._share]
        return RowTransport(UNEQUAL_GATHER, (own,), received_by_share, self._share_group)

    def _pieces(self, by_source: IntArray, gathered: HostCopy) -> tuple[Pieces, Pieces]:
        """:attr:`HostSplits.pieces` from the rows for local experts ``[P * S, L]``."""
        arriving = by_source
        if self._num_shares > 1:
            # Gathered rows are ordered by share first.
            by_rank = by_source.reshape(self._num_ranks, self._num_shares, self._num_local)
            arriving = by_rank.swapaxes(0, 1).reshape(-1, self._num_local)
        if not self._fused:
            return arriving.tolist(), arriving.T.tolist()
        on_device = copy_to_device(torch.tensor(arriving.tolist()), gathered.on_device.device)
        return on_device, on_device.T.contiguous()

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sort received rows ``[R, D]``, and probabilities ``[R]`` or ``[R, L]``, by local expert.

        Returns ``[copies, D]``, sorted by expert; the number of rows of each expert ``[L]``, on the host; and
        the probabilities ``[copies]``. Can run a second time.
        """
        assert self.splits is not None
        per_expert = self.splits.tokens_per_expert
        if self._dedup_copies:
            self._copied = Permutation(~probs.isneginf(), int(per_expert.sum()), fused=self._fused)
            rows, probs = self._copied.rows(rows, probs)
        elif self.splits.pieces is not None:
            rows, sorted_probs = self._sorted(rows, self.splits.pieces[0], probs)
            assert sorted_probs is not None
            return rows, per_expert, sorted_probs
        return rows, per_expert, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Sort weighted expert outputs ``[copies, D]`` to ``[R, D]``; with ``dedup_copies``, add them."""
        if self._dedup_copies:
            return self._copied.sums(hidden_states)
        assert self.splits is not None
        if self.splits.pieces is None:
            return hidden_states
        return self._sorted(hidden_states, self.splits.pieces[1])[0]

    def _sorted(
        self, rows: Tensor, pieces: Pieces, probs: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Reorder rows and probabilities, pieces of the sizes ``[A][B]``, into the order ``[B][A]``."""
        if self._fused:
            assert isinstance(pieces, Tensor)
            num_pieces, num_columns = pieces.shape
            order = _order(num_pieces, num_columns, pieces.device)
            ordered: tuple[Tensor, Tensor | None] = sort_chunks_by_idxs(
                rows, pieces.ravel(), order, probs, fused=True
            )
            return ordered
        sizes: list[list[int]] = pieces  # type: ignore[assignment]  # on the host
        return transpose_splits(rows, sizes), transpose_splits(probs, sizes) if probs is not None else None

    def combine_postprocess(self, rows: Tensor) -> Tensor:
        """Unpermute and add the returned rows (as many as were sent, maybe none), to ``[rows, B, D]``."""
        return self._packed.sums(rows).view(self.hidden_shape)


@cache
def _order(rows: int, columns: int, device: torch.device) -> Tensor:
    """The indices that read a matrix, which is stored by rows, column by column."""
    return torch.arange(rows * columns, device=device).view(rows, columns).T.ravel()


def counts_group(group: dist.ProcessGroup) -> GroupRequest:
    """The group in which :class:`AllGatherChunk` exchanges counts of the expert-parallel ``group``.

    NCCL runs the collectives of a group one after another, but counts must not wait for dispatches.
    """
    return GroupRequest.of_all(group, "counts")


class AllGatherChunk:
    """The all-gather dispatcher of one chunk: sends all tokens to every rank; counts are the routing map."""

    num_spare: ClassVar = 0
    splits: tuple[Tensor, HostCopy, RowTransport] | None = None
    """The routing map of all ranks, the number of tokens of each local expert, and the transport."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        self._fused, self._group = config.moe_permute_fusion, pg_collection.tp_ep
        self._experts = slice(local_expert_indices[0], local_expert_indices[-1] + 1)
        self.counts_group = made_group(counts_group(self._group))
        """The ranks that exchange :attr:`counts`; a separate group from that of dispatches."""

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens ``[T, D]`` and ``probs``; set :attr:`counts`, the routing map ``[T, E]`` bool."""
        self.hidden_shape, self.counts = hidden_states.shape, routing_map
        return self.tokens_again(hidden_states), probs

    def tokens_again(self, hidden_states: Tensor) -> Tensor:
        """Return for ``[R, B, D]`` the same tokens ``[T, D]`` as :meth:`dispatch_preprocess`."""
        return hidden_states.view(-1, hidden_states.shape[-1])

    def set_counts(self, gathered: Tensor) -> None:
        """Set the routing maps of all ranks ``[ranks * T, E]``."""
        self._gathered = gathered

    def transport(self) -> RowTransport:
        """The transport of the chunk; also starts copying the experts' token counts to the host."""
        if self.splits is None:
            num_rows = len(self._gathered) // self._group.size()
            counts = HostCopy(self._gathered[:, self._experts].sum(dim=0))
            self.splits = self._gathered, counts, all_gather(num_rows, self._group)
            del self._gathered
        return self.splits[2]

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """As in the stock dispatcher, without waiting for the device; can run a second time."""
        assert self.splits is not None
        routing_map, counts, _ = self.splits
        tokens_per_expert = counts.wait()
        local = routing_map[:, self._experts].contiguous()
        self._sorted = Permutation(local, int(tokens_per_expert.sum()), fused=self._fused)
        rows, self._row_probs = self._sorted.rows(hidden_states, probs[:, self._experts].contiguous())
        return rows, tokens_per_expert, self._row_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As in the stock dispatcher, in the dtype in which ``token_combine`` sums over ranks."""
        output = self._sorted.sums(hidden_states)
        self._dtype = output.dtype
        return output.to(self._row_probs.dtype)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """As in the stock dispatcher, in the dtype of the tokens."""
        return hidden_states.to(self._dtype).view(self.hidden_shape)
