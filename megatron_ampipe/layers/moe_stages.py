"""The stage functions of a block's MoE half, from the router to the output of the block.

Megatron's ``TransformerLayer._forward_mlp`` and ``MoELayer.forward``, cut where tokens are sent; for a layer
without experts, its MLP. Modules with parameters are called, never entered through another method, because
Megatron's forward hooks wait for the parameters under ``--overlap-param-gather``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor
from torch.nn import Module

from megatron_ampipe.exchange.codecs import TransferId, WireCodec
from megatron_ampipe.exchange.fixed_rows import ExpertOffsets
from megatron_ampipe.exchange.packing import AllToAllChunk, HostSplits
from megatron_ampipe.exchange.transports import all_gather, exchange_chunks, with_rows
from megatron_ampipe.layers.block_modules import BlockModules
from megatron_ampipe.layers.block_pass import BlockPass
from megatron_ampipe.layers.fixed_experts import FixedProducts, run_experts
from megatron_ampipe.layers.grouped_experts import rows_of_experts, rows_on_device
from megatron_ampipe.layers.linear_layers import products_run_by, replaced
from megatron_ampipe.layers.stage_functions import ReadBlock, Tensors, runs
from megatron_ampipe.runtime.collectives import Transfer
from megatron_ampipe.runtime.saved_tensors import ExpertTensors, InnerTensors
from megatron_ampipe.runtime.slot_ops import take_rows
from megatron_ampipe.schedule import Chunk, Direction, kinds

# S sequence rows, B batch, D hidden size, T tokens in the order in which they are sent, E experts.

_OPPOSITE = {Direction.FORWARD: Direction.BACKWARD, Direction.BACKWARD: Direction.FORWARD}


def _read_by_route(block: ReadBlock) -> list[Module]:
    router = [] if block.chooses else [block.moe.router]
    return [*router, block.moe.fc1_latent_proj] if block.is_latent else router


@runs(kinds.CHOOSE, reads=lambda block: [block.moe.router])
def choose(state: BlockPass, chunk: None, normed: Tensor) -> tuple[Tensor, ...]:
    """Route all chunks at once: ``[S, B, D]`` to ``(probs [S, B, E], logits [S, B, L])``."""
    probs, state.chosen, logits = state.block.moe.router(
        normed, block=state.routing, chunk=0, **_of_rows(state, state.whole)
    )
    return probs.view(*normed.shape[:2], -1), logits


@runs(kinds.ROUTE, reads=_read_by_route)
def route(state: BlockPass, chunk: int, normed: Tensor, *choice: Tensor) -> tuple[Tensor, ...]:
    """Route and permute ``[rows, B, D]`` to ``(tokens [T, D], probs [T], logits [rows, B, L])``.

    ``L`` is the number of experts, or more: see :meth:`~.router.ChunkRouting.forward`. ``choice`` is the
    output of :func:`choose` for these rows.
    """
    if choice:
        probs, logits = choice[0].flatten(0, 1), choice[1].view_as(choice[1])
        chosen = state.chosen.view(-1, normed.shape[1], state.chosen.shape[-1])
        routing_map = take_rows(chosen, state.chunks[chunk].hidden).flatten(0, 1)
    else:
        others = _of_rows(state, state.chunks[chunk])
        probs, routing_map, logits = state.block.moe.router(
            normed, block=state.routing, chunk=chunk, **others
        )
    dispatcher = state.dispatchers[chunk]
    tokens, token_probs = dispatcher.dispatch_preprocess(_narrowed(state.block, normed), routing_map, probs)
    return tokens, token_probs, logits


def _of_rows(state: BlockPass, chunk: Chunk) -> dict[str, Tensor]:
    """Further arguments of a router: the ids of tokens, if it reads them, and which rows are padding."""
    given = {"token_ids": state.token_ids, "padding": state.padding}
    return {name: take_rows(rows, chunk.hidden) for name, rows in given.items() if rows is not None}


@runs(kinds.CONDENSE)
def condense(state: BlockPass, chunk: int, tokens: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    """Select from ``tokens [T, D]`` the ``[Q, D]`` to send, with probabilities of 1; ``probs`` go to
    :func:`expand`."""
    dispatcher, condenser = state.dispatchers[chunk], state.block.context.condenser
    assert condenser is not None and isinstance(dispatcher, AllToAllChunk)
    batch = dispatcher.hidden_shape[1]
    condensed = condenser.condense(
        tokens,
        dispatcher.routing_map,
        batch=batch,
        counted=state.block.moe_layer.training and not state.is_again,
    )
    state.condensed[chunk], dispatcher.counts = condensed, condensed.counts
    # A token that reuses the output of a similar token keeps its own probability.
    own_probs = probs[: len(condensed.place)].clone()
    return tokens.index_select(0, condensed.sent), torch.ones_like(probs[: len(condensed.sent)]), own_probs


def _narrowed(block: BlockModules, normed: Tensor) -> Tensor:
    """The input of the experts from ``[rows, B, D]``: projected to the latent size, if there is one."""
    return block.moe.fc1_latent_proj(normed)[0] if block.is_latent else normed


@runs(kinds.LOSSES)
def losses(state: BlockPass, chunk: None, *logits: Tensor) -> tuple[Tensor, ...]:
    """Router losses from the logits of all chunks: an fp32 scalar whose backward adds their gradient."""
    return (state.block.moe.router.block_losses(torch.cat(logits), state.routing),)


@runs(
    kinds.SHARED,
    reads=lambda block: [block.moe.shared_experts],
)
def shared(state: BlockPass, chunk: int, normed: Tensor) -> tuple[Tensor, ...]:
    """Apply the shared experts to ``[rows, B, D]``."""
    return (state.block.moe.shared_experts(normed),)


@runs(kinds.COUNTS)
def counts(state: BlockPass, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
    """All-gather the token counts that other ranks need before tokens can be sent."""
    dispatchers = [state.dispatchers[chunk] for chunk in chunks]
    counts = [dispatcher.counts for dispatcher in dispatchers]
    group = dispatchers[0].counts_group
    gathered = exchange_chunks(
        [all_gather(len(chunk_counts), group) for chunk_counts in counts],
        [[chunk_counts] for chunk_counts in counts],
        combine=False,
    )
    for dispatcher, rank_counts in zip(dispatchers, gathered.outputs, strict=True):
        dispatcher.set_counts(rank_counts)
    return Transfer((), gathered.works, gathered.unpack, uses=(*counts, *gathered.outputs))


@runs(kinds.DISPATCH, kinds.REDISPATCH)
def dispatch(state: BlockPass, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
    """Send tokens ``[T, D]`` and their probabilities ``[T]`` to the ranks of their experts.

    Where :func:`route` allocated rows before their number was known, the spare rows at the end are not sent,
    and their gradient is 0.
    """
    forward = direction is Direction.FORWARD
    dispatchers = [state.dispatchers[chunk] for chunk in chunks]
    transports = [dispatcher.transport() for dispatcher in dispatchers]
    is_condensed = state.block.context.condenser is not None
    spare = [0 if is_condensed else dispatcher.num_spare for dispatcher in dispatchers]
    if forward and any(spare):
        tensors = [
            [part[: part.shape[0] - rows] for part in chunk_tensors]
            for chunk_tensors, rows in zip(tensors, spare, strict=True)
        ]
    codecs = _codecs(state, "dispatch", chunks, direction)
    transfer = exchange_chunks(transports, tensors, combine=not forward, codecs=codecs)
    if forward or not any(spare):
        return transfer
    per_chunk = len(transfer.outputs) // len(chunks)
    return with_rows(transfer, [rows for rows in spare for _ in range(per_chunk)])


def _host_splits(state: BlockPass, chunk: int) -> HostSplits:
    """The exchanged counts of a chunk of the ``alltoall`` dispatcher."""
    splits = state.dispatchers[chunk].splits
    assert isinstance(splits, HostSplits)
    return splits


@runs(kinds.SPREAD, kinds.RESPREAD)
def spread(state: BlockPass, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
    """Second hop of a dispatch: send tokens ``[T, D]`` and probabilities on to ranks within the node."""
    hops = [hop for chunk in chunks if (hop := _host_splits(state, chunk).hop) is not None]
    combine = direction is Direction.BACKWARD
    return exchange_chunks([hop.transport for hop in hops], tensors, combine=combine, codecs=hops)


@runs(kinds.COLLECT)
def collect(state: BlockPass, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
    """First hop of a combine: send expert outputs ``[T, D]`` back within the node, where they are added."""
    return spread(state, chunks, tensors, _OPPOSITE[direction])


@runs(kinds.GATHER, kinds.REGATHER)
def gather(state: BlockPass, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
    """All-gather tokens ``[T, D]`` and probabilities over the ranks that share an expert, in rank order."""
    gathers = [state.dispatchers[chunk].gather() for chunk in chunks]
    return exchange_chunks(gathers, tensors, combine=direction is Direction.BACKWARD)


@runs(kinds.SCATTER)
def scatter(state: BlockPass, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
    """Reduce-scatter expert outputs ``[T, D]`` over these ranks: a row returns to the rank it came from."""
    return gather(state, chunks, tensors, _OPPOSITE[direction])


@runs(kinds.EXPERT, reads=lambda block: [block.moe.experts])
def expert(
    state: BlockPass, chunk: int, tokens: Tensor, probs: Tensor, *, inner: ExpertTensors | None = None
) -> tuple[Tensor, ...]:
    """Apply the local experts to received tokens ``[T, D]``; ``inner`` runs them, if they save less."""
    output = _experts(state, chunk, tokens, probs, inner)
    return (state.dispatchers[chunk].combine_preprocess(output),)


def _experts(
    state: BlockPass, chunk: int, tokens: Tensor, probs: Tensor, inner: ExpertTensors | None
) -> Tensor:
    tokens, tokens_per_expert, probs = state.dispatchers[chunk].dispatch_postprocess(tokens, probs)
    if inner is None:
        return _products(state, tokens_per_expert, None, tokens, probs)
    products = functools.partial(_products, state, tokens_per_expert, inner)
    return inner.run(products, tokens, probs)


def _products(
    state: BlockPass,
    tokens_per_expert: Tensor | ExpertOffsets,
    inner: ExpertTensors | None,
    tokens: Tensor,
    probs: Tensor,
) -> Tensor:
    block, experts = state.block, state.block.moe.experts
    on_device: AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(tokens_per_expert, ExpertOffsets):
        if isinstance(experts, SequentialMLP):
            products = FixedProducts(tokens_per_expert, state.expert_weights, inner)
            return run_experts(experts, tokens, probs, products)
        tokens_per_expert, on_device = rows_of_experts(tokens_per_expert.ends), rows_on_device(experts)
    # Megatron's checkpoint inside the experts fails under ``torch.autograd.grad``.
    stock = replaced((experts, "activation_recompute", False))
    with stock, on_device, products_run_by(inner, block.expert_products):
        result: tuple[Tensor, None] = experts(tokens, tokens_per_expert, probs)
    output, bias = result
    assert bias is None, "Megatron's experts add their bias themselves"
    return output


@runs(kinds.REPERMUTE)
def repermute(state: BlockPass, chunk: int, normed: Tensor) -> tuple[Tensor, ...]:
    """Permute ``[rows, B, D]`` again to the tokens ``[T, D]`` of ``route``."""
    return (state.dispatchers[chunk].tokens_again(_narrowed(state.block, normed)),)


@runs(kinds.REBUILD)
def rebuild(state: BlockPass, chunk: int, tokens: Tensor, probs: Tensor, *, inner: InnerTensors) -> None:
    """Run the experts again up to their second linear layer, to rebuild the tensors of ``inner``."""
    _experts(state, chunk, tokens, probs, inner)


@runs(kinds.RESORT)
def resort(state: BlockPass, chunk: int, tokens: Tensor, probs: Tensor, *, inner: InnerTensors) -> None:
    """Sort redispatched tokens ``[T, D]`` by expert again, for ``inner``."""
    sorted_tokens, *_ = state.dispatchers[chunk].dispatch_postprocess(tokens, probs)
    inner.sorted(sorted_tokens)


@runs(kinds.COMBINE)
def combine(state: BlockPass, chunks: Sequence[int], tensors: Tensors, direction: Direction) -> Transfer:
    """Send expert outputs ``[T, D]`` back to the ranks that own the tokens."""
    transports = [state.dispatchers[chunk].transport() for chunk in chunks]
    codecs = _codecs(state, "combine", chunks, direction)
    return exchange_chunks(transports, tensors, combine=direction is Direction.FORWARD, codecs=codecs)


def _codecs(
    state: BlockPass, stage: str, chunks: Sequence[int], direction: Direction
) -> list[WireCodec] | None:
    if state.block.context.wire is None:
        return None
    number = state.block.moe_layer.layer_number
    return [
        WireCodec(state.block.context.wire, TransferId(number, chunk, stage, direction)) for chunk in chunks
    ]


@runs(kinds.EXPAND)
def expand(state: BlockPass, chunk: int, combined: Tensor, probs: Tensor) -> tuple[Tensor, ...]:
    """Expand the outputs ``[Q, D]`` of the sent tokens to all tokens ``[T, D]``, weighted by ``probs``."""
    rows = combined.index_select(0, state.condensed.pop(chunk).place)
    return ((rows * probs.unsqueeze(-1)).to(combined.dtype),)


@runs(
    kinds.MERGE,
    reads=lambda block: [block.moe.fc2_latent_proj] if block.is_latent else [],
)
def merge(
    state: BlockPass, chunk: int, combined: Tensor, residual: Tensor, *shared: Tensor
) -> tuple[Tensor, ...]:
    """Unpermute ``combined [T, D]``, add shared experts and residual: the output rows ``[rows, B, D]``."""
    block, output = state.block, state.dispatchers[chunk].combine_postprocess(combined)
    if block.is_latent:
        output, _ = block.moe.fc2_latent_proj(output)
    for part in shared:
        output = output + part
    return (block.add_residual(block.moe_layer.mlp_bda, (output, None), residual),)


@runs(kinds.MLP, reads=lambda block: [block.moe])
def mlp(state: BlockPass, chunk: int, normed: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
    """Apply the MLP of a layer without experts to ``[rows, B, D]``, and add the residual."""
    layer = state.block.moe_layer
    return (state.block.add_residual(layer.mlp_bda, layer.mlp(normed), residual),)
