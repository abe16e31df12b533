"""All-gather and reduce-scatter with uneven splits, which gloo does not support: pads to the longest split.

Megatron needs them for tensor-parallel experts, when ranks have received different numbers of tokens. Called
by :mod:`.megatron`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def with_uneven_gather(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's ``_gather_along_first_dim`` with uneven splits over gloo."""

    def gathering(
        tensor: Tensor, group: Any, output_split_sizes: Sequence[int] | None = None, *options: Any
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(tensor, group, output_split_sizes, *options)
        longest = max(output_split_sizes)
        received = tensor.new_empty((group.size() * longest, *tensor.shape[1:]))
        dist.all_gather_into_tensor(received, _pad_rows(tensor, longest), group=group)
        parts = received.split([longest] * group.size())
        return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])

    return gathering


def with_uneven_reduce_scatter(scatter: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Megatron's ``_reduce_scatter_along_first_dim`` with uneven splits over gloo."""

    def scattering(
        tensor: Tensor, group: Any, input_split_sizes: Sequence[int] | None = None, *options: Any
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return scatter(tensor, group, input_split_sizes, *options)
        longest = max(input_split_sizes)
        parts = [_pad_rows(part, longest) for part in tensor.split(list(input_split_sizes))]
        received = tensor.new_empty((longest, *tensor.shape[1:]))
        dist.reduce_scatter_tensor(received, torch.cat(parts), group=group)
        return received[: input_split_sizes[group.rank()]]

    return scattering


def _pad_rows(tensor: Tensor, length: int) -> Tensor:
    missing = tensor.new_zeros((length - tensor.shape[0], *tensor.shape[1:]))
    return torch.cat([tensor, missing])
