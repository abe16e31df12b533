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
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

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
) -> Tensor:
    """torch's flash attention for CPU, each span as rectangle plus triangle.

    The kernel knows causal attention only for as many queries as keys. So a span is attended to in two
    parts, all earlier keys (no mask) and its own (causal), merged by their log-sum-exp.
    """
    assert dropout == 0.0 and window is None, "the CPU kernel has neither dropout nor window"
    output: Tensor = _CpuFlash.apply(query, key, value, tuple(spans), scale)
    return output


class _CpuFlash(torch.autograd.Function):
    """All spans of a chunk, so that the gradients of keys and values are summed in place.

    The backward of both parts uses the merged output and log-sum-exp, which makes it exact. Heads that
    share keys are laid out as more query rows of the rectangle, so its keys are never copied.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: tuple[Span, ...], scale: float
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        outputs, sums = [], []
        for rows, span in _split(query, spans):
            rectangle, triangle = _parts(rows, key, value, span)
            output, lse = attend(*triangle, 0.0, True, scale=scale)
            if span.global_start:
                earlier, earlier_lse = attend(*rectangle, 0.0, False, scale=scale)
                earlier, earlier_lse = earlier.reshape(output.shape), earlier_lse.reshape(lse.shape)
                total = torch.logaddexp(lse, earlier_lse)
                output.mul_((lse - total).exp_().unsqueeze(-1))
                output.addcmul_(earlier, (earlier_lse - total).exp_().unsqueeze(-1).to(output.dtype))
                lse = total
            outputs.append(output)
            sums.append(lse)
        ctx.save_for_backward(query, key, value, *outputs, *sums)
        ctx.spans, ctx.scale = spans, scale
        return _join([output.permute(2, 0, 1, 3) for output in outputs])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *saved = ctx.saved_tensors
        outputs, sums = saved[: len(ctx.spans)], saved[len(ctx.spans) :]
        differentiate = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        groups = key.shape[2]
        key_gradient, value_gradient = torch.zeros_like(key), torch.zeros_like(value)
        row_gradients = []
        gradient = gradient.view(*query.shape[:3], -1)
        for (rows, span), (incoming, _), output, lse in zip(
            _split(query, ctx.spans), _split(gradient, ctx.spans), outputs, sums, strict=True
        ):
            rectangle, triangle = _parts(rows, key, value, span)
            incoming = incoming.permute(1, 2, 0, 3).contiguous()
            row_gradient, *own = differentiate(incoming, *triangle, output, lse, 0.0, True, scale=ctx.scale)
            for target, part in zip((key_gradient, value_gradient), own, strict=True):
                if part.shape[1] != groups:
                    part = part.unflatten(1, (groups, -1)).sum(2)
                target[span.global_start : span.global_end] += part.permute(2, 0, 1, 3)
            if span.global_start:
                folded, *earlier = differentiate(
                    _fold_heads(incoming, groups),
                    *rectangle,
                    _fold_heads(output, groups),
                    lse.reshape(lse.shape[0], groups, -1),
                    0.0,
                    False,
                    scale=ctx.scale,
                )
                row_gradient = row_gradient + folded.reshape(row_gradient.shape)
                for target, part in zip((key_gradient, value_gradient), earlier, strict=True):
                    target[: span.global_start] += part.permute(2, 0, 1, 3)
            row_gradients.append(row_gradient.permute(2, 0, 1, 3))
        query_gradient = row_gradients[0] if len(row_gradients) == 1 else torch.cat(row_gradients)
        return query_gradient, key_gradient, value_gradient, None, None


def _parts(
    rows: Tensor, key: Tensor, value: Tensor, span: Span
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """``(query, key, value)`` of a span's rectangle and of its triangle, heads before rows."""
    query = rows.permute(1, 2, 0, 3)
    earlier = (x[: span.global_start].permute(1, 2, 0, 3) for x in (key, value))
    own = (
        _repeat_heads(x[span.global_start : span.global_end], rows.shape[2]).permute(1, 2, 0, 3)
        for x in (key, value)
    )
    return (_fold_heads(query, key.shape[2]), *earlier), (query, *own)


def _fold_heads(tensor: Tensor, groups: int) -> Tensor:
    """``[B, H, R, C]`` to ``[B, groups, H / groups * R, C]``."""
    if tensor.shape[1] == groups:
        return tensor
    return tensor.reshape(tensor.shape[0], groups, -1, tensor.shape[-1])


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
