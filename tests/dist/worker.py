"""What every worker process of the distributed tests does first and last."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any


def start() -> tuple[int, int]:
    """Host platform, process group, Megatron's parallel state with all ranks expert-parallel.

    Returns:
        Rank and world size.
    """
    from megatron_ampipe.launch import host

    host.install()
    import torch

    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['AMPIPE_TEST_RENDEZVOUS']}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(expert_model_parallel_size=world_size)
    model_parallel_cuda_manual_seed(123)
    return rank, world_size


def report(result: Any) -> None:
    """Hand this rank's result to the test."""
    Path(os.environ["AMPIPE_TEST_REPORT"]).write_text(json.dumps(result))
