"""The all-to-all of the host platform: sends and receives, for Megatron's layers and AMPipe's.

gloo's own all-to-all sends larger messages in one direction of a link at a time, so it takes up to twice as
long for the same bytes. Both layers call this one, as both call NCCL's on a GPU.
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
    """Replace ``torch.distributed.all_to_all_single``, which everybody looks up at every call; once."""
    global _gloo
    if _gloo is None:
        _gloo, dist.all_to_all_single = dist.all_to_all_single, _all_to_all_single


@contextlib.contextmanager
def gloo_all_to_all() -> Iterator[None]:
    """Use gloo's own all-to-all, to measure what the replacement gains; all ranks have to enter it."""
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
    sent, received = (
        tensor.tensor_split(group.size()) if splits is None else tensor.split_with_sizes(list(splits))
        for tensor, splits in ((input, input_split_sizes), (output, output_split_sizes))
    )
    handle = _Works(send_receive(sent, received, group))
    if async_op:
        return handle
    handle.wait()
    return None


class _Works:
    """The handle of an exchange."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self._works = works

    def wait(self, *_: Any) -> bool:
        """Return when everything has been received and the input may be reused."""
        for work in self._works:
            work.wait()
        return True
