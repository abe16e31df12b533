"""What the chunks of a block share while they are routed: capacity, losses, records of the routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_capacity
from torch import Tensor
from torch.nn import Module

# S sequence rows of the whole block, R rows of one chunk, B batch, D hidden size, T tokens, E experts, K
# experts per token.

Hook = Callable[[Any, tuple[Any, ...], Any], Any]


class Capacity:
    """Which tokens of a chunk are within the capacity of the experts; one object per block and pass.

    As Megatron's ``apply_router_token_dropping``. Dropping by position keeps an expert's first tokens of the
    sequence, so a count is carried from chunk to chunk. ``num_tokens`` are those of the block on this rank;
    None if the capacity is that of what is routed at once.
    """

    def __init__(self, config: Any, topk: int, num_tokens: int | None) -> None:
        self._policy, self._factor = config.moe_token_drop_policy, config.moe_expert_capacity_factor
        self._topk, self._num_experts = topk, config.num_moe_experts
        self._of_block = None if num_tokens is None else self._of(num_tokens)
        self._used: Tensor | int = 0
        self._num_tokens = 0

    def _of(self, num_tokens: int) -> int:
        return get_capacity(num_tokens * self._topk, self._num_experts, self._factor)

    def keep(self, probs: Tensor, routing_map: Tensor) -> Tensor:
        """The kept entries of ``routing_map`` ``[T, E]`` bool; called once per chunk, in order."""
        if self._of_block is None:
            with torch.no_grad():
                _, kept = apply_router_token_dropping(
                    probs, routing_map, self._topk, self._factor, drop_policy=self._policy
                )
            return kept
        position = routing_map.long().cumsum(dim=0) + self._used
        self._used = position[-1]
        return routing_map & (position <= self._of_block)

    def slots(self, num_tokens: int) -> int:
        """How many rows every expert gets of a chunk if it is padded to its capacity; as :meth:`keep`."""
        if self._of_block is None:
            return min(num_tokens, self._of(num_tokens))
        before = min(self._num_tokens, self._of_block)
        self._num_tokens += num_tokens
        return min(self._num_tokens, self._of_block) - before


@dataclass(slots=True)
class ChunkLosses:
    """What a router hands to Megatron's loss functions in one chunk; the losses are of the whole block."""

    tensors: list[Tensor] = field(default_factory=list)
    """Logits and scores ``[T, E]``, each once."""
    calls: list[tuple[str, int, Tensor | None]] = field(default_factory=list)
    """The loss functions in order: name, index in ``tensors``, and the routing map ``[T, E]`` bool."""
    counts_experts: bool = False
    """Whether the router adds its choice to the counts of the expert bias."""

    def add(self, name: str, tensor: Tensor, routing_map: Tensor | None = None) -> None:
        """Note one call."""
        index = next((i for i, known in enumerate(self.tensors) if known is tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        self.calls.append((name, index, routing_map))

    def packed(self, hidden: Tensor) -> Tensor:
        """All tensors side by side, ``[R, B, E * tensors]``, from the routing of ``hidden [R, B, D]``.

        Their graph is kept no longer.
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
    """Which tokens are kept; None for dropless routing."""
    num_tokens: int
    first_tokens: Sequence[int]
    prescribed: Tensor | None
    """The experts that a routing replay prescribes, ``[T, K]``; None without."""
    forced_std: float | None
    """``--moe-router-force-biased``, or None."""
    losses: dict[int, ChunkLosses] = field(default_factory=dict)
    """By chunk, what its losses are computed from."""
    forced_bias: Tensor | None = None
    """``[E]``, drawn with that deviation and added to the logits of all tokens; None before."""
    parts: dict[object, dict[int, tuple[Tensor, ...]]] = field(default_factory=dict)
    """What :meth:`join` keeps."""

    def join(self, what: object, chunk: int, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Keep tensors of a chunk, with one row for each token; the last one returns those of the block.

        ``what`` is the same for all chunks. Returned are ``[T, ...]``, in the order of the sequence.
        """
        parts = self.parts.setdefault(what, {})
        parts[chunk] = tensors
        if sum(len(first) for first, *_ in parts.values()) < self.num_tokens:
            return None
        ordered = [parts[index] for index in sorted(parts)]
        del self.parts[what]
        return tuple(torch.cat(of_chunks) for of_chunks in zip(*ordered, strict=True))


class ChunkReplay:
    """Megatron's ``RouterReplay``, ``whole``, for one chunk: part of the choice or the record."""

    def __init__(self, whole: Any, block: BlockRouting, chunk: int) -> None:
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
        if block.prescribed is not None:
            first = block.first_tokens[self._chunk]
            indices = block.prescribed[first : first + len(scores)].to(scores.device)
            return scores.gather(1, indices), indices
        assert default_compute_topk is not None
        values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if getattr(self._whole.router_replay_action, "value", None) == "record":
            recorded = block.join("replay", self._chunk, indices)
            if recorded is not None:
                self._whole.record_indices(*recorded)
        return values, indices


def prescribed_by(replay: Any) -> Tensor | None:
    """The experts ``[T, K]`` that a router's replay prescribes for a block; once per pass."""
    action = getattr(replay.router_replay_action, "value", None)
    if action == "replay_forward":
        return replay.target_topk_idx
    if action == "replay_backward":
        # Megatron takes the choices of its micro-batches in their order, one for each pass.
        return replay.replay_backward_list.pop(0)
    return None


def hook_of_block(hook: Hook) -> Callable[..., Any]:
    """A forward hook of a router that is called once for all chunks of a block, as by a stock router.

    It may look at what the router takes (``[T, 1, D]`` in place of ``[S, B, D]``) and gives, not replace it.
    """

    def of_chunk(module: Any, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        block = options.get("block")
        if block is None:
            return hook(module, inputs, outputs)
        hidden, (probs, routing_map) = inputs[0].flatten(0, 1), outputs[:2]
        # One hook may be registered on several routers, and several on one.
        whole = block.join(of_chunk, options["chunk"], hidden.detach(), probs.detach(), routing_map)
        if whole is None:
            return None
        rows, *routed = whole
        replaced = hook(module, (rows.unsqueeze(1),), tuple(routed))
        assert replaced is None, (
            f"{hook}, a forward hook of a router, replaces the routing of a sequence, and chunks are sent "
            "before the last one is routed: use --ampipe-router with a custom class"
        )
        return None

    of_chunk.sees_whole_blocks = True  # type: ignore[attr-defined]
    return of_chunk


def sees_whole_blocks(router: Module) -> bool:
    """Whether a router has a hook that :func:`hook_of_block` made."""
    return any(getattr(hook, "sees_whole_blocks", False) for hook in router._forward_hooks.values())
