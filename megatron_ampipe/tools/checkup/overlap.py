"""Whether communication and computation overlap on this machine: timed alone, and together.

An all-to-all of some MB and matrix products that take about as long are run each alone, then together by the
executor that training uses here. The hidden share is what running them together saved, of the shorter of the
two: 100 % is as if it cost nothing, 0 % is one after the other. Imports torch, not Megatron. Called by
:mod:`.rank`, on every rank.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ampipe.runtime.collectives import Transfer, exchange_rows
from megatron_ampipe.runtime.executors import CudaExecutor, Executor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule import Stage, kinds
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE
from megatron_ampipe.tools.checkup.overlap_figures import hidden_share, verdict

_CHUNKS = 4
_COLUMNS = 1024
_LARGEST_BYTES = 512 * 2**20
_REPEATS, _WARM_UP = 10, 2
# Long compared with the clock and the launch of a kernel, short enough for a user.
_AIM_S = {"cuda": 4e-3, "cpu": 40e-3}
_MATRIX = {"cuda": 4096, "cpu": 384}


def measure(device: str) -> dict[str, Any]:
    """Time both alone and together.

    Args:
        device: ``cuda`` or ``cpu``; a process group of it is there.

    Returns:
        Milliseconds, each the median of several times of the slowest rank: ``communication_ms``,
        ``computation_ms``, ``together_ms``; ``hidden_share`` from 0 to 1; ``bytes`` that a rank exchanged;
        ``what`` was exchanged; ``verdict`` as a word.
    """
    work = _Work(device)
    alone = (
        [Stage(kinds.DISPATCH, chunk) for chunk in range(_CHUNKS)],
        [Stage(kinds.EXPERT, chunk) for chunk in range(_CHUNKS)],
    )
    communication = [(COMM, stage) for stage in alone[0]]
    computation = [(COMPUTE, stage) for stage in alone[1]]
    together = [entry for pair in zip(communication, computation, strict=True) for entry in pair]
    samples: list[list[float]] = [[], [], []]
    for repeat in range(_WARM_UP + _REPEATS):
        # In turns, so that a machine that becomes slower affects all equally.
        for index, order in enumerate((communication, computation, together)):
            seconds = work.slowest(functools.partial(work.run, order))
            if repeat >= _WARM_UP:
                samples[index].append(seconds)
    times_s = [statistics.median(found) for found in samples]
    share = hidden_share(*times_s)
    return {
        "communication_ms": round(times_s[0] * 1e3, 3),
        "computation_ms": round(times_s[1] * 1e3, 3),
        "together_ms": round(times_s[2] * 1e3, 3),
        "hidden_share": round(share, 3),
        "bytes": work.size_bytes,
        "what": "all-to-all" if dist.get_world_size() > 1 else "copy on the GPU, in place of an all-to-all",
        "verdict": verdict(share),
    }


class _Work:
    """What is timed, of a size that takes about :data:`_AIM_S`."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._ranks = dist.get_world_size()
        self._executor: Executor = CudaExecutor() if device == "cuda" else ThreadExecutor()
        self._recorder = Recorder()
        size = _MATRIX[device]
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self._matrix = torch.full((size, size), 1e-3, device=device, dtype=dtype)
        self._product = torch.empty_like(self._matrix)
        self._products_per_chunk = 1
        self._rows = torch.zeros(self._ranks * _CHUNKS, _COLUMNS, device=device)
        self._received = torch.empty_like(self._rows)
        with torch.no_grad():
            self._choose_size()

    @property
    def size_bytes(self) -> int:
        """What a rank holds to exchange, its own part included."""
        return _CHUNKS * self._rows.numel() * self._rows.element_size()

    def run(self, order: Sequence[tuple[str, Stage]]) -> None:
        """Every stage of the order, by the executor; waited for on the device."""
        tape = Tape.of(order, {stage: () for _, stage in order})
        with torch.no_grad():
            self._executor.execute(tape, self._run, self._recorder)
        self._synchronize()

    def slowest(self, call: Callable[[], None]) -> float:
        """Seconds that the call takes, on the slowest rank; the same figure on every rank."""
        self._synchronize()
        dist.barrier()
        self._synchronize()
        begin = time.perf_counter()
        call()
        taken = torch.tensor([time.perf_counter() - begin], device=self._device, dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def _run(self, call: Call) -> Transfer | None:
        if call.stage.kind == kinds.DISPATCH:
            return self._exchange()
        for _ in range(self._products_per_chunk):
            torch.mm(self._matrix, self._matrix, out=self._product)
        return None

    def _exchange(self) -> Transfer:
        if self._ranks == 1:
            # One GPU has no peer to exchange with; this shows whether its streams overlap.
            return Transfer((self._received.copy_(self._rows),))
        share = [self._rows.shape[0] // self._ranks] * self._ranks
        assert dist.group.WORLD is not None
        return exchange_rows([self._rows], send=share, receive=share, group=dist.group.WORLD)

    def _choose_size(self) -> None:
        """Decided by figures that all ranks share, so that all exchange the same amount."""
        aim_s = _AIM_S[self._device]
        communication = [(COMM, Stage(kinds.DISPATCH, chunk)) for chunk in range(_CHUNKS)]
        computation = [(COMPUTE, Stage(kinds.EXPERT, chunk)) for chunk in range(_CHUNKS)]
        taken_s = self._timed(communication)
        while taken_s < aim_s and 2 * self.size_bytes <= _LARGEST_BYTES:
            self._rows = torch.zeros(2 * self._rows.shape[0], _COLUMNS, device=self._device)
            self._received = torch.empty_like(self._rows)
            taken_s = self._timed(communication)
        self._products_per_chunk = max(1, round(taken_s / self._timed(computation)))

    def _timed(self, order: Sequence[tuple[str, Stage]]) -> float:
        """The better of two: the first one may set things up."""
        return min(self.slowest(lambda: self.run(order)) for _ in range(2))

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
