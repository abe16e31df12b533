"""Causal core attention of some rows of a sequence against all earlier keys, by several kernels.

Every kernel has the same signature (:class:`AttentionKernel`): queries are the rows of a list of spans,
and a span's queries see the keys ``[0, global_start + length)``, causal aligned to the bottom right
(AMPipe, figure 5). No kernel but ``exact`` ever holds a mask of the whole sequence. Called by ``layers``.

Shapes: ``R`` query rows of the chunk, ``S`` keys, ``B`` batch, ``H`` query heads, ``G`` key/value heads,
``C`` head size of queries and keys, ``V`` head size of values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

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
        dropout: float,
    ) -> Tensor:
        """Attend.

        Args:
            query: ``[R, B, H, C]``, the rows of the spans one after another.
            key: ``[S, B, G, C]``, from the start of the sequence.
            value: ``[S, B, G, V]``.
            spans: Where the query rows stand in the sequence.
            scale: Factor on the scores.
            dropout: Probability of dropping an attention weight.

        Returns:
            ``[R, B, H * V]``.
        """
        ...


def exact(
    query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span], scale: float, dropout: float
) -> Tensor:
    """The definition, with scores in memory: the yardstick in tests, and the kernel that takes every input.

    Softmax in fp32.
    """
    outputs = []
    for rows, span in _split(query, spans):
        keys, values = (_repeat_heads(x[: span.global_end], rows.shape[2]) for x in (key, value))
        scores = torch.einsum("rbhc,sbhc->bhrs", rows, keys).float() * scale
        visible = torch.ones(span.length, span.global_end, dtype=torch.bool, device=query.device)
        scores = scores.masked_fill(~visible.tril(span.global_start), -math.inf)
        weights = F.dropout(scores.softmax(dim=-1).to(values.dtype), p=dropout)
        outputs.append(torch.einsum("bhrs,sbhv->rbhv", weights, values))
    return _join(outputs)


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span], scale: float, dropout: float
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with its bottom-right causal bias."""
    outputs = []
    for rows, span in _split(query, spans):
        keys, values = key[: span.global_end], value[: span.global_end]
        output = F.scaled_dot_product_attention(
            rows.permute(1, 2, 0, 3),
            keys.permute(1, 2, 0, 3),
            values.permute(1, 2, 0, 3),
            attn_mask=causal_lower_right(span.length, span.global_end),
            dropout_p=dropout,
            scale=scale,
            enable_gqa=rows.shape[2] != key.shape[2],
        )
        outputs.append(output.permute(2, 0, 1, 3))
    return _join(outputs)


def flash_attn(
    query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span], scale: float, dropout: float
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
        )
        outputs.append(output.transpose(0, 1))
    return _join(outputs)


def cpu_flash(
    query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span], scale: float, dropout: float
) -> Tensor:
    """torch's flash attention for CPU, a span as rectangle plus triangle.

    The kernel knows causal attention only for as many queries as keys. So a span is attended to in two
    parts, all earlier keys (no mask) and its own (causal), merged by their log-sum-exp.
    """
    assert dropout == 0.0, "the CPU kernel has no dropout"
    return _join([_CpuFlash.apply(rows, key, value, span, scale) for rows, span in _split(query, spans)])


class _CpuFlash(torch.autograd.Function):
    """One span. The backward of both parts uses the merged output and log-sum-exp, which makes it exact.

    Heads that share keys are laid out as more query rows of the rectangle, so its keys are never copied.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, key: Tensor, value: Tensor, span: Span, scale: float) -> Tensor:
        rectangle, triangle = _CpuFlash._parts(rows, key, value, span)
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *triangle, 0.0, True, scale=scale
        )
        if span.global_start:
            earlier, earlier_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *rectangle, 0.0, False, scale=scale
            )
            earlier, earlier_lse = earlier.reshape(output.shape), earlier_lse.reshape(lse.shape)
            total = torch.logaddexp(lse, earlier_lse)
            output.mul_((lse - total).exp_().unsqueeze(-1))
            output.addcmul_(earlier, (earlier_lse - total).exp_().unsqueeze(-1).to(output.dtype))
            lse = total
        ctx.save_for_backward(rows, key, value, output, lse)
        ctx.span, ctx.scale = span, scale
        return output.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, key, value, output, lse = ctx.saved_tensors
        span, scale = ctx.span, ctx.scale
        rectangle, triangle = _CpuFlash._parts(rows, key, value, span)
        length, batch, heads, _ = rows.shape
        groups = key.shape[2]
        incoming = gradient.permute(1, 2, 0, 3).contiguous()
        own = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            incoming, *triangle, output, lse, 0.0, True, scale=scale
        )
        key_gradient, value_gradient = torch.zeros_like(key), torch.zeros_like(value)
        for target, part in zip((key_gradient, value_gradient), own[1:], strict=True):
            part = part.reshape(batch, groups, heads // groups, length, -1).sum(2)
            target[span.global_start : span.global_end] = part.permute(2, 0, 1, 3)
        row_gradient = own[0]
        if span.global_start:
            folded = (batch, groups, heads // groups * length, -1)
            earlier = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                incoming.reshape(folded),
                *rectangle,
                output.reshape(folded),
                lse.reshape(folded[:3]),
                0.0,
                False,
                scale=scale,
            )
            row_gradient = row_gradient + earlier[0].reshape(row_gradient.shape)
            key_gradient[: span.global_start] = earlier[1].permute(2, 0, 1, 3)
            value_gradient[: span.global_start] = earlier[2].permute(2, 0, 1, 3)
        return row_gradient.permute(2, 0, 1, 3), key_gradient, value_gradient, None, None

    @staticmethod
    def _parts(
        rows: Tensor, key: Tensor, value: Tensor, span: Span
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """``(query, key, value)`` of the rectangle and of the triangle, heads before rows."""
        length, batch, heads, size = rows.shape
        groups = key.shape[2]
        query = rows.permute(1, 2, 0, 3)
        folded = query.reshape(batch, groups, heads // groups * length, size)
        earlier = (x[: span.global_start].permute(1, 2, 0, 3) for x in (key, value))
        own = (
            _repeat_heads(x[span.global_start : span.global_end], heads).permute(1, 2, 0, 3)
            for x in (key, value)
        )
        return (folded, *earlier), (query, *own)


def _split(query: Tensor, spans: Sequence[Span]) -> list[tuple[Tensor, Span]]:
    return list(zip(query.split([span.length for span in spans]), spans, strict=True))


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
