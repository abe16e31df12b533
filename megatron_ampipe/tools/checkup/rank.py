"""What one rank of the doctor does: reports what it runs with, and takes part in measuring overlap.

Under the user's torchrun, the command itself calls :func:`examine`. Else :mod:`.compare_ranks` starts
``python -m megatron_ampipe.tools.checkup.rank REPORT`` under a torchrun that it starts.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import os
import platform
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from megatron_ampipe import __version__, compat
from megatron_ampipe.files import outputs
from megatron_ampipe.tools.checkup.environment import compared
from megatron_ampipe.tools.checkup.probe import nccl_version

_PR_SET_PDEATHSIG = 1
_TIMEOUT = datetime.timedelta(seconds=60)


def examine(*, measure_overlap: bool) -> dict[str, Any]:
    """Meet the other ranks; every rank calls this.

    Args:
        measure_overlap: Also take the minute or so that the measurement needs.

    Returns:
        ``ranks``: what each runs with; ``overlap``: see :func:`.overlap.measure`, None where not asked for.
    """
    import torch
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from megatron_ampipe.launch.host import all_to_all

        all_to_all.install()
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=_TIMEOUT)
    try:
        own = facts(device)
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        overlap = None
        if measure_overlap and not (device == "cpu" and len(ranks) == 1):
            from megatron_ampipe.tools.checkup.overlap import measure

            overlap = {"device": device, **measure(device)}
    finally:
        dist.destroy_process_group()
    return {"ranks": ranks, "overlap": overlap}


def facts(device: str) -> dict[str, Any]:
    """What this rank runs with: ``host``, ``versions`` and ``environment``."""
    import torch

    versions = {
        "python": platform.python_version(),
        "megatron-ampipe": __version__,
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda,
        "NCCL": nccl_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    for name in ("megatron-core", *(component.distribution for component in compat.OPTIONAL_PACKAGES)):
        found = compat.found_version(name)
        versions[name] = str(found) if found is not None else None
    return {"host": socket.gethostname(), "versions": versions, "environment": compared(os.environ)}


def main(report: Path) -> None:
    """Write what was found, on the first rank alone."""
    if sys.platform == "linux":
        # The doctor ends torchrun when its time is up, and then no rank may stay.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    found = examine(measure_overlap=True)
    if int(os.environ["RANK"]) == 0:
        outputs.write_text(report, json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
