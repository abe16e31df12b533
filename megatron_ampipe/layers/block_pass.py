"""The state of one pass of one micro-batch through a block, so that a layer can have several in flight."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch import Tensor

from megatron_ampipe.attention.ring import RingAttention
from megatron_ampipe.exchange.codecs import Condensed
from megatron_ampipe.exchange.transports import RowTransfers
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.chunk_attention import RotaryEmbedding, has_gate, random_states
from megatron_ampipe.schedule import BlockFeatures, Chunk
from megatron_ampipe.schedule.chunks import Documents


class RandomStates:
    """The random states with which functions ran, so that they can draw the same numbers once more."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    def drawn(self, function: Callable[..., Any], key: object, *, again: bool) -> Callable[..., Any]:
        """See ``runtime.block_functions.Draws``."""
        if not again:
            self._states[key] = random._get_all_rng_states()
            return function

        def run(*args: Any, **kwargs: Any) -> Any:
            states = self._states.pop(key, None)
            if states is None:
                return function(*args, **kwargs)
            with random_states(states):
                return function(*args, **kwargs)

        return run


class BlockPass:
    """What functions of stages are given first (``runtime.block_functions.BlockState``).

    ``documents`` are None unless rows attend to their own one only; ``token_ids [S, B]`` are for a router
    that reads them.
    """

    ring: RingAttention
    row_transfers: RowTransfers
    chosen: Tensor
    """The choice for all chunks at once, ``[S * B, E]`` bool."""
    is_again = False
    """Whether it is a second run of the forward pass."""

    def __init__(
        self,
        block: BlockModules,
        features: BlockFeatures,
        hidden: Tensor,
        *,
        chunks: Sequence[Chunk],
        whole: Chunk,
        rotary_pos_emb: RotaryEmbedding | None,
        documents: Documents | None,
        token_ids: Tensor | None,
    ) -> None:
        block.begin_micro_batch()
        self.block, self.features, self.chunks, self.whole = block, features, chunks, whole
        self.rotary_pos_emb, self.documents, self.token_ids = rotary_pos_emb, documents, token_ids
        self.attend = block.attend(hidden.is_cuda, documents is not None)
        self.ring_ranks = block.attention_layer.pg_collection.cp
        self.has_gate = has_gate(block.attention_layer.self_attention)
        if features.row_links:
            keeps = features.recomputed or not torch.is_grad_enabled()
            self.row_transfers = RowTransfers(block.row_group, keeps=keeps)
        self.draws = RandomStates() if features.recomputed and block.draws else None
        self._num_rows, self._batch = hidden.shape[:2]
        self._begin()

    def _begin(self) -> None:
        """Make what a second run has apart from the first."""
        block = self.block
        if self.features.ring:
            self.ring = self.attend.ring(self.ring_ranks)
        if block.dense:
            return
        self.routing = block.moe.router.begin_block(
            self._num_rows * self._batch,
            per_chunk=block.context.config.capacity_scope == "chunk",
            first_tokens=[chunk.hidden[0].local_start * self._batch for chunk in self.chunks],
        )
        # The state of a chunk is stored as attributes of a separate copy; the constants are shared.
        dispatcher = block.dispatcher(block.context.pipeline.exchange)
        self.dispatchers = [copy.copy(dispatcher) for _ in self.chunks]
        self.condensed: dict[int, Condensed] = {}

    def again(self) -> BlockPass:
        """See ``BlockState``."""
        second = copy.copy(self)
        second.is_again = True
        second._begin()
        if not self.block.dense:
            for dispatcher, of_second in zip(self.dispatchers, second.dispatchers, strict=True):
                of_second.told = dispatcher.told
        return second

    def rows_of(self, chunk: int | None) -> Chunk:
        """A chunk by its index, or the whole sequence."""
        return self.whole if chunk is None else self.chunks[chunk]
