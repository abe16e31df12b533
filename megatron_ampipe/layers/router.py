"""Megatron's top-k router, or a subclass of it, that routes a sequence chunk by chunk with the same result.

Parameters, buffers and checkpoint keys are those of the class that is extended. What a class must promise is
in docs/gates.md; ``ampipe gate`` tests it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from functools import partialmethod
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from megatron_ampipe.errors import BadInput
from megatron_ampipe.layers.block_routing import (
    BlockRouting,
    Capacity,
    ChunkLosses,
    ChunkReplay,
    Hook,
    hook_of_block,
    prescribed_by,
)

# S sequence rows of the whole block, R rows of one chunk, B batch, D hidden size, E experts.


class ChunkRouting:
    """Lets a router class route single chunks, and computes the losses of a block separately.

    The class runs its own ``forward`` on the rows of a chunk. Only what depends on the whole block is
    replaced for that call: the losses are noted and computed later, and tokens beyond the capacity are
    dropped here.
    """

    _noted: ChunkLosses | None = None
    """Where the losses of the chunk that is being routed are noted; None outside."""
    _block: BlockRouting | None = None
    """The block of the chunk that is being routed; None outside."""

    def begin_block(
        self, num_tokens: int, *, per_chunk: bool, first_tokens: Sequence[int] = (0,)
    ) -> BlockRouting:
        """What :meth:`forward` needs of a block with ``num_tokens`` on this rank.

        Its chunks begin with ``first_tokens``. With ``per_chunk``, every chunk has a separate capacity.
        """
        config, capacity = self.config, None
        # Older versions have neither.
        replay = getattr(self, "router_replay", None)
        forced_std = getattr(config, "moe_router_force_biased", None)
        if config.moe_expert_capacity_factor is not None:
            at_once = per_chunk or config.moe_token_drop_policy == "probs"
            capacity = Capacity(config, self.topk, None if at_once else num_tokens)
        prescribed = None if replay is None else prescribed_by(replay)
        return BlockRouting(capacity, num_tokens, first_tokens, prescribed, forced_std)

    def forward(
        self,
        hidden: Tensor,
        *args: Any,
        block: BlockRouting | None = None,
        chunk: int = 0,
        token_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, ...]:
        """Route the tokens of one chunk without the losses; without ``block``, run the class unchanged.

        Args:
            hidden: ``[R, B, D]``.
            args: Of the stock router, like ``kwargs``.
            block: From :meth:`begin_block`; with a capacity, chunks must be routed in order.
            chunk: The index of the chunk in the block; 0 if all are routed at once.
            token_ids: ``[R, B]``, for a class that reads ids (``TokenIdRouter``).

        Returns:
            ``probs [R*B, E]``, ``routing_map [R*B, E]`` bool, and for a chunk what :meth:`block_losses`
            takes, ``[R, B, L]``: the logits, and for a class that overrides ``routing`` also its scores.
        """
        if block is None:
            return super().forward(hidden, *args, **kwargs)
        assert not args and not kwargs, "chunks are routed by their hidden states alone"
        losses = block.losses[chunk] = ChunkLosses()
        config, replay = self.config, getattr(self, "router_replay", None)
        kept: dict[str, Any] = {"config": config, "_noted": None, "_block": None}
        # Not by ``setattr``, which looks for parameters and modules first.
        vars(self).update(_noted=losses, _block=block)
        if config.moe_expert_capacity_factor is not None or block.forced_std is not None:
            # The class's ``forward`` drops no token and draws no bias of the experts.
            self.config = copy.copy(config)
            self.config.moe_expert_capacity_factor = self.config.moe_router_force_biased = None
        if replay is not None:
            kept["router_replay"] = replay
            self.router_replay = ChunkReplay(replay, block, chunk)
        if token_ids is not None:
            kept["token_ids"] = None
            self.token_ids = token_ids
        try:
            probs, routing_map = super().forward(hidden)
        finally:
            vars(self).update(kept)
        counted = routing_map
        if block.capacity is not None:
            routing_map = counted = block.capacity.keep(probs, routing_map)
            probs = probs * routing_map
            if self.config.moe_pad_expert_input_to_capacity:
                # The stock router counts the padding: every expert has the same number of rows.
                counted = torch.ones_like(routing_map[: block.capacity.slots(len(routing_map))])
        if losses.counts_experts:
            super()._apply_expert_bias(counted)
        return probs, routing_map, losses.packed(hidden)

    def routing(self, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As in Megatron; in a chunk with the random numbers of ``--moe-router-force-biased``.

        Every token draws logits; the bias of the experts is drawn once for a block.
        """
        block = self._block
        if block is not None and block.forced_std is not None:
            logits = moe_utils.apply_random_logits(logits)
            if block.forced_bias is None:
                zeros, std = logits.new_zeros(logits.shape[-1]), block.forced_std
                block.forced_bias = moe_utils.RandomSTEShared.apply(zeros, std, self.layer_number)
            logits = logits + block.forced_bias
        return super().routing(logits, *args, **kwargs)

    def register_forward_hook(self, hook: Hook, **options: Any) -> RemovableHandle:
        """As in torch; the hook is called once for all chunks of a block, with what a stock router gets.

        Hooks that want keyword arguments, or to be called after an error, see chunks.
        """
        if options.get("with_kwargs") or options.get("always_call"):
            return super().register_forward_hook(hook, **options)
        return super().register_forward_hook(hook_of_block(hook), **options, with_kwargs=True)

    def block_losses(self, packed: Tensor, block: BlockRouting) -> Tensor:
        """All losses of the router, computed once for the whole block and logged as in a stock run.

        ``packed [S, B, L]`` is the third result of :meth:`forward` of all chunks, in order. Returns a scalar
        whose backward adds the gradient of the losses to it, independent of the incoming gradient (Megatron's
        ``MoEAuxLossAutoScaler``); call it with a gradient of zero. Reads no parameter, so no hook has to run.
        """
        sequence_length, batch = packed.shape[:2]
        chunks = [block.losses[index] for index in sorted(block.losses)]
        tensors = chunks[0].unpacked(packed)
        # What carries the losses: attaching one gives a tensor to differentiate in place of the old one.
        carriers = list(tensors)
        for number, (name, index, _) in enumerate(chunks[0].calls):
            if name == "apply_z_loss":
                carriers[index] = self.apply_z_loss(carriers[index])
                continue
            routing_map = torch.cat([chunk.calls[number][2] for chunk in chunks])
            shape = (sequence_length, batch) if name == "_apply_seq_aux_loss" else ()
            carriers[index] = getattr(self, name)(carriers[index], tensors[index], routing_map, *shape)
        if self.has_stock_routing and self.is_aux_loss_enabled():
            (logits,) = carriers
            routing_map, scores = compute_routing_scores_for_aux_loss(
                logits, self.topk, self.score_function, fused=self.config.moe_router_fusion
            )
            carrier = self._apply_aux_loss(logits, scores, routing_map)
            carrier = self._apply_seq_aux_loss(carrier, scores, routing_map, sequence_length, batch)
            carriers = [self._apply_global_aux_loss(carrier, scores, routing_map)]
        sums = [carrier.sum(dtype=torch.float32) for carrier in carriers or [packed]]
        return functools.reduce(torch.add, sums)

    @functools.cached_property
    def has_stock_routing(self) -> bool:
        """Whether the class leaves the choice to ``TopKRouter.routing``.

        Then every token has ``topk`` experts, and the logits are all that its losses depend on.
        """
        gate = type(self).__mro__[2]
        return gate.routing is TopKRouter.routing and gate.forward is TopKRouter.forward

    def is_aux_loss_enabled(self) -> bool:
        """As in Megatron; the losses of Megatron's own choice are computed from the logits later."""
        if self._noted is not None and self.has_stock_routing:
            return False
        return super().is_aux_loss_enabled()

    def apply_z_loss(self, logits: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As in Megatron; within a chunk, note the logits."""
        if self._noted is None:
            return super().apply_z_loss(logits, *args, **kwargs)
        self._noted.add("apply_z_loss", logits)
        return logits

    def _apply_expert_bias(self, routing_map: Tensor, *args: Any, **kwargs: Any) -> None:
        """As in Megatron; within a chunk, after tokens were dropped."""
        if self._noted is None:
            super()._apply_expert_bias(routing_map, *args, **kwargs)
        else:
            self._noted.counts_experts = True

    def _add_loss(
        self, name: str, probs: Tensor, scores: Tensor, routing_map: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """As in Megatron; within a chunk, note the scores and the choice."""
        if self._noted is None:
            return getattr(super(), name)(probs, scores, routing_map, *args, **kwargs)
        self._noted.add(name, scores, routing_map)
        return probs

    _apply_aux_loss = partialmethod(_add_loss, "_apply_aux_loss")
    _apply_seq_aux_loss = partialmethod(_add_loss, "_apply_seq_aux_loss")
    _apply_global_aux_loss = partialmethod(_add_loss, "_apply_global_aux_loss")

    def attach_and_log_load_balancing_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in Megatron, for a whole block only.

        Raises:
            BadInput: the class adds a loss that it has computed from one chunk.
        """
        if self._noted is None:
            return super().attach_and_log_load_balancing_loss(*args, **kwargs)
        raise BadInput(
            "--ampipe-router",
            type(self).__mro__[2].__qualname__,
            rule="its routing computes a separate loss, and the sum over chunks would be another loss",
            remedy="Override _apply_aux_loss, which is called with the scores and choice of all tokens, or "
            "train with --ampipe-degree 1.",
        )


@functools.cache
def chunk_router_of(gate: type[TopKRouter]) -> type[TopKRouter]:
    """The class ``gate`` extended by :class:`ChunkRouting`."""
    return type(f"Chunk{gate.__name__}", (ChunkRouting, gate), {"__doc__": gate.__doc__})
