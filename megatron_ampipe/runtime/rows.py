"""Reading and writing the rows of a chunk: a view for one span, one copy for several.

Also the reshaping that all attention kernels share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ampipe.schedule.chunks import Span


def take_rows(tensor: Tensor, spans: Sequence[Span]) -> Tensor:
    """The rows of the spans, in order, along the first dimension."""
    if len(spans) == 1:
        return tensor[spans[0].local_start : spans[0].local_end]
    return torch.cat([tensor[span.local_start : span.local_end] for span in spans])


def write_rows(target: Tensor, spans: Sequence[Span], rows: Tensor) -> None:
    """Write rows that :func:`take_rows` would read."""
    start = 0
    for span in spans:
        target[span.local_start : span.local_end] = rows[start : start + span.length]
        start += span.length


def write_sum(target: Tensor, spans: Sequence[Span], rows: Tensor, others: Tensor) -> None:
    """Write the sum of two tensors of rows that :func:`take_rows` would read."""
    start = 0
    for span in spans:
        end = start + span.length
        torch.add(rows[start:end], others[start:end], out=target[span.local_start : span.local_end])
        start = end


def split_spans(tensor: Tensor, spans: Sequence[Span]) -> list[tuple[Tensor, Span]]:
    """Split the concatenated rows of several spans; returns the rows of each span with the span."""
    if len(spans) == 1:
        return [(tensor, spans[0])]
    return list(zip(tensor.split([span.length for span in spans]), spans, strict=True))


def join_spans(outputs: list[Tensor]) -> Tensor:
    """Concatenate the attention outputs of the spans, each ``[rows, B, H, V]``, to ``[R, B, H * V]``."""
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output.reshape(*output.shape[:2], -1)


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """``[S, B, G, C]`` to ``[S, B, heads, C]``; each key/value head serves consecutive query heads."""
    repeats = heads // tensor.shape[2]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=2)
