"""Connects ranks that torchrun has started, and collects what they found. Called by ``ampipe profile``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron_ampipe.tools.measuring import machine
from megatron_ampipe.tools.measuring.grid import Case


def under_torchrun() -> bool:
    """Whether this process is one of several ranks already."""
    return {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def measure_here(
    case: Case, *, repeats: int, seed: int, progress: Callable[[], None]
) -> tuple[list[dict[str, Any]], int]:
    """Connect to the other ranks and measure with them.

    Returns:
        What every rank found, on every rank; and how many ranks a machine has.
    """
    import torch
    import torch.distributed as dist

    on_cuda = machine.num_gpus() > 0
    if on_cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        from megatron_ampipe.launch import host

        host.install()
    dist.init_process_group("nccl" if on_cuda else "gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron_ampipe.tools.profiling.measure import measure

    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    model_parallel_cuda_manual_seed(seed)
    found = measure(
        case,
        rank=rank,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        turns=1 if on_cuda else machine.ranks_per_core(ranks_per_node),
        repeats=repeats,
        on_cuda=on_cuda,
        seed=seed,
        progress=progress,
        # torchrun and the process group have their own timeouts.
        alive=lambda: None,
    )
    reports: list[Any] = [None] * num_ranks
    dist.all_gather_object(reports, found)
    dist.destroy_process_group()
    return reports, ranks_per_node
