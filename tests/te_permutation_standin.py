"""Stand-ins for Transformer Engine's kernels of ``--moe-permute-fusion`` and ``--moe-router-fusion``.

For tests with the host platform. They have the interface of ``transformer_engine.pytorch.permutation`` with a
mask as map, its assertions, and its results for empty tensors, and that of
``transformer_engine.pytorch.router``; the rest is Megatron's own code. Rows that a kernel allocates and does
not write are NaN, and the gradients of such rows are not read.
"""

from typing import Any

import torch
from torch import Tensor


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor | None, routing_map: Tensor, num_out_tokens: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    from megatron.core.transformer.moe import moe_utils

    if not inp.numel():
        return inp.clone(), None if probs is None else probs.flatten()[:0], torch.tensor([])
    assert routing_map.dtype == torch.bool and len(inp) == len(routing_map)
    assert num_out_tokens > 0, f"moe_permute (mask map) requires num_out_tokens > 0, got {num_out_tokens}."
    rows, of_rows, row_id_map, *_ = moe_utils.permute(inp, routing_map, probs, int(routing_map.sum()))
    unwritten = num_out_tokens - len(rows)
    assert unwritten >= 0, "the kernel would write beyond its output"
    rows, of_rows = (
        None if x is None else torch.cat([x, x.new_full((unwritten, *x.shape[1:]), float("nan"))])
        for x in (rows, of_rows)
    )
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
    from megatron.core.transformer.moe import moe_utils

    if not inp.numel():
        return inp.clone()
    assert merging_probs is None
    tokens: Tensor = moe_utils.unpermute(inp[: len(row_id_map)], row_id_map, restore_shape)
    return tokens


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor | None, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor | None]:
    from megatron.core.transformer.moe import moe_utils

    if not inp.numel():
        return inp.clone(), None if probs is None else probs.clone()
    assert split_sizes.sum() == len(inp)
    rows, of_rows = moe_utils.sort_chunks_by_idxs(inp, split_sizes, sorted_index, probs)
    return rows, of_rows


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    return moe_sort_chunks_by_index_with_probs(inp, None, split_sizes, sorted_index)[0]


def topk_with_score_function(logits: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    from megatron.core.transformer.moe import moe_utils

    assert logits.dtype != torch.float64, "Current TE does not support float64 router type."
    probs, routing_map = moe_utils.topk_routing_with_score_function(logits, **options)
    return probs, routing_map


def compute_score_for_moe_aux_loss(logits: Tensor, topk: int, score_function: str) -> tuple[Tensor, Tensor]:
    from megatron.core.transformer.moe import moe_utils

    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, topk, score_function)
    return routing_map, scores


def moe_aux_loss(coeff: float, **options: Any) -> Tensor:
    from megatron.core.transformer.moe import moe_utils

    loss: Tensor = moe_utils.switch_load_balancing_loss_func(moe_aux_loss_coeff=coeff, **options)
    return loss


def install() -> None:
    """Make the stand-ins what Megatron has found of Transformer Engine."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.HAVE_TE = True
    moe_utils.fused_permute = moe_permute
    moe_utils.fused_permute_with_probs = moe_permute_with_probs
    moe_utils.fused_unpermute = moe_unpermute
    moe_utils.fused_sort_chunks_by_index = moe_sort_chunks_by_index
    moe_utils.fused_sort_chunks_by_index_with_probs = moe_sort_chunks_by_index_with_probs
    moe_utils.fused_topk_with_score_function = topk_with_score_function
    moe_utils.fused_compute_score_for_moe_aux_loss = compute_score_for_moe_aux_loss
    moe_utils.fused_moe_aux_loss = moe_aux_loss
