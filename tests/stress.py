"""Stress test of blocks: emulated ranks, slow stages, poisoned memory; on any device and of any size.

Compares a block run by :class:`~tests.poison.PoisoningExecutor` with the same block run stage by stage.
Called by ``tests/gpu/test_stress.py``, and on a CPU by ``tests/dist/stress_worker.py``. The ranks are
emulated, so :func:`start_ranks` must be called first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.executors import SequentialExecutor
from tests.dist.cases import LARGE, MOE_AGAIN, Case
from tests.poison import PoisoningExecutor, mirrored

RANKS = 4


def block(
    degree: int,
    backward_degree: int | None = None,
    *,
    schedule: str = "ampipe",
    local_experts: int = 1,
    recompute: bool = False,
) -> Case:
    """A block, whose sizes a :class:`StressSetup` says."""
    degrees = f"{degree}:{backward_degree}" if backward_degree else str(degree)
    return Case(
        f"{schedule}-{degrees}-{local_experts}-local{'-recompute' if recompute else ''}",
        world_size=RANKS,
        degree=degree,
        backward_degree=backward_degree,
        schedule=schedule,
        kernel="sdpa",
        model=LARGE | {"num_moe_experts": local_experts * RANKS} | (MOE_AGAIN if recompute else {}),
    )


CUTS = ((2, None), (4, None), (8, None), (4, 2), (2, 4), (1, 4))
STRESSES = [
    *(
        block(*cut, local_experts=local_experts, recompute=recompute)
        for cut in CUTS
        for local_experts in (1, 2)
        for recompute in (False, True)
    ),
    *(block(degree, schedule="moe-only") for degree in (2, 4, 8)),
]


@dataclass(frozen=True)
class StressSetup:
    """The device and the sizes of a stress test.

    Attributes:
        device: ``cpu`` or ``cuda``.
        sequence_length: Sequence length.
        hidden: Hidden size.
        ffn: FFN hidden size of an expert.
        executor: Creates the executor under test.
        delay: Keeps a lane busy before and after the kernels of a computation.
        travel: Keeps a lane busy during a transfer.
    """

    device: str
    sequence_length: int
    hidden: int
    ffn: int
    executor: Callable[[], Any]
    delay: Callable[[], object]
    travel: Callable[[], object]


@contextmanager
def start_ranks() -> Iterator[None]:
    """A process group of :data:`RANKS` ranks, all emulated except this one."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_ampipe.tools.measuring.emulation import Emulation

    before = dist.all_gather_into_tensor, mappings.dist_all_gather_func
    emulation = Emulation()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        parallel_state.initialize_model_parallel(
            expert_model_parallel_size=RANKS, create_gloo_process_groups=False
        )
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)

        def gather_counts(output: Tensor, input: Tensor, **options: Any) -> Any:
            emulation.num_experts = _num_experts
            return emulation.gather_counts(output, input, **options)

        dist.all_gather_into_tensor = mappings.dist_all_gather_func = gather_counts
        yield
    finally:
        dist.all_gather_into_tensor, mappings.dist_all_gather_func = before
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


_num_experts = 0


def differences_under(
    case: Case,
    setup: StressSetup,
    *,
    stock: bool = False,
    insert_fault: Callable[[torch.nn.Module], object] | None = None,
) -> tuple[dict[str, float], int]:
    """The differences between a block under stress and the same block run sequentially.

    Args:
        case: The block.
        setup: Device and sizes.
        stock: Compare with Megatron's layer instead.
        insert_fault: Inserts a fault into the layer under stress.

    Returns:
        The largest difference of the output and of every gradient, relative to its largest value; and how
        often released memory was filled.
    """
    from tests.dist.blocks import build_layers, differences, run

    global _num_experts
    model = case.model | {"hidden_size": setup.hidden, "ffn_hidden_size": setup.ffn}
    case = dataclasses.replace(case, sequence_length=setup.sequence_length, model=model)
    _num_experts = model["num_moe_experts"]
    plain = build_layers(dataclasses.replace(case, schedule="sequential"), executor=SequentialExecutor())
    with mirrored():
        expected = run(plain[0 if stock else 1].to(setup.device), case, rank=0, device=setup.device)
    poisoning = PoisoningExecutor(setup.executor(), delay=setup.delay, travel=setup.travel)
    _, stressed = build_layers(case, executor=poisoning)
    if insert_fault is not None:
        insert_fault(stressed)
    stressed.to(setup.device)
    # Two passes, so that the second one allocates memory that the first has released.
    run(stressed, case, rank=0, device=setup.device)
    found = run(stressed, case, rank=0, device=setup.device)
    return differences(expected, found), poisoning.filled


def insert_unheld_reader(layer: torch.nn.Module) -> None:
    """Make the experts read the received tensors without a reference, like a stream without a wait."""
    experts = layer.mlp.experts
    forward = experts.forward
    experts.forward = lambda tokens, *rest: forward(_Unheld.apply(tokens), *rest)


class _Unheld(torch.autograd.Function):
    """A tensor of the same memory, made from its address."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        memory = torch._C._construct_storage_from_data_pointer(
            tensor.data_ptr(), tensor.device, tensor.numel() * tensor.element_size()
        )
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, 0, tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
