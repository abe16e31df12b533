"""A stand-in for the package ``deep_ep``: the documented interface of its buffers, over gloo, for tests
with the host platform.

What DeepEP documents and callers rely on is checked: dtypes, contiguous tensors, fp32 weights, and that a
handle is used by the buffer that made it.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What every rank has, ``[P, ...]``."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.detach(), group=group)
    return torch.stack(parts)


@torch.no_grad()
def returned(rows: Tensor, places: tuple[Tensor, ...], shape: Sequence[int], group: Any) -> Tensor:
    """Rows added up at their places in what every rank has, ``shape``; the part of this rank."""
    sums = rows.new_zeros(shape).index_put_(places, rows, accumulate=True)
    dist.all_reduce(sums, group=group)
    return sums[group.rank()]


class Config:
    """Sizes of the buffers that DeepEP would register."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class EventOverlap:
    """The end of a call: on a CPU it has ended already."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def current_stream_wait(self) -> None:
        return None


class Buffer:
    """``deep_ep.Buffer``: a token goes once to every rank that has at least one of its experts."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self._is_told: bool | None = None

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        assert num_sms % 2 == 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, **_: Any
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous()
        local = num_experts // self.group.size()
        chosen = topk_idx.unsqueeze(-1) == torch.arange(num_experts)
        per_expert = chosen.any(1)
        in_rank = per_expert.unflatten(1, (-1, local)).any(2)
        return in_rank.sum(0).int(), None, per_expert.sum(0).int(), in_rank, EventOverlap()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_worst_tokens: int = 0,
        **_: Any,
    ) -> tuple[Any, ...]:
        assert x.is_contiguous() and x.dim() == 2
        if handle is not None:
            assert topk_idx is None and topk_weights is None, "a handle knows where tokens go"
            buffer, senders, rows, _, count = handle
            assert buffer is self
            received = gathered(x, self.group)[senders, rows]
            return _padded(received, count, float("nan")), None, None, None, None, EventOverlap()
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        assert num_tokens_per_rank.equal(is_token_in_rank.sum(0).int())
        num_ranks, rank = self.group.size(), self.group.rank()
        local = len(num_tokens_per_expert) // num_ranks
        senders, rows = gathered(is_token_in_rank, self.group)[:, :, rank].nonzero().unbind(1)
        tokens, experts, weights = (
            gathered(of_all, self.group)[senders, rows] for of_all in (x, topk_idx, topk_weights)
        )
        experts = experts - rank * local
        own = (experts >= 0) & (experts < local)
        experts, weights = experts.masked_fill(~own, -1), weights.masked_fill(~own, 0.0)
        # Where one dispatch does not wait, another one could read its count.
        assert self._is_told in (None, num_worst_tokens > 0)
        self._is_told = num_worst_tokens > 0
        if self._is_told:
            # More rows are not written; fewer would be written beyond.
            assert num_worst_tokens == max(1, len(rows)) and num_ranks <= 8
            per_expert = []
            tokens, weights = (_padded(x, num_worst_tokens, float("nan")) for x in (tokens, weights))
            experts = _padded(experts, num_worst_tokens, -1)
        else:
            per_expert = [int((experts == expert).sum()) for expert in range(local)]
        handle = (self, senders, rows, len(x), len(tokens))
        return tokens, experts, weights, per_expert, handle, EventOverlap()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        buffer, senders, rows, num_tokens, count = handle
        assert buffer is self and x.is_contiguous() and len(x) == count

        def sent_back(given: Tensor) -> Tensor:
            shape = (self.group.size(), num_tokens, given.shape[1])
            return returned(given[: len(rows)], (senders, rows), shape, self.group)

        weights = None if topk_weights is None else sent_back(topk_weights)
        return sent_back(x), weights, EventOverlap()


def _padded(rows: Tensor, count: int, value: float) -> Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)), value=value)


class _Ways(NamedTuple):
    """Where the rows of one routing map go: the part of a handle that is no tensor."""

    buffer: HybridEPBuffer
    num_permuted: int
    """Or the budget."""
    options: tuple[int | None, bool]
    """What every call must say again."""


class HybridEPBuffer:
    """``deep_ep.HybridEPBuffer``: the interface that Megatron calls.

    All ranks have the same number of tokens. Rows are received in the order of the local experts, then of the
    ranks that sent them, then of their tokens. With a budget (``num_permuted_tokens``), rows after the last
    are not written, here NaN, and what does not fit is dropped, the last rows, which the last part of the
    handle says to this rank alone. All calls with a handle have to agree with the one that made it. It is
    stricter than HybridEP in one thing: the counts of all calls are in the same memory. It also takes fp32
    tokens, which HybridEP does not.

    Its kernels are operations of torch, so that a stand-in for CUDA graphs can record them: with a budget,
    the host reads nothing, and tensors have sizes that do not depend on the routing.
    """

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
        self._name = group.group_name
        GROUPS[self._name] = group

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
            assert len(routing_map) == len(hidden) and non_blocking == (num_permuted_tokens is not None)
            options = (pad_multiple, fuse_permute_dispatch)
            handle, counts = self._preprocess(
                routing_map, num_of_experts_per_rank, options, num_permuted_tokens
            )
        else:
            assert routing_map is None and probs is None, "a handle knows where tokens go"
            assert num_permuted_tokens == handle[-2].num_permuted, "a handle does not know how many arrive"
        places, num_tokens, ways, _ = handle
        self._check(ways, pad_multiple, fuse_permute_dispatch)
        assert len(hidden) == num_tokens
        rows = hidden.new_empty((ways.num_permuted, hidden.shape[1]))
        row_probs = None
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.is_contiguous()
            row_probs = probs.new_empty((ways.num_permuted,))
        torch.ops.deep_ep_standin.dispatch(rows, row_probs, hidden.detach(), probs, places, self._name)
        return rows, row_probs, None, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        places, num_tokens, ways, _ = handle
        self._check(ways, pad_multiple, fuse_unpermute_combine)
        assert hidden.is_contiguous() and len(hidden) == ways.num_permuted
        combined = hidden.new_empty((num_tokens, hidden.shape[1]))
        combined_probs = None
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.is_contiguous() and probs.shape == hidden.shape[:1]
            combined_probs = probs.new_empty((num_tokens, places.shape[1] * self.group.size()))
        operation = torch.ops.deep_ep_standin.combine
        operation(combined, combined_probs, hidden.detach(), probs, places, self._name)
        return combined, combined_probs

    def _preprocess(
        self, routing_map: Tensor, num_local: int, options: tuple[int | None, bool], budget: int | None
    ) -> tuple[tuple[Any, ...], Tensor]:
        """The handle, and how many rows each local expert gets within the budget."""
        assert not options[0], "no rows are added here"
        # A rest of 128 tokens is copied in units of 16 bytes, with 4 for each token and rank.
        assert len(routing_map) % 128 * self.group.size() * 4 % 16 == 0, "alignment"
        num_tokens, num_experts = routing_map.shape
        assert num_experts == num_local * self.group.size()
        if len(self._counts) != num_local:
            self._counts = torch.zeros(num_local, dtype=torch.int64)
        places = torch.empty((num_tokens * self.group.size(), num_local), dtype=torch.int32)
        overflow = torch.empty(1, dtype=torch.int32)
        most = 1 << 30 if budget is None else budget
        torch.ops.deep_ep_standin.preprocess(
            places, self._counts, overflow, routing_map.detach(), most, self._name
        )
        num_permuted = wait_for_rows(self._counts) if budget is None else budget
        return (places, num_tokens, _Ways(self, num_permuted, options), overflow), self._counts

    def _check(self, ways: _Ways, *options: Any) -> None:
        assert ways.buffer is self and ways.options == options


def wait_for_rows(counts: Tensor) -> int:
    """The number of rows, for which HybridEP waits on the host."""
    return int(counts.sum())


GROUPS: dict[str, dist.ProcessGroup] = {}
"""The groups of buffers, by name."""
_LIBRARY = torch.library.Library("deep_ep_standin", "DEF")
_LIBRARY.define(
    "preprocess(Tensor(a!) places, Tensor(b!) counts, Tensor(c!) overflow, Tensor routing_map, int most, "
    "str group) -> ()"
)
_LIBRARY.define(
    "dispatch(Tensor(a!) rows, Tensor(b!)? row_probs, Tensor hidden, Tensor? probs, Tensor places, "
    "str group) -> ()"
)
_LIBRARY.define(
    "combine(Tensor(a!) combined, Tensor(b!)? combined_probs, Tensor hidden, Tensor? probs, Tensor places, "
    "str group) -> ()"
)


def _preprocess(
    places: Tensor, counts: Tensor, overflow: Tensor, routing_map: Tensor, most: int, name: str
) -> None:
    """Fill ``places [P * T, L]``: the row of each token for each local expert; -1 for none, or if dropped."""
    group = GROUPS[name]
    first = group.rank() * len(counts)
    own = gathered(routing_map, group).flatten(0, 1)[:, first : first + len(counts)]
    in_order = own.T.reshape(-1).cumsum(0).view(len(counts), -1).T - 1
    places.copy_(in_order.masked_fill(~own | (in_order >= most), -1))
    counts.copy_((places >= 0).sum(0))
    overflow.fill_(int(own.sum() > most))


def _dispatch(
    rows: Tensor, row_probs: Tensor | None, hidden: Tensor, probs: Tensor | None, places: Tensor, name: str
) -> None:
    group = GROUPS[name]
    sources, experts = (places >= 0).nonzero().unbind(1)
    written = places[sources, experts].long()
    rows.fill_(float("nan"))
    rows[written] = gathered(hidden, group).flatten(0, 1)[sources]
    if row_probs is not None:
        assert probs is not None
        row_probs.fill_(float("nan"))
        global_experts = group.rank() * places.shape[1] + experts
        row_probs[written] = gathered(probs, group).flatten(0, 1)[sources, global_experts]


def _combine(
    combined: Tensor,
    combined_probs: Tensor | None,
    hidden: Tensor,
    probs: Tensor | None,
    places: Tensor,
    name: str,
) -> None:
    group = GROUPS[name]
    sources, experts = (places >= 0).nonzero().unbind(1)
    written = places[sources, experts].long()
    # In the order of rows, as they are added.
    order = written.argsort()
    written, sources, experts = written[order], sources[order], experts[order]
    shape = (group.size(), len(combined))
    ranks, tokens = sources // len(combined), sources % len(combined)
    combined.copy_(returned(hidden[written], (ranks, tokens), (*shape, hidden.shape[1]), group))
    if combined_probs is not None:
        assert probs is not None
        where = (ranks, tokens, group.rank() * places.shape[1] + experts)
        combined_probs.copy_(returned(probs[written], where, (*shape, combined_probs.shape[1]), group))


for _operation in (_preprocess, _dispatch, _combine):
    _LIBRARY.impl(_operation.__name__.removeprefix("_"), _operation, "CompositeExplicitAutograd")


def install() -> None:
    """Make the stand-in what Megatron has found as ``deep_ep``; Megatron may have been imported before."""
    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    package.__spec__ = ModuleSpec("deep_ep", None, is_package=True)
    package.Buffer, package.HybridEPBuffer, package.utils = Buffer, HybridEPBuffer, utils
    utils.EventHandle, utils.EventOverlap = object, EventOverlap
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    dispatch = ("fused_dispatch", "fused_combine", "set_deepep_num_sms")
    for name in (*dispatch, "hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
