"""Stand-ins for Transformer Engine's permutation kernels of ``--moe-permute-fusion``, for tests on a CPU.

They have the interface of ``transformer_engine.pytorch.permutation`` with a mask as map, its assertions, and
its results for empty tensors. Rows that a kernel allocates and does not write are NaN, and the gradients of
such rows are not read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.deep_ep_standin import make_on_the_host


class _Chosen(torch.autograd.Function):
    """The chosen rows in the order of the experts; the rest of ``count`` rows is not written."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, chosen: Tensor, count: int) -> Tensor:
        assert count >= len(chosen), "the kernel would write beyond its output"
        ctx.save_for_backward(chosen)
        ctx.shape = source.shape
        output = source.new_full((count, *source.shape[1:]), float("nan"))
        output[: len(chosen)] = source[chosen]
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (chosen,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).index_add_(0, chosen, gradient[: len(chosen)]), None, None


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    if not inp.numel():
        return inp.clone(), None if probs is None else probs.flatten()[:0], torch.tensor([])
    assert routing_map.dtype == torch.bool and len(inp) == len(routing_map)
    assert num_out_tokens > 0, f"moe_permute (mask map) requires num_out_tokens > 0, got {num_out_tokens}."
    num_tokens, num_experts = routing_map.shape
    flat = routing_map.T.reshape(-1)
    chosen = flat.nonzero().flatten()
    # Where the row of each token and expert is; -1 for none.
    places = torch.where(flat, flat.cumsum(0) - 1, -1).view(num_experts, num_tokens).T
    row_id_map = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
    row_id_map[:, :num_experts] = places
    rows = _Chosen.apply(inp, chosen % num_tokens, num_out_tokens)
    of_rows = None if probs is None else _Chosen.apply(probs.T.reshape(-1), chosen, num_out_tokens)
    return rows, of_rows, row_id_map


def moe_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: int) -> tuple[Tensor, Tensor]:
    rows, _, row_id_map = moe_permute_with_probs(inp, None, routing_map, num_out_tokens)
    return rows, row_id_map


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
) -> Tensor:
    if not inp.numel():
        return inp.clone()
    assert merging_probs is None
    num_tokens, hidden_size = restore_shape
    tokens, experts = (row_id_map[:, : row_id_map.shape[1] // 2] >= 0).nonzero(as_tuple=True)
    places = row_id_map[tokens, experts].long()
    return inp.new_zeros(num_tokens, hidden_size).index_add(0, tokens, inp[places])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor | None, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor | None]:
    if not inp.numel():
        return inp.clone(), None if probs is None else probs.clone()
    assert split_sizes.sum() == len(inp)
    order = torch.arange(len(inp)).split(split_sizes.tolist())
    rows = torch.cat([order[index] for index in sorted_index.tolist()])
    return inp[rows], None if probs is None else probs[rows]


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    return moe_sort_chunks_by_index_with_probs(inp, None, split_sizes, sorted_index)[0]


def install() -> None:
    """Make the stand-ins what Megatron has found of Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    moe_utils.HAVE_TE = True
    moe_utils.fused_permute = moe_permute
    moe_utils.fused_permute_with_probs = moe_permute_with_probs
    moe_utils.fused_unpermute = moe_unpermute
    moe_utils.fused_sort_chunks_by_index = moe_sort_chunks_by_index
    moe_utils.fused_sort_chunks_by_index_with_probs = moe_sort_chunks_by_index_with_probs
    make_on_the_host(MoEAlltoAllTokenDispatcher)
