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
from torch.nn.attention.bias import causal_lower_right

from megatron_ampipe.runtime.cpu_flash import cpu_flash
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.rows import join_spans, repeat_heads, split_spans
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


def flash_attn(
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
    """The flash-attn package, 2.1 or later (causal is bottom-right from there on)."""
    from flash_attn import flash_attn_func

    outputs = []
    for rows, span in split_spans(query, spans):
        output = flash_attn_func(
            rows.transpose(0, 1),
            key[: span.global_end].transpose(0, 1),
            value[: span.global_end].transpose(0, 1),
            dropout_p=dropout,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window, 0),
        )
        outputs.append(output.transpose(0, 1))
    return join_spans(outputs)


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
    "flash-attn": flash_attn,
    "cpu-flash": cpu_flash,
}
