"""Megatron's own ``--overlap-moe-expert-parallel-comm``, over a stack of layers and without AMPipe's classes.

What runs is Megatron's schedule plan, in the order of its loop without pipeline parallelism: the first
micro-batch forward, each next one forward together with the one before it backward, the last one backward. A
plan needs of a model only its layers, and what comes before and after them: here nothing, so that gradients
are those of the layers alone, as in all other rows of :mod:`partners`. Weight gradients are computed with the
other gradients: ``--delay-wgrad-compute`` needs linear layers of Transformer Engine.

Megatron has this overlap in 16 bit only.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.pipeline_parallel.utils import set_streams

FIELDS = {"overlap_moe_expert_parallel_comm": True}
"""Of Megatron's configuration, which checks what the overlap needs."""


class Stack:
    """What a schedule plan reads of a model: layers, with nothing before or after them."""

    pre_process = True
    post_process = False
    vp_stage = None
    mtp = None

    def __init__(self, layers: torch.nn.Module) -> None:
        self.decoder = SimpleNamespace(layers=layers.layers, final_layernorm=None)
        self.config = layers.layers[0].config

    def _preprocess(self, *, decoder_input: torch.Tensor, **_: Any) -> tuple[Any, ...]:
        """The hidden states as they are; no rotary embeddings, offset or mask."""
        return decoder_input, None, None, None, None, None


def run_overlapped(
    layers: torch.nn.Module, given: Sequence[torch.Tensor], above: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of all micro-batches ``given``, ``[S, B, D]`` each; ``above`` are those of their outputs."""
    model = Stack(layers)
    set_streams(high_priority=model.config.high_priority_a2a_comm_stream)
    inputs = [hidden.clone().requires_grad_() for hidden in given]
    earlier = gradient = None
    for number in range(len(inputs) + 1):
        plan = None
        if number < len(inputs):
            plan = TransformerModelChunkSchedulePlan(
                model, input_ids=None, position_ids=None, attention_mask=None, decoder_input=inputs[number]
            )
        TransformerModelChunkSchedulePlan.run(plan, earlier, b_grad=gradient)
        earlier = plan
        if number < len(inputs):
            gradient = above[number]
    return [hidden.grad for hidden in inputs]
