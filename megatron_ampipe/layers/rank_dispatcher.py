"""The all-to-all dispatcher of one chunk that sends a token once to each rank (``--ampipe-exchange ranks``).

Megatron's dispatcher sends a token ``K`` times, also where several of its experts are on one rank. Here a row
goes once to every rank that has an expert of the token, with its probabilities for the experts there. That
rank copies it for its experts and adds their weighted outputs, and one row comes back. Sums are linear, so
nothing is approximated; only the order of additions differs. The gradients take the way back in the same
number of rows, because autograd differentiates the copies as sums and the sums as copies.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from megatron_ampipe.layers.dispatcher import AllToAllChunk, permute_rows, unpermute_rows
from megatron_ampipe.runtime.collectives import HostCopy

# T tokens of a chunk, D hidden size, E experts, P expert-parallel ranks, L experts of a rank,
# R rows that are sent or received: one for each pair of a token and a rank; M at most.

NOT_ROUTED = float("-inf")
"""Stands in place of a probability where an expert does not get the token; no router gives it."""


class RankChunk(AllToAllChunk):
    """The all-to-all dispatcher, with one row for each pair of a token and a rank.

    :attr:`counts` are ``[E + P]`` int64: this rank's tokens for each expert, and its rows for each rank.
    :class:`~.node_dispatcher.NodeChunk` has nodes as its places, in which a row goes to one rank.
    """

    FROM_COUNTS: ClassVar = (
        "num_out_tokens", "input_splits", "output_splits", "output_splits_tp", "tokens_per_expert",
    )  # fmt: skip

    @property
    def num_places(self) -> int:
        """To how many places a token can go."""
        size: int = self.ep_size
        return size

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose the rows that are sent, and count them.

        Args:
            hidden_states: ``[rows, B, D]``, ``T`` tokens.
            routing_map: ``[T, E]`` bool.
            probs: ``[T, E]``.

        Returns:
            ``[M, D]``, the rows for the first rank, then those for the second, and so on, each in the order
            of the tokens, and then rows that are not sent; and ``[M, L]``, their probabilities for the
            experts of the rank, in the dtype of ``probs``; minus infinity for an expert that does not get
            the token.
        """
        self.hidden_shape, self.probs = hidden_states.shape, probs
        tokens = hidden_states.view(-1, hidden_states.shape[-1])
        self.hidden_shape_before_permute = tokens.shape
        to_places = self._places_of(routing_map, self.num_places)
        if self.input_splits is None:
            by_place = to_places.sum(dim=0)
            counts = [routing_map.sum(dim=0), by_place, *self._more_counts(routing_map)]
            self.counts = torch.cat(counts).long()
            self.num_out_tokens = self._num_rows(to_places, by_place)
        self.routing_map = to_places
        rows = self.tokens_again(tokens)
        num_tokens = len(to_places)
        by_place = probs.masked_fill(~routing_map, NOT_ROUTED).view(num_tokens * self.num_places, -1)
        # A stable sort puts what is chosen first, place by place, without a wait for how much that is.
        chosen = to_places.T.reshape(-1).argsort(stable=True, descending=True)[: self.num_out_tokens]
        # In ``by_place``, a token has one row for each place.
        return rows, by_place.index_select(0, chosen % num_tokens * self.num_places + chosen // num_tokens)

    @staticmethod
    def _places_of(routing_map: Tensor, num_places: int) -> Tensor:
        """``[T, E]`` to ``[T, places]``: which places have experts of a token."""
        return routing_map.unflatten(1, (num_places, -1)).any(dim=2)

    def _more_counts(self, routing_map: Tensor) -> list[Tensor]:
        """What ranks must know besides the tokens of each expert and the rows for each place."""
        return []

    def tokens_again(self, hidden_states: Tensor) -> Tensor:
        """``[rows, B, D]`` to the rows ``[M, D]`` that :meth:`dispatch_preprocess` returned for them."""
        rows, _, self.reversed_local_input_permutation_mapping = permute_rows(
            hidden_states.view(self.hidden_shape_before_permute),
            self.routing_map,
            num_out_tokens=self.num_out_tokens,
            fused=self.config.moe_permute_fusion,
        )
        return rows

    def _derive(self, gathered: HostCopy) -> None:
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
        own = self.ep_group.rank()
        # [tp, ep, E + P]
        by_rank = gathered.wait().view(self.ep_size, self._num_shares, -1).transpose(0, 1)
        rows = by_rank[:, :, self.num_experts :]
        received = rows[:, :, own]
        self.input_splits = rows[self.tp_rank, own].tolist()
        self.output_splits = received[self.tp_rank].tolist()
        self.output_splits_tp = received.sum(dim=1)
        self.tokens_per_expert = by_rank[:, :, first:last].sum(dim=(0, 1))

    def dispatch_postprocess(self, rows: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """Copy the received rows for the experts of this rank; can run a second time.

        Args:
            rows: ``[R, D]`` from the ranks of the expert-parallel group, and of those that share an expert.
            probs: ``[R, L]``, as :meth:`dispatch_preprocess` gives them.

        Returns:
            ``[copies, D]``, sorted by expert; how many each expert gets ``[L]``, on the host; and
            ``[copies]``, their probabilities. The same values in the same order as from the stock dispatcher.
        """
        self._received_shape, self._to_experts = rows.shape, ~probs.isneginf()
        copies, copied_probs, self._of_copies = permute_rows(
            rows,
            self._to_experts,
            probs=probs,
            num_out_tokens=int(self.tokens_per_expert.sum()),
            fused=self.config.moe_permute_fusion,
        )
        return copies, self.tokens_per_expert, copied_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """``[copies, D]``, weighted, to their sums ``[R, D]``, one for each row that was received."""
        return unpermute_rows(
            hidden_states,
            self._of_copies,
            restore_shape=self._received_shape,
            routing_map=self._to_experts,
            fused=self.config.moe_permute_fusion,
        )
