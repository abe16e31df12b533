"""Causal core attention of some rows of a sequence against all earlier keys, by several kernels.

Every kernel has the same signature (:class:`AttentionKernel`): queries are the rows of a list of spans,
and a span's queries see the keys ``[0, global_start + length)``, causal aligned to the bottom right
(AMPipe, figure 5). No kernel holds a mask of the whole sequence. Called by ``layers``.

Shapes: ``R`` query rows of the chunk, ``S`` keys, ``B`` batch, ``H`` query heads, ``G`` key/value heads,
``C`` head size of queries and keys, ``V`` head size of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from megatron_ampipe.runtime.cpu_flash import CpuFlash
from megatron_ampipe.runtime.flash_attn_packages import FlashAttn2, FlashAttn3, flash_attn
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.merged import MergedAttention
from megatron_ampipe.runtime.rows import join_spans, repeat_heads, split_spans
from megatron_ampipe.runtime.torch_flash import Cudnn, TorchFlash2
from megatron_ampipe.schedule.chunks import Span


class AttentionKernel(Protocol):
    """Attention of one chunk; differentiable."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        spans: Sequence[Span],
        scale: float,
        dropout: float = 0.0,
        window: int | None = None,
        sums: KeyValueSums | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[R, B, H, C]``, the rows of the spans one after another.
            key: ``[S, B, G, C]``, from the start of the sequence.
            value: ``[S, B, G, V]``.
            spans: Where the query rows stand in the sequence.
            scale: Factor on the scores.
            dropout: Probability of dropping an attention weight.
            window: How many keys before its own a query sees; None for all.
            sums: A kernel that can adds the gradients of keys and values there and returns none.

        Returns:
            ``[R, B, H * V]``.
        """
        ...


def exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spans: Sequence[Span],
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sums: KeyValueSums | None = None,
) -> Tensor:
    """The definition, with the chunk's scores in memory: the yardstick of the other kernels.

    Softmax in fp32.
    """

    def attend(rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        visible = _visible(rows, keys, window)
        keys, values = (repeat_heads(x, rows.shape[2]) for x in (keys, values))
        scores = torch.einsum("rbhc,sbhc->bhrs", rows, keys).float() * scale
        scores = scores.masked_fill(~visible, -math.inf)
        weights = F.dropout(scores.softmax(dim=-1).to(values.dtype), p=dropout)
        return torch.einsum("bhrs,sbhv->rbhv", weights, values)

    return _each_span(attend, query, key, value, spans=spans, window=window)


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spans: Sequence[Span],
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sums: KeyValueSums | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``; without a window, by its bottom-right bias."""

    def attend(rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        if window is None:
            bias = causal_lower_right(rows.shape[0], keys.shape[0])
        else:
            bias = _visible(rows, keys, window)
        output = F.scaled_dot_product_attention(
            rows.permute(1, 2, 0, 3),
            keys.permute(1, 2, 0, 3),
            values.permute(1, 2, 0, 3),
            attn_mask=bias,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=rows.shape[2] != keys.shape[2],
        )
        return output.permute(2, 0, 1, 3)

    return _each_span(attend, query, key, value, spans=spans, window=window)


def sdpa_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spans: Sequence[Span],
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sums: KeyValueSums | None = None,
) -> Tensor:
    """:func:`sdpa` on a GPU by torch's memory-efficient kernel alone, whatever the shapes and the dtype.

    For comparisons: by itself torch may choose another kernel for a chunk than for the whole sequence.
    Shared heads are repeated, because this kernel has no grouped ones in older versions of torch.
    """
    key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return sdpa(query, key, value, spans=spans, scale=scale, dropout=dropout, window=window)


def _each_span(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spans: Sequence[Span],
    window: int | None,
) -> Tensor:
    """Call ``attend`` with each span's rows and the keys and values that any of them sees."""
    outputs = []
    for rows, span in split_spans(query, spans):
        first = 0 if window is None else max(0, span.global_start - window)
        outputs.append(attend(rows, key[first : span.global_end], value[first : span.global_end]))
    return join_spans(outputs)


def _visible(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """``[R, S]`` bool: which row sees which key, the last row standing at the last key."""
    visible = torch.ones(rows.shape[0], keys.shape[0], dtype=torch.bool, device=rows.device)
    offset = keys.shape[0] - rows.shape[0]
    visible = visible.tril(offset)
    return visible if window is None else visible.triu(offset - window)


KERNELS: dict[str, AttentionKernel] = {
    "exact": exact,
    "sdpa": sdpa,
    "sdpa-efficient": sdpa_efficient,
    "cpu-flash": MergedAttention(CpuFlash()),
    "cudnn": MergedAttention(Cudnn()),
    "torch-flash-2": MergedAttention(TorchFlash2()),
    "flash-attn": flash_attn,
    "flash-attn-2": MergedAttention(FlashAttn2()),
    "flash-attn-3": MergedAttention(FlashAttn3()),
}
"""By the name that start-up table and benchmarks give them: which backend runs, for every chunk the same.

But for ``sdpa``, which leaves the choice to torch.
"""
