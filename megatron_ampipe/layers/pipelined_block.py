"""An attention layer and an MoE layer of Megatron, run as a pipeline of chunks, and stacks of such blocks.

Not modules: they own no parameter, so checkpoints look as if they were not there. In a GPT both layers are
one ``TransformerLayer``; in a hybrid model they are two. Used by :mod:`.layer` and :mod:`.hybrid`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from megatron_ampipe.block_features import features_of_settings
from megatron_ampipe.exchange.row_scatter import RowTransfers
from megatron_ampipe.layers.attention_stages import AttentionStages
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.chunk_attention import ChunkAttention, RotaryEmbedding, kernel_of, reads_mask
from megatron_ampipe.layers.chunk_sharding import ChunkSharding
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.layer_hooks import refuse_hooks
from megatron_ampipe.layers.megatron_stages import MegatronFunctions, MegatronState
from megatron_ampipe.layers.moe_stages import MoEStages
from megatron_ampipe.layers.recompute import RandomStates
from megatron_ampipe.runtime.collectives import lane_group
from megatron_ampipe.runtime.compile import compiled
from megatron_ampipe.runtime.executors import Executor
from megatron_ampipe.runtime.stack_call import StackCall
from megatron_ampipe.runtime.tape import Tapes
from megatron_ampipe.schedule import (
    BlockFeatures,
    Chunk,
    Pipeline,
    SequenceLayout,
    useful_exchanges,
    with_exchange,
    with_memory,
)
from megatron_ampipe.schedule.documents import Documents


class PipelinedBlock:
    """The two halves of a block and what is needed to pipeline them.

    Args:
        attention_layer: Whose norm, attention and residual come first.
        moe_layer: Whose norm, MoE layer and residual follow; may be the same layer. A dense layer, with an
            MLP in place of experts, can share the schedule of other blocks.
        context: Shared settings and machinery.
        recomputed: In training, keep only what the block is given, and run it again in the backward pass.
    """

    def __init__(
        self,
        attention_layer: TransformerLayer,
        moe_layer: TransformerLayer,
        context: AMPipeContext,
        *,
        recomputed: bool = False,
    ) -> None:
        self._context, self._recomputed = context, recomputed
        self.modules = BlockModules(
            attention_layer,
            moe_layer,
            capacity_per_chunk=context.config.capacity_scope == "chunk",
            chooses=features_of_settings(moe_layer.config, context.config).chooses,
            ranks_per_node=context.config.ranks_per_node,
            added=context.added,
        )
        self._attend: dict[bool, ChunkAttention] = {}
        self._features: dict[Hashable, BlockFeatures] = {}
        self._make_groups()

    def _make_groups(self) -> None:
        """Make the process groups beyond Megatron's, before the first batch and on all ranks in one order."""
        if self.modules.scatters_rows:
            self._row_group = lane_group(self.modules.attention_layer.pg_collection.tp, "rows of attention")
        if self.modules.dense:
            return
        exchanges, config = {self._context.pipeline.exchange}, self.modules.config
        if self._context.config.chooses_exchange:
            exchanges.update(
                useful_exchanges(
                    experts=config.num_moe_experts,
                    expert=config.expert_model_parallel_size,
                    expert_tensor=config.expert_tensor_parallel_size,
                    topk=config.moe_router_topk,
                    dispatcher=config.moe_token_dispatcher_type,
                    ranks_per_node=self._context.config.ranks_per_node,
                )
            )
        for exchange in sorted(exchanges):
            self.modules.dispatcher(exchange)

    def documents(
        self, packing: PackedSeqParams | None, mask: Tensor | None, hidden: Tensor
    ) -> Documents | None:
        """The documents of a micro-batch, from what Megatron passes to the layer with ``hidden``."""
        layer = self.modules.attention_layer
        ranks = layer.pg_collection.tp.size() if layer.config.sequence_parallel else 1
        return self._context.documents.read(packing, mask, num_rows=hidden.shape[0] * ranks, ranks=ranks)

    def is_megatrons(self, packing: PackedSeqParams | None, mask: Tensor | None, hidden: Tensor) -> bool:
        """Whether Megatron's own layer computes the current pass; rows of documents stay with the stages."""
        return self._context.runs_megatron_layers and self.documents(packing, mask, hidden) is None

    def timed(
        self, layer: Callable[[Tensor], tuple[Tensor, Tensor | None]], hidden: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Call Megatron's own layer, and time it as a schedule would be."""
        passes = self._context.recorder.passes
        passes.record_shape(*hidden.shape[:2])
        return passes.timed_layer(layer, hidden)

    def features(self, *, shares_schedule: bool = False) -> BlockFeatures:
        """What the block contains in the current pass."""
        context, training = self._context, self.modules.moe_layer.training
        key = context.pipeline, context.reductions, training, torch.is_grad_enabled(), shares_schedule
        if key not in self._features:
            self._features[key] = self._features_now(shares_schedule=shares_schedule)
        return self._features[key]

    def _features_now(self, *, shares_schedule: bool) -> BlockFeatures:
        modules = self.modules
        found = replace(
            features_of_settings(
                modules.config,
                self._context.config,
                # As in the stock router: the pass of a recompute that keeps no graph adds and logs no loss.
                with_losses=modules.moe_layer.training and torch.is_grad_enabled(),
                dense=modules.dense,
                shares_schedule=shares_schedule,
                local=modules.scatters_rows,
            ),
            recomputed=self.recomputes,
            added=tuple(stage.kind for stage in self._context.added),
        )
        found = replace(found, gathers_rows=found.gathers_rows and modules.gathers_rows)
        found = with_exchange(found, self._context.pipeline.exchange)
        if not torch.is_grad_enabled():
            return found
        reductions = self._context.reductions
        if reductions is not None:
            found = replace(found, reduces=True, reduces_experts=found.experts and reductions.of_experts)
        return with_memory(found, self._context.pipeline.memory)

    @property
    def recomputes(self) -> bool:
        """Whether the current pass will run again in its backward pass."""
        return self._recomputed and self.modules.moe_layer.training and torch.is_grad_enabled()

    @cached_property
    def functions(self) -> MegatronFunctions:
        """What its stages compute."""
        return MegatronFunctions(self.modules, self._context.added)

    def state(
        self,
        chunks: Sequence[Chunk],
        whole: Chunk,
        hidden: Tensor,
        rotary_pos_emb: RotaryEmbedding | None,
        documents: Documents | None,
        token_ids: Tensor | None,
        *,
        shares_schedule: bool = False,
    ) -> MegatronState:
        """The state of one pass."""
        self.modules.add_first_weight_gradients()
        features = self.features(shares_schedule=shares_schedule)
        if documents is not None and documents.masked and not self._reads_mask:
            documents = None
        return MegatronState(
            AttentionStages(
                self.modules,
                chunks=chunks,
                whole=whole,
                attend=self._attention_of_chunks(on_gpu=hidden.is_cuda, documents=documents is not None),
                rotary_pos_emb=rotary_pos_emb,
                documents=documents,
                ring_ranks=self.modules.attention_layer.pg_collection.cp if features.ring else None,
                row_transfers=self._row_transfers(features) if features.scatters_rows else None,
            ),
            MoEStages(
                self.modules,
                chunks=chunks,
                whole=whole,
                num_tokens=hidden.shape[0] * hidden.shape[1],
                exchange=self._context.pipeline.exchange,
                wire=self._context.wire,
                condenser=self._context.condenser,
                token_ids=token_ids,
            ),
            RandomStates() if self.recomputes and self._draws else None,
        )

    def _row_transfers(self, features: BlockFeatures) -> RowTransfers:
        return RowTransfers(
            self._row_group,
            gathers=features.gathers_rows,
            keeps=features.recomputed or not torch.is_grad_enabled(),
        )

    @property
    def _draws(self) -> bool:
        """Whether stages may draw random numbers."""
        config = self.modules.config
        return bool(
            config.attention_dropout
            or config.hidden_dropout
            or config.moe_input_jitter_eps
            or config.moe_router_force_load_balancing
            or getattr(config, "moe_router_force_biased", None)
            or self._context.gate
            or self._context.added
        )

    @cached_property
    def _reads_mask(self) -> bool:
        return reads_mask(self.modules.attention_layer.self_attention)

    def _attention_of_chunks(self, *, on_gpu: bool, documents: bool) -> ChunkAttention:
        if documents not in self._attend:
            attention = self.modules.attention_layer.self_attention
            kernel = self._context.kernel or kernel_of(attention, on_gpu=on_gpu, documents=documents)
            self._attend[documents] = ChunkAttention(attention, kernel=kernel)
        return self._attend[documents]


class BlockStack:
    """Consecutive blocks that share a schedule.

    Args:
        blocks: From the first to the last.
        context: Shared settings and machinery.
    """

    def __init__(self, blocks: Sequence[PipelinedBlock], context: AMPipeContext) -> None:
        self._blocks, self._context = blocks, context
        # The pipeline can change between two iterations, so what follows from it is kept by pipeline.
        self._tapes: dict[Hashable, Tapes] = {}
        self._chunks: dict[tuple[Pipeline, int], tuple[Chunk, ...]] = {}
        self._whole: dict[int, Chunk] = {}
        self._sharding: dict[tuple[Chunk, ...], ChunkSharding] = {}
        layer = blocks[0].modules.moe_layer
        groups, sharded = layer.pg_collection, layer.config.sequence_parallel
        self._layout = SequenceLayout(
            tensor_ranks=groups.tp.size() if sharded else 1,
            tensor_rank=groups.tp.rank() if sharded else 0,
            context_ranks=groups.cp.size(),
            context_rank=groups.cp.rank(),
            by_chunk=sharded and len(blocks) > 1,
        )
        self._tensor_ranks = groups.tp
        halves = ((block.modules.attention_layer, block.modules.moe_layer) for block in blocks)
        self._numbers = tuple(block.modules.attention_layer.layer_number for block in blocks)
        self._layers = tuple(dict.fromkeys(itertools.chain.from_iterable(halves)))

    @property
    def is_dense(self) -> bool:
        """Whether no block has experts, so that there is nothing to hide."""
        return all(block.modules.dense for block in self._blocks)

    def __call__(
        self, hidden: Tensor, rotary_pos_emb: RotaryEmbedding | None, documents: Documents | None = None
    ) -> Tensor:
        """``[S, B, D]``, this rank's rows of the residual stream, through all blocks to the same shape.

        Args:
            hidden: Of a packed micro-batch also ``[B * S, 1, D]``, one sequence after another.
            rotary_pos_emb: As Megatron passes it to a layer.
            documents: Of the micro-batch, if rows attend to their own document only.

        Raises:
            BadInput: several layers of Megatron run as one, and one of them has a hook of the user.
        """
        if documents is not None and documents.num_sequences > hidden.shape[1]:
            sequences = hidden.view(documents.num_sequences, -1, hidden.shape[-1]).transpose(0, 1)
            output = self(sequences.contiguous(), rotary_pos_emb, documents)
            return output.transpose(0, 1).reshape(hidden.shape)
        if len(self._layers) > 1:
            refuse_hooks(self._layers)
        self._context.recorder.passes.record_shape(*hidden.shape[:2])
        executor = self._context.executor_for(on_gpu=hidden.is_cuda)
        chunks = self._chunks_of(hidden.shape[0])
        if not self._layout.by_chunk:
            return self._run(hidden, chunks, executor, rotary_pos_emb, documents)
        if chunks not in self._sharding:
            lengths = [chunk.hidden[0].length for chunk in chunks]
            self._sharding[chunks] = ChunkSharding(lengths, self._tensor_ranks)
        sharding = self._sharding[chunks]
        output = self._run(sharding.by_chunk(hidden), chunks, executor, rotary_pos_emb, documents)
        return sharding.by_sequence(output)

    def _run(
        self,
        hidden: Tensor,
        chunks: Sequence[Chunk],
        executor: Executor,
        rotary_pos_emb: RotaryEmbedding | None,
        documents: Documents | None,
    ) -> Tensor:
        token_ids = self._token_ids(chunks, hidden)
        shares, context = len(self._blocks) > 1, self._context
        whole = self._whole[hidden.shape[0]]
        parameters = [block.modules.parameters for block in self._blocks]
        keep_graph = torch.is_grad_enabled() and (hidden.requires_grad or any(one.all for one in parameters))
        call = StackCall(
            [
                block.state(
                    chunks, whole, hidden, rotary_pos_emb, documents, token_ids, shares_schedule=shares
                )
                for block in self._blocks
            ],
            self._tape(executor, chunks, num_rows=hidden.shape[0], keep_graph=keep_graph),
            executor,
            context.recorder,
            numbers=self._numbers,
            parameters=parameters,
            keep_graph=keep_graph,
            reductions=context.reductions if keep_graph else None,
        )
        return call.run(hidden)

    def _token_ids(self, chunks: Sequence[Chunk], hidden: Tensor) -> Tensor | None:
        """``[S, B]``, the ids of the rows of ``hidden``; None if no router reads them."""
        sources = (block.modules.id_source for block in self._blocks)
        source = next((source for source in sources if source is not None), None)
        if source is None:
            return None
        layout = self._layout
        num_rows, batch = hidden.shape[:2]
        if not layout.by_chunk:
            return source.rows_of_rank(num_rows, batch, ranks=layout.tensor_ranks, rank=layout.tensor_rank)
        ids = source.rows(num_rows, batch, ranks=layout.tensor_ranks)
        spans = (span for chunk in chunks for span in chunk.hidden)
        return torch.cat([ids[span.global_start : span.global_end] for span in spans])

    def _chunks_of(self, num_rows: int) -> tuple[Chunk, ...]:
        """Chunks of a sequence of which this rank holds ``num_rows`` rows."""
        pipeline, layout = self._context.pipeline, self._layout
        key = (pipeline, num_rows)
        if key not in self._chunks:
            length = num_rows * layout.tensor_ranks * layout.context_ranks
            self._chunks[key] = pipeline.chunks(length, layout)
            self._whole[num_rows] = Chunk.joined(self._chunks[key])
        return self._chunks[key]

    def _features(self) -> tuple[BlockFeatures, ...]:
        shares = len(self._blocks) > 1
        return tuple(block.features(shares_schedule=shares) for block in self._blocks)

    def _tape(self, executor: Executor, chunks: Sequence[Chunk], *, num_rows: int, keep_graph: bool) -> Tapes:
        """What the current pass runs; made once for each pipeline and number of rows."""
        pipeline, layers = self._context.pipeline, self._features()
        key = (pipeline, layers, num_rows, keep_graph, executor.threads)
        if key not in self._tapes:
            schedule = pipeline.schedule_of(layers)
            for block in self._blocks:
                block.modules.require_linears(schedule.backward.weights)
            self._tapes[key] = compiled(
                schedule,
                layers,
                chunks=chunks,
                functions=[block.functions for block in self._blocks],
                keep_graph=keep_graph,
                host_waits=executor.host_waits,
                threads=executor.threads,
            )
        return self._tapes[key]
