"""Environment variables that make runs slow or different. Called by ``ampipe doctor`` and by its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_ampipe.launch import connections

COMPARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "NVTE_", "UCX_", "AMPIPE_")
COMPARED_NAMES = (
    connections.VARIABLE,
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
MAY_DIFFER = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME", "NCCL_TOPO_FILE", "UCX_NET_DEVICES")
"""They name a node's hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something about a variable that its user should know.

    Attributes:
        name: Of the variable.
        value: As it is set; None where it is not.
        means: What it does to a run.
        remedy: What to do.
    """

    name: str
    value: str | None
    means: str
    remedy: str


def compared(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that should be equal on every rank."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if (name in COMPARED_NAMES or name.startswith(COMPARED_PREFIXES)) and name not in MAY_DIFFER
    }


def notes(environ: Mapping[str, str] = os.environ, *, has_gpu: bool) -> list[Note]:
    """What is to be said about the variables that are set."""
    found = []
    value = environ.get(connections.VARIABLE)
    if has_gpu or value is not None:
        found.append(_connections(value))
    for name, means, remedy in _HARMFUL:
        value = environ.get(name, "0")
        if value not in ("", "0"):
            found.append(Note(name=name, value=value, means=means, remedy=remedy))
    return found


def _connections(value: str | None) -> Note:
    means, remedy = connections.meaning(value)
    if value is None:
        # A launch does it.
        remedy = f"nothing to do: pipelined launches set {connections.QUEUES}"
    return Note(name=connections.VARIABLE, value=value, means=means, remedy=remedy or "nothing to do")


_SLOW_WAY = "disables a fast path between GPUs"
_HARMFUL = (
    ("CUDA_LAUNCH_BLOCKING", "every kernel is waited for: nothing overlaps", "unset it; it is for debugging"),
    ("TORCH_NCCL_BLOCKING_WAIT", "the host waits for every collective: nothing overlaps", "unset it"),
    ("NCCL_P2P_DISABLE", _SLOW_WAY, "unset it, unless this machine hangs without it"),
    ("NCCL_IB_DISABLE", "disables InfiniBand and RoCE", "unset it where there is such a network"),
    ("NCCL_SHM_DISABLE", _SLOW_WAY, "unset it"),
)
