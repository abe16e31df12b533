"""Blocks under stress: pretended ranks, slow stages, poisoned memory; on any device, of any size.

What :class:`~tests.poison.PoisoningExecutor` runs is compared with the same block run one stage after
another. Called by ``tests/gpu/test_stress.py``, and on a CPU by ``tests/dist/stress_worker.py``. Ranks are
pretended, so :func:`start_ranks` comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.executors import SequentialExecutor
from tests.dist.cases import AUX, Case, Z
from tests.poison import PoisoningExecutor, mirrored

RANKS = 4


@dataclass(frozen=True)
class Stress:
    """One block, and how it is cut."""

    degree: int
    backward_degree: int | None = None
    schedule: str = "ampipe"
    local_experts: int = 1
    recompute: bool = False

    def __str__(self) -> str:
        degrees = f"{self.degree}:{self.backward_degree}" if self.backward_degree else str(self.degree)
        experts = f"{self.local_experts}-local"
        return f"{self.schedule}-{degrees}-{experts}{'-recompute' if self.recompute else ''}"


CUTS = ((2, None), (4, None), (8, None), (4, 2), (2, 4), (1, 4))
STRESSES = [
    *(
        Stress(*cut, local_experts=local_experts, recompute=recompute)
        for cut in CUTS
        for local_experts in (1, 2)
        for recompute in (False, True)
    ),
    *(Stress(degree, schedule="moe-only") for degree in (2, 4, 8)),
]


@dataclass(frozen=True)
class Scene:
    """Where and how large.

    Attributes:
        device: ``cpu`` or ``cuda``.
        sequence_length: Rows.
        hidden: Width of the residual stream.
        ffn: Width inside an expert.
        executor: Makes the executor under test.
        delay: Keeps a lane busy before and after the kernels of a computation.
        travel: Keeps a lane busy while a transfer travels.
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
    """A process group of :data:`RANKS` ranks, all but this one pretended."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from megatron_ampipe.tools.measuring.emulation import Emulation

    before = dist.all_gather_into_tensor, mappings.dist_all_gather_func
    emulation = Emulation(clock="host", why_cycles=None)
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
    stress: Stress,
    scene: Scene,
    *,
    stock: bool = False,
    plant: Callable[[torch.nn.Module], object] | None = None,
) -> tuple[dict[str, float], int]:
    """How the block under stress differs from the same one run in sequence.

    Args:
        stress: The block.
        scene: Where.
        stock: Compare with Megatron's own layer instead.
        plant: Puts a fault into the layer under stress.

    Returns:
        The largest difference of output and every gradient, relative to its largest value; and how often
        memory that was released has been poisoned.
    """
    from tests.dist.blocks import build_layers, differences, run

    global _num_experts
    case = _case(stress, scene)
    _num_experts = case.model["num_moe_experts"]
    plain = build_layers(_case(stress, scene, schedule="sequential"), executor=SequentialExecutor())
    with mirrored():
        expected = run(plain[0 if stock else 1].to(scene.device), case, rank=0, device=scene.device)
    poisoning = PoisoningExecutor(scene.executor(), delay=scene.delay, travel=scene.travel)
    _, stressed = build_layers(case, executor=poisoning)
    if plant is not None:
        plant(stressed)
    stressed.to(scene.device)
    # What the second pass is given was released by the first.
    run(stressed, case, rank=0, device=scene.device)
    found = run(stressed, case, rank=0, device=scene.device)
    return differences(expected, found), poisoning.filled


def _case(stress: Stress, scene: Scene, *, schedule: str | None = None) -> Case:
    model = {
        **AUX,
        **Z,
        "hidden_size": scene.hidden,
        "ffn_hidden_size": scene.ffn,
        "num_moe_experts": stress.local_experts * RANKS,
        "moe_router_topk": 2,
        "gated_linear_unit": True,
        "activation_func": "silu",
    }
    if stress.recompute:
        model |= {"recompute_granularity": "selective", "recompute_modules": ["moe"]}
    return Case(
        str(stress),
        world_size=RANKS,
        degree=stress.degree,
        backward_degree=stress.backward_degree,
        schedule=schedule or stress.schedule,
        sequence_length=scene.sequence_length,
        kernel="sdpa",
        model=model,
    )


def plant_unheld_reader(layer: torch.nn.Module) -> None:
    """The experts read what they received without holding it, as a stream reads that no event waits for."""
    experts = layer.mlp.experts
    forward = experts.forward
    experts.forward = lambda tokens, *rest: forward(_Unheld.apply(tokens), *rest)


class _Unheld(torch.autograd.Function):
    """The same memory, by its address."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        memory = torch._C._construct_storage_from_data_pointer(
            tensor.data_ptr(), tensor.device, tensor.numel() * tensor.element_size()
        )
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory, 0, tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
