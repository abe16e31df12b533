"""A stand-in for the package ``deep_ep``: the documented interface of its buffers, over gloo, for tests.

What DeepEP documents and callers rely on is checked: dtypes, contiguous tensors, fp32 weights, and that a
handle is used by the buffer that made it.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode


def exchanged(tensor: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows for each rank to rows from each rank."""
    output = tensor.new_empty((sum(receive), *tensor.shape[1:]))
    dist.all_to_all_single(output, tensor.contiguous(), receive, send, group=group)
    return output


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
            buffer, rows, send, receive, _, count = handle
            assert buffer is self
            received = exchanged(x[rows], send, receive, self.group)
            received = torch.cat([received, x.new_full((count - len(received), x.shape[1]), float("nan"))])
            return received, None, None, None, None, EventOverlap()
        assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous()
        num_ranks, rank = self.group.size(), self.group.rank()
        local = len(num_tokens_per_expert) // num_ranks
        rows = torch.cat([is_token_in_rank[:, peer].nonzero().flatten() for peer in range(num_ranks)])
        counts = [torch.empty_like(num_tokens_per_rank) for _ in range(num_ranks)]
        dist.all_gather(counts, num_tokens_per_rank, group=self.group)
        send, receive = num_tokens_per_rank.tolist(), [int(one[rank]) for one in counts]
        tokens, experts, weights = (
            exchanged(y[rows], send, receive, self.group) for y in (x, topk_idx, topk_weights)
        )
        own = (experts >= rank * local) & (experts < (rank + 1) * local)
        experts = (experts - rank * local).masked_fill(~own, -1)
        weights = weights.masked_fill(~own, 0.0)
        # Where one dispatch does not wait, another one could read its count.
        assert self._is_told in (None, num_worst_tokens > 0)
        self._is_told = num_worst_tokens > 0
        if self._is_told:
            # More rows are not written; fewer would be written beyond.
            assert num_worst_tokens == max(1, sum(receive)) and num_ranks <= 8
            per_expert, rest = [], num_worst_tokens - len(tokens)
            tokens, weights = (
                torch.cat([x, x.new_full((rest, x.shape[1]), float("nan"))]) for x in (tokens, weights)
            )
            experts = torch.cat([experts, experts.new_full((rest, experts.shape[1]), -1)])
        else:
            per_expert = [int((experts == expert).sum()) for expert in range(local)]
        handle = (self, rows, send, receive, is_token_in_rank, len(tokens))
        return tokens, experts, weights, per_expert, handle, EventOverlap()

    def combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        buffer, rows, send, receive, in_rank, count = handle
        assert buffer is self and x.is_contiguous() and len(x) == count
        found = []
        for given in (x, topk_weights):
            if given is None:
                found.append(None)
                continue
            parts = exchanged(given[: sum(receive)], receive, send, self.group)
            found.append(parts.new_zeros((len(in_rank), *parts.shape[1:])).index_add_(0, rows, parts))
        return found[0], found[1], EventOverlap()


class _Ways(NamedTuple):
    """Where the rows of one routing map go: the part of a handle that is no tensor."""

    buffer: HybridEPBuffer
    send: list[int]
    receive: list[int]
    num_permuted: int
    """With padding; or the budget."""
    num_written: int
    """Of these."""
    options: tuple[int | None, bool]
    """What every call must say again."""


class HybridEPBuffer:
    """``deep_ep.HybridEPBuffer``: the interface that Megatron calls.

    All ranks have the same number of tokens. Rows are received in the order of the local experts, then of the
    ranks that sent them, then of their tokens; ``pad_multiple`` adds rows of zeros to each expert's. With a
    budget (``num_permuted_tokens``), rows after the last are not written, here NaN, and what does not fit is
    dropped, which the last part of the handle says. All
    calls with a handle have to agree with the one that made it. It is stricter than HybridEP in one thing:
    the counts of all calls are in the same memory. It also takes fp32 tokens, which HybridEP does not.
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
        rows, experts, places, num_tokens, ways, _ = handle
        self._check(ways, pad_multiple, fuse_permute_dispatch)
        assert len(hidden) == num_tokens
        fits = places < ways.num_permuted
        received = [hidden[rows]]
        if probs is not None:
            assert probs.dtype == torch.float32 and probs.is_contiguous()
            received.append(probs[rows, experts])
        outputs = []
        for sent in received:
            output = sent.new_zeros((ways.num_permuted, *sent.shape[1:]))
            output[ways.num_written :] = float("nan")
            output[places[fits]] = exchanged(sent, ways.send, ways.receive, self.group)[fits]
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
        rows, experts, places, num_tokens, ways, _ = handle
        self._check(ways, pad_multiple, fuse_unpermute_combine)
        assert hidden.is_contiguous() and len(hidden) == ways.num_permuted
        fits = places < ways.num_permuted

        def sent_back(given: Tensor) -> Tensor:
            found = given.new_zeros((len(places), *given.shape[1:]))
            found[fits] = given[places[fits]]
            return exchanged(found, ways.receive, ways.send, self.group)

        back = sent_back(hidden)
        combined = back.new_zeros((num_tokens, hidden.shape[1])).index_add_(0, rows, back)
        if probs is None:
            return combined, None
        assert probs.dtype == torch.float32 and probs.is_contiguous() and probs.shape == hidden.shape[:1]
        num_experts = len(self._counts) * self.group.size()
        of_probs = probs.new_zeros((num_tokens, num_experts))
        of_probs[rows, experts] = sent_back(probs)
        return combined, of_probs

    def _preprocess(
        self, routing_map: Tensor, num_local: int, options: tuple[int | None, bool], budget: int | None
    ) -> tuple[tuple[Any, ...], Tensor]:
        """The handle, and how many rows each local expert gets, with padding and within the budget."""
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
        num_rows = int(padded.sum())
        most = num_rows if budget is None else budget
        ends = padded.cumsum(0).clamp_max(most)
        self._counts.copy_(ends.diff(prepend=ends.new_zeros(1)))
        ways = _Ways(
            self, sent.sum((1, 2)).tolist(), received.sum((1, 2)).tolist(), most, min(num_rows, most), options
        )
        overflow = torch.tensor([int(num_rows > most)])
        return (rows, peers * num_local + experts, places, len(routing_map), ways, overflow), self._counts

    def _check(self, ways: _Ways, *options: Any) -> None:
        assert ways.buffer is self and ways.options == options


class _OnTheHost(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **kwargs | ({"device": "cpu"} if str(kwargs.get("device")) == "cuda" else {}))


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
    make_on_the_host(token_dispatcher._HybridEPManager)


def make_on_the_host(made: type) -> None:
    """Let the class make its tensors on the CPU where it asks for a GPU."""
    make = made.__init__

    def make_it(*args: Any, **kwargs: Any) -> None:
        with _OnTheHost():
            make(*args, **kwargs)

    made.__init__ = make_it
