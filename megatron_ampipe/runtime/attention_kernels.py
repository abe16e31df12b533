"""Causal core attention of a chunk's rows over all earlier keys, implemented by several kernels.

Every kernel has the same signature (:class:`AttentionKernel`): the queries are the rows of a list of spans,
and the queries of a span see the keys ``[0, global_start + length)`` under a causal mask aligned to the
bottom right (AMPipe, figure 5). No kernel stores a mask of the whole sequence. Called by ``layers``.

Shapes: ``R`` query rows of the chunk, ``S`` keys, ``B`` batch, ``H`` query heads, ``G`` key/value heads,
``C`` head size of queries and keys, ``V`` head size of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from megatron_ampipe.runtime.cpu_flash import CpuFlash
from megatron_ampipe.runtime.exact_pieces import ExactPieces
from megatron_ampipe.runtime.flash_attn_packages import FlashAttn2, FlashAttn3, flash_attn
from megatron_ampipe.runtime.key_value_sums import RowSums
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
        sums: RowSums | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[R, B, H, C]``, the rows of the spans one after another.
            key: ``[S, B, G, C]``, from the start of the sequence.
            value: ``[S, B, G, V]``.
            spans: Positions of the query rows in the sequence.
            scale: Factor on the scores.
            dropout: Probability of dropping an attention weight.
            window: How many keys before its own position a query sees; None for all.
            sums: Where a kernel that supports it accumulates the gradients of keys and values; it then
                returns None for both. Other kernels ignore it.
            sinks: ``[H]``, the score of one more key that every query sees, whose value is zero
                (``--softmax-type``). For ``exact`` and ``sdpa`` only.

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
    sums: RowSums | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The reference implementation, which the other kernels are compared with.

    Materializes the scores of the chunk. Softmax in fp32.
    """

    def attend(rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        visible = visible_keys(rows, keys, window)
        keys, values = (repeat_heads(x, rows.shape[2]) for x in (keys, values))
        scores = torch.einsum("rbhc,sbhc->bhrs", rows, keys).float() * scale
        scores = scores.masked_fill(~visible, -math.inf)
        if sinks is not None:
            of_rows = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, of_rows], dim=-1)
        weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
        weights = F.dropout(weights.to(values.dtype), p=dropout)
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
    sums: RowSums | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``; without a window, with its bottom-right bias."""

    def attend(rows: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        bias: Any
        if sinks is not None:
            bias = _bias_with_sink(visible_keys(rows, keys, window), sinks)
            keys, values = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, 1)) for x in (keys, values))
        elif window is None:
            bias = causal_lower_right(rows.shape[0], keys.shape[0])
        else:
            bias = visible_keys(rows, keys, window)
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
    sums: RowSums | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """:func:`sdpa` on a GPU, restricted to torch's memory-efficient kernel for all shapes and dtypes.

    For comparisons: otherwise torch may choose a different kernel for a chunk than for the whole sequence.
    Key/value heads are repeated, because this kernel does not support GQA in older versions of torch.
    """
    key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return sdpa(query, key, value, spans=spans, scale=scale, dropout=dropout, window=window, sinks=sinks)


def _each_span(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    spans: Sequence[Span],
    window: int | None,
) -> Tensor:
    """Call ``attend`` with the rows of each span and the keys and values that at least one of them sees."""
    outputs = []
    for rows, span in split_spans(query, spans):
        first = 0 if window is None else max(0, span.global_start - window)
        outputs.append(attend(rows, key[first : span.global_end], value[first : span.global_end]))
    return join_spans(outputs)


def visible_keys(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """``[R, S]`` bool: which row sees which key; the last row is at the position of the last key."""
    visible = torch.ones(rows.shape[0], keys.shape[0], dtype=torch.bool, device=rows.device)
    offset = keys.shape[0] - rows.shape[0]
    visible = visible.tril(offset)
    return visible if window is None else visible.triu(offset - window)


def _bias_with_sink(visible: Tensor, sinks: Tensor) -> Tensor:
    """``[1, H, R, S + 1]``: what is added to the scores; one more key, of a score of zero, is at the end."""
    bias = torch.zeros_like(visible, dtype=sinks.dtype).masked_fill_(~visible, -math.inf)
    num_heads, num_rows = len(sinks), len(visible)
    of_rows = sinks.view(1, -1, 1, 1).expand(1, num_heads, num_rows, 1)
    return torch.cat([bias.expand(1, num_heads, *bias.shape), of_rows], dim=-1)


KERNELS: dict[str, AttentionKernel] = {
    "exact": exact,
    "exact-pieces": MergedAttention(ExactPieces()),
    "sdpa": sdpa,
    "sdpa-efficient": sdpa_efficient,
    "cpu-flash": MergedAttention(CpuFlash()),
    "cudnn": MergedAttention(Cudnn()),
    "torch-flash-2": MergedAttention(TorchFlash2()),
    "flash-attn": flash_attn,
    "flash-attn-2": MergedAttention(FlashAttn2()),
    "flash-attn-3": MergedAttention(FlashAttn3()),
}
"""Kernels by the name that the start-up table and the benchmarks print.

Each name stands for one backend, the same for every chunk. Only for ``sdpa`` does torch choose the backend.
"""
