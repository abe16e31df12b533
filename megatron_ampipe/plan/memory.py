"""Estimates the peak memory of a pass through consecutive blocks, in bytes, by degree and memory strategy.

The peak is at one of two moments of the backward pass. When it begins, every block still keeps all that its
backward needs, and the experts of a chunk of the last one hold gradients. When it ends, one block is left,
and gradients of parameters have gathered. What is kept depends on the modules: Megatron's local ones keep
more than those of Transformer Engine, which fuse operations. Not counted: weights, the optimizer, rounding by
the allocator, and, unless ``gathers``, gradients of parameters that Megatron has too.

A whole rank (:func:`memory_by_stage`) also holds weights, gradients, optimizer and buffers. Parameters are
counted exactly, as Megatron's modules have them. Not counted: the CUDA context, buffers of NCCL and HybridEP,
quantized copies of weights in FP8, padding of Megatron's buffers, fragmentation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.model_file import ModelFile, TrainingFlags, layers_by_stage, without_experts
from megatron_ampipe.plan.operation_times import (
    SUM_BYTES,
    Product,
    attention_products,
    expert_products,
    qkv_products,
)
from megatron_ampipe.schedule import STRATEGIES, Exchange, Pipeline, of_chunks
from megatron_ampipe.schedule.dataflow import AHEAD


@dataclass(frozen=True, slots=True)
class _Modules:
    """What a row of a block keeps, as tensors of 4, or else of ``Block.element_bytes`` bytes.

    ``norms`` are those of the hidden size of both norms and the residual stream, ``norms_wide`` with 4 bytes;
    ``inner`` those of an expert's width, with or without a gate, ``weighted`` of which exist because of the
    probability, and not in the MLP of a dense layer; ``routing_bytes`` are for each expert, and for each
    expert of a token; ``combined``: rows that came back from the experts are kept for the gradient of their
    probabilities; ``gradient_bytes`` are of the gradients inside an expert that exist at the same time,
    beyond what they have released, for each unit of its width, without and with a gate. In 16 bit, local
    modules multiply by the probability in fp32.
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
"""Transformer Engine, by reading."""
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
        pipeline: How they run; its exchange is that of the block.
        num_layers: How many blocks a pass goes through before the first is differentiated.
        dense_layers: Which of them have no experts, from 0.
        local: Blocks of Megatron's local modules, not of Transformer Engine's.
        gathers: Gradients of parameters stay until the end of the pass, and the gradient of the output is not
            counted, as in ``ampipe bench``.
    """
    stock = not pipeline.overlaps and block.exchange is Exchange.ROWS
    joins_weights = pipeline.joins_weights
    chunks, element = pipeline.backward_degree, block.element_bytes
    modules = _LOCAL[element] if local else _FUSED
    dense, arrived, inner = _kept(block, modules)
    rebuilt = inner * _rebuilt_share(block, modules)
    rows = block.rows * block.batch * block.hidden * element
    norm_again = (_of_norm(block, modules) - rows) * ("layernorm" in block.recompute_modules)
    names = of_chunks(pipeline.memory)
    # Of the experts of each chunk: what is kept, what is loaded from host memory, and what is restored right
    # before they are differentiated; of a redispatch while tokens of the next chunk are on their way.
    of_experts, loaded, again = [], [], []
    for chunk in range(chunks):
        restored = set(STRATEGIES[names[chunk * len(names) // chunks]])
        dropped = rebuilt if restored.isdisjoint({"rebuild", "offload"}) else inner
        here = arrived * (not restored & {"redispatch", "offload_tokens"}) + inner - dropped
        of_experts.append(0.0 if "offload" in restored else here / chunks)
        with_tokens = "offload_tokens" in restored or {"offload", "redispatch"} & restored == {"offload"}
        loaded.append((inner * ("offload" in restored) + arrived * with_tokens) / chunks)
        computed = 0.0 if "offload" in restored else dropped
        # Tokens are sent again from what a norm gives.
        computed += norm_again * (AHEAD if "redispatch" in restored else 1)
        again.append((3 * arrived * ("redispatch" in restored) + computed) / chunks)
    kept = dense + sum(of_experts)
    # Numbers of weights of a layer on one rank.
    experts = block.local_experts * _weights(expert_products(block, 0))
    attention = _weights(_of_attention(block))
    summed, of_attention = (0.0, 0.0) if block.fused_gradients else (experts, attention)
    sum_bytes = element if stock else SUM_BYTES
    keys = _keys(block)
    # Of a ring also what arrives: keys of the next step, and gradients of the last one.
    sums = keys * (element if stock else (SUM_BYTES + element) * (2 if block.ring else 1))
    # Of the chunk whose experts are differentiated: gradients before each product, of one expert at a time,
    # and of the weights of its last product.
    received = block.received(block.rows)
    gradient_bytes = modules.gradient_bytes[block.gated]
    of_width = gradient_bytes * block.ffn / block.expert_tensor
    calls = 1 if block.grouped else block.local_experts
    of_chunk = received * (block.hidden * element + of_width / calls) / chunks
    if pipeline.splits_weights:
        # The input of that product waits instead.
        of_chunk += received * block.ffn / block.expert_tensor * element / calls / chunks
    else:
        of_chunk += element * summed / calls / (3 if block.gated else 2)
    # Gradients on their way from and to the experts: of two transfers, if there are as many chunks.
    of_chunk += received * block.hidden * element * min(3, 2 * (chunks - 1)) / chunks

    # What products of all chunks take, input and gradient of each: of the experts, and of attention.
    inner_width = block.ffn / block.expert_tensor
    waiting = received * element * (2 * block.hidden + (2 + block.gated) * inner_width)
    attended: float = block.rows * block.batch * element
    attended *= sum(product.k + product.n for product in _of_attention(block))

    def differentiating(chunk: int) -> float:
        """Of one layer, while the experts of a chunk are differentiated; the last chunk comes first."""
        # Ahead of it, what is in host memory is loaded; in the end nothing is left to load.
        ahead = sum(loaded[(chunk - n) % chunks] for n in range(AHEAD) if chunk >= n or num_layers > 1)
        held = dense + sum(of_experts[: chunk + 1]) + again[chunk] + ahead + of_chunk
        if joins_weights:
            held += waiting * (chunks - 1 - chunk) / chunks
        elif chunk < chunks - 1:
            held += sum_bytes * summed
        if not _keeps_shared(block):
            held += _shared(block, modules) / chunks
        elif not stock:
            # Shared experts come first; Megatron differentiates them last.
            held -= _shared(block, modules) * (chunks - chunk) / chunks
        # The attention of a chunk follows the experts of the next one. The first begins the sums.
        done = chunks - 2 - chunk
        if pipeline.whole_attention:
            # Gradients of the residual stream are collected.
            held += rows
        elif done > 0:
            held += SUM_BYTES * keys + rows - done * (dense - keys * element) / chunks
            held += attended * done / chunks if joins_weights else SUM_BYTES * of_attention
        return held

    num_dense = len(dense_layers)
    kept_dense = dense_weights = 0.0
    if num_dense:
        width, products = block.dense_ffn or 0, 3 if block.gated else 2
        count = (modules.inner_gated if block.gated else modules.inner) - modules.weighted
        count *= "mlp" not in block.recompute_modules
        kept_dense = _kept_by_attention(block, modules) + block.rows * block.batch * count * width * element
        if not block.fused_gradients:
            dense_weights = products * block.hidden * width / block.tensor
    # The gradient of the output is there before the pass that ``ampipe bench`` watches.
    gathered = 0.0
    if gathers:
        others = summed * (num_layers - 1 - num_dense) + dense_weights * num_dense
        gathered = element * (others + of_attention * (num_layers - 1))
    given = 0.0 if gathers else rows
    of_one = max(map(differentiating, range(chunks)))
    end = rows + dense + sum_bytes * (summed + of_attention) + sums
    found = gathered + max(given + of_one, end)
    # The layers before the one that is differentiated keep all that theirs needs.
    before = 0.0
    for layer in range(num_layers):
        if layer not in dense_layers:
            found = max(found, before + given + of_one)
        before += kept_dense if layer in dense_layers else kept
    return found


def expert_bytes(block: Block, rows: int, *, local: bool, inner: bool) -> float:
    """What the experts keep of a chunk with these rows of a rank: what arrived, and the ``inner`` tensors."""
    _, arrived, of_experts = _kept(block, _LOCAL[block.element_bytes] if local else _FUSED)
    return (arrived + of_experts * inner) * rows / block.rows


def _rebuilt_share(block: Block, modules: _Modules) -> float:
    """Of the experts' inner tensors the share that Megatron's selective recompute computes once more."""
    if "moe" in block.recompute_modules:
        return 1.0
    if "moe_act" not in block.recompute_modules:
        return 0.0
    # All but the result of the first product.
    return 1 - 2 / modules.inner_gated if block.gated else 1 - 1 / modules.inner


def _kept(block: Block, modules: _Modules) -> tuple[float, float, float]:
    """Bytes saved for the backward pass: outside the experts, of what arrives, and inside them."""
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
    """Bytes that attention, both norms and the residual stream keep."""
    tokens, element = block.rows * block.batch, block.element_bytes
    # Of a norm that runs again, its input. Transformer Engine joins the first one and the projection, which
    # keeps the output, except in latent attention.
    norms_again = int("layernorm" in block.recompute_modules)
    if "mla_up_proj" in block.recompute_modules or (norms_again and (block.latent or modules != _FUSED)):
        norms_again += 1
    norms = _of_norm(block, modules) * (2 - norms_again) + tokens * block.hidden * element * norms_again
    width = (block.heads * (block.head_size + block.value_size)) / block.tensor
    # Also the log-sum-exp of each head.
    attended = tokens * block.tensor * (width * element + 4 * block.heads / block.tensor)
    return norms + attended + _keys(block) * element


def _of_norm(block: Block, modules: _Modules) -> float:
    """Bytes that a norm and its input keep."""
    per_number = (modules.norms * block.element_bytes + modules.norms_wide * 4) / 2
    return block.rows * block.batch * block.hidden * per_number


def _shared(block: Block, modules: _Modules) -> float:
    """Bytes that the backward of shared experts needs."""
    if block.shared_ffn is None:
        return 0.0
    count = modules.inner_gated if block.gated else modules.inner
    # With sequence parallelism, each rank has a part of their width and the rows of all.
    return block.rows * block.batch * count * block.shared_ffn * block.element_bytes


def _keeps_shared(block: Block) -> bool:
    """Whether shared experts keep it, rather than run again."""
    return {"moe", "shared_experts"}.isdisjoint(block.recompute_modules)


def _keys(block: Block) -> float:
    """Numbers in the keys and values that a block keeps."""
    rows = block.sequence_length / (block.context if block.ring else 1)
    return rows * block.batch * block.key_value_width / block.tensor


def _weights(products: Sequence[Product]) -> float:
    return sum(product.k * product.n for product in products)


def _of_attention(block: Block) -> list[Product]:
    return [*qkv_products(block, 0), *attention_products(block, 0)]


# What a whole rank holds.

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class Parameters(NamedTuple):
    """Numbers of parameters of one rank, which different data-parallel groups reduce."""

    others: float = 0
    experts: float = 0

    def __add__(self, other: Parameters) -> Parameters:  # type: ignore[override]
        return Parameters(self.others + other.others, self.experts + other.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank in training.

    Attributes:
        stage: The rank's pipeline stage, from 0.
        parameters: Of the rank: experts and others.
        weights: In the dtype of training.
        gradients: Megatron's buffers, of all parameters also with a distributed optimizer.
        optimizer: Master weights and moments; a share of them with a distributed optimizer.
        activations: Peak over the micro-batches that wait for their backward pass; with the logits.
        buffers: Those that DeepEP keeps for its exchange.
    """

    stage: int
    parameters: Parameters
    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def memory_by_stage(model: ModelFile, block: Block, pipeline: Pipeline) -> list[RankMemory] | str:
    """The memory of a rank of each pipeline stage, or why it cannot be estimated.

    Args:
        model: The whole model.
        block: A block of it on a rank, with the exchange of the pipeline.
        pipeline: How blocks run.

    Raises:
        BadInput: a value of the model is invalid.
    """
    flags = model.read(TrainingFlags)
    if flags.hybrid_layer_pattern is not None:
        return "layers of hybrid models are not counted"
    if flags.moe_latent_size:
        return "projections of --moe-latent-size are not counted"
    if flags.optimizer not in ("adam", "sgd"):
        return f"what the optimizer {flags.optimizer} keeps is not known"
    if not flags.vocab_size:
        return "the model file has no vocab-size"
    # Of any stage, and not only of the one that is planned.
    block = replace(block, dense_ffn=flags.ffn_hidden_size or 4 * block.hidden)
    parts, stages = layers_by_stage(model), flags.pipeline_model_parallel_size
    return [_of_rank(flags, block, pipeline, stage, parts[stage::stages]) for stage in range(stages)]


def _of_rank(
    flags: TrainingFlags, block: Block, pipeline: Pipeline, stage: int, parts: list[tuple[bool, ...]]
) -> RankMemory:
    """Of a rank of one pipeline stage; ``parts`` are its layers by virtual stage."""
    parameters = _parameters(flags, block, stage, parts)
    wide, element = block.dtype == "fp32", block.element_bytes
    aware = flags.use_precision_aware_optimizer
    gradient = 4 if wide else 2 if flags.grad_reduce_in_bf16 else _BYTES[flags.main_grads_dtype]
    kept = 4.0 * (flags.sgd_momentum > 0)
    if flags.optimizer == "adam":
        kept = _BYTES[flags.exp_avg_dtype] + _BYTES[flags.exp_avg_sq_dtype]
    if not wide:
        # Transformer Engine keeps those 16 bits of a master weight that a weight in BF16 lacks.
        halves = aware and (flags.main_params_dtype == "fp16" or block.dtype == "bf16")
        kept += 2 if halves else 4
    shards = (block.replicas, block.expert_replicas) if block.shards_optimizer else (1, 1)
    return RankMemory(
        stage=stage,
        parameters=parameters,
        weights=sum(parameters) * element,
        gradients=sum(parameters) * gradient,
        optimizer=kept * sum(count / ranks for count, ranks in zip(parameters, shards, strict=True)),
        activations=_activations(flags, block, pipeline, stage, parts),
        buffers=_deepep_bytes(block) if block.dispatcher == "deepep" else 0.0,
    )


def _parameters(flags: TrainingFlags, block: Block, stage: int, parts: list[tuple[bool, ...]]) -> Parameters:
    """Parameters of a rank of one pipeline stage, as Megatron's GPT model has them."""
    hidden, stages = block.hidden, flags.pipeline_model_parallel_size
    of_norm = hidden * (1 if flags.normalization == "RMSNorm" else 2)
    kinds = [has_experts for part in parts for has_experts in part]
    total = sum((_layer(flags, block, of_norm, has_experts) for has_experts in kinds), Parameters())
    first, last, mtp = stage == 0, stage == stages - 1, flags.mtp_num_layers or 0
    embedding = _vocabulary(flags) * hidden / block.tensor
    count = 0.0
    # Predictors of later tokens embed them, and a shared output layer is a copy of the embedding.
    tied = not flags.untie_embeddings_and_output_weights
    count += embedding * (first or (last and (mtp > 0 or tied)))
    if first and flags.position_embedding_type == "learned_absolute":
        count += flags.max_position_embeddings * hidden
    if last:
        count += of_norm + embedding * (not tied)
        count += mtp * (2 * hidden * hidden / block.tensor + 3 * of_norm)
        total = sum([_layer(flags, block, of_norm, has_experts) for has_experts in kinds[-1:] * mtp], total)
    return total + Parameters(count)


def _vocabulary(flags: TrainingFlags) -> int:
    """Rows of the embedding: Megatron pads the vocabulary."""
    multiple = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    return math.ceil(flags.vocab_size / multiple) * multiple


def _layer(flags: TrainingFlags, block: Block, of_norm: int, has_experts: bool) -> Parameters:
    """Parameters of a layer on one rank."""
    hidden, tensor, bias = block.hidden, block.tensor, not flags.disable_bias_linear
    count: float = 2 * of_norm
    for k, n in block.projections:
        # Transformer Engine's projections to compressed rows are the same on all tensor-parallel ranks.
        compresses = block.latent and k == hidden and n != block.heads * block.head_size
        count += k * n / (1 if compresses and not block.local else tensor)
        if not block.latent and (bias or flags.add_qkv_bias):
            count += n / tensor
    count += block.heads * block.value_size / tensor * hidden + hidden * bias
    if flags.qk_layernorm:
        sizes = (flags.kv_lora_rank, flags.q_lora_rank or 0) if block.latent else (block.head_size,) * 2
        count += sum(sizes) * of_norm / hidden
    if not has_experts:
        return Parameters(count + _mlp(block, hidden, (block.dense_ffn or 0) / tensor, bias=bias))
    count += block.experts * hidden + block.experts * bias
    if block.shared_ffn is not None:
        count += _mlp(block, hidden, block.shared_ffn / tensor) + hidden * flags.moe_shared_expert_gate
    expert = _mlp(block, hidden, block.ffn / block.expert_tensor, bias=bias)
    return Parameters(count, block.local_experts * expert)


def _mlp(block: Block, hidden: int, width: float, *, bias: bool = False) -> float:
    """Parameters of two products with an activation between."""
    up = (2 if block.gated else 1) * width
    return hidden * (up + width) + (up + hidden) * bias


def _activations(
    flags: TrainingFlags, block: Block, pipeline: Pipeline, stage: int, parts: list[tuple[bool, ...]]
) -> float:
    """Peak of the layers over all micro-batches in flight, and logits in two precisions on the last stage."""
    stages, virtual = flags.pipeline_model_parallel_size, len(parts)
    # As launch.planned.in_flight, with as many micro-batches as a pipeline holds.
    passes = stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    part = max(parts, key=len)
    num_layers = len(part) * passes
    row_bytes = block.batch * block.element_bytes * block.rows
    logits = 0.0
    if stage == stages - 1:
        logits = block.batch * block.rows * _vocabulary(flags) * (block.element_bytes + 4)
    if block.recomputes:
        one = peak_bytes(block, pipeline, local=block.local)
        return one + (num_layers - 1) * row_bytes * block.hidden + logits
    dense = {len(part) * index + layer for index in range(passes) for layer in without_experts(part)}
    # With a partner, a layer is kept ahead before the backward pass has released one.
    ahead = pipeline.partner is not None
    layers = peak_bytes(block, pipeline, num_layers=num_layers + ahead, dense_layers=dense, local=block.local)
    return layers + logits


def _deepep_bytes(block: Block) -> float:
    """Of DeepEP's buffers for 20 multiprocessors, after ``csrc/config.hpp``: rows with their choices."""
    ranks = block.expert * block.expert_tensor
    channels, row = 10, block.hidden * 2 + 128 * (8 + 4 + 4) + 16
    near, nodes = min(ranks, 8), ranks // 8
    return channels * row * (near * 288 + (2 * 128 * nodes if nodes > 1 else 0))
