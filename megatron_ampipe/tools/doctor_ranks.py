"""What the ranks of ``ampipe doctor`` do: report what they run with, and measure whether overlap happens.

An all-to-all of some MB and matrix products that take about as long are run each alone, then together by the
executor that training uses here. The hidden share is what running them together saved, of the shorter of the
two: 100 % is as if it cost nothing, 0 % is one after the other. Imports torch, not Megatron.
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from platform import node
from typing import Any

import torch
import torch.distributed as dist

from megatron_ampipe.launch import connections
from megatron_ampipe.runtime.collectives import Transfer, exchange_rows
from megatron_ampipe.runtime.executors import CudaExecutor, Executor, ThreadExecutor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.tape import Call, Tape
from megatron_ampipe.schedule import Stage, kinds
from megatron_ampipe.schedule.stage_kind import COMM, COMPUTE
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.link import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob, run_ranks

_COMPARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "NVTE_", "UCX_", "AMPIPE_")
_COMPARED_NAMES = (
    *(connections.VARIABLE, "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS"),
    "PYTORCH_CUDA_ALLOC_CONF",
)
_MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "NCCL_TOPO_FILE", "UCX_NET_DEVICES")
"""They name a node's hardware."""
_TIMEOUT = datetime.timedelta(seconds=60)
_TIME_LIMIT_S = 120.0
_CHUNKS, _COLUMNS, _LARGEST_BYTES = 4, 1024, 512 * 2**20
_REPEATS, _WARM_UP = 10, 2
# Long compared with the clock and the launch of a kernel, short enough for a user.
_AIM_S = {"cuda": 4e-3, "cpu": 40e-3}
_MATRIX = {"cuda": 4096, "cpu": 384}
Order = Sequence[tuple[str, Stage]]
_COMMUNICATION: Order = [(COMM, Stage(kinds.DISPATCH, chunk)) for chunk in range(_CHUNKS)]
_COMPUTATION: Order = [(COMPUTE, Stage(kinds.EXPERT, chunk)) for chunk in range(_CHUNKS)]


def start(num_ranks: int) -> dict[str, Any]:
    """Run :func:`examine` in ranks on this machine.

    Raises:
        RunFailed: they failed, or took too long.
    """
    job = RankJob(num_ranks=num_ranks, link=parse_link("none"), timeout_s=_TIME_LIMIT_S)
    found: dict[str, Any] = run_ranks(job, _examine_rank)[0]
    return found


def _examine_rank(rank: Rank[RankJob]) -> dict[str, Any]:
    if sys.platform == "linux":
        # A machine's name may not resolve to one of its addresses.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    place = {
        "init_method": f"file://{rank.rendezvous}",
        "rank": rank.number,
        "world_size": rank.job.num_ranks,
    }
    return examine(measure_overlap=True, **place)


def examine(*, measure_overlap: bool, **place: Any) -> dict[str, Any]:
    """Meet the other ranks; every rank calls this.

    Args:
        measure_overlap: Also take the minute or so that the measurement needs.
        place: How torch's process group finds the other ranks, where torchrun has not said it.

    Returns:
        ``ranks``: what each runs with: ``host``, ``versions`` of what is there, and ``environment``;
        ``differences``: see :func:`differences`; ``overlap``: see :func:`measure`, None where not asked for.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from megatron_ampipe.launch.host import all_to_all

        all_to_all.install()
        torch.set_num_threads(1)
    versions = machine.versions()
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        versions |= {"CUDA": str(torch.version.cuda), "NCCL": nccl, "device": torch.cuda.get_device_name()}
    mine = {"host": node(), "versions": versions, "environment": compared_variables(os.environ)}
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT, **place)
    try:
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        # One rank on a CPU has no peer.
        has_peer = device == "cuda" or len(ranks) > 1
        overlap = {"device": device, **measure(device)} if measure_overlap and has_peer else None
    finally:
        dist.destroy_process_group()
    return {"ranks": ranks, "differences": differences(ranks), "overlap": overlap}


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be equal on every rank."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in _COMPARED_NAMES or name.startswith(_COMPARED_PREFIXES)) and name not in _MAY_DIFFER
    }


def differences(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Versions and variables that differ between ranks: ``name``, and ``values`` with their ranks."""
    found = []
    for part in ("versions", "environment"):
        for name in sorted({name for rank in ranks for name in rank[part]}):
            values: dict[str, list[int]] = {}
            for number, rank in enumerate(ranks):
                values.setdefault(rank[part].get(name, "(not there)"), []).append(number)
            if len(values) > 1:
                found.append({"name": name, "values": values})
    return found


def hidden_share(communication_s: float, computation_s: float, together_s: float) -> float:
    """What running both together saved, of the shorter of the two; from 0 to 1."""
    saved = communication_s + computation_s - together_s
    return min(1.0, max(0.0, saved / min(communication_s, computation_s)))


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
    work.choose_size()
    together = [stage for pair in zip(_COMMUNICATION, _COMPUTATION, strict=True) for stage in pair]
    samples: list[list[float]] = [[], [], []]
    for repeat in range(_WARM_UP + _REPEATS):
        # In turns, so that a machine that becomes slower affects all equally.
        for index, order in enumerate((_COMMUNICATION, _COMPUTATION, together)):
            seconds = work.seconds(order)
            if repeat >= _WARM_UP:
                samples[index].append(seconds)
    times_s = [statistics.median(found) for found in samples]
    share = hidden_share(*times_s)
    verdict = "overlaps" if share >= 0.5 else "overlaps in part" if share >= 0.2 else "does not overlap"
    names = ("communication_ms", "computation_ms", "together_ms")
    return {
        **{name: round(seconds * 1e3, 3) for name, seconds in zip(names, times_s, strict=True)},
        "hidden_share": round(share, 3),
        "bytes": work.size_bytes,
        "what": "all-to-all" if dist.get_world_size() > 1 else "copy on the GPU, in place of an all-to-all",
        "verdict": verdict,
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

    def choose_size(self) -> None:
        """Decided by figures that all ranks share, so that all exchange the same amount."""
        taken_s = self._better_of_two(_COMMUNICATION)
        while taken_s < _AIM_S[self._device] and 2 * self.size_bytes <= _LARGEST_BYTES:
            self._rows = torch.zeros(2 * self._rows.shape[0], _COLUMNS, device=self._device)
            self._received = torch.empty_like(self._rows)
            taken_s = self._better_of_two(_COMMUNICATION)
        self._products_per_chunk = max(1, round(taken_s / self._better_of_two(_COMPUTATION)))

    def seconds(self, order: Order) -> float:
        """Run every stage of the order; the time of the slowest rank, the same figure on every rank."""
        tape = Tape.of(order, {stage: () for _, stage in order})
        self._synchronize()
        dist.barrier()
        self._synchronize()
        begin = time.perf_counter()
        with torch.no_grad():
            self._executor.execute(tape, self._run, self._recorder)
        self._synchronize()
        taken = torch.tensor([time.perf_counter() - begin], device=self._device, dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return float(taken)

    def _better_of_two(self, order: Order) -> float:
        """The first one may set things up."""
        return min(self.seconds(order) for _ in range(2))

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
