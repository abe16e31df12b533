"""Runs micro-batches one after another, or as partners: each forward pass next to the backward pass before.

Import it after the host platform is installed.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from megatron_ampipe.runtime.partners import Partners
from megatron_ampipe.schedule import Partner
from tests.dist import logged_losses, routing_records
from tests.dist.blocks import forward, inputs_of, summed_results
from tests.dist.cases import Case

NUM_MICROBATCHES = 3


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
    backward pass run alone. Graphs of whole passes need the ``Partners`` of earlier steps, in the context.
    """
    if partner is None:
        for microbatch in range(number):
            ahead(microbatch)
            back(microbatch)
        return
    context = getattr(layer, "layers", [layer])[0]._block.context
    usual, before = context.pipeline, context.partners
    context.partners = before or Partners()
    if usual.splits_weights:
        partner = replace(partner, schedule=usual.schedule)
    context.partners.partner = partner

    def pipelined(microbatch: int) -> None:
        context.pipeline = replace(usual, partner=partner).with_partners(
            forward=microbatch > 0, backward=microbatch < number - 1
        )
        ahead(microbatch)

    context.partners.graphs.begin_step(number)
    try:
        pipelined(0)
        for microbatch in range(1, number):
            context.partners.run(
                functools.partial(pipelined, microbatch), functools.partial(back, microbatch - 1)
            )
        back(number - 1)
        context.partners.graphs.end_step()
    finally:
        context.partners.graphs.give_up_step()
        context.pipeline, context.partners = usual, before


def step(
    layer: torch.nn.Module,
    case: Case,
    *,
    partner: Partner | None = None,
    number: int = NUM_MICROBATCHES,
    first: int = 0,
) -> dict[str, torch.Tensor]:
    """The output and the input gradient of every micro-batch, and what all of them have summed.

    Args:
        layer: Megatron's layer or layers, or AMPipe's.
        case: The case.
        partner: How passes with a partner run; None to run micro-batches one after another.
        number: Of micro-batches.
        first: How many micro-batches, with other inputs, earlier steps had.
    """
    logged_losses.zero()
    parameter = next(layer.parameters())
    passes: list[Any] = []
    found: dict[str, torch.Tensor] = {}

    def ahead(microbatch: int) -> None:
        # Tensor-parallel ranks share ids, and their number divides this one.
        rank = torch.distributed.get_rank() + 8 * (first + microbatch)
        inputs = inputs_of(case, rank=rank, device=parameter.device.type, dtype=parameter.dtype)
        routing_records.prescribe(layer, case, microbatch)
        passes.append((inputs.gradient, *forward(layer, inputs)))
        found.update(routing_records.recorded(layer, case, microbatch))

    def back(microbatch: int) -> None:
        gradient, output, hidden = passes[microbatch]
        output.backward(gradient)
        found[f"output {microbatch}"] = output.detach()
        found[f"input gradient {microbatch}"] = hidden.grad

    with routing_records.in_micro_batches(layer, case):
        run_passes(layer, ahead, back, number=number, partner=partner)
    return found | summed_results(layer)


class Action(NamedTuple):
    """One pass of one micro-batch through one of the model chunks of a pipeline stage."""

    kind: str
    """F, B, or E for a forward pass of an evaluation."""
    microbatch: int
    model_chunk: int

    @classmethod
    def of(cls, text: str) -> "Action":
        """From a text like ``F0`` or, in model chunk 1, ``F0.1``."""
        microbatch, _, model_chunk = text[1:].partition(".")
        return cls(text[0], int(microbatch), int(model_chunk or 0))


def step_in_order(
    layer: torch.nn.Module, case: Case, order: str, *, model_chunks: Sequence[torch.nn.Module] = ()
) -> dict[str, torch.Tensor]:
    """As :func:`step`, of passes in an order; without ``model_chunks`` the layer is the only one.

    As in Megatron's pipelines, a model chunk gets the detached output of the one before.
    """
    logged_losses.zero()
    parameter = next(layer.parameters())
    model_chunks = model_chunks or [layer]
    last = len(model_chunks) - 1
    passes: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    found = {}
    for action in map(Action.of, order.split()):
        kind, microbatch, place = action
        rank = torch.distributed.get_rank() + 8 * microbatch
        inputs = inputs_of(case, rank=rank, device=parameter.device.type, dtype=parameter.dtype)
        if kind == "B":
            output, hidden = passes.pop((microbatch, place))
            gradient = inputs.gradient if place == last else found[f"input gradient {microbatch}.{place + 1}"]
            routing_records.prescribe_again(model_chunks[place], case)
            output.backward(gradient)
            found[f"input gradient {microbatch}.{place}"] = hidden.grad
            continue
        if place:
            inputs = inputs._replace(hidden=found[f"output {microbatch}.{place - 1}"])
        routing_records.prescribe(model_chunks[place], case, microbatch)
        with torch.set_grad_enabled(kind == "F"):
            output, hidden = forward(model_chunks[place], inputs)
        found[f"{'evaluated' if kind == 'E' else 'output'} {microbatch}.{place}"] = output.detach()
        if kind == "F":
            passes[microbatch, place] = output, hidden
    return found | summed_results(layer)
