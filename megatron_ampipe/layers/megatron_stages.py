"""What every stage of a Megatron MoE block computes: one object per forward call.

Implements ``runtime.block_stages.BlockStages`` on the modules of a block: Megatron's
``TransformerLayer._forward_attention`` and ``_forward_mlp`` and ``MoELayer.forward``, cut where tokens are
sent. A module with parameters is entered by calling it, never by one of its methods: Megatron's forward hooks
wait for the parameters under ``--overlap-param-gather``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from megatron_ampipe.layers.attention_extras import pad_gate, split_gate
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.chunk_attention import (
    ChunkAttention,
    RotaryEmbedding,
    project_qkv,
)
from megatron_ampipe.layers.condense import Condensed, Condenser
from megatron_ampipe.layers.dispatcher import copy_counts
from megatron_ampipe.layers.expert_products import products_run_by
from megatron_ampipe.layers.linear_weights import transfers_apart, weights_apart
from megatron_ampipe.layers.recompute import RandomStates
from megatron_ampipe.runtime.block_stages import (
    AddedStage,
    BackwardFunction,
    CommunicationFunction,
    ComputeFunction,
)
from megatron_ampipe.runtime.collectives import Transfer, exchange_chunks, gather_chunks, pass_on
from megatron_ampipe.runtime.inner_tensors import InnerTensors
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.node_hop import collect, spread
from megatron_ampipe.runtime.row_scatter import RowTransfers
from megatron_ampipe.runtime.rows import take_rows
from megatron_ampipe.runtime.weight_products import WeightProducts
from megatron_ampipe.runtime.wire import Trip, Wire, exchange_encoded
from megatron_ampipe.schedule import Chunk, Direction, Exchange, StageKind, kinds
from megatron_ampipe.schedule.documents import Documents

# S sequence rows, B batch, D hidden size, T tokens in the order in which they are sent, E experts.


class MegatronStages:
    """The stages of one pass of one micro-batch through a block.

    Args:
        modules: What is called.
        chunks: Where the sequence is cut.
        attend: Core attention of a chunk.
        rotary_pos_emb: As Megatron passes it to the layer.
        documents: Of the micro-batch, if rows attend to their own document only.
        num_tokens: Tokens of this rank in the block, ``S * B``.
        exchange: How often a token is sent.
        wire: Around the transfers of tokens; None to send them as they are.
        condenser: Chooses which of similar tokens are sent; None to send all.
        added: Stages beyond those of the table.
        random: Keeps the random states of the stages, for :meth:`again`; None where no number is drawn twice.
        ring_ranks: The context-parallel ranks, if they pass keys on to one another.
        row_transfers: Between tensor-parallel ranks, if these are stages.
        token_ids: ``[S, B]``, of the rows of the residual stream, for a router that reads them.
    """

    def __init__(
        self,
        modules: BlockModules,
        *,
        chunks: Sequence[Chunk],
        attend: ChunkAttention,
        rotary_pos_emb: RotaryEmbedding | None,
        documents: Documents | None,
        num_tokens: int,
        exchange: Exchange = Exchange.ROWS,
        wire: Wire | None = None,
        condenser: Condenser | None = None,
        added: Sequence[AddedStage] = (),
        random: RandomStates | None = None,
        ring_ranks: ProcessGroup | None = None,
        row_transfers: RowTransfers | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        self.chunks = chunks
        self._modules, self._attend, self._rotary_pos_emb = modules, attend, rotary_pos_emb
        self._documents, self._whole = documents, Chunk.joined(chunks)
        self._num_tokens, self._random, self._is_again = num_tokens, random, False
        self._kind_of_exchange, self._wire, self._condenser = exchange, wire, condenser
        self._ring_ranks, self._row_transfers, self._token_ids = ring_ranks, row_transfers, token_ids
        self._begin()
        self.recomputed = modules.recomputed_stages
        self.parameters: Mapping[StageKind, Sequence[Parameter]] = modules.stage_parameters
        self._added = {stage.kind: stage for stage in added}

    def _begin(self) -> None:
        modules = self._modules
        self._ring = None if self._ring_ranks is None else self._attend.ring(self._ring_ranks)
        if not modules.dense:
            rows = sum(span.length for span in self._whole.hidden)
            self._routing = modules.moe.router.begin_block(
                self._num_tokens,
                per_chunk=modules.capacity_per_chunk,
                first_tokens=[
                    chunk.hidden[0].local_start * (self._num_tokens // rows) for chunk in self.chunks
                ],
            )
            # The state of a chunk is stored as attributes of a separate copy; the constants are shared.
            dispatcher = modules.dispatcher(self._kind_of_exchange)
            self._dispatchers = [copy.copy(dispatcher) for _ in self.chunks]
            self._condensed: dict[int, Condensed] = {}

    def again(self) -> MegatronStages:
        """See ``BlockStages``."""
        found = copy.copy(self)
        found._is_again = True
        found._row_transfers = None if self._row_transfers is None else self._row_transfers.again()
        found._begin()
        if not self._modules.dense:
            found._routing.forced_bias = self._routing.forced_bias
            for first, second in zip(self._dispatchers, found._dispatchers, strict=True):
                copy_counts(first, second)
        return found

    # Bound methods are made when they are asked for: kept here, they would be a cycle that holds activations.

    def compute(self, kind: StageKind) -> ComputeFunction:
        """See ``BlockStages``."""
        if kind in self._added:
            function = self._added[kind].compute
            assert function is not None, f"{kind} is not computed"
        else:
            function = functools.partial(_COMPUTE[kind.row], self)
            if kind.step_of is not None:
                function = functools.partial(function, kind.step)
        return function if self._random is None else functools.partial(self._draw, kind, function)

    def differentiate(self, kind: StageKind) -> BackwardFunction:
        """See ``BlockStages``."""
        assert kind.row is kinds.ATTEND
        return functools.partial(self.attend_backward, kind.step)

    def weights_apart(self, kind: StageKind, products: WeightProducts) -> AbstractContextManager[None]:
        """See ``BlockStages``."""
        return weights_apart(self._modules.linears[kind], products)

    def _draw(
        self, kind: StageKind, function: ComputeFunction, chunk: int | None, *tensors: Tensor, **extra: Any
    ) -> tuple[Tensor, ...]:
        """Run a function so that a second run draws the random numbers of the first."""
        assert self._random is not None
        if not self._is_again:
            self._random.record((kind, chunk))
            return function(chunk, *tensors, **extra)
        with self._random.restored((kind, chunk)):
            return function(chunk, *tensors, **extra)

    def communicate(self, kind: StageKind) -> CommunicationFunction:
        """See ``BlockStages``."""
        if kind in self._added:
            function = self._added[kind].communicate
            assert function is not None, f"{kind} is computed"
            return function
        return functools.partial(_COMMUNICATE[kind.row], self)

    def input_norm(self, chunk: int | None, hidden: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to the same shape."""
        return (self._modules.attention_layer.input_layernorm(hidden),)

    def gather_rows(
        self, chunks: Sequence[int | None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """``[rows, B, D]`` that :meth:`input_norm` gave, to ``[ranks * rows, B, D]``."""
        rows, num_rows = self._rows_exchanged(chunks)
        if direction is Direction.FORWARD:
            return rows.gather(chunks, tensors, num_rows)
        return rows.exchange(tensors, num_rows, scatter=True)

    def regather_rows(
        self, chunks: Sequence[int | None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """The same rows once more, for the backward of :meth:`qkv`."""
        rows, num_rows = self._rows_exchanged(chunks)
        return rows.regather(chunks, num_rows)

    def _rows_exchanged(self, chunks: Sequence[int | None]) -> tuple[RowTransfers, list[int]]:
        assert self._row_transfers is not None
        return self._row_transfers, [
            sum(span.length for span in self._rows_of(chunk).hidden) for chunk in chunks
        ]

    def qkv(self, chunk: int | None, hidden: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to queries, keys and values, each ``[rows, B, heads, head size]``.

        ``hidden`` is what :meth:`gather_rows` gave, where rows are gathered as a stage.
        """
        layer = self._modules.attention_layer
        with contextlib.ExitStack() as within:
            rows = self._row_transfers
            if rows is not None and rows.gathers:
                normed = hidden
                within.enter_context(transfers_apart(layer.self_attention.linear_qkv))
                within.enter_context(rows.dropped(chunk, hidden))
            else:
                normed = layer.input_layernorm(hidden)
            query, key, value = project_qkv(
                layer.self_attention,
                normed,
                self._rotary_pos_emb,
                spans=self._rows_of(chunk).queries,
                num_keys=self._whole.num_keys,
                documents=self._documents,
                gathered=self._ring is None,
            )
        if self._ring is not None:
            # Views would keep the joint projection.
            return query.contiguous(), key.contiguous(), value.contiguous()
        if chunk is not None:
            # Keys and values are copied into the rows of the sequence. Queries that are a view of the joint
            # projection would keep a second copy of both.
            query = query.contiguous()
        return query, key, value

    def attend(
        self, step: int, chunk: int | None, query: Tensor, key: Tensor, value: Tensor, *context: Tensor
    ) -> tuple[Tensor, ...]:
        """Rows of one chunk to ``[rows, B, H * V]``: attention to the keys of the steps up to this one."""
        assert self._ring is not None
        if step:
            return (self._ring.go_on(step, chunk, key, value, *context),)
        query, _ = split_gate(query, self._modules.attention_layer.self_attention)
        return (self._ring.begin(chunk, query, key, value, spans=self._rows_of(chunk).queries),)

    def attend_backward(
        self,
        step: int,
        chunk: int | None,
        gradients: Sequence[Tensor | None],
        recalled: Sequence[Tensor],
        sums: KeyValueSums,
    ) -> Sequence[Tensor | None]:
        """The gradients of what :meth:`attend` took; of the queries all at once, in step 0."""
        (gradient,), (key, value) = gradients, recalled
        assert self._ring is not None and gradient is not None
        of_query = self._ring.differentiate(step, chunk, gradient, key, value, sums)
        if of_query is None:
            return None, None, None, gradient
        return pad_gate(of_query, self._modules.attention_layer.self_attention), None, None

    def ring(
        self, chunks: Sequence[None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Keys and values ``[S, B, G, C]`` to the next rank; their gradients to the one before."""
        assert self._ring_ranks is not None
        return pass_on(tensors[0], group=self._ring_ranks, back=direction is Direction.BACKWARD)

    def rering(
        self, chunks: Sequence[None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Keys and values to the rank before, so that those of the last step arrive first."""
        assert self._ring_ranks is not None
        return pass_on(tensors[0], group=self._ring_ranks, back=True)

    def attention(
        self, chunk: int | None, query: Tensor, *rest: Tensor, sums: KeyValueSums | None = None
    ) -> tuple[Tensor, ...]:
        """Rows of one chunk to ``(residual, normed)``, both ``[rows, B, D]``.

        Where tensor-parallel ranks scatter rows as a stage, to this rank's part of their sum, of the rows of
        all ranks.

        Args:
            chunk: Index; None for the whole sequence.
            query: Of its rows.
            rest: Keys and values of all rows that it sees, or what :meth:`attend` gave of the last step; then
                its rows of the residual stream, unless rows are scattered.
            sums: Where its backward may add the gradients of keys and values; it then gives none.
        """
        layer = self._modules.attention_layer
        attended, hidden = (rest, None) if self._row_transfers is not None else (rest[:-1], rest[-1])
        query, gate = split_gate(query, layer.self_attention)
        if self._ring is not None:
            (context,) = attended
        else:
            key, value = attended
            spans, documents = self._rows_of(chunk).queries, self._documents
            context = self._attend(query, key, value, spans=spans, documents=documents, sums=sums)
        if gate is not None:
            context = layer.self_attention._apply_output_gate(context, gate)
        projection = layer.self_attention.linear_proj
        if hidden is None:
            with transfers_apart(projection):
                return (projection(context)[0],)
        return self._add_norm(projection(context), hidden)

    def scatter_rows(
        self, chunks: Sequence[int | None], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Parts of the projection ``[ranks * rows, B, D]`` to the sums of this rank's ``[rows, B, D]``."""
        rows, num_rows = self._rows_exchanged(chunks)
        return rows.exchange(tensors, num_rows, scatter=direction is Direction.FORWARD)

    def add_norm(self, chunk: int | None, projected: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` and the residual stream to ``(residual, normed)``, both ``[rows, B, D]``."""
        # The bias is a parameter of a module that the same chunk has called before.
        bias = self._modules.attention_layer.self_attention.linear_proj.bias
        return self._add_norm((projected, bias), hidden)

    def _add_norm(self, output_with_bias: tuple[Tensor, Tensor | None], hidden: Tensor) -> tuple[Tensor, ...]:
        modules = self._modules
        residual = modules.add_residual(modules.attention_layer.self_attn_bda, output_with_bias, hidden)
        return residual, modules.moe_layer.pre_mlp_layernorm(residual)

    def choose(self, chunk: None, normed: Tensor) -> tuple[Tensor, ...]:
        """``[S, B, D]`` to ``(probs [S, B, E], logits [S, B, L])``; the router sees all chunks as one."""
        probs, self._chosen, logits = self._modules.moe.router(
            normed, block=self._routing, chunk=0, **self._ids_of(self._whole)
        )
        return probs.view(*normed.shape[:2], -1), logits

    def route(self, chunk: int, normed: Tensor, *choice: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to ``(tokens [T, D], probs [T], logits [rows, B, L])``.

        ``L`` is the number of experts, or more: see :meth:`~.router.ChunkRouting.forward`. ``choice`` is what
        :meth:`choose` gave for these rows.
        """
        if choice:
            probs, logits = choice[0].flatten(0, 1), choice[1].view_as(choice[1])
            chosen = self._chosen.view(-1, normed.shape[1], self._chosen.shape[-1])
            routing_map = take_rows(chosen, self.chunks[chunk].hidden).flatten(0, 1)
        else:
            ids = self._ids_of(self.chunks[chunk])
            probs, routing_map, logits = self._modules.moe.router(
                normed, block=self._routing, chunk=chunk, **ids
            )
        dispatcher = self._dispatchers[chunk]
        tokens, token_probs = dispatcher.dispatch_preprocess(self._narrowed(normed), routing_map, probs)
        return tokens, token_probs, logits

    def _ids_of(self, chunk: Chunk) -> dict[str, Tensor]:
        """What a router that reads the ids of tokens is also given."""
        ids = self._token_ids
        return {} if ids is None else {"token_ids": take_rows(ids, chunk.hidden)}

    def condense(self, chunk: int, tokens: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """``tokens [T, D]`` to those that are sent, ``[Q, D]``, probabilities of 1, and ``probs`` for
        :meth:`expand`."""
        dispatcher, condenser = self._dispatchers[chunk], self._condenser
        assert condenser is not None
        batch = dispatcher.hidden_shape[1]
        found = condenser.condense(
            tokens,
            dispatcher.routing_map,
            batch=batch,
            counted=self._modules.moe_layer.training and not self._is_again,
        )
        self._condensed[chunk], dispatcher.counts = found, found.counts
        # The probability of a token that takes another one's result is its own.
        return tokens.index_select(0, found.sent), torch.ones_like(probs[: len(found.sent)]), probs.clone()

    def _narrowed(self, normed: Tensor) -> Tensor:
        """What the experts are given of ``[rows, B, D]``: with a latent size, fewer columns."""
        if not self._modules.is_latent:
            return normed
        narrowed: Tensor
        narrowed, _ = self._modules.moe.fc1_latent_proj(normed)
        return narrowed

    def losses(self, chunk: None, *logits: Tensor) -> tuple[Tensor, ...]:
        """All chunks' router logits to one fp32 number whose backward adds the gradient of the losses."""
        return (self._modules.moe.router.block_losses(torch.cat(logits), self._routing),)

    def shared(self, chunk: int, normed: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` through the shared experts."""
        return (self._modules.moe.shared_experts(normed),)

    def counts(
        self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Exchange what the other ranks must know of the routing before tokens can be sent. Forward only."""
        dispatchers = [self._dispatchers[chunk] for chunk in chunks]
        counts = [dispatcher.counts for dispatcher in dispatchers]
        gathered = gather_chunks(counts, group=dispatchers[0].counts_group)
        for dispatcher, of_ranks in zip(dispatchers, gathered.outputs, strict=True):
            dispatcher.set_counts(of_ranks)
        return replace(gathered, outputs=(), uses=(*counts, *gathered.outputs))

    def dispatch(
        self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Tokens ``[T, D]`` and their probabilities ``[T]`` to the ranks of their experts."""
        return self._exchange(kinds.DISPATCH, chunks, tensors, direction)

    def spread(
        self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Tokens ``[T, D]`` that came to this node, and probabilities, to the ranks of their experts."""
        return self._hand_on(chunks, tensors, back=direction is Direction.BACKWARD)

    def collect(
        self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Expert outputs ``[T, D]`` to the ranks of this node that the tokens came to, and added."""
        return self._hand_on(chunks, tensors, back=direction is Direction.FORWARD)

    def _hand_on(self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], *, back: bool) -> Transfer:
        hops = [
            # Only tokens come with probabilities; what comes back knows where it was.
            self._dispatchers[chunk].hop(*of_chunk[1:])
            for chunk, of_chunk in zip(chunks, tensors, strict=True)
        ]
        return (collect if back else spread)(hops, tensors)

    def gather(
        self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Tokens ``[T, D]``, and probabilities, to all ranks that share an expert, in the order of ranks."""
        return self._over_shares(chunks, tensors, back=direction is Direction.BACKWARD)

    def scatter(
        self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Expert outputs ``[T, D]`` of these ranks, added, each row to the rank that it arrived at."""
        return self._over_shares(chunks, tensors, back=direction is Direction.FORWARD)

    def _over_shares(
        self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], *, back: bool
    ) -> Transfer:
        gathers = [self._dispatchers[chunk].gather() for chunk in chunks]
        return exchange_chunks(gathers, tensors, combine=back)

    def expert(
        self, chunk: int, tokens: Tensor, probs: Tensor, *, inner: InnerTensors | None = None
    ) -> tuple[Tensor, ...]:
        """Received tokens ``[T, D]`` through the local experts, to ``[T, D]``."""
        return (self._dispatchers[chunk].combine_preprocess(self._experts(chunk, tokens, probs, inner)),)

    def _experts(self, chunk: int, tokens: Tensor, probs: Tensor, inner: InnerTensors | None) -> Tensor:
        tokens, tokens_per_expert, probs = self._dispatchers[chunk].dispatch_postprocess(tokens, probs)
        if inner is not None:
            inner.sorted(tokens)
        with products_run_by(inner, self._modules.expert_products):
            output, bias = self._modules.moe.experts(tokens, tokens_per_expert, probs)
        assert bias is None, "Megatron's experts add their bias themselves"
        found: Tensor = output
        return found

    def repermute(self, chunk: int, normed: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to the tokens ``[T, D]`` that ``route`` gave."""
        return (self._dispatchers[chunk].tokens_again(self._narrowed(normed)),)

    def rebuild(self, chunk: int, tokens: Tensor, probs: Tensor, *, inner: InnerTensors) -> tuple[()]:
        """The experts once more without their last product, for ``inner``."""
        self._experts(chunk, tokens, probs, inner)
        return ()

    def resort(self, chunk: int, tokens: Tensor, probs: Tensor, *, inner: InnerTensors) -> tuple[()]:
        """Tokens ``[T, D]`` that were sent once more into the order of the experts, for ``inner``."""
        tokens, *_ = self._dispatchers[chunk].dispatch_postprocess(tokens, probs)
        inner.sorted(tokens)
        return ()

    def combine(
        self, chunks: Sequence[int], tensors: Sequence[Sequence[Tensor]], direction: Direction
    ) -> Transfer:
        """Expert outputs ``[T, D]`` to the ranks that own the tokens."""
        return self._exchange(kinds.COMBINE, chunks, tensors, direction)

    def expand(self, chunk: int, combined: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """``combined [Q, D]`` of the tokens that were sent to ``[T, D]`` of all, weighted by ``probs``."""
        rows = combined.index_select(0, self._condensed.pop(chunk).place)
        return ((rows * probs.unsqueeze(-1)).to(combined.dtype),)

    def merge(self, chunk: int, combined: Tensor, residual: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """``combined [T, D]`` into the order of the rows, plus shared and residual, to ``[rows, B, D]``."""
        modules = self._modules
        output = self._dispatchers[chunk].combine_postprocess(combined)
        if modules.is_latent:
            output, _ = modules.moe.fc2_latent_proj(output)
        for part in shared:
            output = output + part
        return (modules.add_residual(modules.moe_layer.mlp_bda, (output, None), residual),)

    def mlp(self, chunk: int, normed: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` through the MLP of a layer without experts, plus residual."""
        modules = self._modules
        layer = modules.moe_layer
        return (modules.add_residual(layer.mlp_bda, layer.mlp(normed), residual),)

    def _exchange(
        self,
        kind: StageKind,
        chunks: Sequence[int],
        tensors: Sequence[Sequence[Tensor]],
        direction: Direction,
    ) -> Transfer:
        transports = [self._dispatchers[chunk].transport() for chunk in chunks]
        combine = (kind is kinds.COMBINE) == (direction is Direction.FORWARD)
        if self._wire is None:
            return exchange_chunks(transports, tensors, combine=combine)
        number = self._modules.moe_layer.layer_number
        trips = [Trip(number, chunk, kind.name, direction) for chunk in chunks]
        return exchange_encoded(self._wire, transports, tensors, trips, combine=combine)

    def _rows_of(self, chunk: int | None) -> Chunk:
        return self._whole if chunk is None else self.chunks[chunk]


_COMPUTE: Mapping[StageKind, ComputeFunction] = {
    kinds.INPUT_NORM: MegatronStages.input_norm,
    kinds.QKV: MegatronStages.qkv,
    kinds.ATTEND: MegatronStages.attend,
    kinds.ATTENTION: MegatronStages.attention,
    kinds.ADD_NORM: MegatronStages.add_norm,
    kinds.CHOOSE: MegatronStages.choose,
    kinds.ROUTE: MegatronStages.route,
    kinds.CONDENSE: MegatronStages.condense,
    kinds.LOSSES: MegatronStages.losses,
    kinds.SHARED: MegatronStages.shared,
    kinds.EXPERT: MegatronStages.expert,
    kinds.EXPAND: MegatronStages.expand,
    kinds.MERGE: MegatronStages.merge,
    kinds.MLP: MegatronStages.mlp,
    kinds.REPERMUTE: MegatronStages.repermute,
    kinds.REBUILD: MegatronStages.rebuild,
    kinds.RESORT: MegatronStages.resort,
}
_COMMUNICATE: Mapping[StageKind, Callable[..., Transfer]] = {
    kinds.RING: MegatronStages.ring,
    kinds.RERING: MegatronStages.rering,
    kinds.GATHER_ROWS: MegatronStages.gather_rows,
    kinds.GATHER_ROWS_INTRA: MegatronStages.gather_rows,
    kinds.REGATHER_ROWS: MegatronStages.regather_rows,
    kinds.REGATHER_ROWS_INTRA: MegatronStages.regather_rows,
    kinds.SCATTER_ROWS: MegatronStages.scatter_rows,
    kinds.SCATTER_ROWS_INTRA: MegatronStages.scatter_rows,
    kinds.COUNTS: MegatronStages.counts,
    kinds.DISPATCH: MegatronStages.dispatch,
    kinds.SPREAD: MegatronStages.spread,
    kinds.GATHER: MegatronStages.gather,
    kinds.GATHER_INTRA: MegatronStages.gather,
    kinds.SCATTER: MegatronStages.scatter,
    kinds.SCATTER_INTRA: MegatronStages.scatter,
    kinds.COLLECT: MegatronStages.collect,
    kinds.COMBINE: MegatronStages.combine,
    kinds.REDISPATCH: MegatronStages.dispatch,
    kinds.RESPREAD: MegatronStages.spread,
    kinds.REGATHER: MegatronStages.gather,
    kinds.REGATHER_INTRA: MegatronStages.gather,
}
