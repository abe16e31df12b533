"""The functions and operators of torch that compute attention.

There are three forms: attention of one span, differentiable (:data:`SpanFunction`); of one piece with its
log-sum-exp, and its gradients (:class:`.pieces.PieceKernel`); of several documents in one call,
differentiable (:data:`DocumentFunction`). Operators of flash kernels, for fp16 and bf16, are called directly:
a function that chooses by shape could choose another kernel for the first chunk. Shapes as in :mod:`.pieces`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from megatron_ampipe.attention.pieces import (
    HEADS_FIRST,
    ROWS_FIRST,
    KernelOutput,
    PieceKernel,
    all_visible_keys,
    causal_then_earlier,
    repeat_heads,
)
from megatron_ampipe.runtime.collectives import copy_to_device
from megatron_ampipe.runtime.segment import sum_dtype
from megatron_ampipe.schedule.chunks import DocumentRows

aten = torch.ops.aten


SpanFunction = Callable[..., Tensor]
"""``[R, B, H, C]``, ``[S, B, G, C]``, ``[S, B, G, V]`` to ``[R, B, H, V]``; the last row sees the last key.

Keywords are ``scale``, a factor on the scores; ``dropout``, the probability of dropping a weight; ``window``,
the number of earlier keys that a query sees, None for all; and ``sinks`` ``[H]``, the score of a further key
with value zero that every query sees (``--softmax-type``)."""


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, with torch's bottom-right bias if no window.

    The parameters are those of every :data:`SpanFunction`.
    """
    bias: Tensor
    if sinks is not None:
        bias = _bias_with_sink(visible_keys(query, key, window), sinks)
        key, value = (F.pad(x, (0, 0, 0, 0, 0, 0, 0, 1)) for x in (key, value))
    elif window is None:
        bias = causal_lower_right(query.shape[0], key.shape[0])
    else:
        bias = visible_keys(query, key, window)
    shares_keys = query.shape[2] != key.shape[2]
    query, key, value = (x.permute(HEADS_FIRST) for x in (query, key, value))
    output = F.scaled_dot_product_attention(
        query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale, enable_gqa=shares_keys
    )
    return output.permute(ROWS_FIRST)


def torch_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """torch's FlashAttention 2 on a GPU, also with dropout and a window."""
    tensors = (x.transpose(0, 1) for x in (query, key, value))
    given = *tensors, None, None, len(query), len(key)
    return _torch_flash(*given, scale=scale, dropout=dropout, window=window).transpose(0, 1)


def torch_flash_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *bounds: Tensor | int,
    scale: float,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """The same for several documents: see :data:`DocumentFunction`."""
    return _torch_flash(query, key, value, *bounds, scale=scale, dropout=dropout, window=window)


def _torch_flash(*given: Tensor | int | None, scale: float, dropout: float, window: int | None) -> Tensor:
    output: Tensor = aten._flash_attention_forward(
        *given, dropout, True, False, scale=scale, window_size_left=window
    )[0]
    return output


def visible_keys(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """``[R, S]`` bool, True where a row sees a key; the last row is at the position of the last key."""
    offset = len(keys) - len(rows)
    visible = torch.ones(len(rows), len(keys), dtype=torch.bool, device=rows.device).tril(offset)
    return visible if window is None else visible.triu(offset - window)


def _bias_with_sink(visible: Tensor, sinks: Tensor) -> Tensor:
    """The bias of the scores, ``[1, H, R, S + 1]``; the last key is the sink, whose own score is zero."""
    bias = torch.zeros_like(visible, dtype=sinks.dtype).masked_fill_(~visible, -math.inf)
    sink_bias = sinks.view(1, -1, 1, 1).expand(1, -1, len(visible), 1)
    return torch.cat([bias.expand(1, len(sinks), -1, -1), sink_bias], dim=-1)


# Pieces in plain torch operations, for what no flash kernel supports: any dtype, and head size of values.


def _exact_forward(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal=causal, scale=scale)
    lse = scores.logsumexp(dim=-1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_().to(value.dtype)
    return weights @ repeat_heads(value, query.shape[1]), lse


def _exact_backward(*given: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    gradient, query, key, value, output, lse = given
    heads, groups, dtype = query.shape[1], key.shape[1], query.dtype
    weights = _scores(query, key, causal=causal, scale=scale).sub_(lse.unsqueeze(-1)).exp_()
    mean = (gradient.to(weights.dtype) * output).sum(-1, keepdim=True)
    ds = (gradient @ repeat_heads(value, heads).mT).to(weights.dtype)
    ds = ds.sub_(mean).mul_(weights).mul_(scale).to(dtype)
    dq, dk, dv = ds @ repeat_heads(key, heads), ds.mT @ query, weights.to(dtype).mT @ gradient
    if groups != heads:
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _scores(query: Tensor, key: Tensor, *, causal: bool, scale: float) -> Tensor:
    """``[B, H, R, S]`` in the dtype of sums."""
    scores = (query @ repeat_heads(key, query.shape[1]).mT).to(sum_dtype(query)) * scale
    return scores.masked_fill_(~visible_keys(query[0, 0], key[0, 0], None), -math.inf) if causal else scores


EXACT_PIECES = PieceKernel(all_visible_keys, _exact_forward, _exact_backward)

# torch's flash attention for CPU: causal only if there are as many queries as keys. It also computes masked
# scores, up to 512 keys to the right of the diagonal.

_TRIANGLE_ROWS = 128
"""Queries of the largest causal piece: with fewer, the extra calls cost more than the masked scores saved."""


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> KernelOutput:
    batch, heads, rows, _ = query.shape
    tensors = _of_equal_heads(query, key, value, causal=causal)
    output, lse = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, causal, scale=scale)
    return output.reshape(batch, heads, rows, -1), lse.reshape(batch, heads, rows)


def _cpu_backward(*given: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    gradient, query, key, value, output, lse = given
    shape, groups = query.shape, key.shape[1]
    query, key, value = _of_equal_heads(query, key, value, causal=causal)
    gradient, output, lse = (x.reshape(*query.shape[:3], *x.shape[3:]) for x in (gradient, output, lse))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, output, lse, 0.0, causal, scale=scale
    )
    if dk.shape[1] != groups:
        dk, dv = (x.unflatten(1, (groups, -1)).sum(2) for x in (dk, dv))
    return dq.reshape(shape), dk, dv


def _of_equal_heads(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, ...]:
    """``[B, heads, rows, C]`` with as many key heads as query heads.

    In a causal piece the keys are repeated; in others, query heads that share keys become additional rows.
    """
    if causal:
        return query, *(repeat_heads(x, query.shape[1]) for x in (key, value))
    return query.reshape(*key.shape[:2], -1, query.shape[-1]), key, value


CPU_FLASH = PieceKernel(
    functools.partial(causal_then_earlier, rows=_TRIANGLE_ROWS), _cpu_forward, _cpu_backward
)

# torch's FlashAttention 2, and cuDNN, whose causal mask is aligned to the top left through torch: its causal
# pieces need as many keys as queries. The states are random states, unused without dropout.


def _torch_2_forward(*tensors: Tensor, causal: bool, scale: float) -> KernelOutput:
    output, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        *tensors, 0.0, causal, False, scale=scale
    )
    return output, lse, seed, offset


def _torch_2_backward(*given: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    *tensors, lse, seed, offset = given
    lengths = tensors[1].shape[2], tensors[2].shape[2]
    gradients: tuple[Tensor, ...] = aten._scaled_dot_product_flash_attention_backward(
        *tensors, lse.contiguous(), None, None, *lengths, 0.0, causal, seed, offset, scale=scale
    )
    return gradients


def _cudnn_forward(*tensors: Tensor, causal: bool, scale: float) -> KernelOutput:
    """Also returns the number of dimensions of the log-sum-exp, which depends on torch's version."""
    query, key, _ = tensors
    assert key.shape[2] > 1, "cuDNN attends to two keys or more: use a smaller --ampipe-degree"
    output, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        *tensors, None, True, 0.0, causal, False, scale=scale
    )
    return output, lse.reshape(query.shape[:3]), seed, offset, lse.dim()


_CudnnGiven = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]


def _cudnn_backward(*given: *_CudnnGiven, causal: bool, scale: float) -> tuple[Tensor, ...]:
    *tensors, lse, seed, offset, lse_dimensions = given
    lse = lse.contiguous()
    lse = lse if lse.dim() == lse_dimensions else lse.unsqueeze(-1)
    lengths = tensors[1].shape[2], tensors[2].shape[2]
    gradients: tuple[Tensor, ...] = aten._scaled_dot_product_cudnn_attention_backward(
        *tensors, lse, seed, offset, None, None, None, *lengths, 0.0, causal, scale=scale
    )
    return gradients


TORCH_FLASH_2 = PieceKernel(all_visible_keys, _torch_2_forward, _torch_2_backward)
CUDNN = PieceKernel(causal_then_earlier, _cudnn_forward, _cudnn_backward)


Bounds = tuple[Tensor, Tensor, int, int]
"""Bounds of the rows and of the keys of documents, ``[documents + 1]`` int32 each; the longest of both.

The first document of a chunk may have begun in an earlier one, and then has more keys than queries.
"""
DocumentFunction = Callable[..., Tensor]
"""``[rows, H, C]``, ``[keys, G, C]`` and ``[keys, G, V]`` of all documents, and their bounds, to
``[rows, H, V]``; keywords as of a :data:`SpanFunction`."""


def bounds_of(documents: Sequence[DocumentRows], *, device: torch.device) -> Bounds:
    """The bounds of documents for one call."""
    lengths = [[rows.num_rows for rows in documents], [rows.num_keys for rows in documents]]
    ends = torch.tensor(
        [list(itertools.accumulate(parts, initial=0)) for parts in lengths], dtype=torch.int32
    )
    ends = copy_to_device(ends, device)
    return ends[0], ends[1], max(lengths[0]), max(lengths[1])
