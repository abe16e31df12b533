"""A process group of one rank. Megatron's functions run as written: compiling them needs a C compiler."""

import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _as_written() -> None:
    # Read when Megatron is imported, which a test does first.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of one rank on the device."""
    import torch
    from megatron.core import parallel_state

    from tests.dist.worker import use_groups

    torch.cuda.set_device(0)
    with tempfile.NamedTemporaryFile() as rendezvous:
        torch.distributed.init_process_group(
            "nccl", init_method=f"file://{rendezvous.name}", rank=0, world_size=1
        )
        use_groups(expert_model_parallel_size=1)
        yield
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
