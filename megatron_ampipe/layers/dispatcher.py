"""Megatron's token dispatchers for one chunk, their collectives taken out.

The permutations before and after are the stock dispatchers'; what travels between ranks does so in stages
of the schedule, issued by ``runtime``. The stock objects keep their state on themselves, so every
chunk in flight has its own.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import permute
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
)
from torch import Tensor

from megatron_ampipe.runtime.collectives import AllGather, AllToAll, HostCopy, Transport

# T tokens of a chunk, D hidden size, E experts.


class AllToAllChunk(MoEAlltoAllTokenDispatcher):
    """The all-to-all dispatcher with ``preprocess`` cut where it would wait for the other ranks' counts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Padding to capacity changes no result: chunks send the kept tokens alone.
        self.drop_and_pad = False

    @property
    def counts_group(self) -> dist.ProcessGroup:
        """Ranks that exchange :attr:`counts`."""
        return self.tp_ep_group

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count this rank's tokens; the rest follows in :meth:`set_counts`.

        Args:
            routing_map: ``[T, E]`` bool.

        Returns:
            ``[E]`` int64, tokens of this rank for each expert.
        """
        self.counts = routing_map.sum(dim=0).long()
        if self.config.moe_expert_capacity_factor is None:
            self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        else:
            self.num_out_tokens = int(self.counts.sum())
        return self.counts

    def set_counts(self, gathered: Tensor) -> None:
        """Take the counts of all ranks ``[ranks * E]``; :meth:`transport` waits for them on the host."""
        self._gathered = HostCopy(gathered)

    def transport(self) -> Transport:
        """How the chunk's tokens travel."""
        if self.input_splits is None:
            self._derive(self._gathered)
            del self._gathered
        return AllToAll(self.input_splits, self.output_splits, self.ep_group)

    def _derive(self, gathered: HostCopy) -> None:
        """What ``MoEAlltoAllTokenDispatcher.preprocess`` derives from the gathered counts, on the host."""
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
        # [tp, ep, E]
        by_rank = gathered.wait().view(self.ep_size, self.tp_size, self.num_experts).transpose(0, 1)
        by_local_expert = by_rank[:, :, first:last].contiguous()
        received = by_local_expert.sum(dim=2)
        own = by_rank[self.tp_rank, self.ep_group.rank()]
        self.input_splits = own.view(self.ep_size, self.num_local_experts).sum(dim=1).tolist()
        self.output_splits = received[self.tp_rank].tolist()
        self.output_splits_tp = received.sum(dim=1)
        self.tokens_per_expert = by_local_expert.sum(dim=(0, 1))
        if self.num_local_experts > 1:
            by_local_expert = by_local_expert.view(-1, self.num_local_experts)
            # The fused permutation reads the counts on the device.
            fused, device = self.config.moe_permute_fusion, gathered.on_device.device
            self.num_global_tokens_per_local_expert = (
                by_local_expert.to(device, non_blocking=True) if fused else by_local_expert
            )

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, ...]:
        """As in the stock dispatcher, but able to run again when the experts are recomputed."""
        kept = self.tokens_per_expert
        found: tuple[Tensor, ...] = super().dispatch_postprocess(global_input_tokens, global_probs)
        self.tokens_per_expert = kept
        return found

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        """Nothing is left to copy to the host: the counts arrive there by themselves."""
        return tokens_per_expert


class AllGatherChunk(MoEAllGatherTokenDispatcher):
    """The all-gather dispatcher; what the ranks exchange beforehand is the routing map itself."""

    @property
    def counts_group(self) -> dist.ProcessGroup:
        """Ranks that exchange :attr:`counts`."""
        return self.tp_ep_group

    @property
    def counts(self) -> Tensor:
        """``[T, E]`` bool, the routing map of this rank's tokens."""
        return self.routing_map

    @property
    def _local_experts(self) -> slice:
        return slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)

    def set_counts(self, gathered: Tensor) -> None:
        """Take the routing maps of all ranks ``[ranks * T, E]``."""
        self.routing_map = gathered
        self._tokens_per_expert: HostCopy | None = None

    def transport(self) -> Transport:
        """How the chunk's tokens travel; how many each local expert has goes to the host meanwhile."""
        if self._tokens_per_expert is None:
            self._tokens_per_expert = HostCopy(self.routing_map[:, self._local_experts].sum(dim=0))
        return AllGather(self.routing_map.shape[0] // self.tp_ep_group.size(), self.tp_ep_group)

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """As in the stock dispatcher, without its waits for the device, and able to run again.

        The stock dispatcher asks the device how many tokens each expert has; here these numbers have come to
        the host while they travelled.
        """
        assert self._tokens_per_expert is not None, "no token has travelled yet"
        tokens_per_expert = self._tokens_per_expert.wait()
        self.hidden_shape_before_permute = hidden_states.shape
        self.local_map = self.routing_map[:, self._local_experts].contiguous()
        tokens, self.local_probs, self.reversed_local_input_permutation_mapping, _, _ = permute(
            hidden_states,
            self.local_map,
            probs=probs[:, self._local_experts].contiguous(),
            num_out_tokens=int(tokens_per_expert.sum()),
            fused=self.config.moe_permute_fusion,
        )
        return tokens, tokens_per_expert, self.local_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As in the stock dispatcher, in the precision in which ``token_combine`` sums over ranks."""
        output: Tensor = super().combine_preprocess(hidden_states)
        self._dtype = output.dtype
        return output.to(self.local_probs.dtype)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """As in the stock dispatcher, back in the tokens' precision."""
        output: Tensor = super().combine_postprocess(hidden_states.to(self._dtype))
        return output


CHUNK_DISPATCHERS: dict[str, type[AllToAllChunk] | type[AllGatherChunk]] = {
    "alltoall": AllToAllChunk,
    "allgather": AllGatherChunk,
}
"""By ``--moe-token-dispatcher-type``."""
