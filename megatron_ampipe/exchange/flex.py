"""Megatron's flex dispatcher for one chunk, and its exchange of tokens through DeepEP, HybridEP or NCCL EP.

DeepEP's buffer counts tokens, permutes them by rank and exchanges them in one call; each rank with experts of
a token gets it once. HybridEP's buffer also sorts them by expert. This code has not run on the hardware that
both need; tests use stand-ins of their interfaces.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from torch import Tensor

from megatron_ampipe.exchange.nccl_ep import NCCLEPTransport
from megatron_ampipe.runtime.collectives import HostCopy, Transfer
from megatron_ampipe.schedule.features import counts_inside

if TYPE_CHECKING:
    # Only some versions have it.
    from megatron.core.transformer.moe.token_dispatcher import _HybridEPManager

# T tokens of a chunk, R received tokens (HybridEP: rows, one for each of a token's local experts), D hidden
# size, K experts of a token, E experts of all ranks, P ranks, L experts of a rank.


class FlexChunk(MoEFlexTokenDispatcher):
    """The flex dispatcher of one chunk, with the methods of :class:`~.packing.AllToAllChunk`.

    Within a node, DeepEP is given the number of received rows. With more ranks it counts the tokens in the
    call that sends them, as do NCCL EP, and HybridEP unless it has a budget of rows.
    """

    num_spare: ClassVar = 0
    num_tokens = 0
    """Of all chunks of the micro-batch."""
    splits: tuple[int, list[int]] | None = None
    """The received counts: ``R``, and the tokens of each local expert; as in ``AllToAllChunk``."""
    _transport: FlexTransport | None = None
    _stock: MoEFlexTokenDispatcher | None = None

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.counts_group: dist.ProcessGroup = self._comm_manager.group
        """The ranks that exchange ``counts``, ``[E + P]`` int64: tokens per expert and per rank."""
        if self.config.moe_flex_dispatcher_backend == "deepep":
            # Megatron's own function waits for the number of chosen experts.
            self._comm_manager._indices_to_multihot = functools.partial(
                to_multihot, num_experts=self.num_local_experts
            )
        else:
            # Padding to capacity does not change the result: chunks send only the kept tokens.
            self._comm_manager.drop_and_pad = False

    def __copy__(self) -> Self:
        """A dispatcher with separate state, which includes Megatron's manager."""
        copied = type(self).__new__(type(self))
        copied.__dict__.update(vars(self))
        copied._comm_manager = copy.copy(self._comm_manager)
        if self._stock is not None:
            factor = self._stock._comm_manager.moe_expert_rank_capacity_factor
            copied._comm_manager.moe_expert_rank_capacity_factor = factor
        return copied

    def share_budget(self, stock: MoEFlexTokenDispatcher) -> None:
        """Make copies use the stock dispatcher's budget of rows, and report to it if rows did not fit.

        With ``--moe-expert-rank-capacity-factor``, HybridEP does not make the host wait, and drops rows that
        do not fit. After each step, Megatron asks the stock dispatchers whether rows were dropped; if so, it
        removes their budget and repeats the step.
        """
        self._stock = stock
        self._comm_manager.over_budget = stock._comm_manager.over_budget

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As in the stock dispatcher, with probabilities in fp32, ``[T, K]`` or (HybridEP) ``[T, E]``."""
        tokens, token_probs = super().dispatch_preprocess(hidden_states, routing_map, probs)
        token_probs = token_probs.float()
        self._hidden_bytes = fused_a2a.get_hidden_bytes(tokens)
        if self.splits is None and not counts_inside(self.config):
            manager = self._comm_manager
            to_experts, _ = to_multihot(manager.token_indices, token_probs, num_experts=manager.num_experts)
            to_ranks = to_experts.unflatten(1, (-1, self.num_local_experts)).any(dim=2)
            self.counts = torch.cat([to_experts.sum(dim=0), to_ranks.sum(dim=0)])
        return tokens, token_probs

    def set_counts(self, gathered: Tensor) -> None:
        """Set the counts of all ranks ``[P * (E + P)]``; :meth:`transport` waits for them on the host."""
        self._gathered = HostCopy(gathered)

    def transport(self) -> FlexTransport:
        """The transport of the chunk; the same object, which keeps a handle, for all calls."""
        if self._transport is None:
            manager = self._comm_manager
            if self.config.moe_flex_dispatcher_backend == "ncclep":
                self._transport = NCCLEPTransport(manager, self.num_tokens)
                return self._transport
            if self.config.moe_flex_dispatcher_backend == "hybridep":
                self._transport = HybridEPTransport(manager)
                return self._transport
            find_buffer = fused_a2a.get_buffer
            if not counts_inside(self.config):
                find_buffer, self.splits = buffer_with_splits, self.splits or self._read(self._gathered)
            self._transport = DeepEPTransport(
                find_buffer(manager.group, self._hidden_bytes),
                manager.token_indices,
                num_experts=manager.num_experts,
                splits=self.splits,
            )
        return self._transport

    def _read(self, gathered: HostCopy) -> tuple[int, list[int]]:
        num_experts, rank = self._comm_manager.num_experts, self.counts_group.rank()
        arriving = gathered.wait().view(self.counts_group.size(), -1).sum(dim=0).tolist()
        first = rank * self.num_local_experts
        return arriving[num_experts + rank], arriving[first : first + self.num_local_experts]

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """As in the stock dispatcher, with the state that its manager would have kept; can run twice."""
        transport, manager = self.transport(), self._comm_manager
        manager.dispatched_probs = probs
        manager.tokens_per_expert = torch.as_tensor(transport.tokens_per_expert)
        if isinstance(transport, DeepEPTransport):
            manager.dispatched_indices = transport.received_experts
        outputs: tuple[Tensor, ...] = super().dispatch_postprocess(hidden_states, probs)
        return outputs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """As in the stock dispatcher; NCCL EP's transport adds the rows that its memory has besides these."""
        if isinstance(self._transport, NCCLEPTransport):
            return hidden_states
        restored: Tensor = super().combine_preprocess(hidden_states)
        return restored


class DeepEPBuffer(Protocol):
    """The methods of ``deep_ep.Buffer`` that are called."""

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, object]: ...

    def dispatch(
        self, x: Tensor, **options: object
    ) -> tuple[Tensor, Tensor, Tensor, list[int], tuple[object, ...], object]: ...

    def combine(self, x: Tensor, **options: object) -> tuple[Any, ...]: ...


_told_buffer: DeepEPBuffer | None = None


def buffer_with_splits(group: dist.ProcessGroup, hidden_bytes: int) -> DeepEPBuffer:
    """The buffer for dispatches that are given the number of received rows, created as Megatron's own.

    It is separate because a buffer has one counter on the host, for which the stock layers wait.
    """
    global _told_buffer
    stock_buffer, fused_a2a._buffer = fused_a2a._buffer, _told_buffer
    try:
        buffer: DeepEPBuffer = fused_a2a.get_buffer(group, hidden_bytes)
    finally:
        fused_a2a._buffer = stock_buffer
    _told_buffer = buffer
    return buffer


def to_multihot(experts: Tensor, probs: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """Megatron's ``_indices_to_multihot`` without a wait of the host: from experts ``[T, K]`` int64 (-1 for
    none) and probabilities to the routing map ``[T, E]`` bool and probabilities ``[T, E]``."""
    # Entries without an expert go into a separate column, which is left out.
    places = experts.masked_fill(experts < 0, num_experts)
    zeros = probs.new_zeros((experts.shape[0], num_experts + 1))
    chosen = zeros.bool().scatter(1, places, True)
    return chosen[:, :num_experts], zeros.scatter(1, places, probs)[:, :num_experts]


class DeepEPTransport:
    """Sends tokens through DeepEP, and keeps the handle of a chunk. The issuing stream orders the calls.

    ``buffer`` is a ``deep_ep.Buffer``, which copies received rows to new tensors, so chunks share no memory.
    ``experts [T, K]`` int64 are the experts of each token, -1 for none. ``splits``, within a node, is ``R``
    and the number of received tokens for each local expert. Without it the first dispatch blocks the host.
    """

    received_experts: Tensor
    """``[R, K]`` int64, local experts of the received tokens; -1 for experts of other ranks."""
    tokens_per_expert: Sequence[int] = ()
    """Received tokens of each local expert."""
    _num_received: int | None = None
    _handle: tuple[object, ...]
    """Of the first dispatch."""

    def __init__(
        self,
        buffer: DeepEPBuffer,
        experts: Tensor,
        *,
        num_experts: int,
        splits: tuple[int, Sequence[int]] | None = None,
    ) -> None:
        self._buffer, self._experts, self._num_experts = buffer, experts, num_experts
        if splits is not None:
            self._num_received, self.tokens_per_expert = splits

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """Send tokens ``[T, D]`` and fp32 probabilities ``[T, K]``, received as ``[R, D]`` and ``[R, K]``.

        In the backward pass of the combine, only gradients ``[T, D]``, to the same ranks.
        """
        if len(tensors) == 1:
            received, *_ = self._buffer.dispatch(tensors[0].contiguous(), handle=self._handle)
            return Transfer((received[: self._num_received],), uses=tensors_among(self._handle))
        tokens, probs = tensors
        per_rank, per_node, per_expert, goes_to, _ = self._buffer.get_dispatch_layout(
            self._experts, self._num_experts
        )
        num_received = self._num_received
        # 0 means an unknown number to DeepEP, so 1 row is received that no rank has sent.
        limits = {} if num_received is None else {"num_worst_tokens": max(1, num_received)}
        received, experts, weights, counted, self._handle, _ = self._buffer.dispatch(
            tokens.contiguous(),
            topk_idx=self._experts,
            topk_weights=probs.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_to,
            num_tokens_per_expert=per_expert,
            **limits,
        )
        self.received_experts = experts[:num_received]
        if num_received is None:
            self.tokens_per_expert = counted
        uses = self._experts, self.received_experts, per_rank, per_node, per_expert, goes_to, *self._handle
        return Transfer((received[:num_received], weights[:num_received]), uses=tensors_among(uses))

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """Send expert outputs ``[R, D]`` back, summed over the ranks of a token, to ``[T, D]``.

        In the backward pass of the dispatch, also gradients of probabilities, ``[R, K]`` to ``[T, K]``.
        """
        if self._num_received == 0:
            tensors = [tensor.new_zeros((1, *tensor.shape[1:])) for tensor in tensors]
        tokens, *probs = tensors
        given = {"topk_weights": probs[0].float().contiguous()} if probs else {}
        outputs = self._buffer.combine(tokens.contiguous(), handle=self._handle, **given)
        return Transfer(outputs[: len(tensors)], uses=tensors_among(self._handle))


def tensors_among(values: Sequence[object]) -> tuple[Tensor, ...]:
    return tuple(value for value in values if isinstance(value, Tensor))


class HybridEPTransport:
    """Sends tokens through HybridEP, and keeps the handle of a chunk. Chunks share no memory.

    The first dispatch blocks the host, unless a budget bounds the number of rows: Megatron's
    (:meth:`FlexChunk.share_budget`), or ``num_rows``.

    ``manager`` is Megatron's ``_HybridEPManager`` of the chunk, after ``setup_metadata``. It makes the first
    call, which also creates the buffer if there is none.
    """

    tokens_per_expert: Tensor
    """``[local experts]`` int64, received rows of each local expert; with a budget not on the host."""
    num_growths: ClassVar[int] = 0
    """How often a dispatch of this process had more tokens than all before it, so that HybridEP may have
    replaced its memory, which CUDA graphs use."""
    _most_tokens: ClassVar[int] = 0
    _handle: tuple[object, ...]
    """Of the first dispatch."""
    _num_received = 0

    def __init__(self, manager: _HybridEPManager, num_rows: int | None = None) -> None:
        self._manager, self._num_rows = manager, num_rows

    @property
    def overflow(self) -> Tensor:
        """``[1]`` int32 on the device: other than 0 if rows did not fit into the budget and were dropped."""
        flag = self._handle[-1]
        assert isinstance(flag, Tensor), "this version of DeepEP does not say whether rows were dropped"
        return flag

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer:
        """As :meth:`DeepEPTransport.dispatch`, with probabilities ``[T, E]`` to ``[R]``."""
        if len(tensors) == 1:
            received, *_ = fused_a2a._hybrid_ep_buffer.dispatch_with_permute(
                hidden=tensors[0].contiguous(),
                scaling_factor=None,
                num_permuted_tokens=self._num_received,
                **self._options("fuse_permute_dispatch"),
            )
            return Transfer((received,), uses=tensors_among(self._handle))
        manager, (tokens, probs) = self._manager, tensors
        self._note_growth(len(tokens))
        manager.token_probs = probs.contiguous()
        if self._num_rows is not None:
            # With a factor, the manager keeps the counts of a dispatch that does not wait.
            manager.moe_expert_rank_capacity_factor = 1.0
            manager.num_permuted_tokens = self._num_rows
        with torch.no_grad():
            received = manager.dispatch(tokens.contiguous())
        self._handle, self._num_received = manager.handle, received.shape[0]
        # Cloned, because the next call may use the same memory.
        self.tokens_per_expert = manager.tokens_per_expert.clone()
        uses = (manager.routing_map, self.tokens_per_expert, *tensors_among(self._handle))
        return Transfer((received, manager.dispatched_probs), uses=uses)

    def combine(self, tensors: Sequence[Tensor]) -> Transfer:
        """As :meth:`DeepEPTransport.combine`, with probabilities ``[R]`` to ``[T, E]``."""
        tokens, *probs = tensors
        outputs = fused_a2a._hybrid_ep_buffer.combine_with_unpermute(
            hidden=tokens.contiguous(),
            probs=probs[0].float().contiguous() if probs else None,
            **self._options("fuse_unpermute_combine"),
        )
        return Transfer(outputs[: len(tensors)], uses=tensors_among(self._handle))

    @staticmethod
    def _note_growth(num_tokens: int) -> None:
        if num_tokens > HybridEPTransport._most_tokens:
            HybridEPTransport._most_tokens = num_tokens
            HybridEPTransport.num_growths += 1

    def _options(self, fuse: str) -> dict[str, object]:
        """The options of the first call; older versions of HybridEP have no option for fused kernels."""
        options = {"handle": self._handle, "pad_multiple": self._manager.pad_multiple}
        return options | ({fuse: True} if self._manager.config.moe_permute_fusion_into_hybridep else {})


FlexTransport = DeepEPTransport | HybridEPTransport | NCCLEPTransport
