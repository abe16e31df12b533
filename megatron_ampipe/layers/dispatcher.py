"""Megatron's token dispatchers for one chunk, without their collectives.

The permutations before and after are those of the stock dispatchers; the collectives are stages of the
schedule, issued by ``runtime``. Stock dispatchers store the state of a call in attributes, so every chunk in
flight has a separate dispatcher.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from megatron_ampipe.layers.flex_chunk import FlexChunk
from megatron_ampipe.runtime.collectives import AllGather, AllToAll, HostCopy, Transport, lane_group
from megatron_ampipe.runtime.row_gather import RowGather

# T tokens of a chunk, D hidden size, E experts, L experts of a rank.


def permute_rows(
    tokens: Tensor, routing_map: Tensor, *, probs: Tensor | None = None, num_out_tokens: int, fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Megatron's ``permute``; the fused kernel, which refuses to choose no row, chooses some.

    Returns:
        The rows, their probabilities, if any are given, and what :func:`unpermute_rows` needs.
    """
    rows, row_probs, mapping, *_ = permute(
        tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens, fused=fused and num_out_tokens > 0
    )
    return rows, row_probs, mapping


def unpermute_rows(
    rows: Tensor, mapping: Tensor, *, restore_shape: torch.Size, routing_map: Tensor, fused: bool
) -> Tensor:
    """Megatron's ``unpermute``, for the first of the rows that :func:`permute_rows` chose, or for none.

    Without a row, the fused kernel returns no row either; the sum of none is 0.
    """
    fused = fused and rows.shape[0] > 0
    if not fused:
        # Of the fused kernel it has several columns, and no row is left.
        mapping = mapping[: rows.shape[0]].flatten().long()
    tokens: Tensor = unpermute(
        rows, mapping, restore_shape=restore_shape, routing_map=routing_map, fused=fused
    )
    return tokens


class AllToAllChunk(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher, with ``preprocess`` split where it waits for the other ranks' counts."""

    FROM_COUNTS: ClassVar = (
        "num_out_tokens", "input_splits", "output_splits", "output_splits_tp", "tokens_per_expert",
        "num_global_tokens_per_local_expert",
    )  # fmt: skip
    has_fixed_choices = True
    """Whether the router gives every token ``topk`` experts, if none are dropped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Padding to capacity does not change the result: chunks send only the kept tokens.
        self.drop_and_pad = False
        self._num_shares = self.tp_size
        # What the stock dispatcher does over these ranks are separate stages (:meth:`gather`).
        self.tp_size = 1

    @property
    def counts_group(self) -> dist.ProcessGroup:
        """The ranks that exchange :attr:`counts`."""
        return self.tp_ep_group

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count this rank's tokens; :meth:`set_counts` does the rest.

        Args:
            routing_map: ``[T, E]`` bool.

        Returns:
            ``[E]`` int64, number of this rank's tokens for each expert; in a second run, what the first knew
            in the end.
        """
        if self.input_splits is not None:
            return self.tokens_per_expert
        self.counts = routing_map.sum(dim=0).long()
        self.num_out_tokens = self._num_rows(routing_map, self.counts)
        return self.counts

    def _num_rows(self, chosen: Tensor, counts: Tensor) -> int:
        """How many rows are prepared for the exchange: those that are sent come first.

        A router that gives every token ``topk`` experts sets a bound; another one makes the host wait.

        Args:
            chosen: ``[T, places]`` bool, where each token goes.
            counts: ``[places]``, how many go to each place.
        """
        if self.has_fixed_choices:
            return chosen.size(0) * min(self.config.moe_router_topk, chosen.size(1))
        # The fused permutation refuses to choose no row.
        return max(1, int(counts.sum()))

    def set_counts(self, gathered: Tensor) -> None:
        """Set the counts of all ranks ``[ranks * E]``; :meth:`transport` waits for them on the host."""
        self._gathered = HostCopy(gathered)

    def transport(self) -> Transport:
        """The token exchange of the chunk."""
        if self.input_splits is None:
            self._derive(self._gathered)
            del self._gathered
        return AllToAll(self.input_splits, self.output_splits, self.ep_group)

    def gather(self) -> RowGather:
        """Of the chunk, over the ranks that share an expert; its combine is their reduce-scatter."""
        return RowGather(self.output_splits_tp.tolist(), self.tp_group)

    def _derive(self, gathered: HostCopy) -> None:
        """The part of ``MoEAlltoAllTokenDispatcher.preprocess`` after the exchange of counts, on the host."""
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
        # [tp, ep, E]
        by_rank = gathered.wait().view(self.ep_size, self._num_shares, self.num_experts).transpose(0, 1)
        by_local_expert = by_rank[:, :, first:last].contiguous()
        own = by_rank[self.tp_rank, self.ep_group.rank()]
        self.input_splits = own.view(self.ep_size, self.num_local_experts).sum(dim=1).tolist()
        self.output_splits = by_local_expert[self.tp_rank].sum(dim=1).tolist()
        self._set_received(by_local_expert, gathered.on_device.device)

    def _set_received(self, by_local_expert: Tensor, device: torch.device) -> None:
        """Set what arrives: ``[tp, ranks, L]``, in the order in which rows of other ranks arrive."""
        self.output_splits_tp = by_local_expert.sum(dim=(1, 2))
        self.tokens_per_expert = by_local_expert.sum(dim=(0, 1))
        if self.num_local_experts > 1:
            by_local_expert = by_local_expert.view(-1, self.num_local_experts)
            # The fused permutation reads the counts on the device.
            fused = self.config.moe_permute_fusion
            self.num_global_tokens_per_local_expert = (
                by_local_expert.to(device, non_blocking=True) if fused else by_local_expert
            )

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, ...]:
        """As in the stock dispatcher, but can run a second time, when the experts are recomputed."""
        tokens_per_expert = self.tokens_per_expert
        outputs: tuple[Tensor, ...] = super().dispatch_postprocess(global_input_tokens, global_probs)
        self.tokens_per_expert = tokens_per_expert
        return outputs

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """As in the stock dispatcher, with as many rows as were sent, perhaps none."""
        return unpermute_rows(
            permutated_local_input_tokens,
            self.reversed_local_input_permutation_mapping,
            restore_shape=self.hidden_shape_before_permute,
            routing_map=self.routing_map,
            fused=self.config.moe_permute_fusion,
        ).view(self.hidden_shape)

    def tokens_again(self, hidden_states: Tensor) -> Tensor:
        """``[R, B, D]`` to the tokens ``[T, D]`` that :meth:`dispatch_preprocess` returned for them."""
        tokens, _ = self.dispatch_preprocess(hidden_states, self.routing_map, self.probs)
        found: Tensor = tokens
        return found

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        """Do nothing: :meth:`set_counts` has already started the copy of the counts to the host."""
        return tokens_per_expert


class AllGatherChunk(MoEAllGatherTokenDispatcher):
    """The all-gather dispatcher; its ranks exchange the routing map itself instead of counts."""

    FROM_COUNTS: ClassVar = ("routing_map", "_tokens_per_expert")
    has_fixed_choices = True
    """As in :class:`AllToAllChunk`; this dispatcher counts in any case."""
    num_out_tokens: ClassVar = None
    """All rows that are prepared are sent."""
    _tokens_per_expert: HostCopy | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counts_group = lane_group(self.tp_ep_group, "counts")
        """The ranks that exchange :attr:`counts`, apart from what dispatches use."""

    @property
    def counts(self) -> Tensor:
        """``[T, E]`` bool, the routing map of this rank's tokens."""
        return self.routing_map

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        """As in the stock dispatcher; a second run keeps the routing maps of all ranks."""
        known = None if self._tokens_per_expert is None else self.routing_map
        outputs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        if known is not None:
            self.routing_map = known
        return outputs

    def tokens_again(self, hidden_states: Tensor) -> Tensor:
        """``[R, B, D]`` to the tokens ``[T, D]`` that :meth:`dispatch_preprocess` returned for them."""
        return hidden_states.view(-1, hidden_states.shape[-1])

    @property
    def _local_experts(self) -> slice:
        return slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)

    def set_counts(self, gathered: Tensor) -> None:
        """Set the routing maps of all ranks ``[ranks * T, E]``."""
        self.routing_map = gathered

    def transport(self) -> Transport:
        """The token exchange of the chunk; also starts copying the experts' token counts to the host."""
        if self._tokens_per_expert is None:
            self._tokens_per_expert = HostCopy(self.routing_map[:, self._local_experts].sum(dim=0))
        return AllGather(self.routing_map.shape[0] // self.tp_ep_group.size(), self.tp_ep_group)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """As in the stock dispatcher, without its device synchronization; can run a second time.

        The stock dispatcher synchronizes to read the number of tokens of each expert; here these numbers were
        copied to the host during the dispatch.
        """
        assert self._tokens_per_expert is not None, "transport() has not been called"
        tokens_per_expert = self._tokens_per_expert.wait()
        self.hidden_shape_before_permute = hidden_states.shape
        self.local_map = self.routing_map[:, self._local_experts].contiguous()
        tokens, self.local_probs, self.reversed_local_input_permutation_mapping = permute_rows(
            hidden_states,
            self.local_map,
            probs=probs[:, self._local_experts].contiguous(),
            num_out_tokens=int(tokens_per_expert.sum()),
            fused=self.config.moe_permute_fusion,
        )
        return tokens, tokens_per_expert, self.local_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As in the stock dispatcher, in the dtype in which ``token_combine`` sums over ranks."""
        output = unpermute_rows(
            hidden_states,
            self.reversed_local_input_permutation_mapping,
            restore_shape=self.hidden_shape_before_permute,
            routing_map=self.local_map,
            fused=self.config.moe_permute_fusion,
        )
        self._dtype = output.dtype
        return output.to(self.local_probs.dtype)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """As in the stock dispatcher, in the dtype of the tokens."""
        output: Tensor = super().combine_postprocess(hidden_states.to(self._dtype))
        return output


ChunkDispatcher = AllToAllChunk | AllGatherChunk | FlexChunk


def copy_counts(first: ChunkDispatcher, second: ChunkDispatcher) -> None:
    """Let a second run of a chunk know from the start what the first was told by the other ranks."""
    vars(second).update({name: value for name, value in vars(first).items() if name in first.FROM_COUNTS})
