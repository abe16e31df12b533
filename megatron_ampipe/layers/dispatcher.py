"""Megatron's all-to-all token dispatcher for one chunk, its collectives taken out.

The permutations before and after are the stock dispatcher's; the exchange of counts and the all-to-alls
are stages of the schedule, issued by ``runtime``. The stock object keeps its state on itself, so every
chunk in flight has its own.
"""

from __future__ import annotations

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from megatron_ampipe.runtime.collectives import CountsOnHost


class ChunkDispatcher(MoEAlltoAllTokenDispatcher):
    """The stock dispatcher with ``preprocess`` cut where it would wait for the other ranks' counts."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Count this rank's tokens; the rest follows in :meth:`set_counts`.

        Args:
            routing_map: ``[tokens, E]`` bool.

        Returns:
            ``[E]`` int64, tokens of this rank for each expert.
        """
        self.local_counts = routing_map.sum(dim=0).long()
        if self.config.moe_expert_capacity_factor is None:
            self.num_out_tokens = routing_map.size(0) * self.config.moe_router_topk
        else:
            self.num_out_tokens = int(self.local_counts.sum())
        return self.local_counts

    def set_counts(self, counts: CountsOnHost) -> None:
        """Take the counts of all ranks, on their way to the host; :meth:`splits` waits for them."""
        self._counts = counts

    def splits(self) -> tuple[list[int], list[int]]:
        """Rows sent to and received from each expert-parallel rank in the dispatch."""
        if self.input_splits is None:
            self._derive(self._counts)
            del self._counts
        return self.input_splits, self.output_splits

    def _derive(self, counts: CountsOnHost) -> None:
        """What ``MoEAlltoAllTokenDispatcher.preprocess`` derives from the gathered counts, on the host."""
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1] + 1
        # [tp, ep, E]
        by_rank = counts.wait().view(self.ep_size, self.tp_size, self.num_experts).transpose(0, 1)
        by_local_expert = by_rank[:, :, first:last].contiguous()
        received = by_local_expert.sum(dim=2)
        own = by_rank[self.tp_rank, self.ep_rank]
        self.input_splits = own.view(self.ep_size, self.num_local_experts).sum(dim=1).tolist()
        self.output_splits = received[self.tp_rank].tolist()
        self.output_splits_tp = received.sum(dim=1)
        self.tokens_per_expert = by_local_expert.sum(dim=(0, 1))
        if self.num_local_experts > 1:
            by_local_expert = by_local_expert.view(-1, self.num_local_experts)
            # The fused permutation reads the counts on the device.
            on_device = self.config.moe_permute_fusion
            self.num_global_tokens_per_local_expert = (
                by_local_expert.to(counts.on_device.device, non_blocking=True)
                if on_device
                else by_local_expert
            )

    def _maybe_dtoh_and_synchronize(
        self, point: str, tokens_per_expert: Tensor | None = None
    ) -> Tensor | None:
        """Nothing is left to copy to the host: the counts arrive there by themselves."""
        return tokens_per_expert
