"""Starts ranks under torchrun, and compares what ranks run with. No torch. Called by ``ampipe doctor``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ampipe.errors import RunFailed

TIME_LIMIT_S = 120.0
_SOURCES = str(Path(__file__).resolve().parents[3])
_LOG_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDifference:
    """Something that is not the same on every rank.

    Attributes:
        name: Of the version or variable.
        values: By value, the ranks that have it.
    """

    name: str
    values: Mapping[str, Sequence[int]]


def start(num_ranks: int, *, on_gpu: bool, time_limit_s: float = TIME_LIMIT_S) -> dict[str, Any]:
    """Run ranks on this machine to their end; none is left, whatever happens.

    Returns:
        What :func:`.rank.examine` found.

    Raises:
        RunFailed: they failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="ampipe-doctor-") as folder:
        report, log = Path(folder) / "report.json", Path(folder) / "log"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", "-m", "megatron_ampipe.tools.checkup.rank", str(report)]
        path = os.pathsep.join(filter(None, [_SOURCES, os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if not on_gpu and sys.platform == "linux":
            # A machine's name may not resolve to one of its addresses.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(timeout=time_limit_s)
            except subprocess.TimeoutExpired:
                raise RunFailed(
                    f"{num_ranks} ranks did not end within {time_limit_s:g} s, and were ended. "
                    "They hang at the first collective where a network is chosen that does not work."
                    f"{_tail(log)}"
                ) from None
            finally:
                if process.poll() is None:
                    # Ranks die with torchrun (rank.main).
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code != 0 or not report.exists():
            raise RunFailed(f"{num_ranks} ranks failed (code {code}).{_tail(log)}")
        found: dict[str, Any] = json.loads(report.read_text())
        return found


def differences(ranks: Sequence[Mapping[str, Any]]) -> list[RankDifference]:
    """What of the versions and of the environment is not the same on every rank."""
    found = []
    for part in ("versions", "environment"):
        for name in sorted({name for rank in ranks for name in rank[part]}):
            values: dict[str, list[int]] = {}
            for number, rank in enumerate(ranks):
                value = rank[part].get(name)
                values.setdefault("(not there)" if value is None else str(value), []).append(number)
            if len(values) > 1:
                found.append(RankDifference(name=name, values=values))
    return found


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "".join(f"\n  {line}" for line in ["", "the end of their output:", *lines] if lines)
