"""The flex dispatcher with HybridEP for one chunk, without its exchange of tokens.

HybridEP permutes tokens by expert as part of the exchange, which is a stage of the schedule
(:mod:`megatron_ampipe.runtime.hybrid_ep_transport`). Used by :mod:`.block_modules`.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.moe import fused_a2a
from torch import Tensor

from megatron_ampipe.layers.flex_chunk import FlexChunk
from megatron_ampipe.runtime.hybrid_ep_transport import HybridEPTransport


class HybridEPChunk(FlexChunk):
    """The flex dispatcher, whose tokens are exchanged through HybridEP's buffer."""

    _transport: HybridEPTransport | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Padding to capacity does not change the result: chunks send only the kept tokens.
        self._comm_manager.drop_and_pad = False

    def transport(self) -> HybridEPTransport:
        """The token exchange of the chunk; the same object, with HybridEP's handle, for all of its calls."""
        if self._transport is None:
            # Megatron makes the buffer in the first dispatch of all.
            self._transport = HybridEPTransport(
                self._comm_manager, buffer=lambda: fused_a2a._hybrid_ep_buffer
            )
        return self._transport

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Any, ...]:
        """As in the stock dispatcher; can run a second time, when the experts are recomputed."""
        return self._receive(hidden_states, probs, self.transport().tokens_per_expert)
