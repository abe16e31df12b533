"""One transformer block as one autograd function whose inside runs by a schedule.

What a stage computes comes from the layer (:class:`~.block_stages.BlockStages`); in which order, from the
schedule; where, from the executor; :class:`~.block_call.BlockCall` brings them together. Called by
``layers``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.block_call import BlockCall
from megatron_ampipe.runtime.block_stages import BlockStages, CompiledSchedule
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.recorder import Recorder

# S sequence rows, B batch, D hidden size.


def run_block(
    hidden: Tensor,
    *,
    stages: BlockStages,
    schedule: CompiledSchedule,
    executor: Executor,
    recorder: Recorder,
    layer: int,
    parameters: Sequence[Parameter],
) -> Tensor:
    """Run a block; differentiable in ``hidden`` and ``parameters``.

    Args:
        hidden: ``[S, B, D]``, this rank's rows of the residual stream.
        stages: What the layer computes.
        schedule: In which order.
        executor: On what.
        recorder: Told of every stage.
        layer: Layer number for the recorder.
        parameters: All parameters the stages use.

    Returns:
        ``[S, B, D]``. Under ``torch.no_grad`` nothing is kept.
    """
    keep_graph = torch.is_grad_enabled() and (
        hidden.requires_grad or any(parameter.requires_grad for parameter in parameters)
    )
    call = BlockCall(stages, schedule, executor, recorder, layer=layer, keep_graph=keep_graph)
    if not keep_graph:
        return call.forward(hidden)
    trained = tuple(parameter for parameter in parameters if parameter.requires_grad)
    output: Tensor = _Block.apply(call, hidden, *trained)
    return output


class _Block(torch.autograd.Function):
    """The autograd node: hands each parameter its gradient exactly once."""

    @staticmethod
    def forward(ctx, call: BlockCall, hidden: Tensor, *parameters: Parameter) -> Tensor:
        ctx.call, ctx.parameters = call, parameters
        return call.forward(hidden)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.call is None:
            raise RuntimeError(
                "an AMPipe block was differentiated twice; its graph is gone after the first time"
            )
        call, parameters = ctx.call, ctx.parameters
        ctx.call = ctx.parameters = None
        hidden_gradient, sums = call.backward(gradient)
        return (None, hidden_gradient, *(sums.take(parameter) for parameter in parameters))
