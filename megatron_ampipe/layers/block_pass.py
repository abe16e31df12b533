"""The state of one micro-batch in a block, so that a layer can have several in flight."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.tensor_parallel import random
from torch import Tensor

from megatron_ampipe.attention.ring import RingAttention
from megatron_ampipe.exchange.codecs import Condensed
from megatron_ampipe.exchange.fixed_rows import BudgetedChunk
from megatron_ampipe.exchange.flex import FlexChunk
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.chunk_attention import RotaryEmbedding, random_states
from megatron_ampipe.layers.fixed_experts import ExpertWeights
from megatron_ampipe.layers.router import BlockRouting
from megatron_ampipe.runtime.block_functions import Function
from megatron_ampipe.schedule import BlockFeatures, Chunk, Saved, StageKind, kinds
from megatron_ampipe.schedule.chunks import Documents


@dataclass(slots=True)
class MicroBatch:
    """What the passes of one micro-batch through the blocks of a stack share.

    Attributes:
        chunks: The chunks of the sequence.
        whole: All of its rows as one chunk.
        rotary_pos_emb: As in Megatron.
        documents: The documents of the micro-batch; None if there are no bounds.
        token_ids: ``[S, B]``; None unless a router reads ids.
        padding: ``[S, B]`` bool, True for rows that count in no loss of a router; None if all count.
    """

    chunks: Sequence[Chunk]
    whole: Chunk
    rotary_pos_emb: RotaryEmbedding | None
    documents: Documents | None
    token_ids: Tensor | None
    padding: Tensor | None = None


class BlockPass:
    """The first argument of every stage function (``runtime.block_functions.BlockState``).

    ``documents`` is None unless attention of this block stays within documents.
    """

    ring: RingAttention
    routing: BlockRouting
    chosen: Tensor
    """The routing map of all chunks if the router chooses for all at once, ``[S * B, E]`` bool."""
    expert_weights: ExpertWeights
    """With fixed rows."""
    is_again = False
    """Whether this is the recompute of a forward pass."""

    def __init__(
        self,
        block: BlockModules,
        features: BlockFeatures,
        hidden: Tensor,
        micro_batch: MicroBatch,
    ) -> None:
        block.begin_micro_batch()
        self.block, self.features = block, features
        self.chunks, self.whole = micro_batch.chunks, micro_batch.whole
        self.rotary_pos_emb, self.token_ids = micro_batch.rotary_pos_emb, micro_batch.token_ids
        self.padding = micro_batch.padding
        self.documents = block.separate(micro_batch.documents)
        if features.attention:
            self.attend = block.attend(hidden.is_cuda, self.documents is not None)
            self.ring_ranks = block.attention_layer.pg_collection.cp
        self.draws = features.saved.block is Saved.RECOMPUTE and block.draws
        # The random states of the stages that will be recomputed.
        self._states: dict[object, tuple[object, ...]] = {}
        self._num_rows, self._batch = hidden.shape[:2]
        self._begin()

    def _begin(self) -> None:
        """Create the state that a recompute does not share with the first run."""
        block = self.block
        if self.features.ring:
            self.ring = self.attend.ring(self.ring_ranks)
        if block.dense:
            return
        self.routing = block.moe.router.begin_block(
            self._num_rows * self._batch,
            per_chunk=block.context.settings.capacity_scope == "chunk",
            first_tokens=[chunk.hidden[0].local_start * self._batch for chunk in self.chunks],
            first_run=self.routing if self.is_again else None,
        )
        # The state of a chunk is stored as attributes of a separate copy; the constants are shared.
        dispatcher = block.dispatcher(block.context.pipeline.exchange)
        if isinstance(dispatcher, FlexChunk):
            dispatcher.num_tokens = self._num_rows * self._batch
        if block.context.fixed_rows is not None:
            assert isinstance(dispatcher, BudgetedChunk)
            count = len(self.chunks)
            self.dispatchers = [dispatcher.of_chunk(index, count) for index in range(count)]
            self.expert_weights = ExpertWeights(count)
        else:
            self.dispatchers = [copy.copy(dispatcher) for _ in self.chunks]
        self.condensed: dict[int, Condensed] = {}

    def for_recompute(self) -> BlockPass:
        """See ``BlockState``."""
        second = copy.copy(self)
        second.is_again = True
        second._begin()
        if not self.block.dense:
            for dispatcher, second_dispatcher in zip(self.dispatchers, second.dispatchers, strict=True):
                if isinstance(second_dispatcher, BudgetedChunk):
                    second_dispatcher.take_splits(dispatcher)
                else:
                    second_dispatcher.splits = dispatcher.splits
        return second

    def with_rng_state(self, function: Function, key: object, *, is_recompute: bool) -> Function:
        """See ``BlockState``."""
        if not is_recompute:
            self._states[key] = random._get_all_rng_states()
            return function

        def run(*args: object, **kwargs: object) -> object:
            states = self._states.pop(key, None)
            if states is None:
                return function(*args, **kwargs)
            with random_states(states):
                return function(*args, **kwargs)

        return run

    def rows_of(self, chunk: int | None) -> Chunk:
        """The chunk with this index; the whole sequence if None."""
        return self.whole if chunk is None else self.chunks[chunk]

    @property
    def outside(self) -> tuple[Tensor, ...]:
        """See ``BlockState``."""
        rotary = self.rotary_pos_emb
        return () if rotary is None else rotary if isinstance(rotary, tuple) else (rotary,)

    @outside.setter
    def outside(self, tensors: tuple[Tensor, ...]) -> None:
        if self.rotary_pos_emb is not None:
            is_pair = isinstance(self.rotary_pos_emb, tuple)
            self.rotary_pos_emb = (tensors[0], tensors[1]) if is_pair else tensors[0]

    def export_state(self, kind: StageKind, chunk: int | None) -> object:
        """See ``BlockState``."""
        if kind != kinds.ROUTE:
            return None
        assert chunk is not None
        return copy.copy(self.dispatchers[chunk]), self.routing.losses[chunk]

    def import_state(self, kind: StageKind, chunk: int | None, left: object) -> None:
        """See ``BlockState``."""
        assert chunk is not None and isinstance(left, tuple)
        dispatcher, self.routing.losses[chunk] = left
        self.dispatchers[chunk] = copy.copy(dispatcher)
