"""What the stages of a block's MoE half compute, from the router to what the block returns.

Megatron's ``TransformerLayer._forward_mlp`` and ``MoELayer.forward``, cut where tokens are sent; of a layer
without experts, its MLP. The norm before the router belongs to the other half, :mod:`.attention_stages`.

Modules with parameters are entered by calling them, never by one of their methods: Megatron's forward hooks
wait for the parameters under ``--overlap-param-gather``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Module

from megatron_ampipe.exchange.codecs import Condensed, Trip, WireCodec
from megatron_ampipe.exchange.transports import all_gather, exchange_chunks, with_rows
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.linear_layers import products_run_by
from megatron_ampipe.layers.stage_functions import MOE, Tensors
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.moves import take_rows
from megatron_ampipe.runtime.saved_tensors import InnerTensors
from megatron_ampipe.schedule import Chunk, Direction, kinds

# S sequence rows, B batch, D hidden size, T tokens in the order in which they are sent, E experts.


def _read_by_route(block: BlockModules) -> list[Module]:
    router = [] if block.chooses else [block.moe.router]
    return [*router, block.moe.fc1_latent_proj] if block.is_latent else router


class MoEStages:
    """The MoE half of one pass of one micro-batch through a block; as :class:`~.block_stack.BlockPass`.

    ``num_tokens`` are the tokens of this rank in the block, ``S * B``.
    """

    def __init__(
        self,
        modules: BlockModules,
        *,
        chunks: Sequence[Chunk],
        whole: Chunk,
        num_tokens: int,
        token_ids: Tensor | None = None,
    ) -> None:
        self._modules, self._chunks, self._whole = modules, chunks, whole
        self._num_tokens, self._token_ids, self._is_again = num_tokens, token_ids, False
        context = modules.context
        self._exchange, self._wire, self._condenser = (
            context.pipeline.exchange,
            context.wire,
            context.condenser,
        )
        self._begin()

    def _begin(self) -> None:
        modules = self._modules
        if not modules.dense:
            per_row = self._num_tokens // sum([span.length for span in self._whole.hidden])
            self._routing = modules.moe.router.begin_block(
                self._num_tokens,
                per_chunk=modules.context.config.capacity_scope == "chunk",
                first_tokens=[chunk.hidden[0].local_start * per_row for chunk in self._chunks],
            )
            # The state of a chunk is stored as attributes of a separate copy; the constants are shared.
            dispatcher = modules.dispatcher(self._exchange)
            self._dispatchers = [copy.copy(dispatcher) for _ in self._chunks]
            self._condensed: dict[int, Condensed] = {}

    def again(self) -> MoEStages:
        """See ``BlockPass.again``."""
        stages = copy.copy(self)
        stages._is_again = True
        stages._begin()
        if not self._modules.dense:
            stages._routing.forced_bias = self._routing.forced_bias
            for first, second in zip(self._dispatchers, stages._dispatchers, strict=True):
                second.told = first.told
        return stages

    @MOE.runs(kinds.CHOOSE, reads=lambda block: [block.moe.router])
    def choose(self, chunk: None, normed: Tensor) -> tuple[Tensor, ...]:
        """``[S, B, D]`` to ``(probs [S, B, E], logits [S, B, L])``; the router sees all chunks as one."""
        probs, self._chosen, logits = self._modules.moe.router(
            normed, block=self._routing, chunk=0, **self._ids_of(self._whole)
        )
        return probs.view(*normed.shape[:2], -1), logits

    @MOE.runs(kinds.ROUTE, reads=_read_by_route)
    def route(self, chunk: int, normed: Tensor, *choice: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to ``(tokens [T, D], probs [T], logits [rows, B, L])``.

        ``L`` is the number of experts, or more: see :meth:`~.router.ChunkRouting.forward`. ``choice`` is what
        :meth:`choose` gave for these rows.
        """
        if choice:
            probs, logits = choice[0].flatten(0, 1), choice[1].view_as(choice[1])
            chosen = self._chosen.view(-1, normed.shape[1], self._chosen.shape[-1])
            routing_map = take_rows(chosen, self._chunks[chunk].hidden).flatten(0, 1)
        else:
            ids = self._ids_of(self._chunks[chunk])
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

    @MOE.runs(kinds.CONDENSE)
    def condense(self, chunk: int, tokens: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """``tokens [T, D]`` to those that are sent, ``[Q, D]``, probabilities of 1, and ``probs`` for
        :meth:`expand`."""
        dispatcher, condenser = self._dispatchers[chunk], self._condenser
        assert condenser is not None
        batch = dispatcher.hidden_shape[1]
        condensed = condenser.condense(
            tokens,
            dispatcher.routing_map,
            batch=batch,
            counted=self._modules.moe_layer.training and not self._is_again,
        )
        self._condensed[chunk], dispatcher.counts = condensed, condensed.counts
        # The probability of a token that takes another one's result is its own.
        own = probs[: len(condensed.place)].clone()
        return tokens.index_select(0, condensed.sent), torch.ones_like(probs[: len(condensed.sent)]), own

    def _narrowed(self, normed: Tensor) -> Tensor:
        """What the experts are given of ``[rows, B, D]``: with a latent size, fewer columns."""
        if not self._modules.is_latent:
            return normed
        return self._modules.moe.fc1_latent_proj(normed)[0]

    @MOE.runs(kinds.LOSSES)
    def losses(self, chunk: None, *logits: Tensor) -> tuple[Tensor, ...]:
        """All chunks' router logits to one fp32 number whose backward adds the gradient of the losses."""
        return (self._modules.moe.router.block_losses(torch.cat(logits), self._routing),)

    @MOE.runs(
        kinds.SHARED, reads=lambda block: [block.moe.shared_experts], recompute=("moe", "shared_experts")
    )
    def shared(self, chunk: int, normed: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` through the shared experts."""
        return (self._modules.moe.shared_experts(normed),)

    @MOE.runs(kinds.COUNTS)
    def counts(self, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
        """Exchange what the other ranks must know of the routing before tokens can be sent. Forward only."""
        dispatchers = [self._dispatchers[chunk] for chunk in chunks]
        counts = [dispatcher.counts for dispatcher in dispatchers]
        group = dispatchers[0].counts_group
        gathered = exchange_chunks(
            [all_gather(len(of_chunk), group) for of_chunk in counts],
            [[of_chunk] for of_chunk in counts],
            combine=False,
        )
        for dispatcher, of_ranks in zip(dispatchers, gathered.outputs, strict=True):
            dispatcher.set_counts(of_ranks)
        return Transfer((), gathered.works, gathered.unpack, uses=(*counts, *gathered.outputs))

    @MOE.runs(kinds.DISPATCH, kinds.REDISPATCH)
    def dispatch(self, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
        """Tokens ``[T, D]`` and their probabilities ``[T]`` to the ranks of their experts.

        Only the first rows are sent, where :meth:`route` prepared more before their number was known; the
        gradient of the others is 0.
        """
        forward = direction is Direction.FORWARD
        dispatchers = [self._dispatchers[chunk] for chunk in chunks]
        transports = [dispatcher.transport() for dispatcher in dispatchers]
        spare = [0 if self._condenser is not None else dispatcher.num_spare for dispatcher in dispatchers]
        if forward and any(spare):
            tensors = [
                [part[: part.shape[0] - rows] for part in of_chunk]
                for of_chunk, rows in zip(tensors, spare, strict=True)
            ]
        codecs = self._codecs("dispatch", chunks, direction)
        transfer = exchange_chunks(transports, tensors, combine=not forward, codecs=codecs)
        if forward or not any(spare):
            return transfer
        per_chunk = len(transfer.outputs) // len(chunks)
        return with_rows(transfer, [rows for rows in spare for _ in range(per_chunk)])

    @MOE.runs(kinds.SPREAD, kinds.RESPREAD)
    def spread(self, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
        """Tokens ``[T, D]`` that came to this node, and probabilities, to the ranks of their experts."""
        return self._hand_on(chunks, tensors, combine=direction is Direction.BACKWARD)

    @MOE.runs(kinds.COLLECT)
    def collect(self, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
        """Expert outputs ``[T, D]`` to the ranks of this node that the tokens came to, and added."""
        return self._hand_on(chunks, tensors, combine=direction is Direction.FORWARD)

    def _hand_on(self, chunks: Sequence[int], tensors: Tensors, *, combine: bool) -> Transfer:
        hops = [self._dispatchers[chunk].told.hop for chunk in chunks]
        return exchange_chunks([hop.transport for hop in hops], tensors, combine=combine, codecs=hops)

    @MOE.runs(kinds.GATHER, kinds.REGATHER)
    def gather(self, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
        """Tokens ``[T, D]``, and probabilities, to all ranks that share an expert, in the order of ranks."""
        gathers = [self._dispatchers[chunk].told.gather for chunk in chunks]
        return exchange_chunks(gathers, tensors, combine=direction is Direction.BACKWARD)

    @MOE.runs(kinds.SCATTER)
    def scatter(self, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
        """Expert outputs ``[T, D]`` of these ranks, added, each row to the rank that it arrived at."""
        gathers = [self._dispatchers[chunk].told.gather for chunk in chunks]
        return exchange_chunks(gathers, tensors, combine=direction is Direction.FORWARD)

    @MOE.runs(kinds.EXPERT, reads=lambda block: [block.moe.experts], recompute=("moe",))
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
        return output

    @MOE.runs(kinds.REPERMUTE)
    def repermute(self, chunk: int, normed: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` to the tokens ``[T, D]`` that ``route`` gave."""
        return (self._dispatchers[chunk].tokens_again(self._narrowed(normed)),)

    @MOE.runs(kinds.REBUILD)
    def rebuild(self, chunk: int, tokens: Tensor, probs: Tensor, *, inner: InnerTensors) -> tuple[()]:
        """The experts once more without their last product, for ``inner``."""
        self._experts(chunk, tokens, probs, inner)
        return ()

    @MOE.runs(kinds.RESORT)
    def resort(self, chunk: int, tokens: Tensor, probs: Tensor, *, inner: InnerTensors) -> tuple[()]:
        """Tokens ``[T, D]`` that were sent once more into the order of the experts, for ``inner``."""
        tokens, *_ = self._dispatchers[chunk].dispatch_postprocess(tokens, probs)
        inner.sorted(tokens)
        return ()

    @MOE.runs(kinds.COMBINE)
    def combine(self, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
        """Expert outputs ``[T, D]`` to the ranks that own the tokens."""
        transports = [self._dispatchers[chunk].transport() for chunk in chunks]
        codecs = self._codecs("combine", chunks, direction)
        return exchange_chunks(transports, tensors, combine=direction is Direction.FORWARD, codecs=codecs)

    def _codecs(self, stage: str, chunks: Sequence[int], direction: Direction) -> list[WireCodec] | None:
        if self._wire is None:
            return None
        number = self._modules.moe_layer.layer_number
        return [WireCodec(self._wire, Trip(number, chunk, stage, direction)) for chunk in chunks]

    @MOE.runs(kinds.EXPAND)
    def expand(self, chunk: int, combined: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
        """``combined [Q, D]`` of the tokens that were sent to ``[T, D]`` of all, weighted by ``probs``."""
        rows = combined.index_select(0, self._condensed.pop(chunk).place)
        return ((rows * probs.unsqueeze(-1)).to(combined.dtype),)

    @MOE.runs(kinds.MERGE, reads=lambda block: [block.moe.fc2_latent_proj] if block.is_latent else [])
    def merge(self, chunk: int, combined: Tensor, residual: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
        """``combined [T, D]`` into the order of the rows, plus shared and residual, to ``[rows, B, D]``."""
        modules = self._modules
        output = self._dispatchers[chunk].combine_postprocess(combined)
        if modules.is_latent:
            output, _ = modules.moe.fc2_latent_proj(output)
        for part in shared:
            output = output + part
        return (modules.add_residual(modules.moe_layer.mlp_bda, (output, None), residual),)

    @MOE.runs(kinds.MLP, reads=lambda block: [block.moe], recompute=("mlp",))
    def mlp(self, chunk: int, normed: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        """``[rows, B, D]`` through the MLP of a layer without experts, plus residual."""
        modules = self._modules
        layer = modules.moe_layer
        return (modules.add_residual(layer.mlp_bda, layer.mlp(normed), residual),)
