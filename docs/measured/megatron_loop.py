"""A step of Megatron's own loop over a stack of layers, without AMPipe's classes.

What runs is Megatron's ``forward_backward_no_pipelining``, which its training calls: micro-batches one after
another, or with ``--overlap-moe-expert-parallel-comm`` each one forward together with the one before it
backward; and the CUDA graphs of ``--cuda-graph-impl`` are captured and replayed. Of a model the loop needs
its layers, and what comes before and after them: here nothing, so that gradients are those of the layers
alone, as in all other rows of :mod:`partners`. Weight gradients are computed with the other gradients:
``--delay-wgrad-compute`` needs linear layers of Transformer Engine.

Megatron has the overlap in 16 bit only. Layers with graphs of ``--cuda-graph-impl local`` have attention or
experts alone (``BlockFactory.build_with_graphs``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.common.model_chunk_schedule_plan import TransformerModelChunkSchedulePlan
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from megatron_ampipe.tools.measuring.blocks import Layers
from megatron_ampipe.tools.measuring.given_gradient import GivenGradient

OVERLAP = {"overlap_moe_expert_parallel_comm": True}
"""Of Megatron's configuration, which checks what the overlap needs."""


def graphs(modules: Sequence[str]) -> dict[str, Any]:
    """Fields of Megatron's configuration: ``--cuda-graph-impl transformer_engine --cuda-graph-modules``."""
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": sorted(modules)}


class Model(torch.nn.Module):
    """What the loop and a schedule plan read of a model: layers, with nothing before or after them."""

    model_type = ModelType.encoder_or_decoder
    position_embedding_type = "none"
    pre_process = True
    post_process = False
    vp_stage = None

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.config = layers.layers[0].config
        self.decoder = SimpleNamespace(layers=layers.layers, final_layernorm=None)

    def set_input_tensor(self, _: Any) -> None:
        """Nothing comes from an earlier stage."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[S, B, D]`` to the same shape."""
        output, _ = self.layers(hidden_states=hidden, attention_mask=None)
        return output

    def build_schedule_plan(self, hidden: torch.Tensor) -> TransformerModelChunkSchedulePlan:
        """Of one micro-batch."""
        return TransformerModelChunkSchedulePlan(
            self, input_ids=None, position_ids=None, attention_mask=None, decoder_input=hidden
        )

    def _preprocess(self, *, decoder_input: torch.Tensor, **_: Any) -> tuple[Any, ...]:
        """The hidden states as they are; no rotary embeddings, offset or mask."""
        return decoder_input, None, None, None, None, None


class Loop:
    """Steps of the loop through layers.

    Attributes:
        first_steps: How many steps run before the graphs are replayed, if there are any.
    """

    def __init__(self, layers: Layers) -> None:
        config = layers.layers[0].config
        self._model = Model(layers)
        self._of_engine = config.cuda_graph_impl == "transformer_engine"
        self._captured = not self._of_engine
        # Megatron's local graphs are made at the end of the first step.
        self.first_steps = 0 if config.cuda_graph_impl == "none" else 1
        self._local = layers.local_graphs

    def step(self, given: Sequence[torch.Tensor], above: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients of all micro-batches ``given``, ``[S, B, D]``; ``above`` are those of their outputs."""
        inputs = [hidden.clone().requires_grad_() for hidden in given]
        with contextlib.nullcontext() if self._local is None else self._local.step():
            forward_backward_no_pipelining(
                forward_step_func=_forward_step,
                data_iterator=iter(zip(inputs, above, strict=True)),
                model=self._model,
                num_microbatches=len(inputs),
                seq_length=inputs[0].shape[0],
                micro_batch_size=inputs[0].shape[1],
            )
        if not self._captured:
            self._capture(inputs)
        return [hidden.grad for hidden in inputs]

    def first(self, given: Sequence[torch.Tensor], above: Sequence[torch.Tensor]) -> None:
        """The steps before graphs are replayed."""
        for _ in range(self.first_steps):
            self.step(given, above)

    def _capture(self, inputs: Sequence[torch.Tensor]) -> None:
        """Make the graphs of ``--cuda-graph-impl transformer_engine``, as Megatron's training does."""
        from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

        rows, batch, _ = inputs[0].shape
        # The helper asks for it.
        init_num_microbatches_calculator(0, None, len(inputs) * batch, batch, 1)
        helper = TECudaGraphHelper(
            model=[self._model], config=self._model.config, seq_length=rows, micro_batch_size=batch
        )
        helper.create_cudagraphs()
        assert helper.graphs_created(), "Megatron found no layer to capture"
        self._captured = True


Batch = tuple[torch.Tensor, torch.Tensor]


def _forward_step(data: Iterator[Batch], model: Model, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """What Megatron's ``pretrain_gpt.py`` has: the output or a plan for it, and a function for the loss."""
    hidden, gradient = next(data)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        return GivenGradient.apply(output, gradient), {}

    return model.build_schedule_plan(hidden) if return_schedule_plan else model(hidden), loss
