"""A stand-in for ``deep_ep.HybridEPBuffer``: the interface that Megatron calls, over gloo, for tests.

All ranks have the same number of tokens. Rows are received in the order of the local experts, then of the
ranks that sent them, then of their tokens; ``pad_multiple`` adds rows of zeros to each expert's. What callers
rely on is checked: dtypes, contiguous tensors, and that all calls with a handle agree with the one that made
it. It is stricter than HybridEP in one thing: the counts of all calls are in the same memory. It also takes
fp32 tokens, which HybridEP does not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class _Ways(NamedTuple):
    """Where the rows of one routing map go: the part of a handle that is no tensor."""

    buffer: HybridEPBuffer
    send: list[int]
    receive: list[int]
    num_permuted: int
    """With padding."""
    options: tuple[int | None, bool]
    """What every call must say again."""


def exchanged(tensor: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows for each rank to rows from each rank."""
    output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    dist.all_to_all_single(output, tensor.contiguous(), receive, send, group=group)
    return output


class HybridEPBuffer:
    """``deep_ep.HybridEPBuffer``."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        **_: Any,
    ) -> None:
        assert not use_fp8
        self.group = group
        self._counts = torch.zeros(num_local_experts, dtype=torch.int64)

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        num_of_experts_per_rank: int | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: tuple[Any, ...] | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, Tensor | None, tuple[Any, ...]]:
        assert hidden.is_contiguous() and hidden.dim() == 2 and scaling_factor is None
        counts = None
        if handle is None:
            assert routing_map.dtype == torch.bool and routing_map.is_contiguous()
            assert len(routing_map) == len(hidden) and not non_blocking and num_permuted_tokens is None
            options = (pad_multiple, fuse_permute_dispatch)
            handle, counts = self._preprocess(routing_map, num_of_experts_per_rank, options)
        else:
            assert routing_map is None and probs is None, "a handle knows where tokens go"
            assert num_permuted_tokens == handle[-1].num_permuted, "a handle does not know how many arrive"
        rows, experts, places, num_tokens, ways = handle
        self._check(ways, pad_multiple, fuse_permute_dispatch)
        assert len(hidden) == num_tokens
        received = [hidden[rows]]
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.is_contiguous()
            received.append(probs[rows, experts])
        outputs = []
        for sent in received:
            output = sent.new_zeros((ways.num_permuted, *sent.shape[1:]))
            output[places] = exchanged(sent, ways.send, ways.receive, self.group)
            outputs.append(output)
        return outputs[0], outputs[1] if probs is not None else None, None, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        rows, experts, places, num_tokens, ways = handle
        self._check(ways, pad_multiple, fuse_unpermute_combine)
        assert hidden.is_contiguous() and len(hidden) == ways.num_permuted
        back = exchanged(hidden[places], ways.receive, ways.send, self.group)
        combined = back.new_zeros((num_tokens, hidden.shape[1])).index_add_(0, rows, back)
        if probs is None:
            return combined, None
        assert probs.dtype == torch.float32 and probs.is_contiguous() and probs.shape == hidden.shape[:1]
        num_experts = len(self._counts) * self.group.size()
        of_probs = probs.new_zeros((num_tokens, num_experts))
        of_probs[rows, experts] = exchanged(probs[places], ways.receive, ways.send, self.group)
        return combined, of_probs

    def _preprocess(
        self, routing_map: Tensor, num_local: int, options: tuple[int | None, bool]
    ) -> tuple[tuple[Any, ...], Tensor]:
        """The handle, and how many rows each local expert gets, with padding."""
        size, rank = self.group.size(), self.group.rank()
        everywhere = [torch.empty_like(routing_map) for _ in range(size)]
        dist.all_gather(everywhere, routing_map, group=self.group)
        # By peer, local expert of that peer, and token, in this order.
        sent = routing_map.unflatten(1, (size, num_local)).permute(1, 2, 0)
        # By peer, local expert of this rank, and token.
        first = rank * num_local
        received = torch.stack(everywhere)[:, :, first : first + num_local].permute(0, 2, 1)
        peers, experts, rows = sent.nonzero().unbind(1)
        counts = received.sum((0, 2))
        multiple = options[0] or 1
        padded = (counts + multiple - 1) // multiple * multiple
        of_experts = received.nonzero()[:, 1]
        order = of_experts.argsort(stable=True)
        places = torch.empty_like(order)
        gaps = (padded - counts).cumsum(0) - (padded - counts)
        places[order] = torch.arange(len(order)) + gaps[of_experts[order]]
        self._counts = self._counts if len(self._counts) == num_local else torch.empty_like(padded)
        self._counts.copy_(padded)
        ways = _Ways(
            self, sent.sum((1, 2)).tolist(), received.sum((1, 2)).tolist(), int(padded.sum()), options
        )
        return (rows, peers * num_local + experts, places, len(routing_map), ways), self._counts

    def _check(self, ways: _Ways, *options: Any) -> None:
        assert ways.buffer is self and ways.options == options
