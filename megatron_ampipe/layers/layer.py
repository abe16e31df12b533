"""Megatron's transformer layer, run as a pipeline of chunks, alone or together with the layers after it.

Same modules, parameters and checkpoint keys as ``TransformerLayer``; only ``forward`` differs. :mod:`.spec`
puts it in place of the stock class.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.tensor_parallel import checkpoint
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_ampipe.layers.chunk_attention import RotaryEmbedding
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.layer_run import LayerRun, PlaceInRun
from megatron_ampipe.layers.pipelined_block import PipelinedBlock


class AMPipeTransformerLayer(TransformerLayer):
    """A transformer layer whose attention and MoE layer, or MLP, are pipelined.

    Args:
        ampipe: State shared by all pipelined layers.
        place: Among the layers that can share a schedule; alone if None.
        args: As for ``TransformerLayer``.
        kwargs: As for ``TransformerLayer``.
    """

    def __init__(
        self, *args: Any, ampipe: AMPipeContext, place: PlaceInRun | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        # A layer of multi-token prediction is built from the specification of another layer.
        self._run = LayerRun(ampipe) if place is None or self.is_mtp_layer else place.run()
        self._block = PipelinedBlock(
            self, self, ampipe, recomputed=self._is_recomputed(ampipe, kwargs.get("layer_number", 1))
        )
        self._place = self._run.add(self._block)

    def _is_recomputed(self, context: AMPipeContext, number: int) -> bool:
        """Whether the layer is recomputed inside its schedule; ``number`` counts from 1 in its stage."""
        recompute = context.recompute
        if recompute is None:
            return False
        return recompute.covers_mtp if self.is_mtp_layer else recompute.covers(number - 1)

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
                layer while the pipeline is one chunk in which nothing overlaps (``--ampipe-degree auto``).
            kwargs: Megatron's other layer arguments; all must be None except ``packed_seq_params``, the
                documents of a packed micro-batch.

        Returns:
            ``[S, B, D]`` and ``context``.
        """
        packing = kwargs.pop("packed_seq_params", None)
        stack = self._run.stack_from(self._place)
        untimed = inference_context is not None or (stack is not None and stack.is_dense)
        if untimed or self._block.is_megatrons(packing, attention_mask, hidden_states):
            stock = functools.partial(
                super().forward,
                attention_mask=attention_mask,
                context=context,
                rotary_pos_emb=rotary_pos_emb,
                inference_context=inference_context,
                packed_seq_params=packing,
                **kwargs,
            )
            layer = functools.partial(checkpoint, stock, False) if self._block.recomputes else stock
            return layer(hidden_states) if untimed else self._block.timed(layer, hidden_states)
        assert_no_extra_arguments(kwargs)
        if stack is None:
            return hidden_states, context
        documents = self._block.documents(packing, attention_mask, hidden_states)
        return stack(hidden_states, rotary_pos_emb, documents), context


def assert_no_extra_arguments(kwargs: dict[str, Any]) -> None:
    """Assert that no other layer argument is set; start-up refuses every setting that would set one."""
    given = [name for name, value in kwargs.items() if value is not None]
    assert not given, f"an AMPipe layer was called with {given}, which start-up should have refused"
