"""Estimates the memory of a whole rank in training: weights, gradients, optimizer, activations, buffers.

Parameters are counted exactly, as Megatron's modules have them. Not counted: the CUDA context, buffers of
NCCL and HybridEP, quantized copies of weights in FP8, padding of Megatron's buffers, fragmentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.memory import peak_bytes, stage_bytes
from megatron_ampipe.plan.model_block import layers_by_stage, without_experts
from megatron_ampipe.plan.model_file import ModelFile
from megatron_ampipe.plan.model_flags import TrainingFlags
from megatron_ampipe.plan.operation_times import (
    attention_products,
    expert_products,
    mlp_products,
    shared_products,
    weights_of,
)
from megatron_ampipe.schedule import Pipeline

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


class Parameters(NamedTuple):
    """Numbers of parameters of one rank, by the data-parallel group that reduces them."""

    others: float = 0
    experts: float = 0

    def __add__(self, other: Parameters) -> Parameters:  # type: ignore[override]
        return Parameters(self.others + other.others, self.experts + other.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Bytes of one rank in training.

    Attributes:
        stage: The rank's pipeline stage, from 0.
        parameters: Numbers of parameters of the rank: of experts and others.
        weights: Weights in the dtype of training.
        gradients: Megatron's gradient buffers, of all parameters even with a distributed optimizer.
        optimizer: Master weights and moments; a share of them with a distributed optimizer.
        activations: Peak over the micro-batches that wait for their backward pass, with the logits.
        buffers: DeepEP's communication buffers.
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
        """The sum of all parts."""
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
    # For all stages, not only for the planned one.
    block = replace(block, dense_ffn=flags.ffn_hidden_size or 4 * block.hidden)
    parts, stages = layers_by_stage(model), flags.pipeline_model_parallel_size
    return [_rank_memory(flags, block, pipeline, stage, parts[stage::stages]) for stage in range(stages)]


def _rank_memory(
    flags: TrainingFlags, block: Block, pipeline: Pipeline, stage: int, parts: list[tuple[bool, ...]]
) -> RankMemory:
    """The memory of a rank of one pipeline stage; ``parts`` are its layers by virtual stage."""
    parameters = _parameters(flags, block, stage, parts)
    wide, element = block.dtype == "fp32", block.element_bytes
    aware = flags.use_precision_aware_optimizer
    gradient = 4 if wide else 2 if flags.grad_reduce_in_bf16 else _BYTES[flags.main_grads_dtype]
    kept = 4.0 * (flags.sgd_momentum > 0)
    if flags.optimizer == "adam":
        kept = _BYTES[flags.exp_avg_dtype] + _BYTES[flags.exp_avg_sq_dtype]
    if not wide:
        # Transformer Engine only keeps the 16 bits of a master weight that a BF16 weight lacks.
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
    norm_size = hidden * (1 if flags.normalization == "RMSNorm" else 2)
    kinds = [has_experts for part in parts for has_experts in part]
    total = sum((_layer(flags, block, norm_size, has_experts) for has_experts in kinds), Parameters())
    first, last, mtp = stage == 0, stage == stages - 1, flags.mtp_num_layers or 0
    embedding = _vocabulary(flags) * hidden / block.tensor
    count = 0.0
    # Predictors of later tokens embed them, and a shared output layer is a copy of the embedding.
    tied = not flags.untie_embeddings_and_output_weights
    count += embedding * (first or (last and (mtp > 0 or tied)))
    if first and flags.position_embedding_type == "learned_absolute":
        count += flags.max_position_embeddings * hidden
    if last:
        count += norm_size + embedding * (not tied)
        count += mtp * (2 * hidden * hidden / block.tensor + 3 * norm_size)
        total = sum([_layer(flags, block, norm_size, has_experts) for has_experts in kinds[-1:] * mtp], total)
    return total + Parameters(count)


def _vocabulary(flags: TrainingFlags) -> int:
    """Rows of the embedding: Megatron pads the vocabulary."""
    multiple = flags.make_vocab_size_divisible_by * flags.tensor_model_parallel_size
    return math.ceil(flags.vocab_size / multiple) * multiple


def _layer(flags: TrainingFlags, block: Block, norm_size: int, has_experts: bool) -> Parameters:
    """Parameters of a layer on one rank."""
    hidden, tensor, bias = block.hidden, block.tensor, not flags.disable_bias_linear
    count: float = 2 * norm_size
    for k, n in block.projections:
        # Transformer Engine's projections to compressed rows are the same on all tensor-parallel ranks.
        compresses = block.latent and k == hidden and n != block.heads * block.head_size
        count += k * n / (1 if compresses and not block.local else tensor)
        if not block.latent and (bias or flags.add_qkv_bias):
            count += n / tensor
    count += weights_of(attention_products(block, 0), bias=bias)
    if flags.qk_layernorm:
        sizes = (flags.kv_lora_rank, flags.q_lora_rank or 0) if block.latent else (block.head_size,) * 2
        count += sum(sizes) * norm_size / hidden
    if not has_experts:
        return Parameters(count + weights_of(mlp_products(block, 0), bias=bias))
    count += block.experts * hidden + block.experts * bias
    if block.shared_ffn is not None:
        count += weights_of(shared_products(block, 0)) + hidden * flags.moe_shared_expert_gate
    return Parameters(count, block.local_experts * weights_of(expert_products(block, 0), bias=bias))


def _activations(
    flags: TrainingFlags, block: Block, pipeline: Pipeline, stage: int, parts: list[tuple[bool, ...]]
) -> float:
    """Peak of the layers over all micro-batches in flight, and logits in two precisions on the last stage."""
    stages, virtual = flags.pipeline_model_parallel_size, len(parts)
    passes = waiting_passes(stages, virtual, stage=stage)
    part = max(parts, key=len)
    num_layers = len(part) * passes
    row_bytes = block.batch * block.element_bytes * block.rows
    logits = 0.0
    if stage == stages - 1:
        logits = block.batch * block.rows * _vocabulary(flags) * (block.element_bytes + 4)
    if block.recomputes:
        one_layer = peak_bytes(block, pipeline, local=block.local)
        peaks = 1
        if block.captures_passes and pipeline.partner is None:
            # What graphs of one stack and micro-batch need for a layer is not there for others.
            peaks = passes * math.ceil(len(part) / pipeline.stack_of(len(part)))
        return peaks * one_layer + (num_layers - peaks) * row_bytes * block.hidden + logits
    layers = stage_bytes(
        block,
        pipeline,
        num_layers=len(part),
        dense_layers=without_experts(part),
        passes=passes,
        ahead=pipeline.partner is not None,
        local=block.local,
    )
    return layers + logits


def waiting_passes(stages: int, virtual: int, *, stage: int = 0) -> int:
    """The largest number of passes of a rank's (virtual) pipeline stages that wait for their backward.

    As in ``megatron.core.pipeline_parallel.schedules``: the warm-up passes and the current one.
    """
    return stages - stage if virtual == 1 else 2 * (stages - stage - 1) + (virtual - 1) * stages + 1


def _deepep_bytes(block: Block) -> float:
    """Bytes of DeepEP's buffers for 20 multiprocessors, after ``csrc/config.hpp``: rows with choices."""
    ranks = block.expert * block.expert_tensor
    channels, row = 10, block.hidden * 2 + 128 * (8 + 4 + 4) + 16
    ranks_per_node, nodes = min(ranks, 8), ranks // 8
    return channels * row * (ranks_per_node * 288 + (2 * 128 * nodes if nodes > 1 else 0))
