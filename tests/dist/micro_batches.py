"""Runs micro-batches one after another, or as partners: each forward pass next to the backward pass before.

Import it after the host platform is installed.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.schedule import Partner
from tests.dist import logged_losses
from tests.dist.blocks import forward, inputs_of, summed_results
from tests.dist.cases import Case

NUM_MICROBATCHES = 3
FORWARD, BACKWARD = "forward", "backward"
ONE_FORWARD_ONE_BACKWARD = (
    (FORWARD, 0), (FORWARD, 1), (BACKWARD, 0), (FORWARD, 2), (BACKWARD, 1), (BACKWARD, 2),
)  # fmt: skip
"""The passes of the first of two pipeline stages."""


def run_passes(
    layer: Any,
    ahead: Callable[[int], object],
    back: Callable[[int], None],
    *,
    number: int = NUM_MICROBATCHES,
    partner: Partner | None = None,
) -> None:
    """Run the forward and the backward pass of each micro-batch, which are told its number.

    With ``partner`` the passes of AMPipe's layers meet as in Megatron's loop: the first forward and the last
    backward pass run alone.
    """
    if partner is None:
        for microbatch in range(number):
            ahead(microbatch)
            back(microbatch)
        return
    context = getattr(layer, "layers", [layer])[0]._block.context
    usual, context.partners = context.pipeline, Partners()
    if usual.splits_weights:
        partner = replace(partner, schedule=usual.schedule)
    context.partners.partner = partner

    def pipelined(microbatch: int) -> None:
        context.pipeline = replace(usual, partner=partner).with_partners(
            forward=microbatch > 0, backward=microbatch < number - 1
        )
        ahead(microbatch)

    pipelined(0)
    for microbatch in range(1, number):
        context.partners.run(
            functools.partial(pipelined, microbatch), functools.partial(back, microbatch - 1)
        )
    back(number - 1)
    context.pipeline, context.partners = usual, None


def step(
    layer: torch.nn.Module,
    case: Case,
    *,
    partner: Partner | None = None,
    in_flight: Sequence[int] = (),
    order: Sequence[tuple[str, int]] = (),
) -> dict[str, torch.Tensor]:
    """The output and the input gradient of every micro-batch, and what all of them have summed.

    With ``in_flight`` all forward passes run first, then the backward passes of these micro-batches; with
    ``order`` passes run in this order.
    """
    logged_losses.clear()
    parameter = next(layer.parameters())
    passes: list[Any] = []
    found = {}

    def ahead(microbatch: int) -> None:
        # Tensor-parallel ranks share ids, and their number divides this one.
        rank = torch.distributed.get_rank() + 8 * microbatch
        inputs = inputs_of(case, rank=rank, device=parameter.device.type, dtype=parameter.dtype)
        passes.append((inputs.gradient, *forward(layer, inputs)))

    def back(microbatch: int) -> None:
        gradient, output, hidden = passes[microbatch]
        output.backward(gradient)
        found[f"output {microbatch}"] = output.detach()
        found[f"input gradient {microbatch}"] = hidden.grad

    if in_flight:
        order = [(FORWARD, microbatch) for microbatch in range(NUM_MICROBATCHES)]
        order += [(BACKWARD, microbatch) for microbatch in in_flight]
    if order:
        for direction, microbatch in order:
            run_one = ahead if direction == FORWARD else back
            run_one(microbatch)
    else:
        run_passes(layer, ahead, back, partner=partner)
    return found | summed_results(layer)
