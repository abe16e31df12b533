"""torch's flash attention for CPU, made to attend with the rows of a chunk to all earlier keys.

The kernel itself knows causal attention only for as many queries as keys. One of the kernels of
:mod:`.attention`, which has the signature and the meaning of the letters in shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import KeyValueSums, sum_dtype
from megatron_ampipe.runtime.rows import join_spans, repeat_heads, split_spans
from megatron_ampipe.schedule.chunks import Span


def cpu_flash(
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
    """torch's flash attention for CPU, each span as rectangles without a mask and small causal triangles.

    The kernel knows causal attention only for as many queries as keys, and it computes what the mask hides
    up to 512 keys to the right of the diagonal.
    """
    assert dropout == 0.0 and window is None, "the CPU kernel has neither dropout nor window"
    output: Tensor = _CpuFlash.apply(query, key, value, tuple(spans), scale, sums)
    return output


_TRIANGLE_ROWS = 128
"""Queries of the largest triangle: fewer would spend more on calls than they save behind the mask."""


class _CpuFlash(torch.autograd.Function):
    """All spans of a chunk, the gradients of keys and values summed in place.

    Forward, few rows at a time attend to all earlier keys and to their own, and the two are merged by their
    log-sum-exp. Backward every part of the scores is differentiated with the merged output and log-sum-exp,
    which makes it exact; there nothing has to be merged, so parts are as large as can be.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        spans: tuple[Span, ...],
        scale: float,
        sums: KeyValueSums | None,
    ) -> Tensor:
        outputs, exponents = [], []
        for rows, span in split_spans(query, spans):
            for start in range(0, span.length, _TRIANGLE_ROWS):
                part = rows[start : start + _TRIANGLE_ROWS]
                first_key = span.global_start + start
                last_key = first_key + part.shape[0]
                output, lse = _attend(
                    part, key[first_key:last_key], value[first_key:last_key], causal=True, scale=scale
                )
                if first_key:
                    earlier, earlier_lse = _attend(
                        part, key[:first_key], value[:first_key], causal=False, scale=scale
                    )
                    total = torch.logaddexp(lse, earlier_lse)
                    output.mul_((lse - total).exp_().unsqueeze(-1))
                    output.addcmul_(earlier, (earlier_lse - total).exp_().unsqueeze(-1).to(output.dtype))
                    lse = total
                outputs.append(output.permute(2, 0, 1, 3))
                exponents.append(lse)
        joined = join_spans(outputs)
        ctx.save_for_backward(query, key, value, joined, torch.cat(exponents, dim=-1))
        ctx.spans, ctx.scale, ctx.sums = spans, scale, sums
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        sums = KeyValueSums(key, value) if ctx.sums is None else ctx.sums
        query_gradient = torch.empty(query.shape, dtype=sum_dtype(query))
        gradient, output = (x.view(*query.shape[:3], -1) for x in (gradient, output))
        first_row = 0
        for span in ctx.spans:
            for part in reversed(_parts_of(span)):
                rows = slice(first_row + part.first_row, first_row + part.last_row)
                keys = slice(part.first_key, part.last_key)
                of_rows, *of_keys = _differentiate(
                    gradient[rows],
                    query[rows],
                    key[keys],
                    value[keys],
                    output[rows],
                    lse[..., rows],
                    causal=part.causal,
                    scale=ctx.scale,
                )
                sums.add(part.first_key, *of_keys)
                if part.causal:
                    # The one part of these rows that comes first.
                    query_gradient[rows] = of_rows
                else:
                    query_gradient[rows] += of_rows
            first_row += span.length
        if ctx.sums is not None:
            return query_gradient.to(query.dtype), None, None, None, None, None
        key_gradient, value_gradient = (total.to(key.dtype) for total in sums.totals())
        return query_gradient.to(query.dtype), key_gradient, value_gradient, None, None, None


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a span and keys that they see, all of them or up to their own."""

    first_row: int
    last_row: int
    first_key: int
    last_key: int
    causal: bool


@functools.cache
def _parts_of(span: Span) -> tuple[_Part, ...]:
    """Rectangles, each as large as can be, and the triangles of a span; a row's triangle comes last."""
    parts = []
    if span.global_start:
        parts.append(_Part(0, span.length, 0, span.global_start, causal=False))

    def cut(first: int, last: int) -> None:
        keys = span.global_start + first, span.global_start + last
        if last - first <= _TRIANGLE_ROWS:
            parts.append(_Part(first, last, *keys, causal=True))
            return
        # Half, in whole triangles.
        half = first + -(-(last - first) // (2 * _TRIANGLE_ROWS)) * _TRIANGLE_ROWS
        parts.append(_Part(half, last, keys[0], span.global_start + half, causal=False))
        cut(first, half)
        cut(half, last)

    cut(0, span.length)
    return tuple(parts)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """torch's kernel: ``[R, B, H, C]`` and keys to ``[B, H, R, V]`` and log-sum-exp ``[B, H, R]``."""
    heads = query.shape[2]
    query, key, value = _before_rows(query, key, value, causal=causal)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, scale=scale
    )
    if query.shape[1] == heads:
        return output, lse
    return output.reshape(output.shape[0], heads, -1, output.shape[-1]), lse.reshape(lse.shape[0], heads, -1)


def _differentiate(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """The backward of :func:`_attend`: gradients of query, key and value, shaped as these are."""
    heads, groups = query.shape[2], key.shape[2]
    gradient, output = (x.permute(1, 2, 0, 3) for x in (gradient, output))
    query, key, value = _before_rows(query, key, value, causal=causal)
    if query.shape[1] != heads:
        gradient, output, lse = (
            x.reshape(x.shape[0], groups, -1, *x.shape[3:]) for x in (gradient, output, lse)
        )
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, lse, 0.0, causal, scale=scale
    )
    of_query, of_key, of_value = found
    if query.shape[1] != heads:
        of_query = of_query.reshape(of_query.shape[0], heads, -1, of_query.shape[-1])
    if of_key.shape[1] != groups:
        of_key, of_value = (x.unflatten(1, (groups, -1)).sum(2) for x in (of_key, of_value))
    return tuple(x.permute(2, 0, 1, 3) for x in (of_query, of_key, of_value))


def _before_rows(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """Heads before rows, and as many of keys as of queries.

    Heads that share keys become more query rows of a rectangle, so its keys are never copied; a triangle's
    are.
    """
    groups = key.shape[2]
    if causal:
        key, value = (repeat_heads(x, query.shape[2]) for x in (key, value))
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if not causal and query.shape[1] != groups:
        query = query.reshape(query.shape[0], groups, -1, query.shape[-1])
    return query, key, value
