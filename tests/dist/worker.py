"""Start-up and report of the worker processes of the distributed tests."""

import contextlib
import datetime
import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock


def start() -> tuple[int, int]:
    """Install the host platform and create the process group; returns rank and world size."""
    from megatron_ampipe.launch import host

    host.install()
    import torch

    from tests import tapes

    tapes.check_all()

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


def start_alone(world_size: int, **sizes: int) -> None:
    """Be rank 0 of ranks that do not exist; ``sizes`` as for :func:`use_groups`."""
    from megatron_ampipe.launch import host

    if not host.gpu_available():
        host.install()
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    use_groups(**sizes)


def use_groups(**sizes: Any) -> None:
    """Use Megatron's process groups of these sizes; without any, all ranks are expert-parallel.

    Other arguments of ``initialize_model_parallel`` are passed on.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    global _sizes
    sizes = sizes or {"expert_model_parallel_size": int(os.environ["WORLD_SIZE"])}
    if sizes != _sizes or not parallel_state.model_parallel_is_initialized():
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
            end_groups()
        parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        _sizes = sizes
    model_parallel_cuda_manual_seed(123, force_reset_rng=True)


_sizes: dict[str, Any] = {}


def end_groups() -> None:
    """End all process groups but the default one, and their threads, which Megatron only forgets."""
    import torch.distributed as dist
    from megatron.core.transformer.moe import fused_a2a

    from megatron_ampipe.runtime.groups import forget_groups

    # A slower rank still needs its peers.
    dist.barrier()
    forget_groups()
    # Megatron makes HybridEP's buffer once for all groups.
    fused_a2a.reset_hybrid_ep_buffer()
    if hasattr(fused_a2a, "nccl_ep_finalize"):
        # And NCCL EP's context, from 0.19 on.
        fused_a2a.nccl_ep_finalize()
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


@contextlib.contextmanager
def empty_is_nan() -> Iterator[None]:
    """Context manager that fills uninitialized memory with NaN, such as placeholders of fused gradients."""
    import torch

    empty = torch.empty

    def filled(*args: Any, **kwargs: Any) -> Any:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    with mock.patch.object(torch, "empty", filled):
        yield


def report(result: Any) -> None:
    """Pass this rank's result to the test."""
    path = Path(os.environ["AMPIPE_TEST_REPORT"], f"rank{os.environ['RANK']}.json")
    path.write_text(json.dumps(result))
