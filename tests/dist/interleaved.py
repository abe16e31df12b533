"""A step of Megatron's interleaved pipeline schedule, through layers that are a model chunk each.

Every pipeline rank has two model chunks of one layer. What travels between ranks, and in which order passes
run, is Megatron's. Import it after the host platform is installed.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron_ampipe.tools.measuring.given_gradient import GivenGradient
from tests.dist import logged_losses
from tests.dist.blocks import Inputs, forward, inputs_of, summed_results
from tests.dist.cases import Case

NUM_MICROBATCHES = 4


class _ModelChunk(torch.nn.Module):
    """What the schedule reads of a model: here a layer, with nothing before or after it."""

    model_type = ModelType.encoder_or_decoder

    def __init__(self, layer: torch.nn.Module, config: Any, place: int) -> None:
        super().__init__()
        self.layer, self.config, self.vp_stage = layer, config, place
        self._received: torch.Tensor | None = None

    def set_input_tensor(self, received: Any) -> None:
        """The hidden states of the stage before; None in the first one."""
        self._received = received[0] if isinstance(received, list) else received

    def run(self, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and what the gradient of the input is asked of."""
        if self._received is None:
            return forward(self.layer, inputs)
        # The schedule reads the gradient of what it received.
        output, _ = self.layer(
            hidden_states=self._received, attention_mask=inputs.mask, rotary_pos_emb=inputs.rotary
        )
        return output, self._received


def step(layers: Any, case: Case) -> dict[str, torch.Tensor]:
    """Outputs of the last stage, input gradients of the first, and what all passes have summed."""
    logged_losses.zero()
    config, parameter = layers.layers[0].config, next(layers.parameters())
    # Not while the layers were built: Megatron would number them as those of one chunk.
    config.virtual_pipeline_model_parallel_size = len(layers.layers)
    chunks = [_ModelChunk(layer, config, place) for place, layer in enumerate(layers.layers)]
    found: dict[str, torch.Tensor] = {}
    first: dict[int, torch.Tensor] = {}
    is_first_rank = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    is_last_rank = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def micro_batches() -> Iterator[tuple[int, Inputs]]:
        for number in itertools.count():
            # Pipeline ranks of a micro-batch have the same rotary embeddings; others their own inputs.
            rank = torch.distributed.get_rank() + 8 * number
            yield number, inputs_of(case, rank=rank, device=parameter.device.type, dtype=parameter.dtype)

    def forward_step(data: Iterator[tuple[int, Inputs]], chunk: _ModelChunk) -> tuple[torch.Tensor, Any]:
        number, inputs = next(data)
        output, hidden = chunk.run(inputs)
        if is_first_rank and chunk.vp_stage == 0:
            first[number] = hidden
        if is_last_rank and chunk.vp_stage == len(chunks) - 1:
            found[f"output {number}"] = output.detach().clone()

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            return GivenGradient.apply(output, inputs.gradient), {}

        return output, loss

    # The schedule divides the router's losses by the number of micro-batches; cases before and after do not.
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    forward_backward_pipelining_with_interleaving(
        forward_step_func=forward_step,
        data_iterator=[micro_batches() for _ in chunks],
        model=chunks,
        num_microbatches=NUM_MICROBATCHES,
        seq_length=case.sequence_length,
        micro_batch_size=case.batch,
    )
    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    found |= {f"input gradient {number}": hidden.grad for number, hidden in first.items()}
    return found | summed_results(layers)
