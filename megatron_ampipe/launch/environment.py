"""What is read of Megatron's arguments for a run: its block, and what surrounds the blocks.

Functions of arguments stand here, for :func:`~megatron_ampipe.launch.resolve.resolve` and for the table of
refusals. Nothing else below the entries of a launch reads them. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from megatron_ampipe.block.hybrid_pattern import runs_of, stages_of
from megatron_ampipe.block.megatron_settings import Arguments
from megatron_ampipe.block.settings import Settings
from megatron_ampipe.compat import delays_weight_gradients
from megatron_ampipe.plan.block import Block
from megatron_ampipe.plan.model_block import StageLayers, block_of, layers_of
from megatron_ampipe.plan.model_file import ModelFile
from megatron_ampipe.plan.model_flags import GRAPH_FLAGS, SIZE_FLAGS
from megatron_ampipe.plan.rank_memory import waiting_passes
from megatron_ampipe.schedule import BlockFeatures, Exchange, Pipeline, useful_exchanges
from megatron_ampipe.schedule.chunks import SequenceLayout
from megatron_ampipe.schedule.features import (
    boundary,
    expert_tensor_ranks,
    features_of_settings,
    fp8_recipe,
    gather_lane,
    rows_of_recipe,
    splits_weights,
    uses_ring_attention,
)

_DTYPES = {
    "torch.float32": "fp32",
    "torch.float16": "fp16",
    "torch.bfloat16": "bf16",
    "torch.uint8": "fp8",
}
_OF_STAGES = (
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Arguments that decide whether layers can be split over pipeline stages."""
Parsed = argparse.Namespace | Arguments
"""Megatron's arguments: as its parser returns them, or from elsewhere."""
PARTNER_FLAG = "--overlap-moe-expert-parallel-comm"
"""Megatron's flag for what ``--ampipe-partner`` does."""


class LoopState(Protocol):
    """Megatron's arguments that its training loop counts in, or reads in every step."""

    curr_iteration: int
    overlap_moe_expert_parallel_comm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What surrounds the blocks of a run: ranks, data, and Megatron's training loop.

    Attributes:
        loop: The state of Megatron's loop. All other fields stay as they are.
        world_size: Number of ranks; ``rank`` is this one.
        on_gpu: Whether the blocks run on a GPU.
        trains: Whether there are training iterations (no ``--skip-train``).
        log_interval: Iterations between two lines of Megatron's log.
        sequence_length: Tokens of a sequence; ``batch`` sequences are a micro-batch.
        layout: How the rows of a sequence are distributed over ranks.
        tensor_ranks: Number of tensor-parallel ranks.
        documents: ``packed`` if sequences consist of documents that do not attend to each other, ``masked``
            if the masks of the data loader separate them, else None.
        slices_sequence: Whether Megatron's loader gives context-parallel ranks slices of the sequence even if
            it is packed from documents; else each document is shared.
        num_experts: Experts of a layer; None without MoE layers.
        hidden_size: Width of the residual stream.
        expert_ranks: Number of ranks that share the experts of a layer.
        expert_replicas: Whether several ranks hold the same experts, whose gradients they reduce.
        ring_ranks: Number of ranks that pass keys and values around in a ring; 1 without.
        other_attention: Megatron's ``--experimental-attention-variant``.
        fp8_recipe: Megatron's FP8 recipe; None without FP8.
        exchanges: The exchanges that the layers can choose from.
        chunks_boundary: Why consecutive layers cannot share a schedule, where attention runs per chunk; None
            if they can.
        whole_boundary: The same where attention is computed for the whole sequence at once.
        uses_fsdp: Whether parameters are those of Megatron-FSDP.
        overlaps_reductions: Whether gradients are reduced during backward passes (``--overlap-grad-reduce``).
        graph_warm_up: Micro-batches that run before CUDA graphs are captured.
    """

    loop: LoopState
    world_size: int
    rank: int
    on_gpu: bool
    trains: bool
    log_interval: int
    sequence_length: int
    batch: int
    layout: SequenceLayout
    tensor_ranks: int
    documents: str | None
    slices_sequence: bool
    num_experts: int | None
    hidden_size: int
    expert_ranks: int
    expert_replicas: bool
    ring_ranks: int
    other_attention: str | None
    fp8_recipe: str | None
    exchanges: tuple[Exchange, ...]
    chunks_boundary: str | None
    whole_boundary: str | None
    uses_fsdp: bool
    overlaps_reductions: bool
    graph_warm_up: int

    @property
    def iteration(self) -> int:
        """The iteration that runs, from 1 as in Megatron's log; its own count begins at 0."""
        return self.loop.curr_iteration + 1

    @property
    def rows(self) -> int:
        """Rows of the residual stream on a rank."""
        return self.sequence_length // (self.layout.tensor_ranks * self.layout.context_ranks)

    @property
    def shape(self) -> tuple[int, int]:
        """The input of a block on a rank: rows and sequences."""
        return self.rows, self.batch

    def rows_of_tile(self, batch: int) -> int:
        """The number that a chunk's rows, of ``batch`` tokens each, must be a multiple of."""
        return rows_of_recipe(self.fp8_recipe, batch)

    def boundary(self, pipeline: Pipeline) -> str | None:
        """Why consecutive layers cannot share a schedule of this pipeline; None if they can."""
        return self.whole_boundary if pipeline.whole_attention else self.chunks_boundary

    def shares_schedule(self, pipeline: Pipeline) -> bool:
        """Whether consecutive layers share a schedule."""
        return pipeline.stack != 1 and self.boundary(pipeline) is None


def environment_of(given: argparse.Namespace, settings: Settings, *, on_gpu: bool) -> Environment:
    """The environment that Megatron's validated arguments describe."""
    args = Arguments(given)
    expert_ranks = args.expert_model_parallel_size * expert_tensor_ranks(args)
    ranks_of_stage = args.world_size // (args.pipeline_model_parallel_size or 1)
    return Environment(
        loop=given,
        world_size=args.world_size,
        rank=args.rank or 0,
        on_gpu=on_gpu,
        trains=not args.skip_train,
        log_interval=args.log_interval,
        sequence_length=args.seq_length,
        batch=args.micro_batch_size,
        layout=layout_of_args(args),
        tensor_ranks=args.tensor_model_parallel_size,
        documents="packed" if packs_documents(args) else "masked" if masks_documents(args) else None,
        slices_sequence=not args.sft,
        num_experts=args.num_experts,
        hidden_size=args.hidden_size,
        expert_ranks=expert_ranks,
        expert_replicas=ranks_of_stage > expert_ranks,
        ring_ranks=args.context_parallel_size if uses_ring_attention(args) else 1,
        other_attention=args.experimental_attention_variant,
        fp8_recipe=fp8_recipe(args),
        exchanges=exchanges_of(args, settings.ranks_per_node),
        chunks_boundary=boundary(args, whole_attention=False),
        whole_boundary=boundary(args, whole_attention=True),
        uses_fsdp=bool(args.use_megatron_fsdp),
        overlaps_reductions=bool(args.overlap_grad_reduce),
        graph_warm_up=max(1, args.cuda_graph_warmup_steps or 1),
    )


def waits_for_stage(args: Parsed) -> bool:
    """Whether passes have no partner: without virtual stages, a backward pass waits for the next stage."""
    stages = args.pipeline_model_parallel_size or 1
    return stages > 1 and args.virtual_pipeline_model_parallel_size is None


def partnered_share(args: Parsed, settings: Settings) -> float:
    """The share of a step's passes that Megatron's loops can run together with another micro-batch's pass."""
    if not settings.partner or waits_for_stage(args):
        return 0.0
    # With pipeline parallelism, the warm-up passes, and as many at the end, run alone.
    alone = 1 if args.pipeline_model_parallel_size == 1 else passes_in_flight(args, settings)
    return max(0.0, 1 - alone / passes_of_step(args))


def passes_in_flight(args: Parsed, settings: Settings) -> int:
    """The largest number of forward passes of a (virtual) pipeline stage that wait for their backward."""
    stages = args.pipeline_model_parallel_size
    virtual = args.virtual_pipeline_model_parallel_size or 1
    waiting = waiting_passes(stages, virtual) + bool(virtual > 1 and settings.partner)
    return int(min(waiting, passes_of_step(args)))


def passes_of_step(args: Parsed) -> int:
    """Number of forward passes of a rank through its (virtual) pipeline stages in a training step."""
    sequences = args.micro_batch_size * (args.data_parallel_size or 1)
    microbatches: int = -(-args.global_batch_size // sequences)
    return microbatches * (args.virtual_pipeline_model_parallel_size or 1)


def layout_of_args(args: Parsed) -> SequenceLayout:
    """How the rows of a sequence are distributed over ranks."""
    return SequenceLayout(
        tensor_ranks=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        context_ranks=args.context_parallel_size,
    )


def packs_documents(args: Parsed) -> bool:
    """Whether sequences are packed from documents that do not attend to each other."""
    return bool(args.sft or getattr(args, "dataloader_inter_document_masking", False))


def masks_documents(args: Parsed) -> bool:
    """Whether the data loader's masks separate documents."""
    return bool(args.create_attention_mask_in_dataloader) and reads_masks(args)


def reads_masks(args: Parsed) -> bool:
    """Whether any layer applies the masks of ``--reset-attention-mask``, by the rule of ``reads_mask``."""
    return bool(
        args.reset_attention_mask
        and args.transformer_impl == "local"
        and not args.multi_latent_attention
        and args.context_parallel_size == 1
        and (args.window_size is None or args.window_attn_skip_freq is not None)
    )


def exchanges_of(args: Parsed, per_node: int | None) -> tuple[Exchange, ...]:
    """The exchanges that layers can choose from, with so many ranks on a node; None if that is unknown."""
    num_experts = getattr(args, "num_experts", None) or 1
    return useful_exchanges(args, num_experts, per_node)


def ranks_per_node(given: int | None) -> int | None:
    """Ranks per node, as the flag gives it, else from the launcher, such as torchrun; None if unknown."""
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return given if given is not None or not local_ranks.isdecimal() else int(local_ranks)


def high_priority_groups(args: Parsed) -> list[str]:
    """The process groups of transfers that overlap with computation, as Megatron names them."""
    names = ["ep", "tp_ep_mp"]
    if gather_lane(args, None):
        names.append("ep_tp")
    if uses_ring_attention(args):
        names.append("cp")
    return names


def features_of_args(args: Parsed, settings: Settings) -> tuple[BlockFeatures, BlockFeatures]:
    """The features of blocks in a training pass: with their own schedules, and with one that they share."""
    local = args.transformer_impl == "local"
    alone = features_of_settings(args, settings, shares_schedule=False, local=local)
    sharing = features_of_settings(args, settings, shares_schedule=True, local=local)
    return alone, sharing


def layers_split_weights(args: Parsed) -> bool:
    """Whether the layers of a run can compute weight gradients separately, with the installed packages."""
    return splits_weights(args) and (args.transformer_impl == "local" or delays_weight_gradients())


def block_of_args(args: Parsed, settings: Settings, *, recomputes: bool = False) -> tuple[Block, StageLayers]:
    """The block that Megatron's arguments describe, and the layers of a pipeline stage.

    ``recomputes``: schedules recompute the layers, in place of Megatron's full recompute.
    """
    model = model_of_args(args, settings, recomputes=recomputes)
    block, _ = block_of(model, None, ranks=args.world_size)
    # Layers use the nodes of this run, even if the figures are of other machines.
    block = replace(
        block,
        ranks_per_node=settings.ranks_per_node,
        splits_weights=block.splits_weights and layers_split_weights(args),
    )
    if not args.bf16 and not args.fp16:
        # A model file has no key for fp32: without a precision, it means the precision of the cluster.
        block = replace(block, dtype="fp32")
    return block, layers_of(model)


def model_of_args(
    args: Parsed, settings: Settings, *, recomputes: bool = False, keys: Sequence[str] = SIZE_FLAGS
) -> ModelFile:
    """The entries of a model file with the same sizes, from which a block is made.

    ``keys``: the flags to take over; with ``TRAINING_FLAGS``, the memory of a rank can be estimated too.
    """
    values: dict[str, object] = {}
    for flag in keys:
        value = getattr(args, flag.replace("-", "_"), None)
        if value is not None and flag not in GRAPH_FLAGS:
            # Megatron's validation makes types of torch of some.
            values[flag] = _DTYPES.get(str(value), value)
    if "disable-bias-linear" in keys:
        values["disable-bias-linear"] = not args.add_bias_linear
    for name in _OF_STAGES:
        if value := getattr(args, name, None):
            values[name.replace("_", "-")] = str(value) if name == _OF_STAGES[0] else value
    if virtual := getattr(args, "virtual_pipeline_model_parallel_size", None):
        # Megatron's validation has computed it, from a layout or from layers of a stage.
        values["num-virtual-stages-per-pipeline-rank"] = virtual
        values.pop("num-layers-per-virtual-pipeline-stage", None)
    if (getattr(args, "moe_expert_capacity_factor", None) or 0.0) < 0:
        # Megatron treats a negative factor as none.
        del values["moe-expert-capacity-factor"]
    if recomputes:
        values["recompute-granularity"] = "full"
    stages = stages_of(args)
    if stages is not None and not runs_of(stages):
        # Plans cover only pairs of attention and MoE layers.
        del values["hybrid-layer-pattern"]
    values["fp8-format"] = getattr(args, "fp8", None)
    values["fp8-recipe"] = fp8_recipe(args)
    values["no-gradient-accumulation-fusion"] = not args.gradient_accumulation_fusion
    return ModelFile(Path("arguments"), values, {}, settings)
