"""The machine that measures: processor, cores, GPUs, memory, versions."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import megatron_ampipe
from megatron_ampipe.compat import found_version


def hardware() -> dict[str, object]:
    """The machine as it is now, with how busy it is."""
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu": _first_value(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory": _first_value(Path("/proc/meminfo"), "MemTotal"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Of Python, the libraries that compute, and AMPipe, to the commit where there is one."""
    found = {"python": platform.python_version(), "megatron-ampipe": megatron_ampipe.__version__}
    for name in ("torch", "megatron-core", "transformer-engine", "flash-attn"):
        version = found_version(name)
        if version is not None:
            found[name] = str(version)
    commit = _commit()
    if commit is not None:
        found["commit"] = commit
    return found


def num_gpus() -> int:
    """How many CUDA devices there are; imports torch only where the driver shows one."""
    if sys.platform != "linux" or not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()


def cores_of(num_ranks: int) -> tuple[int, ...]:
    """A core for each rank where there are enough, else none is pinned."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    usable = sorted(os.sched_getaffinity(0))
    return tuple(usable[:num_ranks]) if len(usable) >= num_ranks else ()


def _commit() -> str | None:
    root = Path(megatron_ampipe.__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _first_value(path: Path, key: str) -> str | None:
    """Of ``key : value`` lines, the first value of the key."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    values = (line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key)
    return next(values, None)
