"""Consecutive blocks that share a schedule: how they are chosen, and how a micro-batch runs through them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.errors import BadInput
from megatron_ampipe.exchange.fixed_rows import BudgetedChunk
from megatron_ampipe.layers import attention_stages, moe_stages  # noqa: F401  Their functions register.
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.block_pass import BlockPass, MicroBatch
from megatron_ampipe.layers.chunk_attention import RotaryEmbedding
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.layers.router import sees_whole_blocks
from megatron_ampipe.layers.user_changes import refuse_hooks_of, refuse_outer_checkpoint
from megatron_ampipe.runtime.collectives import copy_to_device
from megatron_ampipe.runtime.compile import TapeOptions, compiled
from megatron_ampipe.runtime.executors import CudaExecutor, Executor, ThreadExecutor
from megatron_ampipe.runtime.graph_chain import ChainOptions, StackPasses
from megatron_ampipe.runtime.graphs import CaptureOptions, GraphCache, TapeGraphs
from megatron_ampipe.runtime.stack_call import PassRun, StackCall
from megatron_ampipe.runtime.tape import Tapes
from megatron_ampipe.schedule import BlockFeatures, Chunk, Pipeline, SequenceLayout
from megatron_ampipe.schedule.chunks import Documents, require_whole_tiles
from megatron_ampipe.schedule.features import boundary, rows_of_tile

# S sequence rows, B batch, D hidden size, R rows of the residual stream on one rank.

_PADDING_REMEDY = "Leave it out of the call of the model, or train at degree 1."


class ConsecutiveLayers:
    """Consecutive layers that can share schedules; the current pipeline says where it is cut into stacks."""

    def __init__(self, context: AMPipeContext) -> None:
        self._context = context
        self._blocks: list[BlockModules] = []
        self._stack = cache(lambda place, size: BlockStack(self._blocks[place : place + size], context))

    def add(self, block: BlockModules) -> Callable[[], BlockStack | None]:
        """Add the next layer. Returns a getter of the stack that begins with it; None if none does."""
        self._blocks.append(block)
        return partial(self._stack_from, len(self._blocks) - 1)

    def _stack_from(self, place: int) -> BlockStack | None:
        size = self._size()
        first = place - place % size
        if all(block.dense for block in self._blocks[first : first + size]):
            first, size = place, 1
        return None if first < place else self._stack(place, size)

    def _size(self) -> int:
        config, pipeline = self._blocks[0].config, self._context.pipeline
        limit = boundary(config, whole_attention=pipeline.whole_attention)
        if limit is not None or not self._context.shares:
            return 1
        if config.tensor_model_parallel_size > 1 and any(
            not block.dense and sees_whole_blocks(block.moe.router) for block in self._blocks
        ):
            # ``shares`` says the same of routing records, which only the arguments of a launch request.
            return 1
        return pipeline.stack_of(len(self._blocks))


class BlockStack:
    """Consecutive blocks that share a schedule, from the first to the last."""

    def __init__(self, blocks: Sequence[BlockModules], context: AMPipeContext) -> None:
        self._blocks, self._context = blocks, context
        self.is_dense = all(block.dense for block in blocks)
        """Whether no block has experts, so that there is nothing to hide."""
        # Cached by pipeline, which can change between iterations, and by sequence length: micro-batches
        # that are packed from whole sequences have many lengths.
        self._chunks = lru_cache(maxsize=64)(self._make_chunks)
        self._sharding = lru_cache(maxsize=64)(self._make_sharding)
        self._tapes = lru_cache(maxsize=64)(self._make_tapes)
        self._check_tiles = lru_cache(maxsize=64)(self._require_tiles)
        self._graphs = GraphCache(self._make_graphs)
        self._passes = lru_cache(maxsize=64)(self._make_passes)
        layer = blocks[0].moe_layer
        groups, sharded = layer.pg_collection, layer.config.sequence_parallel
        self._layout = SequenceLayout(
            tensor_ranks=groups.tp.size() if sharded else 1,
            tensor_rank=groups.tp.rank() if sharded else 0,
            context_ranks=groups.cp.size(),
            context_rank=groups.cp.rank(),
            by_chunk=sharded and len(blocks) > 1,
        )
        halves = ((block.attention_layer, block.moe_layer) for block in blocks)
        self._numbers = tuple(block.attention_layer.layer_number for block in blocks)
        self._layers = tuple(dict.fromkeys(itertools.chain.from_iterable(halves)))

    def __call__(
        self,
        hidden: Tensor,
        rotary_pos_emb: RotaryEmbedding | None,
        documents: Documents | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """``[S, B, D]``, this rank's rows of the residual stream, through all blocks to the same shape.

        A packed micro-batch can be ``[B * S, 1, D]``, one sequence after another; ``documents`` is None
        unless attention stays within documents. ``padding [B, S]`` is True for rows that count in no loss of
        the router, as Megatron's ``padding_mask``.

        Raises:
            BadInput: A script has changed a module in a way that would be ignored.
        """
        if documents is not None and len(documents.starts) > hidden.shape[1]:
            sequences = hidden.view(len(documents.starts), -1, hidden.shape[-1]).transpose(0, 1)
            if padding is not None:
                padding = padding.view(len(documents.starts), -1)
            output = self(sequences.contiguous(), rotary_pos_emb, documents, padding)
            return output.transpose(0, 1).reshape(hidden.shape)
        if len(self._layers) > 1:
            for layer in self._layers:
                refuse_hooks_of(
                    layer,
                    owner=f"layer {layer.layer_number}",
                    rule="layers that share a schedule run as one, so it would see other tensors",
                    remedy="Use --ampipe-stack 1 in a GPT, or --ampipe-degree 1.",
                )
        self._context.recorder.passes.record_shape(*hidden.shape[:2])
        if padding is not None:
            # ``[S, B]``, as Megatron's MoE layer takes it.
            padding = padding.transpose(0, 1).bool()
            self._refuse_padding(padding, hidden)
        if not self._layout.by_chunk:
            return self._run(hidden, rotary_pos_emb, documents, padding)
        sharding = self._sharding(self._context.pipeline, hidden.shape[0])
        if padding is not None:
            padding = sharding.by_chunk(padding.unsqueeze(-1).byte()).squeeze(-1).bool()
        output = self._run(sharding.by_chunk(hidden), rotary_pos_emb, documents, padding)
        return sharding.by_sequence(output)

    def _refuse_padding(self, padding: Tensor, hidden: Tensor) -> None:
        """Raise :class:`BadInput` for a ``padding_mask`` with which chunks would compute something else."""
        context, config = self._context, self._blocks[0].config
        routers = [block.moe.router for block in self._blocks if not block.dense]
        rule = None
        if padding.shape != hidden.shape[:2]:
            rule = f"the rows of this rank are {list(hidden.shape[1::-1])}"
        elif not all(router.has_stock_routing for router in routers):
            rule = "the router of --ampipe-router computes its choice and its losses without it"
        elif "quantile_balancing" in config.moe_router_load_balancing_type:
            rule = "Megatron's quantile balancing does not support it"
        elif config.moe_pad_expert_input_to_capacity and config.moe_router_enable_expert_bias:
            rule = "rows that pad experts to their capacity count in the expert bias"
        elif context.graph_modules:
            rule = "a CUDA graph would read the mask with which it was captured"
        elif self._layout.tensor_ranks > 1 and config.calculate_per_token_loss:
            rule = "with tensor parallelism and a loss per token, Megatron counts the auxiliary loss twice"
        elif self._layout.by_chunk and config.moe_z_loss_coeff is not None:
            rule = (
                "with tensor parallelism, the z-loss is a mean over the rows of each rank, and layers that "
                "share a schedule have other rows: use --ampipe-stack 1"
            )
        if rule is not None:
            raise BadInput("padding_mask", list(padding.shape[::-1]), rule=rule, remedy=_PADDING_REMEDY)

    def _run(
        self,
        hidden: Tensor,
        rotary_pos_emb: RotaryEmbedding | None,
        documents: Documents | None,
        padding: Tensor | None,
    ) -> Tensor:
        blocks, context = self._blocks, self._context
        self._check_tiles(context.pipeline, *hidden.shape[:2])
        if (executor := context.executor) is None:
            executor = context.executor = CudaExecutor() if hidden.is_cuda else ThreadExecutor()
        revisions = tuple(
            block.follow_changes(within_documents=block.separate(documents) is not None) for block in blocks
        )
        packed = documents is not None and documents.own_positions
        features = tuple(block.features(shares_schedule=len(blocks) > 1, packed=packed) for block in blocks)
        parameters = [block.parameters for block in blocks]
        keep_graph = torch.is_grad_enabled() and (
            hidden.requires_grad or any(block_parameters.all for block_parameters in parameters)
        )
        if keep_graph:
            refuse_outer_checkpoint(context)
        chunks, whole = self._chunks(context.pipeline, hidden.shape[0])
        # The tape is one for all documents; which keys a chunk sees differs.
        shares_documents = documents is not None and documents.context_ranks > 1
        if documents is not None and shares_documents:
            chunks = tuple(map(documents.divided, chunks))
            whole = documents.divided(whole)
        graphs: TapeGraphs | StackPasses | None = None
        of_documents = documents is not None and context.captures_attention
        is_captured = keep_graph and bool(context.graph_modules)
        is_captured &= not (context.recorder.recording or of_documents)
        if is_captured and context.captures_budgets:
            # Sizes in the graphs are those of budgets, and exact rows depend on the routing.
            is_captured = None not in self._budgets(len(chunks))
        if is_captured:
            is_chained = context.partners is not None and context.captures_passes
            find = self._passes if is_chained else self._graphs.get
            graphs = find(context.pipeline, features, revisions, hidden.shape, executor, shares_documents)
        elif keep_graph and context.partners is not None:
            context.partners.graphs.pass_without_graph()
        token_ids = self._token_ids(chunks, hidden)
        micro_batch = MicroBatch(chunks, whole, rotary_pos_emb, documents, token_ids, padding)
        passes = [
            BlockPass(block, block_features, hidden, micro_batch)
            for block, block_features in zip(blocks, features, strict=True)
        ]
        tapes = self._tapes(
            context.pipeline, features, revisions, hidden.shape[0], executor, keep_graph, shares_documents
        )
        run = PassRun(executor, context.recorder, self._numbers, context.reductions, context.partners)
        call = StackCall(passes, tapes, run, parameters=parameters, keep_graph=keep_graph, graphs=graphs)
        return call.run(hidden)

    def _budgets(self, num_chunks: int) -> tuple[int | None, ...]:
        """The versions of the budgets of all chunks; None for a layer whose next pass has exact rows."""
        exchange = self._context.pipeline.exchange
        dispatchers = [block.dispatcher(exchange) for block in self._blocks if not block.dense]
        return tuple(
            dispatcher.budget_version(num_chunks) if isinstance(dispatcher, BudgetedChunk) else None
            for dispatcher in dispatchers
        )

    def _token_ids(self, chunks: Sequence[Chunk], hidden: Tensor) -> Tensor | None:
        """``[S, B]``, the ids of the rows of ``hidden``; None if no router reads them."""
        routers = (block.moe.router for block in self._blocks if not block.dense)
        source = next((router.id_source for router in routers if hasattr(router, "id_source")), None)
        if source is None:
            return None
        layout, (num_rows, batch) = self._layout, hidden.shape[:2]
        ids: Tensor = source.rows(num_rows, batch, ranks=layout.tensor_ranks)
        if not layout.by_chunk:
            return ids[layout.tensor_rank * num_rows :][:num_rows]
        spans = (span for chunk in chunks for span in chunk.hidden)
        return torch.cat([ids[span.global_start : span.global_end] for span in spans])

    def _make_chunks(self, pipeline: Pipeline, num_rows: int) -> tuple[tuple[Chunk, ...], Chunk]:
        """The chunks of a sequence (``num_rows`` of its rows are on this rank), and all rows as one chunk."""
        layout = self._layout
        chunks = pipeline.chunks(num_rows * layout.tensor_ranks * layout.context_ranks, layout)
        return chunks, Chunk.joined(chunks)

    def _require_tiles(self, pipeline: Pipeline, num_rows: int, batch: int) -> None:
        tile = rows_of_tile(self._blocks[0].config, batch)
        require_whole_tiles(self._chunks(pipeline, num_rows)[0], tile)

    def _make_sharding(self, pipeline: Pipeline, num_rows: int) -> ChunkSharding:
        lengths = [chunk.hidden[0].length for chunk in self._chunks(pipeline, num_rows)[0]]
        return ChunkSharding(lengths, self._blocks[0].moe_layer.pg_collection.tp)

    def _make_tapes(
        self,
        pipeline: Pipeline,
        features: tuple[BlockFeatures, ...],
        revisions: tuple[int, ...],
        num_rows: int,
        executor: Executor,
        keep_graph: bool,
        shares_documents: bool,
    ) -> Tapes:
        chunks, _ = self._chunks(pipeline, num_rows)
        if shares_documents:
            num_keys = num_rows * self._layout.tensor_ranks * self._layout.context_ranks
            chunks = tuple(chunk.seeing(num_keys) for chunk in chunks)
        return compiled(
            pipeline.schedule_of(features),
            features,
            chunks=chunks,
            functions=self._blocks,
            options=TapeOptions(
                keep_graph=keep_graph, host_waits=executor.host_waits, threads=executor.threads
            ),
        )

    def _make_graphs(
        self,
        pipeline: Pipeline,
        features: tuple[BlockFeatures, ...],
        revisions: tuple[int, ...],
        shape: torch.Size,
        executor: Executor,
        shares_documents: bool,
    ) -> TapeGraphs:
        context, num_chunks = self._context, len(self._chunks(pipeline, shape[0])[0])
        kinds = None if context.captures_passes else [block.captured for block in self._blocks]
        options = CaptureOptions(
            kinds=kinds,
            warm_up=context.graph_warm_up,
            generators=_generators,
            outside=tensors_outside_modules if kinds is None else tuple,
            version=partial(self._budgets, num_chunks) if context.captures_budgets else tuple,
            overlaps=context.overlaps_reductions,
        )
        tapes = self._tapes(pipeline, features, revisions, shape[0], executor, True, shares_documents)
        return TapeGraphs(tapes, self._blocks, options)

    def _make_passes(
        self,
        pipeline: Pipeline,
        features: tuple[BlockFeatures, ...],
        revisions: tuple[int, ...],
        shape: torch.Size,
        executor: Executor,
        shares_documents: bool,
    ) -> StackPasses:
        context, num_chunks = self._context, len(self._chunks(pipeline, shape[0])[0])
        assert context.partners is not None

        def is_current() -> bool:
            # Graphs are not of passes whose attention stays within documents.
            now = [block.follow_changes(within_documents=False) for block in self._blocks]
            return revisions == tuple(now)

        options = ChainOptions(
            warm_up=context.graph_warm_up,
            generators=_generators,
            outside=tensors_outside_modules,
            version=partial(self._budgets, num_chunks),
            is_current=is_current,
        )
        tapes = self._tapes(pipeline, features, revisions, shape[0], executor, True, shares_documents)
        return StackPasses(context.partners.graphs, tapes, self._blocks, options)


def tensors_outside_modules() -> list[Tensor]:
    """Tensors that whole passes read or write and that no module has.

    The losses that Megatron logs, the factor of router losses, and buffers of tensor-parallel transfers.
    """
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    tensors = [*compat.logged_losses().values(), *compat.global_buffers()]
    return tensors if scale is None else [*tensors, scale]


def _generators() -> list[torch.Generator]:
    """Megatron's random generators that CUDA graphs can register: Transformer Engine's."""
    states = random.get_all_rng_states().values()
    return [state for state in states if isinstance(state, torch.Generator)]


class ChunkSharding:
    """Sequence parallelism by chunk: every tensor-parallel rank holds a part of every chunk.

    Megatron gives each rank one contiguous part of the sequence. A chunk made of rows of every part would
    need the keys of all later chunks too. ``lengths`` are the rows that one rank holds of each chunk.
    """

    def __init__(self, lengths: Sequence[int], group: dist.ProcessGroup) -> None:
        ranks, rank, num_rows = group.size(), group.rank(), sum(lengths)
        starts = list(itertools.accumulate(lengths, initial=0))
        # For each rank, the rows of the sequence that it holds in the layout by chunk.
        held = [
            torch.cat(
                [
                    torch.arange(length) + start * ranks + holder * length
                    for start, length in zip(starts, lengths, strict=False)
                ]
            )
            for holder in range(ranks)
        ]
        sent_rows = [rows[rows // num_rows == rank] % num_rows for rows in held]
        self._group, self._sent = group, [len(rows) for rows in sent_rows]
        self._received = (held[rank] // num_rows).bincount(minlength=ranks).tolist()
        # Rows arrive in sequence order, which is also the order of the chunks.
        order = torch.cat(sent_rows)
        indices = order, torch.argsort(order)
        self._indices = cache(lambda device: [copy_to_device(rows, device) for rows in indices])
        """On a device, the order in which rows are sent, and its inverse."""

    def by_chunk(self, hidden: Tensor) -> Tensor:
        """From this rank's part of the sequence to its part of every chunk, ``[R, B, D]``. Differentiable."""
        order, _ = self._indices(hidden.device)
        rows = hidden.index_select(0, order)
        moved: Tensor = all_to_all(self._group, rows, self._received, self._sent)
        return moved

    def by_sequence(self, hidden: Tensor) -> Tensor:
        """The inverse of :meth:`by_chunk`."""
        moved: Tensor = all_to_all(self._group, hidden.contiguous(), self._sent, self._received)
        _, inverse = self._indices(hidden.device)
        return moved.index_select(0, inverse)
