"""A stand-in for ``transformer_engine.pytorch.ep`` (2.18), the interface to NCCL EP, over gloo, for tests.

What its source says is checked: one context for a process, made once, for a number of tokens that is a
multiple of 64; int64 choices and fp32 weights; tensors of the sizes of the context. Where NCCL EP would end
the run, because a rank receives more rows than its capacity, it raises. Rows after the last are not written,
here NaN. It also takes fp32 tokens, which NCCL EP does not.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests import deep_ep_standin


class Context(NamedTuple):
    """The only one of the process."""

    group: dist.ProcessGroup
    num_local: int
    max_tokens: int
    capacity: int
    hidden_dim: int


ep = types.ModuleType("transformer_engine.pytorch.ep")
ep._BOOTSTRAPPED = False  # type: ignore[attr-defined]
_contexts: list[Context] = []


def ep_bootstrap(
    ep_group: dist.ProcessGroup,
    num_experts: int,
    max_tokens_per_rank: int,
    recv_capacity_per_rank: int,
    hidden_dim: int,
    max_num_sms: int = 0,
    zero_copy: bool = False,
) -> None:
    assert not ep._BOOTSTRAPPED and not zero_copy and ep_group.size() >= 2
    assert max_tokens_per_rank % 64 == 0, "invalid usage"
    num_ranks = ep_group.size()
    local = num_experts // num_ranks
    # Collective, with the same numbers on all ranks.
    numbers = torch.tensor([num_experts, max_tokens_per_rank, recv_capacity_per_rank, hidden_dim])
    assert (deep_ep_standin.gathered(numbers, ep_group) == numbers).all()
    _contexts[:] = [Context(ep_group, local, max_tokens_per_rank, recv_capacity_per_rank, hidden_dim)]
    deep_ep_standin.GROUPS[ep_group.group_name] = ep_group
    ep._BOOTSTRAPPED = True  # type: ignore[attr-defined]


def ep_finalize() -> None:
    _contexts.clear()
    ep._BOOTSTRAPPED = False  # type: ignore[attr-defined]


class EpBuffer:
    """The routing of one dispatch and its combine."""

    def __init__(
        self,
        top_k: int,
        max_tokens_per_rank: int,
        recv_capacity_per_rank: int,
        hidden_dim: int,
        num_local_experts: int,
        alignment: int = 0,
    ) -> None:
        (context,) = _contexts
        given = (num_local_experts, max_tokens_per_rank, recv_capacity_per_rank, hidden_dim)
        assert given == context[1:], "sizes of another context"
        assert alignment == 0, "no rows are added here"
        self.top_k, self.max_tokens_per_rank = top_k, max_tokens_per_rank
        num_places = max_tokens_per_rank * (context.group.size() * num_local_experts + top_k)
        self.handle_mem = torch.empty(8 + 4 * num_places, dtype=torch.uint8)
        self.token_counts = torch.empty(num_local_experts, dtype=torch.int32)


class _Routing(NamedTuple):
    """What is in the memory of a handle."""

    num_tokens: Tensor
    places: Tensor
    """``[P * T, L]``, as in HybridEP's stand-in."""
    choices: Tensor
    """``[T, K]``, of this rank's tokens."""


def _in(handle_mem: Tensor, num_tokens: int, top_k: int) -> _Routing:
    (context,) = _contexts
    numbers = handle_mem.view(torch.int32)
    num_places = num_tokens * context.group.size() * context.num_local
    places = numbers[2 : 2 + num_places].view(-1, context.num_local)
    choices = numbers[2 + num_places :][: num_tokens * top_k].view(num_tokens, top_k)
    return _Routing(numbers[:1], places, choices)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: EpBuffer, tokens: Tensor, choices: Tensor, weights: Tensor) -> Any:
        (context,) = _contexts
        assert choices.dtype == torch.int64 and choices.is_contiguous() and weights.dtype == torch.float32
        assert tokens.is_contiguous() and weights.is_contiguous() and tokens.shape[1] == context.hidden_dim
        num_tokens, top_k = choices.shape
        assert len(tokens) == len(weights) == num_tokens <= context.max_tokens and top_k == buffer.top_k
        ctx.handle_mem, ctx.shapes = buffer.handle_mem, (tokens.shape, weights.shape)
        routing = _in(buffer.handle_mem, num_tokens, top_k)
        routing.num_tokens.fill_(num_tokens)
        routing.choices.copy_(choices)
        num_experts = context.group.size() * context.num_local
        routing_map = torch.zeros((num_tokens, num_experts), dtype=torch.bool).scatter(1, choices, True)
        overflow, name = torch.empty(1, dtype=torch.int32), context.group.group_name
        deep_ep_standin._preprocess(
            routing.places, buffer.token_counts, overflow, routing_map, context.capacity, name
        )
        if overflow:
            raise RuntimeError("NCCL EP traps: more rows than its capacity")
        dense = weights.new_zeros((num_tokens, num_experts)).scatter(1, choices, weights.detach())
        rows, row_weights = (
            tokens.new_empty((context.capacity, tokens.shape[1])),
            weights.new_empty(context.capacity),
        )
        deep_ep_standin._dispatch(rows, row_weights, tokens.detach(), dense, routing.places, name)
        return rows, row_weights

    @staticmethod
    def backward(ctx: Any, rows: Tensor, row_weights: Tensor) -> Any:
        tokens, weights = (rows.new_empty(shape) for shape in ctx.shapes)
        _dispatch_bwd(ctx.handle_mem, rows.contiguous(), row_weights.contiguous(), tokens, weights)
        return None, tokens, None, weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: EpBuffer, rows: Tensor, num_tokens: int) -> Tensor:
        (context,) = _contexts
        assert rows.is_contiguous() and len(rows) == context.capacity
        ctx.handle_mem, ctx.shape = buffer.handle_mem, rows.shape
        combined = rows.new_empty((num_tokens, rows.shape[1]))
        routing = _in(buffer.handle_mem, num_tokens, buffer.top_k)
        assert int(routing.num_tokens) == num_tokens
        name = context.group.group_name
        deep_ep_standin._combine(combined, None, rows.detach(), None, routing.places, name)
        return combined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows = gradient.new_empty(ctx.shape)
        _combine_bwd(ctx.handle_mem, gradient.contiguous(), rows)
        return None, rows, None


def ep_dispatch(
    buffer: EpBuffer,
    tokens: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    *,
    recv_tokens: Tensor | None = None,
    recv_topk_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert recv_tokens is None and recv_topk_weights is None, "of the zero-copy mode"
    rows, weights = _Dispatch.apply(buffer, tokens, topk_idx, topk_weights)
    return rows, weights, buffer.token_counts


def ep_combine(
    buffer: EpBuffer,
    expert_out: Tensor,
    *,
    num_local_tokens: int | None = None,
    grad_out: Tensor | None = None,
) -> Tensor:
    assert grad_out is None, "of the zero-copy mode"
    combined: Tensor = _Combine.apply(buffer, expert_out, num_local_tokens or buffer.max_tokens_per_rank)
    return combined


def _dispatch_bwd(
    handle_mem: Tensor,
    grad: Tensor,
    g_recv_topk_weights: Tensor,
    grad_tokens: Tensor,
    grad_topk_weights: Tensor,
) -> None:
    (context,) = _contexts
    assert grad.is_contiguous() and len(grad) == len(g_recv_topk_weights) == context.capacity
    assert g_recv_topk_weights.dtype == grad_topk_weights.dtype == torch.float32
    num_tokens, top_k = grad_topk_weights.shape
    routing, name = _in(handle_mem, num_tokens, top_k), context.group.group_name
    assert int(routing.num_tokens) == num_tokens == len(grad_tokens)
    dense = grad_topk_weights.new_empty((num_tokens, context.group.size() * context.num_local))
    deep_ep_standin._combine(grad_tokens, dense, grad, g_recv_topk_weights, routing.places, name)
    grad_topk_weights.copy_(dense.gather(1, routing.choices.long()))


def _combine_bwd(handle_mem: Tensor, grad: Tensor, grad_expert_out: Tensor) -> None:
    (context,) = _contexts
    assert grad.is_contiguous() and len(grad_expert_out) == context.capacity
    places = _in(handle_mem, len(grad), 0).places
    deep_ep_standin._dispatch(grad_expert_out, None, grad, None, places, context.group.group_name)


_LIBRARY = torch.library.Library("transformer_engine_ep", "FRAGMENT")
_LIBRARY.define(
    "dispatch_bwd(Tensor handle_mem, Tensor grad, Tensor g_recv_topk_weights, Tensor(a!) grad_tokens, "
    "Tensor(b!) grad_topk_weights) -> ()"
)
_LIBRARY.define("combine_bwd(Tensor handle_mem, Tensor grad, Tensor(a!) grad_expert_out) -> ()")
_LIBRARY.impl("dispatch_bwd", _dispatch_bwd, "CPU")
_LIBRARY.impl("combine_bwd", _combine_bwd, "CPU")
for _function in (ep_bootstrap, ep_finalize, EpBuffer, ep_dispatch, ep_combine):
    setattr(ep, _function.__name__, _function)


def install() -> None:
    """Make the stand-ins of DeepEP, HybridEP and NCCL EP what Megatron has found."""
    engine, pytorch = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    engine.__spec__ = ModuleSpec("transformer_engine", None, is_package=True)
    engine.pytorch, pytorch.ep = pytorch, ep  # type: ignore[attr-defined]
    modules = {"transformer_engine": engine, "transformer_engine.pytorch": pytorch, ep.__name__: ep}
    # Not ``mock.patch.dict``, which would forget all modules that are imported meanwhile.
    sys.modules.update(modules)
    try:
        deep_ep_standin.install()
    finally:
        for name in modules:
            del sys.modules[name]
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    if not hasattr(fused_a2a, "HAVE_TE_EP"):
        # Megatron before 0.19.
        return
    assert fused_a2a.HAVE_TE_EP
    names = ("ensure_nccl_ep_bootstrapped", "new_nccl_ep_buffer", "nccl_ep_dispatch", "nccl_ep_combine")
    for name in names:
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
