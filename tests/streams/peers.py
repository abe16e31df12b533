"""Emulated peers: one process is rank 0 of several; collectives run like NCCL's, on separate streams.

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

from tests.streams.model import DEVICE, ModelEvent, ModelStream


class _Work:
    """NCCL's work handle: ``wait`` orders the current stream after the collective, without blocking the host.

    Until then the process group keeps references to the tensors of the collective.
    """

    def __init__(self, done: ModelEvent, *kept: Tensor) -> None:
        self._done, self._kept = done, kept

    def wait(self, *_: Any) -> bool:
        DEVICE.current.wait_event(self._done)
        self._kept = ()
        return True


class Peers:
    """The collectives of a block; every process group has an internal NCCL stream."""

    def __init__(self) -> None:
        self._streams: dict[Any, ModelStream] = {}

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
    ) -> _Work | None:
        return self._run([output], input, group, async_op)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: Any = None, async_op: bool = False
    ) -> _Work | None:
        # Of a gather: every rank is sent the same.
        assert all(one is inputs[0] for one in inputs)
        return self._run(outputs, inputs[0], group, async_op)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> _Work | None:
        return self._run([output], input, group, async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> _Work | None:
        return self._run([output], input, group, async_op)

    def _run(self, outputs: Sequence[Tensor], input: Tensor, group: Any, async_op: bool) -> _Work | None:
        if group not in self._streams:
            self._streams[group] = ModelStream(name=f"NCCL {len(self._streams)}")
            self._streams[group].inside_a_call = True
        stream = self._streams[group]
        DEVICE.note("collective")
        waiting = DEVICE.current
        with DEVICE.using(stream):
            stream.wait_stream(waiting)
            for output in outputs:
                if input.shape[0]:
                    output.copy_(input[torch.arange(output.shape[0]) % input.shape[0]])
                else:
                    output.zero_()
            done = stream.record_event()
        work = _Work(done, *outputs, input)
        if async_op:
            return work
        work.wait()
        return None
