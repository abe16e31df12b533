"""Start-up and report of the worker processes of the distributed tests."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path
from typing import Any


def start() -> tuple[int, int]:
    """Install the host platform and create the process group.

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
    return rank, world_size


def use_groups(**sizes: int) -> None:
    """Replace Megatron's process groups by groups of these sizes.

    Args:
        sizes: For ``initialize_model_parallel``; if empty, all ranks are expert-parallel.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    sizes = sizes or {"expert_model_parallel_size": int(os.environ["WORLD_SIZE"])}
    parallel_state.initialize_model_parallel(**sizes)
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)


def report(result: Any) -> None:
    """Pass this rank's result to the test."""
    Path(os.environ["AMPIPE_TEST_REPORT"]).write_text(json.dumps(result))
