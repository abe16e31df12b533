"""Estimates the peak memory of a pass through consecutive blocks, in bytes, by degree and memory strategy.

The peak is at one of two moments of the backward pass. At its start, every block still has its saved
activations, and the experts of one chunk of the last block hold gradients. At its end, one block is left, and
gradients of parameters have accumulated. Saved activations depend on the modules: Megatron's local modules
save more than Transformer Engine's, which fuse operations. Not counted: weights, the optimizer, rounding by
the allocator, and, unless ``gathers``, parameter gradients, which Megatron has as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.operation_times import (
    SUM_BYTES,
    Product,
    attention_products,
    expert_products,
    mlp_products,
    qkv_products,
    weights_of,
)
from megatron_ampipe.schedule import STRATEGIES, Exchange, Pipeline, chunk_strategies
from megatron_ampipe.schedule.dataflow import AHEAD


@dataclass(frozen=True, slots=True)
class _Modules:
    """Numbers of tensors that are saved per row of a block, of 4 or else of ``Block.element_bytes`` bytes.

    ``norms``: tensors of the hidden size for both norms and the residual stream; ``norms_wide``: those with 4
    bytes. ``inner_gated`` and ``inner``: tensors of an expert's width, with and without a gate; ``weighted``
    of them exist only because of the probability, and not in the MLP of a dense layer. ``routing_bytes``: per
    expert, and per expert of a token. ``combined``: combined rows are saved for the gradient of their
    probabilities. ``gradient_bytes``: gradients inside an expert that exist at the same time, less released
    tensors, per unit of its width, without and with a gate. In 16 bit, local modules multiply by the
    probability in fp32.
    """

    norms_wide: int
    norms: int
    inner_gated: int
    inner: int
    weighted: int
    routing_bytes: tuple[int, int]
    combined: bool
    gradient_bytes: tuple[int, int]


_FUSED = _Modules(0, 4, 3, 2, 0, (2, 0), combined=True, gradient_bytes=(4, 8))
"""Transformer Engine's modules, from reading their code."""
_LOCAL = {
    4: _Modules(0, 6, 6, 3, 1, (13, 20), combined=False, gradient_bytes=(8, 8)),
    2: _Modules(4, 2, 6, 3, 1, (13, 20), combined=False, gradient_bytes=(12, 12)),
}
"""Megatron's local modules by bytes of an element, counted tensor by tensor (docs/memory.md)."""


def peak_bytes(
    block: Block,
    pipeline: Pipeline,
    *,
    num_layers: int = 1,
    dense_layers: Collection[int] = (),
    local: bool = False,
    gathers: bool = False,
) -> float:
    """Peak of the activations of consecutive blocks.

    Args:
        block: One of the blocks.
        pipeline: How they run; its exchange is the exchange of the block.
        num_layers: Number of blocks of a forward pass before the first backward.
        dense_layers: Indices of the blocks without experts, from 0.
        local: Whether blocks consist of Megatron's local modules instead of Transformer Engine's.
        gathers: Parameter gradients stay until the end of the pass, and the gradient of the output is not
            counted, as in ``ampipe bench``.
    """
    stock = not pipeline.overlaps and block.exchange is Exchange.ROWS
    joins_weights = pipeline.joins_weights
    chunks, element = pipeline.backward_degree, block.element_bytes
    modules = _LOCAL[element] if local else _FUSED
    dense, arrived, inner = _kept(block, modules)
    rebuilt = inner * _rebuilt_share(block, modules)
    rows = block.rows * block.batch * block.hidden * element
    norm_again = (_norm_bytes(block, modules) - rows) * ("layernorm" in block.recompute_modules)
    names = chunk_strategies(pipeline.memory)
    # For the experts of each chunk: bytes saved, bytes loaded from host memory, bytes restored right before
    # their backward (for a redispatch, while tokens of the next chunk are in flight).
    saved, loaded, again = [], [], []
    for chunk in range(chunks):
        restored = set(STRATEGIES[names[chunk * len(names) // chunks]])
        dropped = rebuilt if restored.isdisjoint({"rebuild", "offload"}) else inner
        here = arrived * (not restored & {"redispatch", "offload_tokens"}) + inner - dropped
        saved.append(0.0 if "offload" in restored else here / chunks)
        with_tokens = "offload_tokens" in restored or {"offload", "redispatch"} & restored == {"offload"}
        loaded.append((inner * ("offload" in restored) + arrived * with_tokens) / chunks)
        computed = 0.0 if "offload" in restored else dropped
        # Redispatched tokens are permuted from the output of a norm.
        computed += norm_again * (AHEAD if "redispatch" in restored else 1)
        again.append((3 * arrived * ("redispatch" in restored) + computed) / chunks)
    kept = dense + sum(saved)
    # Numbers of weights of a layer on one rank.
    experts = block.local_experts * weights_of(expert_products(block, 0))
    attention = weights_of(_attention_products(block))
    summed, attention_summed = (0.0, 0.0) if block.fused_gradients else (experts, attention)
    sum_bytes = element if stock else SUM_BYTES
    keys = _keys(block)
    # With a ring also received tensors: keys of the next step, and gradients of the last step.
    sums = keys * (element if stock else (SUM_BYTES + element) * (2 if block.ring else 1))
    # During the experts' backward of one chunk: gradients before each product, of one expert at a time, and
    # of the weights of its last product.
    received = block.received(block.rows)
    gradient_bytes = modules.gradient_bytes[block.gated]
    width_bytes = gradient_bytes * block.ffn / block.expert_tensor
    calls = 1 if block.grouped else block.local_experts
    chunk_bytes = received * (block.hidden * element + width_bytes / calls) / chunks
    if pipeline.splits_weights:
        # The input of that product waits instead.
        chunk_bytes += received * block.ffn / block.expert_tensor * element / calls / chunks
    else:
        chunk_bytes += element * summed / calls / (3 if block.gated else 2)
    # Gradients in flight from and to the experts: of two transfers, if there are enough chunks.
    chunk_bytes += received * block.hidden * element * min(3, 2 * (chunks - 1)) / chunks

    # Operands (input and gradient) of joined products of all chunks: of the experts, and of attention.
    inner_width = block.ffn / block.expert_tensor
    waiting = received * element * (2 * block.hidden + (2 + block.gated) * inner_width)
    attended: float = block.rows * block.batch * element
    attended *= sum(product.k + product.n for product in _attention_products(block))

    def differentiating(chunk: int) -> float:
        """Bytes of one layer during the experts' backward of a chunk; the last chunk comes first."""
        # Offloaded tensors of later chunks are already loaded; at the end nothing is left to load.
        ahead = sum(loaded[(chunk - n) % chunks] for n in range(AHEAD) if chunk >= n or num_layers > 1)
        held = dense + sum(saved[: chunk + 1]) + again[chunk] + ahead + chunk_bytes
        if joins_weights:
            held += waiting * (chunks - 1 - chunk) / chunks
        elif chunk < chunks - 1:
            held += sum_bytes * summed
        if not _keeps_shared(block):
            held += _shared(block, modules) / chunks
        elif not stock:
            # Shared experts come first; Megatron differentiates them last.
            held -= _shared(block, modules) * (chunks - chunk) / chunks
        # Attention of a chunk follows the experts of the next chunk. The first one allocates the sums.
        done = chunks - 2 - chunk
        if pipeline.whole_attention:
            # Gradients of the residual stream are collected.
            held += rows
        elif done > 0:
            held += SUM_BYTES * keys + rows - done * (dense - keys * element) / chunks
            held += attended * done / chunks if joins_weights else SUM_BYTES * attention_summed
        return held

    num_dense = len(dense_layers)
    kept_dense = dense_weights = 0.0
    if num_dense:
        assert block.dense_ffn is not None
        count = (modules.inner_gated if block.gated else modules.inner) - modules.weighted
        count *= "mlp" not in block.recompute_modules
        kept_dense = _kept_by_attention(block, modules)
        kept_dense += block.rows * block.batch * count * block.dense_ffn * element
        if not block.fused_gradients:
            dense_weights = weights_of(mlp_products(block, 0))
    # ``ampipe bench`` allocates the gradient of the output before it measures the pass.
    gathered = 0.0
    if gathers:
        others = summed * (num_layers - 1 - num_dense) + dense_weights * num_dense
        gathered = element * (others + attention_summed * (num_layers - 1))
    output_gradient = 0.0 if gathers else rows
    one_layer = max(map(differentiating, range(chunks)))
    end = rows + dense + sum_bytes * (summed + attention_summed) + sums
    peak = gathered + max(output_gradient + one_layer, end)
    # All layers before the one in its backward still have their saved activations.
    before = 0.0
    for layer in range(num_layers):
        if layer not in dense_layers:
            peak = max(peak, before + output_gradient + one_layer)
        before += kept_dense if layer in dense_layers else kept
    return peak


def expert_bytes(block: Block, rows: int, *, local: bool, inner: bool) -> float:
    """Bytes that experts save of a chunk with ``rows`` rows: received tokens, with ``inner`` more tensors."""
    _, arrived, inner_bytes = _kept(block, _LOCAL[block.element_bytes] if local else _FUSED)
    return (arrived + inner_bytes * inner) * rows / block.rows


def _rebuilt_share(block: Block, modules: _Modules) -> float:
    """The share of the experts' inner tensors that Megatron's selective recompute recomputes."""
    if "moe" in block.recompute_modules:
        return 1.0
    if "moe_act" not in block.recompute_modules:
        return 0.0
    # All but the result of the first product.
    return 1 - 2 / modules.inner_gated if block.gated else 1 - 1 / modules.inner


def _kept(block: Block, modules: _Modules) -> tuple[float, float, float]:
    """Bytes saved for the backward pass: outside the experts, received tokens, and inside the experts."""
    element = block.element_bytes
    per_row: float = modules.routing_bytes[0] * block.experts + modules.routing_bytes[1] * block.topk
    if modules.combined:
        per_row += block.rows_per_token * block.hidden * element
    dense = block.rows * block.batch * per_row
    dense += _kept_by_attention(block, modules) + _shared(block, modules) * _keeps_shared(block)
    received = block.received(block.rows)
    inner = (modules.inner_gated if block.gated else modules.inner) * block.ffn / block.expert_tensor
    return dense, received * (block.hidden * element + 4), received * inner * element


def _kept_by_attention(block: Block, modules: _Modules) -> float:
    """Bytes saved by attention, both norms and the residual stream."""
    tokens, element = block.rows * block.batch, block.element_bytes
    # A recomputed norm saves its input. Transformer Engine fuses the first norm with the projection, which
    # saves its output, except in latent attention.
    norms_again = int("layernorm" in block.recompute_modules)
    if "mla_up_proj" in block.recompute_modules or (norms_again and (block.latent or modules != _FUSED)):
        norms_again += 1
    norms = _norm_bytes(block, modules) * (2 - norms_again) + tokens * block.hidden * element * norms_again
    width = (block.heads * (block.head_size + block.value_size)) / block.tensor
    # Also the log-sum-exp of each head.
    attended = tokens * block.tensor * (width * element + 4 * block.heads / block.tensor)
    return norms + attended + _keys(block) * element


def _norm_bytes(block: Block, modules: _Modules) -> float:
    """Bytes saved by a norm and its input."""
    per_number = (modules.norms * block.element_bytes + modules.norms_wide * 4) / 2
    return block.rows * block.batch * block.hidden * per_number


def _shared(block: Block, modules: _Modules) -> float:
    """Bytes that the backward of shared experts needs saved."""
    if block.shared_ffn is None:
        return 0.0
    count = modules.inner_gated if block.gated else modules.inner
    # With sequence parallelism, each rank has a part of their width, and the rows of all ranks.
    return block.rows * block.batch * count * block.shared_ffn * block.element_bytes


def _keeps_shared(block: Block) -> bool:
    """Whether shared experts save these bytes instead of being recomputed."""
    return {"moe", "shared_experts"}.isdisjoint(block.recompute_modules)


def _keys(block: Block) -> float:
    """Number of elements in the keys and values that a block saves."""
    rows = block.sequence_length / (block.context if block.ring else 1)
    return rows * block.batch * block.key_value_width / block.tensor


def _attention_products(block: Block) -> list[Product]:
    return [*qkv_products(block, 0), *attention_products(block, 0)]
