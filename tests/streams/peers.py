"""Emulated peers: one process is rank 0 of several; collectives run like NCCL's, on the current stream.

The rows that the peers would send are copies of this rank's rows, so that all values are realistic.
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


class Peers:
    """The collectives of a block, as torch runs them from 2.8 on.

    Before, each process group has a separate stream for them, which waits for the current one, as that does
    for it.
    """

    @contextlib.contextmanager
    def pretended(self) -> Iterator[None]:
        """Context manager that installs them in ``torch.distributed``."""
        with (
            mock.patch.object(dist, "all_to_all_single", self.all_to_all_single),
            mock.patch.object(dist, "all_to_all", self.all_to_all),
            mock.patch.object(dist, "all_gather_into_tensor", self.all_gather_into_tensor),
            mock.patch.object(dist, "reduce_scatter_tensor", self.reduce_scatter_tensor),
        ):
            yield

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> None:
        self._run([output], input, async_op)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any = None, async_op: bool = False
    ) -> None:
        # Of a gather: every rank is sent the same.
        assert all(one is inputs[0] for one in inputs)
        self._run(outputs, inputs[0], async_op)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> None:
        self._run([output], input, async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> None:
        self._run([output], input, async_op)

    def _run(self, outputs: Sequence[Tensor], input: Tensor, async_op: bool) -> None:
        assert not async_op, "on CUDA, a lane has its own stream, which orders its collectives"
        DEVICE.note("collective")
        stream = DEVICE.current
        stream.inside_a_call = True
        try:
            for output in outputs:
                if input.shape[0]:
                    output.copy_(input[torch.arange(output.shape[0]) % input.shape[0]])
                else:
                    output.zero_()
        finally:
            stream.inside_a_call = False
