"""Reading and writing the rows of a chunk: a view for one span, one copy for several."""

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
