"""The all-to-all of the host platform: sends and receives, for Megatron's layers and AMPipe's.

gloo's own all-to-all sends larger messages in one direction of a link at a time, so it takes up to twice as
long for the same bytes. Both layers call this one, as both call NCCL's on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.collectives import send_receive

_installed = False


def install() -> None:
    """Replace ``torch.distributed.all_to_all_single``, which everybody looks up at every call; once."""
    global _installed
    if not _installed:
        _installed, dist.all_to_all_single = True, _all_to_all_single


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
