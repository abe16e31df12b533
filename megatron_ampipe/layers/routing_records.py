"""Megatron's records of routing, kept for a block that is routed chunk by chunk.

A routing replay records the chosen experts of a whole sequence, or prescribes them. A forward hook of a
router, such as that of ``--moe-routing-trace-path``, sees what the router took and gave for a whole sequence.
Both get here what they get from a stock router. Used by :mod:`.router`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.errors import BadInput

# T tokens of the block, K experts per token.

Hook = Callable[[Any, tuple[Any, ...], Any], Any]


class JoinedChunks:
    """Tensors of the chunks of a block, by chunk, until all tokens are there.

    Args:
        num_tokens: Of the block.
    """

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._parts: dict[int, tuple[Tensor, ...]] = {}

    def add(self, chunk: int, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Note the tensors of a chunk; the last chunk returns those of the block, each ``[T, ...]``.

        Args:
            chunk: The index of the chunk.
            tensors: One row for each token of the chunk, in the order of the sequence.
        """
        self._parts[chunk] = tensors
        if sum(len(part[0]) for part in self._parts.values()) < self._num_tokens:
            return None
        ordered = [self._parts[index] for index in sorted(self._parts)]
        self._parts = {}
        return tuple(torch.cat(parts) for parts in zip(*ordered, strict=True))


class ChunkReplay:
    """Megatron's ``RouterReplay`` for one chunk: part of the prescribed choice, or of the record.

    Args:
        whole: The router's, of which Megatron sets action and indices.
        joined: The choices of the chunks of the block.
        prescribed: From :meth:`prescribed_by`; None if nothing is prescribed.
        first_token: First token of the chunk in the block.
        chunk: The index of the chunk.
    """

    def __init__(
        self, whole: Any, joined: JoinedChunks, prescribed: Tensor | None, *, first_token: int, chunk: int
    ) -> None:
        self._whole, self._joined, self._prescribed = whole, joined, prescribed
        self._first_token, self._chunk = first_token, chunk

    @staticmethod
    def prescribed_by(whole: Any) -> Tensor | None:
        """The experts ``[T, K]`` that the router's replay prescribes for a block; called once per pass."""
        action = getattr(whole.router_replay_action, "value", None)
        if action == "replay_forward":
            forward: Tensor = whole.target_topk_idx
            return forward
        if action == "replay_backward":
            # Megatron takes the choices of its micro-batches in their order, one for each pass.
            again: Tensor = whole.replay_backward_list.pop(0)
            return again
        return None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As ``RouterReplay.get_replay_topk``, for the tokens of the chunk."""
        if self._prescribed is not None:
            rows = slice(self._first_token, self._first_token + len(scores))
            indices = self._prescribed[rows].to(scores.device)
            return scores.gather(1, indices), indices
        assert default_compute_topk is not None
        values, indices = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if getattr(self._whole.router_replay_action, "value", None) == "record":
            recorded = self._joined.add(self._chunk, indices)
            if recorded is not None:
                self._whole.record_indices(*recorded)
        return values, indices


def hook_of_block(hook: Hook) -> Callable[..., Any]:
    """A forward hook of a router that is called once for all chunks of a block, as by a stock router.

    It may look at what the router takes (``[T, 1, D]`` in place of ``[S, B, D]``) and gives, not replace it.
    """

    def of_chunk(module: Any, inputs: tuple[Any, ...], options: dict[str, Any], outputs: Any) -> Any:
        block = options.get("block")
        if block is None:
            return hook(module, inputs, outputs)
        # One hook may be registered on several routers, and several on one.
        joined = block.hooked.setdefault(of_chunk, JoinedChunks(block.num_tokens))
        hidden, (probs, routing_map) = inputs[0].flatten(0, 1), outputs[:2]
        whole = joined.add(options["chunk"], hidden.detach(), probs.detach(), routing_map)
        if whole is None:
            return None
        rows, *routed = whole
        if hook(module, (rows.unsqueeze(1),), tuple(routed)) is not None:
            raise BadInput(
                "forward hook of a router",
                getattr(hook, "__qualname__", type(hook).__qualname__),
                rule="it returns a value to replace the routing of a whole sequence, and chunks are sent "
                "before the last one is routed",
                remedy="Return None, use --ampipe-router with a custom class, or train with "
                "--ampipe-degree 1.",
            )
        return None

    of_chunk.sees_whole_blocks = True  # type: ignore[attr-defined]
    return of_chunk


def sees_whole_blocks(router: torch.nn.Module) -> bool:
    """Whether a router has a hook that :func:`hook_of_block` made."""
    return any(getattr(hook, "sees_whole_blocks", False) for hook in router._forward_hooks.values())
