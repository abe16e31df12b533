"""Extends Megatron's top-k router, or a subclass, to route a sequence chunk by chunk with the same result.

Parameters, buffers and checkpoint keys do not change. docs/gates.md says what a class must promise; ``ampipe
gate`` tests it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partialmethod
from typing import TYPE_CHECKING, TypedDict

import torch
from megatron.core.transformer.moe.moe_utils import (
    apply_router_token_dropping,
    compute_routing_scores_for_aux_loss,
    get_capacity,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.collectives import copy_to_device

# S sequence rows of the whole block, R rows of one chunk, B batch, D hidden size, T tokens, E experts, K
# experts per token.

Hook = Callable[[Module, tuple[Tensor, ...], tuple[Tensor, ...]], object]
"""A forward hook of a router: of the module, its inputs and its outputs, which a result replaces."""


class Capacity:
    """Drops the tokens of a chunk beyond the capacity of the experts; one object per block and pass.

    As Megatron's ``apply_router_token_dropping``. Dropping by position keeps the first tokens of each expert,
    so a count is carried from chunk to chunk. ``num_tokens`` is the number of tokens of the block on this
    rank; None if each call of :meth:`keep` has a separate capacity.
    """

    def __init__(self, config: TransformerConfig, topk: int, num_tokens: int | None) -> None:
        self._policy, self._factor = config.moe_token_drop_policy, config.moe_expert_capacity_factor
        self._topk, self._num_experts = topk, config.num_moe_experts
        self._block_capacity = None if num_tokens is None else self._capacity(num_tokens)
        self._used: Tensor | int = 0
        self._num_tokens = 0

    def _capacity(self, num_tokens: int) -> int:
        capacity: int = get_capacity(num_tokens * self._topk, self._num_experts, self._factor)
        return capacity

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """The kept entries of ``routing_map`` ``[T, E]`` bool; called once per chunk, in order."""
        if self._block_capacity is None:
            with torch.no_grad():
                dropped: tuple[Tensor, Tensor] = apply_router_token_dropping(
                    probs, routing_map, self._topk, self._factor, drop_policy=self._policy
                )
            return dropped[1]
        position = routing_map.long().cumsum(dim=0) + self._used
        self._used = position[-1]
        return routing_map & (position <= self._block_capacity)

    def slots(self, num_tokens: int) -> int:
        """How many rows of a chunk every expert gets with padding to capacity; called as :meth:`keep` is."""
        if self._block_capacity is None:
            return min(num_tokens, self._capacity(num_tokens))
        before = min(self._num_tokens, self._block_capacity)
        self._num_tokens += num_tokens
        return min(self._num_tokens, self._block_capacity) - before


@dataclass(slots=True)
class ChunkLosses:
    """The arguments of a router's calls of Megatron's loss functions in one chunk, computed for the block."""

    tensors: list[Tensor] = field(default_factory=list)
    """Logits and scores ``[T, E]``, without duplicates."""
    calls: list[tuple[str, int, Tensor | None]] = field(default_factory=list)
    """The loss functions in order: name, index in ``tensors``, and the routing map ``[T, E]`` bool."""
    counts_experts: bool = False
    """Whether the router adds its choice to the counts of the expert bias."""
    padding: Tensor | None = None
    """``[T]`` bool, True for tokens that count in no loss and in no count; None if all count."""

    def add(self, name: str, tensor: Tensor, routing_map: Tensor | None = None) -> None:
        """Record a call of the loss function ``name``."""
        index = next((i for i, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        self.calls.append((name, index, routing_map))

    def packed(self, hidden: Tensor) -> Tensor:
        """All tensors side by side, ``[R, B, E * tensors]``, from the routing of ``hidden [R, B, D]``.

        Keeps empty tensors of the same width in place of them, so that their graph is released.
        """
        rows = hidden.shape[:2]
        if not self.tensors:
            return hidden[..., :0]
        joined = [tensor.view(*rows, -1) for tensor in self.tensors]
        self.tensors = [tensor.new_empty((0, tensor.shape[-1])) for tensor in self.tensors]
        return joined[0] if len(joined) == 1 else torch.cat(joined, dim=-1)

    def unpacked(self, packed: Tensor) -> list[Tensor]:
        """The tensors of all chunks, each ``[T, E]`` in its own dtype, from ``[S, B, E * tensors]``."""
        if not self.tensors:
            return []
        widths = [tensor.shape[-1] for tensor in self.tensors]
        parts = packed.flatten(0, 1).split(widths, dim=-1)
        return [part.to(tensor.dtype) for part, tensor in zip(parts, self.tensors, strict=True)]


@dataclass(slots=True)
class BlockRouting:
    """Routing state that the chunks of one block share; one per forward pass."""

    capacity: Capacity | None
    """Drops tokens; None for dropless routing."""
    num_tokens: int
    first_tokens: Sequence[int]
    prescribed: Tensor | None
    """The experts that a routing replay prescribes, ``[T, K]``; None without a replay."""
    is_recompute: bool = False
    """Whether this is the recompute of a forward pass."""
    looks_for_replay: bool = False
    """Whether the recompute has not yet looked what the backward pass is to replay."""
    losses: dict[int, ChunkLosses] = field(default_factory=dict)
    """The loss calls of each chunk."""
    parts: dict[object, dict[int, tuple[Tensor, ...]]] = field(default_factory=dict)
    """The tensors that :meth:`join` has been given, by key and chunk."""

    def join(self, key: object, chunk: int, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Keep a chunk's tensors, one row per token. The last chunk's call returns those of the block.

        All chunks use the same ``key``. Returns ``[T, ...]`` in sequence order, or None before the last.
        """
        parts = self.parts.setdefault(key, {})
        parts[chunk] = tensors
        if sum(len(first) for first, *_ in parts.values()) < self.num_tokens:
            return None
        ordered = [parts[index] for index in sorted(parts)]
        del self.parts[key]
        return tuple(torch.cat(by_chunk) for by_chunk in zip(*ordered, strict=True))


class ChunkReplay:
    """Megatron's ``RouterReplay`` for one chunk: replays or records that chunk's part of ``whole``."""

    def __init__(self, whole: RouterReplay, block: BlockRouting, chunk: int) -> None:
        self._whole, self._block, self._chunk = whole, block, chunk

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As ``RouterReplay.get_replay_topk``, for the tokens of the chunk."""
        block = self._block
        if block.looks_for_replay:
            block.looks_for_replay = False
            if self._whole.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
                block.prescribed = prescribed_by(self._whole)
        if block.prescribed is not None:
            if block.prescribed.device != scores.device:
                block.prescribed = copy_to_device(block.prescribed, scores.device)
            first = block.first_tokens[self._chunk]
            indices = block.prescribed[first : first + len(scores)]
            return scores.gather(1, indices), indices
        assert default_compute_topk is not None
        values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        # Next to a recompute, the forward pass of the next micro-batch may record its own choice.
        if self._whole.router_replay_action is RouterReplayAction.RECORD and not block.is_recompute:
            recorded = block.join("replay", self._chunk, indices)
            if recorded is not None:
                self._whole.record_indices(*recorded)
        return values, indices


def prescribed_by(replay: RouterReplay) -> Tensor | None:
    """The experts ``[T, K]`` that a router's replay prescribes for a block; call it once per pass."""
    experts: Tensor | None = None
    if replay.router_replay_action is RouterReplayAction.REPLAY_FORWARD:
        experts = replay.target_topk_idx
    if replay.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
        # As in Megatron: each pass takes the choices of the next micro-batch.
        experts = replay.replay_backward_list.pop(0)
    return experts


def without_options(hook: Callable[..., object]) -> Hook:
    """Wrap a hook that takes the keyword arguments of a call: Megatron gives its router none."""

    @functools.wraps(hook)
    def plain_hook(module: Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> object:
        return hook(module, inputs, {}, outputs)

    return plain_hook


class _ChunkOptions(TypedDict, total=False):
    """Keyword arguments of :meth:`ChunkRouting.forward` that a hook reads."""

    block: BlockRouting | None
    chunk: int


def hook_of_block(hook: Hook) -> Callable[..., object]:
    """Wrap a forward hook of a router so that it is called once per block, as by a stock router.

    The hook may read the router's input (``[T, 1, D]`` in place of ``[S, B, D]``) and output, not replace it.
    """

    def chunk_hook(
        module: Module, inputs: tuple[Tensor, ...], options: _ChunkOptions, outputs: tuple[Tensor, ...]
    ) -> object:
        block = options.get("block")
        if block is None:
            return hook(module, inputs, outputs)
        hidden, (probs, routing_map) = inputs[0].flatten(0, 1), outputs[:2]
        # The key is this wrapper, because a router may have several hooks.
        whole = block.join(chunk_hook, options["chunk"], hidden.detach(), probs.detach(), routing_map)
        if whole is None:
            return None
        rows, *routed = whole
        if hook(module, (rows.unsqueeze(1),), tuple(routed)) is not None:
            raise BadInput(
                "forward hook of a router",
                f"{hook.__module__}.{hook.__qualname__}",
                rule="it replaces the routing of a sequence whose first chunks have been sent",
                remedy="Use --ampipe-router with a custom class, or train with --ampipe-degree 1.",
            )
        return None

    chunk_hook.sees_whole_blocks = True  # type: ignore[attr-defined]
    return chunk_hook


def sees_whole_blocks(router: Module) -> bool:
    """Whether a router has a hook wrapped by :func:`hook_of_block`."""
    return any(getattr(hook, "sees_whole_blocks", False) for hook in router._forward_hooks.values())


if TYPE_CHECKING:
    # A mixin of router classes, whose methods it calls.
    from megatron.core.transformer.moe.router import TopKRouter as _Router
else:
    _Router = object


class ChunkRouting(_Router):
    """Mixin that lets a router class route single chunks, and computes the losses of a block separately.

    The class runs its own ``forward`` on the rows of a chunk. Only what depends on the whole block is
    replaced for that call: calls of loss functions are recorded and run later, and tokens beyond the
    capacity are dropped here.
    """

    config: TransformerConfig
    router_replay: RouterReplay | ChunkReplay | None
    _noted: ChunkLosses | None = None
    """Records the loss calls of the chunk that is being routed; None otherwise."""

    def begin_block(
        self,
        num_tokens: int,
        *,
        per_chunk: bool,
        first_tokens: Sequence[int] = (0,),
        first_run: BlockRouting | None = None,
    ) -> BlockRouting:
        """Create the routing state of a block with ``num_tokens`` on this rank, for :meth:`forward`.

        ``first_tokens`` are the first token of each chunk. With ``per_chunk``, each has a separate capacity.
        ``first_run`` is the state of the pass that this one recomputes: what was prescribed then is
        prescribed again, unless a replay has choices for backward passes.
        """
        config, capacity, replay = self.config, None, self.router_replay
        if config.moe_expert_capacity_factor is not None:
            at_once = per_chunk or config.moe_token_drop_policy == "probs"
            capacity = Capacity(config, self.topk, None if at_once else num_tokens)
        if first_run is not None:
            prescribed = first_run.prescribed
            return BlockRouting(
                capacity, num_tokens, first_tokens, prescribed, is_recompute=True, looks_for_replay=True
            )
        prescribed = None if replay is None else prescribed_by(replay)
        return BlockRouting(capacity, num_tokens, first_tokens, prescribed)

    def forward(
        self,
        hidden: Tensor,
        *args: object,
        block: BlockRouting | None = None,
        chunk: int = 0,
        token_ids: Tensor | None = None,
        padding: Tensor | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, ...]:
        """Route the tokens of one chunk without the losses; without ``block``, run the class unchanged.

        Args:
            hidden: ``[R, B, D]``.
            args: Arguments of the stock router, as are ``kwargs``.
            block: From :meth:`begin_block`; with a capacity, chunks must be routed in order.
            chunk: The index of the chunk in the block; 0 if all are routed at once.
            token_ids: ``[R, B]``, for a class that reads ids (``TokenIdRouter``).
            padding: ``[R, B]`` bool, True for rows that count in no loss and not in the expert bias.

        Returns:
            ``probs [R*B, E]``, ``routing_map [R*B, E]`` bool; for a chunk also the input ``[R, B, L]`` of
            :meth:`block_losses`: the logits, and the scores of a class that overrides ``routing``.
        """
        if block is None:
            routed: tuple[Tensor, ...] = super().forward(hidden, *args, **kwargs)
            return routed
        assert not args and not kwargs, "chunks are routed by their hidden states alone"
        losses = block.losses[chunk] = ChunkLosses(padding=None if padding is None else padding.flatten())
        config, replay = self.config, self.router_replay
        kept: dict[str, object] = {"config": config, "_noted": None}
        # Not by ``setattr``, which looks for parameters and modules first.
        self.__dict__.update(_noted=losses)
        if config.moe_expert_capacity_factor is not None:
            # The class's own ``forward`` must drop no token.
            self.config = copy.copy(config)
            self.config.moe_expert_capacity_factor = None
        if replay is not None:
            kept["router_replay"] = replay
            self.router_replay = ChunkReplay(replay, block, chunk)
        if token_ids is not None:
            kept["token_ids"] = None
            self.token_ids = token_ids
        try:
            probs, routing_map = super().forward(hidden)
        finally:
            self.__dict__.update(kept)
        counted = routing_map
        if block.capacity is not None:
            routing_map = counted = block.capacity.keep(probs, routing_map)
            probs = probs * routing_map
            if self.config.moe_pad_expert_input_to_capacity:
                # The stock router counts the padding: every expert has the same number of rows.
                counted = torch.ones_like(routing_map[: block.capacity.slots(len(routing_map))])
        if losses.counts_experts:
            if losses.padding is not None:
                counted = counted & ~losses.padding.unsqueeze(-1)
            super()._apply_expert_bias(counted)
        return probs, routing_map, losses.packed(hidden)

    def register_forward_hook(self, hook: Hook, **options: bool) -> RemovableHandle:
        """As in torch; the hook is called once for all chunks of a block, as on a stock router.

        A hook registered with ``always_call``, which also runs after a failure, is called for each chunk.
        """
        handle: RemovableHandle
        if options.get("always_call"):
            handle = super().register_forward_hook(hook, **options)
            return handle
        if options.pop("with_kwargs", False):
            hook = without_options(hook)
        handle = super().register_forward_hook(hook_of_block(hook), **options, with_kwargs=True)
        return handle

    def block_losses(self, packed: Tensor, block: BlockRouting) -> Tensor:
        """Compute all losses of the router once for the whole block, and log them as in a stock run.

        ``packed [S, B, L]`` is the third output of :meth:`forward`, all chunks in order. Returns a scalar
        whose backward gives the gradient of the losses and ignores the incoming gradient (Megatron's
        ``MoEAuxLossAutoScaler``); call it with a gradient of zero. Reads no parameter, so no hook has to run.
        """
        sequence_length, batch = packed.shape[:2]
        chunks = [block.losses[index] for index in sorted(block.losses)]
        tensors = chunks[0].unpacked(packed)
        masks = [chunk.padding for chunk in chunks if chunk.padding is not None]
        padding = torch.cat(masks) if masks else None
        # Older versions of Megatron have no such arguments.
        masked: dict[str, Tensor] = {} if padding is None else {"padding_mask": padding}
        counts = {} if padding is None else {"with_padding_mask": True}
        # Attaching a loss to a tensor gives a new tensor, which is differentiated in place of the old one.
        carriers = list(tensors)
        for number, (name, index, _) in enumerate(chunks[0].calls):
            if name == "apply_z_loss":
                carriers[index] = self.apply_z_loss(carriers[index], **masked)
                continue
            maps = (chunk.calls[number][2] for chunk in chunks)
            routing_map = torch.cat([chunk_map for chunk_map in maps if chunk_map is not None])
            shape = (sequence_length, batch) if name == "_apply_seq_aux_loss" else ()
            carriers[index] = getattr(self, name)(carriers[index], tensors[index], routing_map, *shape)
        if self.has_stock_routing and self.is_aux_loss_enabled():
            (logits,) = carriers
            routing_map, scores = compute_routing_scores_for_aux_loss(
                logits, self.topk, self.score_function, fused=self.config.moe_router_fusion, **masked
            )
            carrier = self._apply_aux_loss(logits, scores, routing_map, **counts)
            carrier = self._apply_seq_aux_loss(carrier, scores, routing_map, sequence_length, batch, **counts)
            carriers = [self._apply_global_aux_loss(carrier, scores, routing_map, **counts)]
        sums = [carrier.sum(dtype=torch.float32) for carrier in carriers or [packed]]
        return functools.reduce(torch.add, sums)

    @functools.cached_property
    def has_stock_routing(self) -> bool:
        """Whether the class chooses experts by ``TopKRouter.routing``.

        Then every token has ``topk`` experts, and the losses depend only on the logits.
        """
        gate: type[TopKRouter] = type(self).__mro__[2]
        return gate.routing is TopKRouter.routing and gate.forward is TopKRouter.forward

    def is_aux_loss_enabled(self) -> bool:
        """As in Megatron; False within a chunk with stock routing, whose losses are computed later."""
        if self._noted is not None and self.has_stock_routing:
            return False
        is_enabled: bool = super().is_aux_loss_enabled()
        return is_enabled

    def apply_z_loss(self, logits: Tensor, *args: object, **kwargs: object) -> Tensor:
        """As in Megatron; within a chunk, record the logits."""
        if self._noted is None:
            with_loss: Tensor = super().apply_z_loss(logits, *args, **kwargs)
            return with_loss
        self._noted.add("apply_z_loss", logits)
        return logits

    def _apply_expert_bias(self, routing_map: Tensor, *args: object, **kwargs: object) -> None:
        """As in Megatron; within a chunk, delayed until tokens have been dropped."""
        if self._noted is None:
            super()._apply_expert_bias(routing_map, *args, **kwargs)
        else:
            self._noted.counts_experts = True

    def _add_loss(
        self, name: str, probs: Tensor, scores: Tensor, routing_map: Tensor, *args: object, **kwargs: object
    ) -> Tensor:
        """As in Megatron; within a chunk, record the scores and the routing map."""
        if self._noted is None:
            with_loss: Tensor = getattr(super(), name)(probs, scores, routing_map, *args, **kwargs)
            return with_loss
        self._noted.add(name, scores, routing_map)
        return probs

    _apply_aux_loss = partialmethod(_add_loss, "_apply_aux_loss")
    _apply_seq_aux_loss = partialmethod(_add_loss, "_apply_seq_aux_loss")
    _apply_global_aux_loss = partialmethod(_add_loss, "_apply_global_aux_loss")

    def attach_and_log_load_balancing_loss(self, *args: object, **kwargs: object) -> Tensor:
        """As in Megatron, but refused within a chunk.

        Raises:
            BadInput: the class adds a loss that it has computed from one chunk.
        """
        if self._noted is None:
            with_loss: Tensor = super().attach_and_log_load_balancing_loss(*args, **kwargs)
            return with_loss
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
