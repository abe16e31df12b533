"""Emulated peers: one process is rank 0 of several; collectives run like NCCL's, on the current stream.

The rows that the peers would send are copies of this rank's rows, so that all values are realistic. As torch
runs collectives from 2.8 on: before, each process group has a separate stream for them, which waits for the
current one, as that does for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from tests.streams.model import DEVICE


@contextlib.contextmanager
def pretended_peers() -> Iterator[None]:
    """Context manager that installs the collectives of a block in ``torch.distributed``."""
    with contextlib.ExitStack() as stack:
        for name in ("all_to_all_single", "all_gather_into_tensor", "reduce_scatter_tensor"):
            stack.enter_context(mock.patch.object(dist, name, _exchange))
        stack.enter_context(mock.patch.object(dist, "all_to_all", _exchange_lists))
        yield


def _exchange_lists(outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: Any) -> None:
    # Of a gather: every rank is sent the same.
    assert all(one is inputs[0] for one in inputs)
    _exchange(outputs, inputs[0], **options)


def _exchange(
    output: Tensor | Sequence[Tensor], input: Tensor, *_: Any, async_op: bool = False, **__: Any
) -> None:
    assert not async_op, "on CUDA, a lane has its own stream, which orders its collectives"
    DEVICE.note("collective")
    stream = DEVICE.current
    stream.inside_a_call = True
    try:
        for one in [output] if isinstance(output, Tensor) else output:
            if input.shape[0]:
                one.copy_(input[torch.arange(one.shape[0]) % input.shape[0]])
            else:
                one.zero_()
    finally:
        stream.inside_a_call = False
