"""The reshaping that all attention kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ampipe.schedule.chunks import Span


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
