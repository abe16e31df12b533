"""Whether a number of ranks can hold a parallel layout: the rules by which Megatron refuses one. Pure.

Megatron applies some of these rules to the arguments, others when it creates process groups, when it builds
layers, or in the first iteration. Here they are applied before any rank exists: by ``ampipe plan`` to a model
file, by ``ampipe config --ranks`` and ``ampipe sbatch`` to a command line, and by a launch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Misfit:
    """A value that Megatron refuses in a layout: the key of its flag, a rule, and a value that would work."""

    key: str
    value: object
    rule: str
    remedy: str


def misfit(args: object, world_size: int) -> Misfit | None:
    """The first rule that a layout breaks on ``world_size`` ranks; None if there is none.

    ``args`` has Megatron's arguments as attributes, before Megatron has validated them. What is absent or
    None has Megatron's default. Without the attribute ``global_batch_size``, batches are not checked.
    """
    rules = (_attention_ranks, _experts, _expert_ranks, _heads, _optimizer_instances, _layers, _batch)
    return next((broken for rule in rules if (broken := rule(args, world_size)) is not None), None)


def _number(args: object, name: str, default: int = 1) -> int:
    """A whole number among the arguments; ``default`` if it is absent, None or of another type."""
    value = getattr(args, name, None)
    return value if type(value) is int else default


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


_DENSE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERT = ("expert_model_parallel_size", "expert_tensor_parallel_size", "pipeline_model_parallel_size")


def _dense_sizes(args: object) -> dict[str, int]:
    """The sizes whose product divides the ranks: of everything but experts."""
    return {name: _number(args, name) for name in _DENSE} | _weight_shards(args, "tensor_parallel", _DENSE[0])


def _expert_sizes(args: object) -> dict[str, int]:
    """The sizes whose product divides the ranks: of experts."""
    tensor = _number(args, "tensor_model_parallel_size")
    sizes = {name: _number(args, name) for name in _EXPERT}
    sizes["expert_tensor_parallel_size"] = _number(args, "expert_tensor_parallel_size", tensor)
    return sizes | _weight_shards(args, "expert_tensor_parallel", _EXPERT[1], tensor)


def _weight_shards(args: object, prefix: str, size: str, default: int = 1) -> dict[str, int]:
    """How many ranks share the weights of a tensor-parallel rank; no entry for one."""
    name = f"{prefix}_num_weight_shards"
    tensor = _number(args, size, default)
    shards = _number(args, name, tensor) // max(1, tensor)
    return {name: shards} if shards > 1 else {}


def _attention_ranks(args: object, world_size: int) -> Misfit | None:
    return _of_product(_dense_sizes(args), world_size)


def _expert_ranks(args: object, world_size: int) -> Misfit | None:
    num_experts = _number(args, "num_experts", 0)
    return _of_product(_expert_sizes(args), world_size, divides={"expert_model_parallel_size": num_experts})


def _of_product(
    sizes: Mapping[str, int], world_size: int, *, divides: Mapping[str, int] | None = None
) -> Misfit | None:
    """The refusal of sizes whose product does not divide the ranks.

    ``divides`` are numbers that a size has to divide as well, by the size's name.
    """
    for name, size in sizes.items():
        if size < 1:
            return Misfit(name, size, "must be at least 1", f"Use {_flag(name)} 1.")
    product = prod(sizes.values())
    if world_size % product == 0:
        return None
    # The largest is the one that most likely has to change.
    name = max(sizes, key=lambda each: sizes[each])
    value = sizes[name]
    others = product // value
    total = (divides or {}).get(name, 0)
    smaller = (size for size in range(value - 1, 0, -1) if total % size == 0)
    fitting = next((size for size in smaller if world_size % (size * others) == 0), None)
    factors = " x ".join(f"{_flag(each)} {size}" for each, size in sizes.items() if size != 1)
    rule = f"must divide the {world_size} ranks of the run"
    if product != value:
        rule = f"{factors} is {product}, which {rule}"
    remedy = f"Use {-(-world_size // product) * product} ranks"
    if fitting is not None:
        remedy += f", or {_flag(name)} {fitting}"
    return Misfit(name, value, rule, f"{remedy}.")


def _experts(args: object, world_size: int) -> Misfit | None:
    expert, num_experts = _number(args, "expert_model_parallel_size"), _number(args, "num_experts", 0)
    if expert == 1 or (num_experts and num_experts % expert == 0):
        return None
    others = prod(_expert_sizes(args).values()) // expert
    sizes = (size for size in range(min(expert, num_experts), 0, -1) if num_experts % size == 0)
    fitting = next((size for size in sizes if world_size % (size * others) == 0), 1)
    rule = f"must divide the {num_experts} experts of a layer"
    remedy = (
        f"Use --expert-model-parallel-size {fitting}, or --num-experts {-(-num_experts // expert) * expert}."
    )
    if not num_experts:
        rule, remedy = "needs a model with experts", f"Add --num-experts {expert}, or leave it out."
    return Misfit("expert_model_parallel_size", expert, rule, remedy)


def _heads(args: object, world_size: int) -> Misfit | None:
    tensor, heads = _number(args, "tensor_model_parallel_size"), _number(args, "num_attention_heads", 0)
    if heads % tensor:
        rule = f"must be a multiple of --tensor-model-parallel-size {tensor}"
        remedy = (
            f"Use --num-attention-heads {-(-heads // tensor) * tensor}, or --tensor-model-parallel-size 1."
        )
        return Misfit("num_attention_heads", heads, rule, remedy)
    groups = _number(args, "num_query_groups", 0) if getattr(args, "group_query_attention", False) else 0
    if groups and groups % tensor and tensor % groups:
        rule = f"must be a multiple or a divisor of --tensor-model-parallel-size {tensor}"
        return Misfit("num_query_groups", groups, rule, f"Use --num-query-groups {tensor}.")
    return None


def _optimizer_instances(args: object, world_size: int) -> Misfit | None:
    name = "num_distributed_optimizer_instances"
    instances = _number(args, name)
    sizes = _dense_sizes(args)
    replicas = world_size // prod(sizes.values()) * sizes["context_parallel_size"]
    if replicas % instances == 0:
        return None
    rule = f"must divide the {replicas} ranks that share parameters and gradients"
    return Misfit(name, instances, rule, "Use 1, or leave it out.")


@dataclass(frozen=True, slots=True)
class _Stages:
    """How a model's layers are split: over pipeline ranks, and each rank's over virtual stages."""

    ranks: int
    virtual: int


def _virtual_stages(args: object) -> int:
    """Virtual stages of a pipeline rank, by Megatron's rules; 1 if there are none, or if they do not fit."""
    pipeline = _number(args, "pipeline_model_parallel_size")
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if isinstance(pattern, str):
        segments = pattern.partition("/")[0].count("|") + 1
        return max(1, segments // pipeline)
    given = _number(args, "num_virtual_stages_per_pipeline_rank", 0)
    size = _number(args, "num_layers_per_virtual_pipeline_stage", 0)
    if given or not size:
        return given or 1
    return max(1, _counted_layers(args) // pipeline // size)


def _counted_layers(args: object) -> int:
    """Layers that are split over pipeline stages, with what counts as one; 0 if their number is not given."""
    extra = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    layers = _number(args, "num_layers", 0)
    return layers and layers + sum(bool(getattr(args, name, False)) for name in extra)


def _layers(args: object, world_size: int) -> Misfit | None:
    """The rules of pipeline stages; a layout in ``--pipeline-model-parallel-layout`` is left to Megatron."""
    if getattr(args, "pipeline_model_parallel_layout", None) is not None:
        return None
    pipeline = _number(args, "pipeline_model_parallel_size")
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if isinstance(pattern, str):
        segments = pattern.partition("/")[0].count("|") + 1
        if segments == 1 or segments % pipeline == 0:
            return None
        rule = f"has {segments} stages, and their number must be a multiple of the {pipeline} pipeline ranks"
        remedy = f"Write {-(-segments // pipeline) * pipeline} parts, with | between them."
        return Misfit("hybrid_layer_pattern", pattern, rule, remedy)
    virtual = _virtual_stages(args)
    if virtual > 1 and pipeline == 1:
        key = "num_virtual_stages_per_pipeline_rank"
        if not _number(args, key, 0):
            key = "num_layers_per_virtual_pipeline_stage"
        rule, remedy = (
            "needs several pipeline ranks",
            "Add --pipeline-model-parallel-size 2, or leave it out.",
        )
        return Misfit(key, getattr(args, key), rule, remedy)
    if not _counted_layers(args):
        return None
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    if any(getattr(args, name, None) is not None for name in ends):
        return _uneven_layers(args, _Stages(pipeline, virtual))
    return _even_layers(args, _Stages(pipeline, virtual))


def _even_layers(args: object, stages: _Stages) -> Misfit | None:
    layers, given = _counted_layers(args), _number(args, "num_layers", 0)
    extra = layers - given
    counted = f" (with {extra} for embedding and loss)" if extra else ""
    if layers % stages.ranks:
        fitting = next(
            size for size in range(stages.ranks, 0, -1) if not (layers % size or stages.ranks % size)
        )
        rule = f"{layers} layers{counted} cannot be split over {stages.ranks} pipeline ranks"
        more = -(-layers // stages.ranks) * stages.ranks - extra
        remedy = f"Use --num-layers {more}, or --pipeline-model-parallel-size {fitting}."
        return Misfit("num_layers", given, rule, remedy)
    of_rank, name = layers // stages.ranks, "num_layers_per_virtual_pipeline_stage"
    size = _number(args, name, 0)
    if not _number(args, "num_virtual_stages_per_pipeline_rank", 0) and size and of_rank % size:
        rule = f"must divide the {of_rank} layers{counted} of a pipeline rank"
        fitting = next(each for each in range(min(size, of_rank), 0, -1) if of_rank % each == 0)
        return Misfit(name, size, rule, f"Use {_flag(name)} {fitting}.")
    if of_rank % stages.virtual:
        name = "num_virtual_stages_per_pipeline_rank"
        rule = f"must divide the {of_rank} layers{counted} of a pipeline rank"
        fitting = next(each for each in range(stages.virtual, 0, -1) if of_rank % each == 0)
        return Misfit(name, stages.virtual, rule, f"Use {_flag(name)} {fitting}.")
    return None


def _uneven_layers(args: object, stages: _Stages) -> Misfit | None:
    """The rules for a first or a last stage with another number of layers."""
    size = "num_layers_per_virtual_pipeline_stage"
    if _number(args, size, 0) and not _number(args, "num_virtual_stages_per_pipeline_rank", 0):
        rule = "cannot be used with --decoder-first-pipeline-num-layers or --decoder-last-pipeline-num-layers"
        remedy = "Use --num-virtual-stages-per-pipeline-rank in place of it."
        return Misfit(size, getattr(args, size), rule, remedy)
    layers, ranks = _number(args, "num_layers", 0), stages.ranks
    for name in ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if (at_end := getattr(args, name, None)) is None:
            continue
        if at_end < 1 or at_end % stages.virtual:
            rule = f"must be a multiple of the {stages.virtual} virtual stages, and at least one layer"
            return Misfit(name, at_end, rule, f"Use {_flag(name)} {stages.virtual}.")
        layers, ranks = layers - at_end, ranks - 1
    each = stages.virtual
    # As in Megatron, also where the first and the last stage are the same.
    if bool(layers) == bool(ranks) and not (ranks and (layers % ranks or layers // ranks % each)):
        return None
    total = _number(args, "num_layers", 0)
    of_ends = total - layers
    more = of_ends + max(0, ranks) * each * max(1, -(-layers // max(1, ranks * each)))
    rule = (
        f"{layers} layers besides the first and the last stage cannot be split over {max(0, ranks)} other "
        f"pipeline ranks with {each} virtual stages each"
    )
    return Misfit("num_layers", total, rule, f"Use --num-layers {more}.")


_VARIABLE_BATCH = ("step_batch_size_schedule", "rampup_batch_size", "decrease_batch_size_if_needed")


def _batch(args: object, world_size: int) -> Misfit | None:
    """The rules of the number of micro-batches in a step; variable batches are left to Megatron."""
    if not hasattr(args, "global_batch_size") or any(getattr(args, name, None) for name in _VARIABLE_BATCH):
        return None
    sizes = _dense_sizes(args)
    replicas = world_size // prod(sizes.values())
    smallest = _number(args, "micro_batch_size") * replicas
    batch = _number(args, "global_batch_size", smallest)
    remedy = "Use --global-batch-size {}."
    if batch < 1 or batch % smallest:
        micro_batch = _number(args, "micro_batch_size")
        rule = (
            f"must be a multiple of {smallest}: --micro-batch-size {micro_batch} on each of {replicas} "
            "data-parallel ranks"
        )
        return Misfit(
            "global_batch_size", batch, rule, remedy.format(max(1, -(-batch // smallest)) * smallest)
        )
    if _virtual_stages(args) == 1:
        return None
    pipeline, microbatches = sizes["pipeline_model_parallel_size"], batch // smallest
    group = _number(args, "microbatch_group_size_per_vp_stage", pipeline)
    if group < pipeline:
        name = "microbatch_group_size_per_virtual_pipeline_stage"
        rule, instead = f"must be at least the {pipeline} pipeline ranks", f"Use {_flag(name)} {pipeline}."
        return Misfit(name, group, rule, instead)
    left = microbatches % group
    if microbatches >= group and not 0 < left < pipeline:
        return None
    rule = (
        f"is {microbatches} micro-batches on a data-parallel rank, and virtual stages take them in groups of "
        f"{group}, of which the last has at least {pipeline}"
    )
    return Misfit(
        "global_batch_size", batch, rule, remedy.format(-(-microbatches // group) * group * smallest)
    )
