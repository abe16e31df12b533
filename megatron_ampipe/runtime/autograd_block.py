"""Consecutive transformer blocks as one autograd function whose inside runs by a schedule.

What a stage computes comes from the layers (:class:`~.block_stages.BlockStages`); in which order, from the
schedule; where, from the executor; :class:`~.stack_call.StackCall` brings them together. Called by
``layers``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.block_stages import BlockParameters, BlockStages, CompiledSchedule
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.recorder import Recorder
from megatron_ampipe.runtime.reductions import Reductions
from megatron_ampipe.runtime.segment import GradientSums, hand_over
from megatron_ampipe.runtime.stack_call import StackCall

# S sequence rows, B batch, D hidden size.


def run_blocks(
    hidden: Tensor,
    *,
    stages: Sequence[BlockStages],
    schedule: CompiledSchedule,
    executor: Executor,
    recorder: Recorder,
    numbers: Sequence[int],
    parameters: Sequence[BlockParameters],
    reductions: Reductions | None = None,
) -> Tensor:
    """Run blocks that share a schedule; differentiable in ``hidden`` and ``parameters``.

    Args:
        hidden: ``[S, B, D]``, this rank's rows of the residual stream.
        stages: What each layer computes.
        schedule: In which order.
        executor: On what.
        recorder: Told of every stage.
        numbers: Of the layers in Megatron, for the recorder.
        parameters: For each layer all parameters that its stages use.
        reductions: Of their gradients, if the schedule has stages that start them.

    Returns:
        ``[S, B, D]``. Under ``torch.no_grad`` nothing is kept.
    """
    trained = [
        BlockParameters(*(tuple(found for found in half if found.requires_grad) for half in one))
        for one in parameters
    ]
    keep_graph = torch.is_grad_enabled() and (
        hidden.requires_grad or any(half for one in trained for half in one)
    )
    call = StackCall(
        stages,
        schedule,
        executor,
        recorder,
        numbers=numbers,
        keep_graph=keep_graph,
        reductions=reductions,
    )
    if not keep_graph:
        return call.forward(hidden)
    anchor = hidden.new_empty(0).requires_grad_()
    output: Tensor = _Blocks.apply(call, trained, anchor, hidden, *trained[0].others)
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
            gradients = [sums.take(parameter) for parameter in parameters]
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
