"""The largest attention score of each head, which ``--qk-clip`` and ``--log-max-attention-logit`` ask for.

Transformer Engine's kernel returns it; the kernels of :mod:`.attention_kernels` do not, so it is computed
separately, for as many rows at a time as take little memory. Called by ``layers``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ampipe.runtime.attention_kernels import visible_keys
from megatron_ampipe.runtime.rows import repeat_heads, split_spans
from megatron_ampipe.schedule.chunks import Span
from megatron_ampipe.schedule.documents import DocumentRows

MOST_SCORES = 2**24
"""Computed at a time: 64 MiB in fp32."""


@torch.no_grad()
def largest_scores(
    query: Tensor,
    key: Tensor,
    *,
    spans: Sequence[Span],
    scale: float,
    window: int | None = None,
    documents: Sequence[DocumentRows] | None = None,
) -> Tensor:
    """The largest score of each head that is not masked, scaled, in fp32.

    Args:
        query: ``[R, B, H, C]``, the rows of the spans one after another.
        key: ``[S, B, G, C]``, from the start of the sequence.
        spans: Positions of the query rows in the sequence.
        scale: Factor on the scores.
        window: How many keys before its own position a query sees; None for all.
        documents: The query rows by document; None where rows see all earlier ones.

    Returns:
        ``[H]``.
    """
    if documents is not None:
        parts = [
            largest_scores(
                query[one.first_row : one.last_row, one.sequence : one.sequence + 1],
                key[one.first_key : one.last_key, one.sequence : one.sequence + 1],
                spans=(one.span,),
                scale=scale,
                window=window,
            )
            for one in documents
        ]
        return functools.reduce(torch.maximum, parts)
    found = query.new_full((query.shape[2],), -math.inf, dtype=torch.float32)
    num_rows = max(1, MOST_SCORES // (query.shape[1] * query.shape[2] * len(key)))
    for rows, span in split_spans(query, spans):
        start = span.global_start
        for some in rows.split(num_rows):
            first = 0 if window is None else max(0, start - window)
            start += len(some)
            keys = repeat_heads(key[first:start], some.shape[2])
            scores = torch.einsum("rbhc,sbhc->bhrs", some.float(), keys.float())
            scores = scores.masked_fill_(~visible_keys(some, keys, window), -math.inf) * scale
            found = torch.maximum(found, scores.amax(dim=(0, 2, 3)))
    return found
