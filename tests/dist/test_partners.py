"""Compares steps of three micro-batches with partners with those of Megatron's layers: all gradients (fp32).

The passes meet as in Megatron's loop: the first forward and the last backward pass run alone.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ampipe.schedule import LISTED, Partner, program_from_text
from tests import deep_ep_standin
from tests.dist.cases import PARITY, Case
from tests.dist.worker import use_groups

TOLERANCE = 1e-5
NUM_MICROBATCHES = 3
NAMES = """
    degree2-ampipe-sequential degree4-ampipe-thread cuda-executor-ampipe-degree8 ranks-degree1
    rows-degree1-lancet top2-several capacity-aux-z capacity-padded-expert-bias shared unequal-odd-length
    recompute-moe-expert-bias stack-ddmm stack-two-degrees stack-shares stack-mla-tp stack-tp2-degree3-3
    window-tp stack-recompute-dense-first stack-recompute-cuda-executor stack-recompute-tp-experts-ep
    cp-ampipe cp4-ring-gate-degree4-2 tp-cp-ampipe documents-stack-recompute documents-many-batch3
    memory-offload-S2-S3-keep-stack memory-redispatch-keep-rebuild-stack-cuda-executor gate-hash-tp-stack
    lancet-stack-recompute lancet-joined-stack-tp2 flex-stack-recompute ranks-two-degrees-shared
    nodes-stack-recompute 2dh-redispatch gathers-nodes-lancet rows-stack-recompute rows-nodes-stack-cuda
    choice-quantile-stack-recompute latent-experts-stack-recompute wire-halves-two-degrees
    again-moe-act-stack-joined again-layernorm-stack-tp again-every-module-mla
""".split()  # noqa: SIM905
CASES = sorted((case for case in PARITY if case.name in NAMES), key=lambda case: str(case.parallel))


def test_every_case_exists() -> None:
    assert {case.name for case in CASES} == set(NAMES)


SEARCHED = """
compute: next:expert.0@-1 losses expert.0 next:merge.0@-1 next:qkv.0 next:attention.0 next:losses route.0
 next:route.0 attention.0 qkv.0 merge.0@1
comm: combine.0@1 next:combine.0 dispatch.0@1 next:counts.0@1 next:dispatch.0@1
""".replace("\n ", " ").strip()
"""What a planner may find: it knows neither weight gradients apart nor what other blocks have."""
WAYS = {
    "megatron": Partner(),
    "listed": Partner(order=LISTED),
    "searched": Partner(period=program_from_text(SEARCHED, degree=1)),
    "degree2": Partner(2),
}
ALL_WAYS = {
    "degree4-ampipe-thread", "cuda-executor-ampipe-degree8", "capacity-aux-z", "unequal-odd-length",
    "stack-ddmm", "stack-mla-tp", "documents-stack-recompute", "lancet-joined-stack-tp2",
    "rows-stack-recompute",
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "way"),
    [
        pytest.param(case, way, id=f"{case.name}-{way}", marks=pytest.mark.ranks(case.world_size))
        for case in CASES
        for way in WAYS
        if way == "megatron" or case.name in ALL_WAYS
    ],
)
def test_equals_stock(case: Case, way: str) -> None:
    from tests.dist.blocks import build_layers, wrong

    deep_ep_standin.install()
    if use_groups(**case.parallel):
        deep_ep_standin.forget_groups()
    stock, ours = build_layers(case)
    expected, found = step(stock, case), step_with_partners(ours, case, WAYS[way])
    assert wrong(expected, found, TOLERANCE) == {}


def inputs(layer: torch.nn.Module, case: Case, microbatch: int) -> Any:
    from tests.dist.blocks import inputs_of

    # Tensor-parallel ranks share ids, and their number divides this one.
    rank = torch.distributed.get_rank() + 8 * microbatch
    device = next(layer.parameters()).device.type
    return inputs_of(case, rank=rank, device=device, dtype=torch.float32)


def step(layer: torch.nn.Module, case: Case) -> dict[str, torch.Tensor]:
    """One micro-batch after another."""
    from tests.dist import logged_losses
    from tests.dist.blocks import forward

    logged_losses.clear()
    found = {}
    for microbatch in range(NUM_MICROBATCHES):
        given = inputs(layer, case, microbatch)
        output, hidden = forward(layer, given)
        output.backward(given.gradient)
        found |= results(microbatch, output, hidden)
    return found | gradients(layer)


def step_with_partners(layer: torch.nn.Module, case: Case, partner: Partner) -> dict[str, torch.Tensor]:
    """The same with the forward pass of each next to the backward pass of the one before."""
    from megatron_ampipe.runtime.partners import Partners
    from tests.dist import logged_losses
    from tests.dist.blocks import forward

    logged_losses.clear()
    layers = getattr(layer, "layers", [layer])
    context = layers[0]._block.context
    context.partners = partners = Partners()
    usual, passes, found = context.pipeline, [], {}
    partners.partner = replace(partner, schedule=usual.schedule if usual.splits_weights else partner.schedule)

    def ahead(microbatch: int) -> None:
        context.pipeline = replace(usual, partner=partners.partner).with_partners(
            forward=microbatch > 0, backward=microbatch < NUM_MICROBATCHES - 1
        )
        given = inputs(layer, case, microbatch)
        passes.append((given, *forward(layer, given)))

    def behind(microbatch: int) -> None:
        given, output, hidden = passes[microbatch]
        output.backward(given.gradient)
        found.update(results(microbatch, output, hidden))

    ahead(0)
    for microbatch in range(1, NUM_MICROBATCHES):
        partners.run(functools.partial(ahead, microbatch), functools.partial(behind, microbatch - 1))
    behind(NUM_MICROBATCHES - 1)
    context.pipeline, context.partners = usual, None
    return found | gradients(layer)


def results(microbatch: int, output: torch.Tensor, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
    assert hidden.grad is not None
    return {f"output {microbatch}": output.detach(), f"input gradient {microbatch}": hidden.grad}


def gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Summed over the micro-batches, and over the ranks where Megatron does that."""
    from megatron.core.parallel_state import get_tensor_model_parallel_group

    from tests.dist import logged_losses

    found = {}
    for name, parameter in layer.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        if getattr(parameter, "sequence_parallel", False):
            torch.distributed.all_reduce(gradient, group=get_tensor_model_parallel_group())
        found[f"gradient of {name}"] = gradient
    for name, values in logged_losses.by_name().items():
        torch.distributed.all_reduce(values, group=get_tensor_model_parallel_group())
        found[f"logged {name}"] = values
    return found | {f"buffer {name}": buffer.clone() for name, buffer in layer.named_buffers()}
