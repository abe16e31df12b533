"""What the ranks of ``ampipe doctor`` do: report what they run with, and measure whether overlap happens.

An all-to-all of some MB and matrix products that take about as long are run each alone, then together by the
executor that training uses here. The hidden share is what running them together saved, of the shorter of the
two: 100 % is as if it cost nothing, 0 % is one after the other. Run as a module with the path of a report,
this is one rank under the torchrun that :func:`start` starts. Imports torch, not Megatron.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ampipe import __version__, compat
from megatron_ampipe.errors import RunFailed
from megatron_ampipe.files import outputs
from megatron_ampipe.runtime.collectives import Transfer, exchange_rows
from megatron_ampipe.runtime.executors import CudaExecutor, Executor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule import Stage, kinds
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE
from megatron_ampipe.tools.checkup import compared_variables, environment_for_modules, nccl_version

OVERLAPS, PARTLY = 0.5, 0.2
"""From these hidden shares on, overlap happens, or happens in part."""
TIME_LIMIT_S = 120.0
_TIMEOUT = datetime.timedelta(seconds=60)
_LOG_LINES = 12
_PR_SET_PDEATHSIG = 1
_CHUNKS, _COLUMNS, _LARGEST_BYTES = 4, 1024, 512 * 2**20
_REPEATS, _WARM_UP = 10, 2
# Long compared with the clock and the launch of a kernel, short enough for a user.
_AIM_S = {"cuda": 4e-3, "cpu": 40e-3}
_MATRIX = {"cuda": 4096, "cpu": 384}


def start(num_ranks: int, *, time_limit_s: float = TIME_LIMIT_S) -> dict[str, Any]:
    """Run :func:`examine` in ranks on this machine; none is left, whatever happens.

    Raises:
        RunFailed: they failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="ampipe-doctor-") as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", "-m", "megatron_ampipe.tools.doctor_ranks", str(report)]
        # A machine's name may not resolve to one of its addresses.
        environment = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        environment |= environment_for_modules() | {"OMP_NUM_THREADS": "1"}
        with log.open("wb") as output:
            try:
                # Killed after the timeout; ranks die with torchrun (see main).
                code = subprocess.run(
                    command, env=environment, stdout=output, stderr=output, timeout=time_limit_s
                ).returncode
                why = f"failed (code {code})"
            except subprocess.TimeoutExpired:
                why = (
                    f"did not end within {time_limit_s:g} s, and were ended. "
                    "They hang at the first collective where a network is chosen that does not work"
                )
        if not report.exists():
            tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise RunFailed(f"{num_ranks} ranks {why}. The end of their output:\n  {tail}")
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def main(report: Path) -> None:
    """Write what was found, on the first rank alone."""
    if sys.platform == "linux":
        # The doctor ends torchrun when its time is up, and then no rank may stay.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    found = examine(measure_overlap=True)
    if int(os.environ["RANK"]) == 0:
        outputs.write_text(report, json.dumps(found))


def examine(*, measure_overlap: bool) -> dict[str, Any]:
    """Meet the other ranks; every rank calls this.

    Args:
        measure_overlap: Also take the minute or so that the measurement needs.

    Returns:
        ``ranks``: what each runs with; ``overlap``: see :func:`measure`, None where not asked for.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from megatron_ampipe.launch.host import all_to_all

        all_to_all.install()
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, facts(device))
        # One rank on a CPU has no peer.
        has_peer = device == "cuda" or len(ranks) > 1
        overlap = {"device": device, **measure(device)} if measure_overlap and has_peer else None
    finally:
        dist.destroy_process_group()
    return {"ranks": ranks, "overlap": overlap}


def facts(device: str) -> dict[str, Any]:
    """What this rank runs with: ``host``, ``versions`` and ``environment``."""
    versions = {
        "python": platform.python_version(),
        "megatron-ampipe": __version__,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "NCCL": nccl_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    for name in ("megatron-core", *(package.distribution for package in compat.OPTIONAL_PACKAGES)):
        version = compat.found_version(name)
        versions[name] = None if version is None else str(version)
    return {"host": socket.gethostname(), "versions": versions, "environment": compared_variables(os.environ)}


def differences(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Versions and variables that differ between ranks: ``name``, and ``values`` with their ranks."""
    found = []
    for part in ("versions", "environment"):
        for name in sorted({name for rank in ranks for name in rank[part]}):
            values: dict[str, list[int]] = {}
            for number, rank in enumerate(ranks):
                value = rank[part].get(name)
                values.setdefault("(not there)" if value is None else str(value), []).append(number)
            if len(values) > 1:
                found.append({"name": name, "values": values})
    return found


def hidden_share(communication_s: float, computation_s: float, together_s: float) -> float:
    """What running both together saved, of the shorter of the two; from 0 to 1."""
    saved = communication_s + computation_s - together_s
    return min(1.0, max(0.0, saved / min(communication_s, computation_s)))


def verdict(share: float) -> str:
    """A hidden share as a word."""
    if share >= OVERLAPS:
        return "overlaps"
    return "overlaps in part" if share >= PARTLY else "does not overlap"


def measure(device: str) -> dict[str, Any]:
    """Time both alone and together.

    Args:
        device: ``cuda`` or ``cpu``; a process group of it is there.

    Returns:
        Milliseconds, each the median of several times of the slowest rank: ``communication_ms``,
        ``computation_ms``, ``together_ms``; ``hidden_share`` from 0 to 1; ``bytes`` that a rank exchanged;
        ``what`` was exchanged; ``verdict`` as a word.
    """
    communication = [(COMM, Stage(kinds.DISPATCH, chunk)) for chunk in range(_CHUNKS)]
    computation = [(COMPUTE, Stage(kinds.EXPERT, chunk)) for chunk in range(_CHUNKS)]
    together = [entry for pair in zip(communication, computation, strict=True) for entry in pair]
    work = _Work(device)
    work.choose_size(communication, computation)
    samples: list[list[float]] = [[], [], []]
    for repeat in range(_WARM_UP + _REPEATS):
        # In turns, so that a machine that becomes slower affects all equally.
        for index, order in enumerate((communication, computation, together)):
            seconds = work.slowest(functools.partial(work.run, order))
            if repeat >= _WARM_UP:
                samples[index].append(seconds)
    times_s = [statistics.median(found) for found in samples]
    share = hidden_share(*times_s)
    names = ("communication_ms", "computation_ms", "together_ms")
    return {
        **{name: round(seconds * 1e3, 3) for name, seconds in zip(names, times_s, strict=True)},
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

    @property
    def size_bytes(self) -> int:
        """What a rank holds to exchange, its own part included."""
        return _CHUNKS * self._rows.numel() * self._rows.element_size()

    def choose_size(
        self, communication: Sequence[tuple[str, Stage]], computation: Sequence[tuple[str, Stage]]
    ) -> None:
        """Decided by figures that all ranks share, so that all exchange the same amount."""
        taken_s = self._timed(communication)
        while taken_s < _AIM_S[self._device] and 2 * self.size_bytes <= _LARGEST_BYTES:
            self._rows = torch.zeros(2 * self._rows.shape[0], _COLUMNS, device=self._device)
            self._received = torch.empty_like(self._rows)
            taken_s = self._timed(communication)
        self._products_per_chunk = max(1, round(taken_s / self._timed(computation)))

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

    def _timed(self, order: Sequence[tuple[str, Stage]]) -> float:
        """The better of two: the first one may set things up."""
        return min(self.slowest(lambda: self.run(order)) for _ in range(2))

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

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
