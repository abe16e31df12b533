"""Consecutive transformer blocks as one autograd function whose inside runs by a schedule.

What a stage computes comes from the layers (:class:`~.block_layout.BlockFunctions`); in which order, from the
tape; where, from the executor; :class:`~.stack_call.StackCall` brings them together. Called by ``layers``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.segment import BlockParameters, GradientSums, hand_over
from megatron_ampipe.runtime.stack_call import StackCall

# S sequence rows, B batch, D hidden size.


def run_blocks(hidden: Tensor, call: StackCall, parameters: Sequence[BlockParameters]) -> Tensor:
    """Run blocks that share a schedule; differentiable in ``hidden`` and ``parameters``.

    Args:
        hidden: ``[S, B, D]``, this rank's rows of the residual stream.
        call: This pass.
        parameters: For each layer all parameters that its stages use.

    Returns:
        ``[S, B, D]``.
    """
    anchor = hidden.new_empty(0).requires_grad_()
    output: Tensor = _Blocks.apply(call, parameters, anchor, hidden, *parameters[0].others)
    return output


class _Blocks(torch.autograd.Function):
    """The autograd node: hands each parameter its gradient exactly once.

    Gradients that are complete when the pass ends are what the node returns. Those of a later layer, and of
    the feed-forward half of the first one, are complete earlier, and are handed to their accumulation nodes
    then, whose hooks start the gradient reduction of data parallelism.
    """

    @staticmethod
    def forward(
        ctx,
        call: StackCall,
        trained: Sequence[BlockParameters],
        anchor: Tensor,
        hidden: Tensor,
        *_: Parameter,
    ) -> Tensor:
        ctx.call, ctx.trained = call, trained
        return call.forward(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call is None:
            raise RuntimeError(
                "an AMPipe block was differentiated twice; its graph is gone after the first time"
            )
        call, trained = ctx.call, ctx.trained
        ctx.call = ctx.trained = None
        of_first: list[Tensor | None] = []

        def finished(layer: int, sums: GradientSums, half: bool) -> None:
            parameters = trained[layer].feed_forward if half else trained[layer].others
            first = len(trained[layer].feed_forward) * (not half)
            gradients = [sums.take(number) for number in range(first, first + len(parameters))]
            if layer == 0 and not half:
                of_first.extend(gradients)
                return
            known = [
                parameter for parameter, found in zip(parameters, gradients, strict=True) if found is not None
            ]
            gradients = [found for found in gradients if found is not None]
            if known:
                hand_over(known, gradients)

        hidden = call.backward(gradient, finished)
        return (None, None, None, hidden, *of_first)
