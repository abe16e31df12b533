"""Causal core attention of some rows of a sequence against all earlier keys, by several kernels.

Every kernel has the same signature (:class:`AttentionKernel`): queries are the rows of a list of spans,
and a span's queries see the keys ``[0, global_start + length)``, causal aligned to the bottom right
(AMPipe, figure 5). No kernel holds a mask of the whole sequence. Called by ``layers``.

Shapes: ``R`` query rows of the chunk, ``S`` keys, ``B`` batch, ``H`` query heads, ``G`` key/value heads,
``C`` head size of queries and keys, ``V`` head size of values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_ampipe.schedule.chunks import Span


class KeyValueSums:
    """The gradients of keys and values, summed in fp32 over everything that attends to them.

    Args:
        key: ``[S, B, G, C]``, of all rows.
        value: ``[S, B, G, V]``.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self._like = key, value
        self._totals: tuple[Tensor, ...] = ()
        self._lowest = key.shape[0]
        """Rows below it have not been written yet."""

    def add(self, start: int, key: Tensor, value: Tensor) -> None:
        """Add the gradients of the rows from ``start`` on, each ``[rows, B, G, ...]``.

        What nothing was added to before is written, not added to: a backward pass that begins at the end of
        the sequence never fills memory with zeros.
        """
        if not self._totals:
            self._totals = tuple(
                torch.empty(like.shape, dtype=_sum_dtype(like), device=like.device) for like in self._like
            )
        end = start + key.shape[0]
        first_added = min(end, max(start, self._lowest))
        for total, part in zip(self._totals, (key, value), strict=True):
            if end < self._lowest:
                total[end : self._lowest].zero_()
            if start < first_added:
                total[start:first_added].copy_(part[: first_added - start])
            if first_added < end:
                total[first_added:end].add_(part[first_added - start :])
        self._lowest = min(self._lowest, start)

    def totals(self) -> tuple[Tensor, ...]:
        """The sums so far, of keys and of values: rows of these tensors change while others still attend."""
        assert self._totals, "nothing has attended to these keys"
        if self._lowest:
            for total in self._totals:
                total[: self._lowest].zero_()
            self._lowest = 0
        return self._totals


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.element_size() < 4 else tensor.dtype


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
        keys, values = (_repeat_heads(x, rows.shape[2]) for x in (keys, values))
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
    for rows, span in _split(query, spans):
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
    return _join(outputs)


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
        for rows, span in _split(query, spans):
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
        joined = _join(outputs)
        ctx.save_for_backward(query, key, value, joined, torch.cat(exponents, dim=-1))
        ctx.spans, ctx.scale, ctx.sums = spans, scale, sums
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        sums = KeyValueSums(key, value) if ctx.sums is None else ctx.sums
        query_gradient = torch.empty(query.shape, dtype=_sum_dtype(query))
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
        key, value = (_repeat_heads(x, query.shape[2]) for x in (key, value))
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    if not causal and query.shape[1] != groups:
        query = query.reshape(query.shape[0], groups, -1, query.shape[-1])
    return query, key, value


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
    for rows, span in _split(query, spans):
        first = 0 if window is None else max(0, span.global_start - window)
        outputs.append(attend(rows, key[first : span.global_end], value[first : span.global_end]))
    return _join(outputs)


def _visible(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """``[R, S]`` bool: which row sees which key, the last row standing at the last key."""
    visible = torch.ones(rows.shape[0], keys.shape[0], dtype=torch.bool, device=rows.device)
    offset = keys.shape[0] - rows.shape[0]
    visible = visible.tril(offset)
    return visible if window is None else visible.triu(offset - window)


def _split(tensor: Tensor, spans: Sequence[Span]) -> list[tuple[Tensor, Span]]:
    if len(spans) == 1:
        return [(tensor, spans[0])]
    return list(zip(tensor.split([span.length for span in spans]), spans, strict=True))


def _repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """``[S, B, G, C]`` to ``[S, B, heads, C]``; each key/value head serves consecutive query heads."""
    repeats = heads // tensor.shape[2]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=2)


def _join(outputs: list[Tensor]) -> Tensor:
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.reshape(*output.shape[:2], -1)


KERNELS: dict[str, AttentionKernel] = {
    "exact": exact,
    "sdpa": sdpa,
    "flash-attn": flash_attn,
    "cpu-flash": cpu_flash,
}
