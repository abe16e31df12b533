"""The work of the ranks of ``ampipe doctor``: report versions and variables, and measure overlap.

An all-to-all and matrix products of about the same time run first alone, then together in the executor that
training uses here. The hidden share is the time saved by running together, relative to the shorter of the
two: 1 if the shorter one costs nothing, 0 if they run one after the other. Imports torch, not Megatron.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.files.outputs import Report
from megatron_ampipe.launch import connections
from megatron_ampipe.runtime.collectives import Transfer, exchange_rows
from megatron_ampipe.runtime.executors import CudaExecutor, Executor, ThreadExecutor
from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.meters import run_lanes
from megatron_ampipe.tools.measuring.network import parse_link
from megatron_ampipe.tools.measuring.ranks import Rank, RankJob, run_ranks

_COMPARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "NVTE_", "UCX_", "AMPIPE_")
_COMPARED_NAMES = (
    *(connections.VARIABLE, "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS"),
    "PYTORCH_CUDA_ALLOC_CONF",
)
_MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "NCCL_TOPO_FILE", "UCX_NET_DEVICES")
"""These variables name a node's hardware."""
_TIME_LIMIT_S, _MEETING_S = 120.0, 60.0
"""Timeouts: for all work of ranks that the doctor starts; for other ranks to connect."""
_CHUNKS, _COLUMNS = 4, 1024
_CHUNK_BYTES, _MATRIX = {"cuda": 32 * 2**20, "cpu": 8 * 2**20}, {"cuda": 4096, "cpu": 384}
_REPEATS, _WARM_UP = 10, 2
_WAIT_CYCLES = 500_000


def job_of(num_ranks: int, *, timeout_s: float) -> RankJob:
    """How the ranks of the doctor run."""
    device: Literal["cuda", "cpu"] = "cuda" if torch.cuda.is_available() else "cpu"
    return RankJob(num_ranks=num_ranks, link=parse_link(None), device=device, timeout_s=timeout_s)


def start(num_ranks: int) -> Report:
    """Run :func:`examine` in ranks on this machine; RunFailed if they failed, or took too long."""
    return dict(run_ranks(job_of(num_ranks, timeout_s=_TIME_LIMIT_S), examine)[0])


def join(*, measures: bool) -> Report:
    """Run :func:`examine` in a rank that torchrun has started."""
    job = job_of(int(os.environ["WORLD_SIZE"]), timeout_s=_MEETING_S)
    return examine(Rank(job, int(os.environ["RANK"])), measures=measures)


def examine(rank: Rank[RankJob], *, measures: bool = True) -> Report:
    """Meet the other ranks; every rank calls this.

    Args:
        rank: A rank that has not connected yet.
        measures: Also measure overlap, which takes up to a minute.

    Returns:
        ``num_ranks``; ``differences``; ``overlap``: the times of :func:`measure` and the ``device``, or None.
    """
    rank.connect()
    device = rank.job.device
    mine = machine.versions() | compared_variables(os.environ)
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        mine |= {"CUDA": str(torch.version.cuda), "NCCL": nccl, "device": torch.cuda.get_device_name()}
    try:
        ranks: list[dict[str, str]] = [{}] * rank.job.num_ranks
        dist.all_gather_object(ranks, mine)
        has_peer = device == "cuda" or len(ranks) > 1
        overlap = {"device": device, **measure(device)} if measures and has_peer else None
    finally:
        dist.destroy_process_group()
    return {"num_ranks": len(ranks), "differences": differences(ranks), "overlap": overlap}


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be equal on every rank."""
    return {
        name: value
        for name, value in environ.items()
        if (name in _COMPARED_NAMES or name.startswith(_COMPARED_PREFIXES)) and name not in _MAY_DIFFER
    }


def differences(ranks: Sequence[Mapping[str, str]]) -> dict[str, dict[str, list[int]]]:
    """Differences between ranks: for each version or variable that differs, the ranks of each value."""
    by_value: dict[str, dict[str, list[int]]] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        for number, rank in enumerate(ranks):
            by_value.setdefault(name, {}).setdefault(rank.get(name, "(not there)"), []).append(number)
    return {name: values for name, values in by_value.items() if len(values) > 1}


def measure(device: str) -> dict[str, float]:
    """Time communication and computation alone and together; ``device`` is ``cuda`` or ``cpu``.

    Returns:
        ``communication_ms``, ``computation_ms``, ``together_ms``: medians of times of the slowest rank; and
        the ``hidden_share``, from 0 to 1.
    """
    executor: Executor = CudaExecutor() if device == "cuda" else ThreadExecutor()
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    matrix = torch.full((_MATRIX[device],) * 2, 1e-3, device=device, dtype=dtype)
    product = torch.empty_like(matrix)
    num_rows = _CHUNK_BYTES[device] // (4 * _COLUMNS * dist.get_world_size()) * dist.get_world_size()
    rows = torch.zeros(num_rows, _COLUMNS, device=device)

    def time_us(exchanges: int, products: int) -> float:
        """The time of the slowest rank, on every rank."""
        spans = run_lanes(
            executor,
            lambda: _exchange(rows),
            lambda: torch.mm(matrix, matrix, out=product),
            exchanges=exchanges,
            products=products,
        )
        took_us = max(span.end_us for span in spans) - min(span.begin_us for span in spans)
        slowest = torch.tensor(took_us, device=device, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    # The first run of each may set things up.
    exchange_us, product_us = (min(time_us(*run) for _ in range(2)) for run in ((_CHUNKS, 0), (0, _CHUNKS)))
    products = max(1, round(_CHUNKS * exchange_us / product_us))
    # In turns, so that a machine that becomes slower affects all equally.
    samples = [
        [time_us(*both) for both in ((_CHUNKS, 0), (0, products), (_CHUNKS, products))]
        for _ in range(_WARM_UP + _REPEATS)
    ]
    sent_us, computed_us, both_us = map(statistics.median, zip(*samples[_WARM_UP:], strict=True))
    saved = (sent_us + computed_us - both_us) / min(sent_us, computed_us)
    return {
        "communication_ms": sent_us / 1e3,
        "computation_ms": computed_us / 1e3,
        "together_ms": both_us / 1e3,
        "hidden_share": min(1.0, max(0.0, saved)),
    }


def _exchange(rows: Tensor) -> Transfer:
    num_ranks = dist.get_world_size()
    if num_ranks == 1:
        # One GPU has no peer; a kernel that waits, in one thread, shows whether its streams overlap.
        torch.cuda._sleep(_WAIT_CYCLES)
        return Transfer((rows,))
    share = [len(rows) // num_ranks] * num_ranks
    assert dist.group.WORLD is not None
    return exchange_rows([rows], send=share, receive=share, group=dist.group.WORLD)
