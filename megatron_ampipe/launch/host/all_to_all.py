"""The all-to-all of the host platform: sends and receives, for Megatron's layers and AMPipe's.

gloo's own all-to-all sends larger messages in one direction of a link at a time, so it takes up to twice as
long for the same bytes. With NCCL, both layers call the same all-to-all. With this replacement they do so on
a CPU too, and a difference between them is not one of transport. :func:`gloo_all_to_all` restores gloo's, to
measure what the replacement gains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.collectives import send_receive

_gloo: Callable[..., Any] | None = None
"""What was replaced; None before :func:`install`."""
_uses_gloo = False


def install() -> None:
    """Replace ``torch.distributed.all_to_all_single``; a second call does nothing.

    Megatron and AMPipe look it up at every call. An emulated link calls this first and wraps it.
    """
    global _gloo
    if _gloo is None:
        _gloo, dist.all_to_all_single = dist.all_to_all_single, _all_to_all_single


@contextlib.contextmanager
def gloo_all_to_all() -> Iterator[None]:
    """Use gloo's own all-to-all, on all threads of this process; all ranks have to enter it."""
    global _uses_gloo
    assert _gloo is not None
    _uses_gloo = True
    try:
        yield
    finally:
        _uses_gloo = False


@torch.no_grad()
def _all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """As ``torch.distributed.all_to_all_single``; every rank has to send what its peer expects."""
    if _uses_gloo:
        assert _gloo is not None
        return _gloo(output, input, output_split_sizes, input_split_sizes, group, async_op)
    group = group or dist.group.WORLD
    assert group is not None
    handle = _Works(
        send_receive(
            _parts(input, input_split_sizes, group), _parts(output, output_split_sizes, group), group
        )
    )
    if async_op:
        return handle
    handle.wait()
    return None


def _parts(tensor: Tensor, splits: Sequence[int] | None, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """The rows of each rank; as many for each if ``splits`` is None."""
    ranks = group.size()
    sizes = [tensor.shape[0] // ranks] * ranks if splits is None else list(splits)
    return tensor.split_with_sizes(sizes)


class _Works:
    """The handle of an exchange."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, *_: Any) -> bool:
        """Return when everything has been received and the input may be reused."""
        for work in self._works:
            work.wait()
        return True
