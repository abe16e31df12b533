"""Starts worker processes that communicate over gloo, and collects their reports."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.forked import REPOSITORY, run_ranks


def run_workers(
    module: str,
    arguments: Sequence[str],
    *,
    world_size: int,
    folder: Path,
    timeout_s: float = 1200,
    preloaded: bool = True,
) -> list[Any]:
    """Run ``python -m module ARGUMENTS`` on ``world_size`` ranks, and return their reports.

    Rank r writes ``folder/rank<r>.json``; ``preloaded`` as in :func:`tests.forked.run_ranks`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
    environments = [environment_of(rank, world_size, folder) for rank in range(world_size)]
    codes = run_ranks(
        module, arguments, environments=environments, logs=logs, timeout_s=timeout_s, preloaded=preloaded
    )
    failed = [rank for rank, code in enumerate(codes) if code != 0]
    ends = "\n".join(f"--- rank {rank}\n{logs[rank].read_text()[-3000:]}" for rank in failed)
    assert not failed, f"ranks {failed} of {module} ended with {codes}\n{ends}"
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def environment_of(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """The variables of a rank, with the files of its rendezvous and of its report."""
    return os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "AMPIPE_TEST_RENDEZVOUS": str(folder / "rendezvous"),
        "AMPIPE_TEST_REPORT": str(folder / f"rank{rank}.json"),
    }
