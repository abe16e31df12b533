"""Megatron's transformer layer, run as a pipeline of chunks, alone or together with the layers after it."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.chunk_attention import RotaryEmbedding
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.stack import LayerRun, RunBuilder


class AMPipeTransformerLayer(TransformerLayer):
    """A transformer layer whose attention and MoE layer, or MLP, are pipelined.

    Same modules, parameters and checkpoint keys as ``TransformerLayer``; only ``forward`` differs.

    Args:
        ampipe: State shared by all pipelined layers.
        run_builder: Of the layers that can share a schedule; None for a layer alone.
        begins_run: Whether they begin with this layer.
        args: As for ``TransformerLayer``.
        kwargs: As for ``TransformerLayer``.
    """

    def __init__(
        self,
        *args: Any,
        ampipe: AMPipeContext,
        run_builder: RunBuilder | None = None,
        begins_run: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        # A layer of multi-token prediction is built from the specification of another layer.
        alone = run_builder is None or self.is_mtp_layer
        run = LayerRun(ampipe) if alone else run_builder.run(begins=begins_run)
        recompute, place = ampipe.recompute, kwargs.get("layer_number", 1) - 1
        recomputed = recompute is not None and (
            recompute.covers_mtp if self.is_mtp_layer else recompute.covers(place)
        )
        self._block = BlockModules(self, self, ampipe, recomputed=recomputed)
        self._stack = run.add(self._block)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | None = None,
        rotary_pos_emb: RotaryEmbedding | None = None,
        inference_context: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One pass through the block, and through those that share its schedule.

        The first layer of such a stack runs all of it; the others return what they are given.

        Args:
            hidden_states: ``[S, B, D]``.
            attention_mask: Read only where it separates documents; attention is causal.
            context: Returned unchanged, as by a stock layer without cross-attention.
            rotary_pos_emb: Rotary embedding, or None.
            inference_context: If given, the stock layer runs. So do a dense layer on its own, and every
                layer while the pipeline is one chunk in which nothing overlaps (``--ampipe-degree auto``),
                unless rows attend to their own document only.
            kwargs: Megatron's other layer arguments; all must be None except ``packed_seq_params``, the
                documents of a packed micro-batch.

        Returns:
            ``[S, B, D]`` and ``context``.
        """
        block, ampipe, stack = self._block, self._block.context, self._stack()
        packing = kwargs.pop("packed_seq_params", None)
        untimed = inference_context is not None or (stack is not None and stack.is_dense)
        documents = None if untimed else block.documents(packing, attention_mask, hidden_states)
        if untimed or (ampipe.runs_megatron_layers and documents is None):
            stock = functools.partial(
                super().forward,
                attention_mask=attention_mask,
                context=context,
                rotary_pos_emb=rotary_pos_emb,
                inference_context=inference_context,
                packed_seq_params=packing,
                **kwargs,
            )
            layer = functools.partial(checkpoint, stock, False) if block.recomputes else stock
            if untimed:
                return layer(hidden_states)
            # As a schedule would be.
            passes = ampipe.recorder.passes
            passes.record_shape(*hidden_states.shape[:2])
            return passes.timed_layer(layer, hidden_states)
        assert_no_extra_arguments(kwargs)
        if stack is not None:
            hidden_states = stack(hidden_states, rotary_pos_emb, documents)
        return hidden_states, context


def assert_no_extra_arguments(kwargs: dict[str, Any]) -> None:
    """Assert that no other layer argument is set; start-up refuses every setting that would set one."""
    given = [name for name, value in kwargs.items() if value is not None]
    assert not given, f"an AMPipe layer was called with {given}, which start-up should have refused"
