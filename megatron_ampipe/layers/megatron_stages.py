"""What every stage of a Megatron MoE block computes: one object per forward call.

Implements ``runtime.block_stages.BlockStages`` on the modules of a block: Megatron's
``TransformerLayer._forward_attention`` and ``_forward_mlp`` and ``MoELayer.forward``, cut where tokens are
sent. A module with parameters is entered by calling it, never by one of its methods: Megatron's forward hooks
wait for the parameters under ``--overlap-param-gather``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.layers.attention_extras import split_gate
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.chunk_attention import (
    ChunkAttention,
    RotaryEmbedding,
    project_qkv,
)
from megatron_ampipe.layers.condense import Condensed, Condenser
from megatron_ampipe.layers.dispatcher import copy_counts
from megatron_ampipe.layers.expert_products import products_run_by
from megatron_ampipe.layers.linear_weights import weights_apart
from megatron_ampipe.layers.recompute import RandomStates
from megatron_ampipe.runtime.block_stages import AddedStage, CommunicationFunction, ComputeFunction
from megatron_ampipe.runtime.collectives import Transfer, exchange_chunks, gather_chunks
from megatron_ampipe.runtime.inner_tensors import InnerTensors
from megatron_ampipe.runtime.key_value_sums import KeyValueSums
from megatron_ampipe.runtime.node_hop import collect, spread
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
    ) -> None:
        self.chunks = chunks
        self._modules, self._attend, self._rotary_pos_emb = modules, attend, rotary_pos_emb
        self._documents, self._whole = documents, Chunk.joined(chunks)
        self._num_tokens, self._random, self._is_again = num_tokens, random, False
        self._kind_of_exchange, self._wire, self._condenser = exchange, wire, condenser
        self._begin()
        self.recomputed = modules.recomputed_stages
        self.parameters: Mapping[StageKind, Sequence[Parameter]] = modules.stage_parameters
        self._added = {stage.kind: stage for stage in added}

    def _begin(self) -> None:
        modules = self._modules
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
            function = functools.partial(_COMPUTE[kind], self)
        return function if self._random is None else functools.partial(self._draw, kind, function)

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
        return functools.partial(_COMMUNICATE[kind], self)

    def qkv(self, chunk: int | None, hidden: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to queries, keys and values, each ``[rows, B, heads, head size]``."""
        layer = self._modules.attention_layer
        query, key, value = project_qkv(
            layer.self_attention,
            layer.input_layernorm(hidden),
            self._rotary_pos_emb,
            spans=self._rows_of(chunk).queries,
            num_keys=self._whole.num_keys,
            documents=self._documents,
        )
        if chunk is not None:
            # Keys and values are copied into the rows of the sequence. Queries that are a view of the joint
            # projection would keep a second copy of both.
            query = query.contiguous()
        return query, key, value

    def attention(
        self,
        chunk: int | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        hidden: Tensor,
        *,
        sums: KeyValueSums | None,
    ) -> tuple[Tensor, ...]:
        """Rows of one chunk to ``(residual, normed)``, both ``[rows, B, D]``.

        Its backward may add the gradients of ``key`` and ``value`` to ``sums``, and then gives none.
        """
        modules = self._modules
        layer = modules.attention_layer
        spans, documents = self._rows_of(chunk).queries, self._documents
        query, gate = split_gate(query, layer.self_attention)
        context = self._attend(query, key, value, spans=spans, documents=documents, sums=sums)
        if gate is not None:
            context = layer.self_attention._apply_output_gate(context, gate)
        output_with_bias = layer.self_attention.linear_proj(context)
        residual = modules.add_residual(layer.self_attn_bda, output_with_bias, hidden)
        return residual, modules.moe_layer.pre_mlp_layernorm(residual)

    def route(self, chunk: int, normed: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to ``(tokens [T, D], probs [T], logits [rows, B, L])``.

        ``L`` is the number of experts, or more: see :meth:`~.router.ChunkRouting.forward`.
        """
        probs, routing_map, logits = self._modules.moe.router(normed, block=self._routing, chunk=chunk)
        dispatcher = self._dispatchers[chunk]
        tokens, token_probs = dispatcher.dispatch_preprocess(self._narrowed(normed), routing_map, probs)
        return tokens, token_probs, logits

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

    def expert(
        self, chunk: int, tokens: Tensor, probs: Tensor, *, inner: InnerTensors | None = None
    ) -> tuple[Tensor, ...]:
        """Received tokens ``[T, D]`` through the local experts, to ``[T, D]``."""
        return (self._dispatchers[chunk].combine_preprocess(self._experts(chunk, tokens, probs, inner)),)

    def _experts(self, chunk: int, tokens: Tensor, probs: Tensor, inner: InnerTensors | None) -> Tensor:
        tokens, tokens_per_expert, probs = self._dispatchers[chunk].dispatch_postprocess(tokens, probs)
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
    kinds.QKV: MegatronStages.qkv,
    kinds.ATTENTION: MegatronStages.attention,
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
}
_COMMUNICATE: Mapping[StageKind, Callable[..., Transfer]] = {
    kinds.COUNTS: MegatronStages.counts,
    kinds.DISPATCH: MegatronStages.dispatch,
    kinds.SPREAD: MegatronStages.spread,
    kinds.COLLECT: MegatronStages.collect,
    kinds.COMBINE: MegatronStages.combine,
    kinds.REDISPATCH: MegatronStages.dispatch,
    kinds.RESPREAD: MegatronStages.spread,
}
