"""Starts worker processes joined by gloo and collects what each of them reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]


def run_workers(
    module: str, arguments: Sequence[str], *, world_size: int, folder: Path, timeout_s: float = 600
) -> list[Any]:
    """Run ``python -m module ARGUMENTS`` as that many ranks; rank r writes ``folder/rank<r>.json``.

    Returns:
        The ranks' reports, in order.

    Raises:
        AssertionError: a rank failed or did not end in time; the message holds the end of its output.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = []
    for rank in range(world_size):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
            "AMPIPE_TEST_RENDEZVOUS": str(folder / "rendezvous"),
            "AMPIPE_TEST_REPORT": str(folder / f"rank{rank}.json"),
        }
        log = (folder / f"rank{rank}.log").open("w")
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment,
                cwd=REPOSITORY,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        )
    try:
        codes = [process.wait(timeout=timeout_s) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
    failed = [rank for rank, code in enumerate(codes) if code != 0]
    logs = "\n".join(f"--- rank {r}\n{(folder / f'rank{r}.log').read_text()[-3000:]}" for r in failed)
    assert not failed, f"ranks {failed} of {module} ended with {codes}\n{logs}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]
