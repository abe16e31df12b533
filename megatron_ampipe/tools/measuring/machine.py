"""The machine that measures: processor, cores, GPUs, memory, versions."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import megatron_ampipe

UNKNOWN = "unknown"
"""The commit of code that is in no git repository."""


def hardware() -> dict[str, object]:
    """The machine and its present load."""
    cpuinfo = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)$", cpuinfo.read_text(), re.M) if cpuinfo.is_file() else []
    return {
        "host": platform.node(),
        "kernel": platform.release(),
        "cpu": models[0] if models else platform.processor(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Versions of Python, the compute libraries and AMPipe, with AMPipe's commit."""
    # Which commit this is can be asked for without any package.
    from megatron_ampipe.compat import found_version

    installed = {"python": platform.python_version(), "megatron-ampipe": megatron_ampipe.__version__}
    for name in ("torch", "megatron-core", "transformer-engine", "flash-attn"):
        version = found_version(name)
        if version is not None:
            installed[name] = str(version)
    return installed | {"commit": commit()}


def commit() -> str:
    """The commit of AMPipe's code: of the checkout, or ``AMPIPE_COMMIT``; otherwise :data:`UNKNOWN`.

    It ends with ``-dirty`` if files of the checkout are modified.
    """
    root = Path(megatron_ampipe.__file__).resolve().parents[1]
    # Without tags, a commit is named by its hash alone.
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude", "*"]
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout.strip()
    return os.environ.get("AMPIPE_COMMIT") or UNKNOWN


def without_commit(versions: Mapping[str, str]) -> str:
    """What to print after the name of a file of results, if nothing says which code they are of."""
    if versions.get("commit", UNKNOWN) != UNKNOWN:
        return ""
    return "; it names no commit: measure in a git checkout, or set AMPIPE_COMMIT"


def num_gpus() -> int:
    """The number of CUDA devices; imports torch only if the driver shows a device."""
    if sys.platform != "linux" or not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    import torch

    return torch.cuda.device_count()
