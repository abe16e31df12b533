"""The block and the layers that a model file describes.

It is the only place that makes a :class:`~.block.Block` of flags: Megatron's arguments and a benchmark's case
become the flags of a model file first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from types import SimpleNamespace
from typing import TypedDict

from megatron_ampipe.block.hybrid_pattern import runs_of, stages_of
from megatron_ampipe.block.layout import misfit
from megatron_ampipe.block.settings import SETTING
from megatron_ampipe.errors import BadInput, meant
from megatron_ampipe.plan.block import FLEX_BACKENDS, Block
from megatron_ampipe.plan.cluster import Cluster, Dtype
from megatron_ampipe.plan.model_file import ModelFile
from megatron_ampipe.plan.model_flags import TRAINING_FLAGS, ModelFlags
from megatron_ampipe.schedule.features import (
    FP8_TILES,
    OTHER_FP8_RECIPE,
    chooses_at_once,
    fp8_recipe,
    has_other_fp8_recipe,
    router_has_losses,
    splits_weights,
    uses_ring_attention,
)


def block_of(
    model: ModelFile, cluster: Cluster | None, *, ranks: int | None = None, imbalance: float = 1.0
) -> tuple[Block, tuple[str, ...]]:
    """The block of a model on a cluster.

    Args:
        model: The model file.
        cluster: Provides dtype and number of ranks if they are not given; None for a model file that names
            its dtype, or trains in fp32.
        ranks: Number of ranks of the run; the ranks of one node of the cluster if None.
        imbalance: See :class:`Block`.

    Returns:
        The block, and a sentence for each assumption about things that the model file does not specify.

    Raises:
        BadInput: a value is missing or invalid; the message names file and line.
    """
    if ranks is None:
        assert cluster is not None
        ranks = cluster.ranks_per_node
    flags, own = model.flags, model.own
    layout = _layout(flags, ranks)
    dtype = _dtype(flags, cluster)
    is_local = flags.transformer_impl == "local"
    recompute_modules: tuple[str, ...] = ()
    if flags.recompute_granularity == "selective":
        recompute_modules = flags.recompute_modules
    block = Block(
        sequence_length=flags.seq_length,
        batch=flags.micro_batch_size,
        hidden=flags.hidden_size,
        heads=flags.num_attention_heads,
        **_attention(flags),
        **_feed_forward(flags, has_dense_layers=bool(layers_of(model).dense)),
        capacity=flags.moe_expert_capacity_factor,
        capacity_per_chunk=own.capacity_scope == "chunk",
        chooses=chooses_at_once(flags, own),
        padded=flags.moe_pad_expert_input_to_capacity,
        imbalance=imbalance,
        grouped=flags.moe_grouped_gemm,
        dispatcher=flags.dispatcher,
        dtype=dtype,
        fp8_tile=FP8_TILES.get(fp8_recipe(flags) or "", 1),
        losses=router_has_losses(flags),
        window=flags.window_size,
        fused_gradients=not flags.no_gradient_accumulation_fusion,
        **layout,
        ranks_per_node=None if cluster is None else cluster.ranks_per_node,
        recomputes=flags.recompute_granularity == "full",
        recompute_modules=recompute_modules,
        local=is_local,
        splits_weights=splits_weights(flags) and not (is_local and flags.moe_grouped_gemm),
        shards_optimizer=flags.use_distributed_optimizer,
        rows_margin=own.rows_margin if own.rows == "fixed" else None,
        captures_passes=own.rows == "fixed" and flags.captures_layers,
    )
    # A run's own arguments are checked when they are parsed.
    _check(model, block, ranks if cluster is not None else None)
    assumptions: list[str] = []
    if flags.expert_model_parallel_size is None:
        assumptions.append(
            f"expert-model-parallel-size {block.expert}: the model names none; this is the largest that "
            f"divides both {flags.num_experts} experts and {ranks} ranks"
        )
    if not _names_precision(flags):
        assumptions.append(f"{dtype}: the model file does not set a precision")
    return block, (*assumptions, *_unread_keys(model))


def _unread_keys(model: ModelFile) -> Iterator[str]:
    """A sentence for each key of a model file that looks like one that is read."""
    setting_keys = {setting.key for setting in SETTING.values()}
    for key in model.values:
        place = f"{model.path}:{model.lines.get(key, 1)}"
        similar = meant(key, TRAINING_FLAGS)
        if similar is not None:
            yield f"{key} ({place}) is not read by the planner; did you mean {similar}?"
        elif key in setting_keys:
            yield f"{key} ({place}) is not read: AMPipe's settings stand below 'ampipe:', indented"


class _AttentionFields(TypedDict):
    """Fields of a block: sizes of heads, and products before attention."""

    latent: bool
    head_size: int
    value_size: int
    projections: tuple[tuple[int, int], ...]
    key_value_width: int


def _attention(flags: ModelFlags) -> _AttentionFields:
    hidden, heads = flags.hidden_size, flags.num_attention_heads
    if not flags.multi_latent_attention:
        groups = flags.num_query_groups if flags.group_query_attention else heads
        size = flags.kv_channels or max(1, hidden // heads)
        return {
            "latent": False,
            "head_size": size,
            "value_size": size,
            "projections": ((hidden, (heads + 2 * groups) * size),),
            "key_value_width": 2 * groups * size,
        }
    rank, query_rank = flags.kv_lora_rank, flags.q_lora_rank
    unrotated, rotated, value_size = flags.qk_head_dim, flags.qk_pos_emb_head_dim, flags.v_head_dim
    head_size = unrotated + rotated
    query_products = [(hidden, heads * head_size)]
    if query_rank:
        query_products = [(hidden, query_rank), (query_rank, heads * head_size)]
    key_value_products = [(hidden, rank + rotated), (rank, heads * (unrotated + value_size))]
    return {
        "latent": True,
        "head_size": head_size,
        "value_size": value_size,
        "projections": (*key_value_products, *query_products),
        "key_value_width": heads * (head_size + value_size),
    }


class _FeedForwardFields(TypedDict):
    """Fields of a block: experts and MLP."""

    experts: int
    topk: int
    ffn: int
    gated: bool
    shared_ffn: int | None
    dense_ffn: int | None


def _feed_forward(flags: ModelFlags, *, has_dense_layers: bool) -> _FeedForwardFields:
    dense_ffn = flags.ffn_hidden_size or 4 * flags.hidden_size
    return {
        "experts": flags.num_experts,
        "topk": flags.moe_router_topk,
        "ffn": flags.moe_ffn_hidden_size or dense_ffn,
        "gated": flags.swiglu,
        "shared_ffn": flags.moe_shared_expert_intermediate_size or None,
        "dense_ffn": dense_ffn if has_dense_layers else None,
    }


class _LayoutFields(TypedDict):
    """Fields of a block: how it is distributed over ranks."""

    tensor: int
    context: int
    ring: bool
    expert: int
    expert_tensor: int
    replicas: int
    expert_replicas: int


def _layout(flags: ModelFlags, ranks: int) -> _LayoutFields:
    """The layout of a run on so many ranks; the experts go to as many of them as can share them equally."""
    ranks_of_stage = ranks // flags.pipeline_model_parallel_size
    tensor = flags.tensor_model_parallel_size
    expert_tensor = flags.expert_tensor_parallel_size or tensor
    expert = flags.expert_model_parallel_size
    if expert is None:
        expert = gcd(max(1, ranks_of_stage // expert_tensor), flags.num_experts)
    return {
        "tensor": tensor,
        "context": flags.context_parallel_size,
        "ring": uses_ring_attention(flags),
        "expert": expert,
        "expert_tensor": expert_tensor,
        "replicas": max(1, ranks_of_stage // tensor),
        "expert_replicas": max(1, ranks_of_stage // (expert * expert_tensor)),
    }


def _names_precision(flags: ModelFlags) -> bool:
    return fp8_recipe(flags) is not None or flags.bf16 or flags.fp16


def _dtype(flags: ModelFlags, cluster: Cluster | None) -> Dtype:
    """The dtype that the flags name, or else one for which the cluster has figures."""
    if fp8_recipe(flags) is not None:
        return "fp8"
    if flags.bf16:
        return "bf16"
    if flags.fp16:
        return "fp16"
    measured = {} if cluster is None else cluster.compute.gemm
    if "bf16" in measured:
        return "bf16"
    return "fp16" if "fp16" in measured else "fp32"


def _check(model: ModelFile, block: Block, ranks: int | None) -> None:
    """Check values that depend on other values, and, with ``ranks``, whether they can hold the layout."""
    slices = block.tensor * block.context * (2 if block.context > 1 else 1)
    experts, length = block.experts, block.sequence_length
    if length % slices:
        model.refuse("seq-length", f"must be a multiple of {slices}: {-(-length // slices) * slices}")
    if ranks is not None:
        unread = {key.replace("-", "_"): value for key, value in model.values.items()}
        broken = misfit(SimpleNamespace(**(unread | model.flags.model_dump(exclude_unset=True))), ranks)
        if broken is not None:
            model.refuse(broken.key.replace("_", "-"), broken.rule, broken.remedy)
    if has_other_fp8_recipe(model.flags):
        model.refuse("fp8-recipe", *OTHER_FP8_RECIPE)
    if block.dtype == "fp8" and block.local:
        model.refuse("transformer-impl", "has no FP8", "Use transformer_engine, or leave fp8-format out.")
    if model.flags.dispatcher not in ("alltoall", "allgather", *FLEX_BACKENDS):
        model.refuse("moe-flex-dispatcher-backend", "cannot run in chunks", "Use deepep or hybridep.")
    if block.rows_margin is not None and block.dispatcher not in ("alltoall", "hybridep"):
        remedy = "Use alltoall, or flex with hybridep, or leave 'rows: fixed' out."
        model.refuse("moe-token-dispatcher-type", "cannot send fixed rows", remedy)
    if block.topk > experts:
        model.refuse("moe-router-topk", f"is above num-experts {experts}")
    busiest = block.expert * min(1.0, block.local_experts / block.topk)
    if not 1 <= block.imbalance <= busiest * (1 + 1e-9):
        rule = f"the busiest of {block.expert} expert-parallel ranks has 1 to {busiest:g} times the mean"
        raise BadInput("--imbalance", f"{block.imbalance:g}", rule=rule, remedy=f"Use {busiest:g}.")


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Consecutive layers that one rank runs one after another, and that can share a schedule.

    ``dense`` are the indices of layers without experts; ``waits`` means pipeline parallelism without virtual
    stages, in which passes cannot have a partner.
    """

    num_layers: int = 1
    dense: tuple[int, ...] = ()
    waits: bool = False


def layers_of(model: ModelFile) -> StageLayers:
    """The layers of the pipeline stage with the most experts; one layer if the file does not say how many.

    Raises:
        BadInput: a value is invalid; the message names file and line.
    """
    flags = model.flags
    hybrid = stages_of(flags)
    if hybrid is not None:
        runs = runs_of(hybrid)
        if not runs:
            rule = "has no attention layer (* or +) with an MoE layer (E) right after it, such as M*EM*E"
            model.refuse("hybrid-layer-pattern", rule)
        # Only consecutive pairs share a schedule; every stage is planned as its longest run.
        parts = list(runs[::-1])
        num_stages = len(hybrid)
    else:
        parts = layers_by_stage(model)
        num_stages = len(parts)
    # The stage with the most experts; of equal stages the last.
    part = max(reversed(parts), key=lambda layers: (sum(layers), len(layers)))
    waits = 1 < flags.pipeline_model_parallel_size == num_stages
    return StageLayers(len(part), without_experts(part), waits)


def layers_by_stage(model: ModelFile) -> list[tuple[bool, ...]]:
    """Whether each layer has experts, by (virtual) pipeline stage in the order of the pass.

    Not for hybrid models. Raises BadInput as :func:`layers_of` does.
    """
    flags = model.flags
    stages, frequency = flags.pipeline_model_parallel_size, flags.moe_layer_freq
    total = flags.num_layers or 1
    if flags.num_layers is None:
        frequency = 1
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(total)]
    if len(frequency) != total:
        model.refuse("moe-layer-freq", f"is of {len(frequency)} layers, and num-layers is {total}")
    stages *= flags.num_virtual_stages_per_pipeline_rank
    if flags.num_layers_per_virtual_pipeline_stage is not None:
        in_stage = flags.num_layers_per_virtual_pipeline_stage
        stages = max(flags.pipeline_model_parallel_size, total // in_stage)
    size = -(-total // stages)
    return [tuple(map(bool, frequency[size * stage : size * (stage + 1)])) for stage in range(stages)]


def without_experts(part: Sequence[bool]) -> tuple[int, ...]:
    """The layers of a stage without experts, from 0."""
    return tuple(layer for layer, experts in enumerate(part) if not experts)
