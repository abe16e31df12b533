"""Model files: Megatron's flags as YAML, read without Megatron, and the block and layers that they describe.

A model file has Megatron's flags without leading dashes (``num-layers: 12``) and AMPipe's in a section
``ampipe:``. Flags that do not change the size of a block are checked by Megatron's parser, at launch or by
``ampipe config``. In a run, Megatron's arguments are used instead of a file.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError

from megatron_ampipe.block.hybrid_pattern import runs_of, stages_of
from megatron_ampipe.block.layout import misfit
from megatron_ampipe.block.settings import SETTING, Settings
from megatron_ampipe.errors import BadInput, did_you_mean, meant, nearest
from megatron_ampipe.files.inputs import LinedMapping, find_config, load, refuse
from megatron_ampipe.plan.block import FLEX_BACKENDS, Block
from megatron_ampipe.plan.cluster import Cluster, Dtype
from megatron_ampipe.schedule.features import (
    FP8_TILES,
    OTHER_FP8_RECIPE,
    chooses_at_once,
    fp8_recipe,
    router_has_losses,
    splits_weights,
    uses_ring_attention,
)

_LARGEST = 10**7
"""The largest value of any size. Time and memory of planning grow with the number of experts."""
_LONGEST = 10_000
"""The largest length of a pattern of layers, which comes from a file and could be any."""


def _window(value: object) -> int | None:
    """Earlier keys that a query attends to, from ``--window-size``; None for all."""
    parts = value if isinstance(value, list | tuple) else str(value).strip("()").split(",")
    try:
        left, right = (int(part) for part in parts)
    except (TypeError, ValueError):
        raise ValueError("is not two whole numbers") from None
    if right != 0:
        raise ValueError("attends to later keys, which is not causal")
    return left if left >= 0 else None


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _frequency(value: object) -> object:
    """The value of ``--moe-layer-freq``, which may be text such as ``([0]*1+[1]*26)``."""
    if not isinstance(value, str):
        return value
    try:
        return _computed(ast.parse(value, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        return None


def _computed(node: ast.expr) -> object:
    """The value of a sum and product of lists and whole numbers; None for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_computed(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _computed(left), _computed(right)
            return first + second if isinstance(first, list) and isinstance(second, list) else None
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            repeated, times = _computed(left), _computed(right)
            if isinstance(repeated, list) and type(times) is int and len(repeated) * times <= _LONGEST:
                return repeated * times
    return None


_Size = Annotated[int, Field(strict=True, ge=1, le=_LARGEST)]
_SizeOrNone = Annotated[int, Field(strict=True, ge=0, le=_LARGEST)]
"""0 for none."""
_Switch = Annotated[bool, Field(strict=True)]


class ModelFlags(BaseModel):
    """The flags that determine the sizes and number of blocks, and how gradients are reduced.

    Names and defaults are Megatron's, so functions that take Megatron's arguments accept this too.
    """

    model_config = ConfigDict(frozen=True)

    hidden_size: _Size
    num_attention_heads: _Size
    num_experts: _Size
    seq_length: _Size
    kv_channels: _Size | None = None
    ffn_hidden_size: _Size | None = None
    micro_batch_size: _Size = 1
    moe_router_topk: _Size = 2
    moe_ffn_hidden_size: _Size | None = None
    swiglu: _Switch = False
    moe_shared_expert_intermediate_size: _SizeOrNone = 0
    moe_expert_capacity_factor: Annotated[FiniteFloat, Field(ge=0)] | None = None
    moe_pad_expert_input_to_capacity: _Switch = False
    moe_grouped_gemm: _Switch = False
    recompute_granularity: Literal["full", "selective"] | None = None
    recompute_modules: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ("core_attn",)
    group_query_attention: _Switch = False
    num_query_groups: _Size = 1
    multi_latent_attention: _Switch = False
    kv_lora_rank: _Size = 32
    q_lora_rank: _SizeOrNone = 0
    qk_head_dim: _Size = 128
    qk_pos_emb_head_dim: _Size = 64
    v_head_dim: _Size = 128
    tensor_model_parallel_size: _Size = 1
    context_parallel_size: _Size = 1
    pipeline_model_parallel_size: _Size = 1
    cp_comm_type: str | list[str] | None = None
    attention_dropout: Annotated[FiniteFloat, Field(ge=0)] = 0.1
    softmax_type: Literal["vanilla", "off-by-one", "learnable"] = "vanilla"
    expert_tensor_parallel_size: _Size | None = None
    expert_model_parallel_size: _Size | None = None
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "allgather"
    moe_flex_dispatcher_backend: str = "deepep"
    moe_router_load_balancing_type: Annotated[list[str], BeforeValidator(_listed)] = ["aux_loss"]
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    moe_aux_loss_coeff: Annotated[list[FiniteFloat], BeforeValidator(_listed)] = [0.0]
    moe_z_loss_coeff: FiniteFloat | None = None
    window_size: Annotated[int | None, BeforeValidator(_window)] = None
    bf16: _Switch = False
    fp16: _Switch = False
    fp8_format: Literal["e4m3", "hybrid"] | None = None
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise", "mxfp8", "custom"] = "delayed"
    no_gradient_accumulation_fusion: _Switch = False
    num_layers: _Size | None = None
    moe_layer_freq: Annotated[
        _Size | list[Annotated[int, Field(strict=True, ge=0, le=1)]], BeforeValidator(_frequency)
    ] = 1
    num_layers_per_virtual_pipeline_stage: _Size | None = None
    num_virtual_stages_per_pipeline_rank: _Size = 1
    transformer_impl: Literal["local", "transformer_engine", "inference_optimized"] | None = None
    hybrid_layer_pattern: str | None = None
    decoder_first_pipeline_num_layers: _Size | None = None
    decoder_last_pipeline_num_layers: _Size | None = None
    use_distributed_optimizer: _Switch = False

    @property
    def dispatcher(self) -> str:
        """As :attr:`Block.dispatcher`."""
        flex = self.moe_token_dispatcher_type == "flex"
        return self.moe_flex_dispatcher_backend if flex else self.moe_token_dispatcher_type


class TrainingFlags(ModelFlags):
    """Also the flags that determine the parameters of a whole model, and the state of the optimizer."""

    vocab_size: _SizeOrNone = 0
    make_vocab_size_divisible_by: _Size = 128
    untie_embeddings_and_output_weights: _Switch = False
    position_embedding_type: str = "learned_absolute"
    max_position_embeddings: _SizeOrNone = 0
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    qk_layernorm: _Switch = False
    disable_bias_linear: _Switch = False
    add_qkv_bias: _Switch = False
    moe_shared_expert_gate: _Switch = False
    mtp_num_layers: _SizeOrNone | None = 0
    moe_latent_size: _SizeOrNone | None = 0
    optimizer: str = "adam"
    sgd_momentum: Annotated[FiniteFloat, Field(ge=0)] = 0.9
    grad_reduce_in_bf16: _Switch = False
    use_precision_aware_optimizer: _Switch = False
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    exp_avg_dtype: Dtype = "fp32"
    exp_avg_sq_dtype: Dtype = "fp32"


def _keys(flags: type[ModelFlags]) -> tuple[str, ...]:
    """The keys of a model file for these flags."""
    return tuple(name.replace("_", "-") for name in flags.model_fields)


SIZE_FLAGS, TRAINING_FLAGS = _keys(ModelFlags), _keys(TrainingFlags)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model file whose keys are checked; :attr:`flags` checks the values.

    Attributes:
        path: The file.
        values: Megatron's flags; values from the command line replace the values of the file.
        lines: The line of each flag; 0 for a value from the command line.
        own: AMPipe's settings in the section ``ampipe:``; their values are not checked.
    """

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[str, int]
    own: Settings = Settings()  # noqa: RUF009

    @property
    def flags(self) -> ModelFlags:
        """The values of the flags.

        Raises:
            BadInput: a flag is missing or invalid; the message names file and line.
        """
        return self.read(ModelFlags)

    def read[Flags: ModelFlags](self, kind: type[Flags]) -> Flags:
        """The values of these flags; raises BadInput as :attr:`flags` does."""
        values = {key.replace("-", "_"): value for key, value in self.values.items() if value is not None}
        try:
            return kind.model_validate({key: values[key] for key in kind.model_fields if key in values})
        except ValidationError as error:
            wrong = error.errors()[0]
        key = str(wrong["loc"][0]).replace("_", "-")
        if wrong["type"] == "missing":
            remedy = f"Add '{key}: ...', or give --set {key}=... {did_you_mean(key, self.values, cutoff=0.9)}"
            refuse(self.path, 1, key, "is missing", remedy.rstrip())
        rule = wrong["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        self.refuse(key, rule)

    def refuse(self, key: str, rule: str, remedy: str = "Write another value, or leave it out.") -> NoReturn:
        """Raise BadInput for the value of a key."""
        shown, line = f"{key} {self.values.get(key, '(default)')}", self.lines.get(key, 1)
        place = f"{self.path}:{line}:" if line else "--set"
        raise BadInput(place, shown, rule=rule, remedy=remedy)


def find_model(text: str) -> Path:
    """The file that ``--model`` names: a path, or the name of a file in ``configs/models``."""
    return find_config(text, folders=("models",), flag="--model", what="model")


def read_model(path: Path, *, overrides: Mapping[str, Any] | None = None) -> ModelFile:
    """Read a model file and check its keys.

    Args:
        path: The file.
        overrides: Flags from the command line, which replace the flags of the file.

    Raises:
        BadInput: a key in the section ``ampipe:``, or on the command line, is unknown.
    """
    top = load(path, what="model", remedy="Write Megatron's flags without dashes: 'num-layers: 12'.")
    values, lines = dict(top), dict(top.lines)
    section = values.pop("ampipe", LinedMapping(1))
    known = {setting.key for setting in SETTING.values()}
    if not isinstance(section, LinedMapping):
        rule, remedy = "must hold AMPipe's settings, as keys with values", "Write 'degree: 4' below it."
        refuse(path, lines["ampipe"], "ampipe", rule, remedy)
    for key in section.keys() - known:
        refuse(path, section.lines[key], key, "there is no such setting of AMPipe", nearest(key, known))
    for key, value in values.items():
        if isinstance(value, LinedMapping):
            refuse(path, lines[key], key, "is a section, and only 'ampipe:' is one", "Write 'ampipe:'.")
    for key, value in (overrides or {}).items():
        values[key], lines[key] = value, 0
        if key not in TRAINING_FLAGS:
            guess = did_you_mean(key, TRAINING_FLAGS) or "Leave it out."
            rule = "has no effect: no size of a block depends on it"
            ModelFile(path, values, lines).refuse(key, rule, guess)
    own = {key.replace("-", "_"): value for key, value in section.items()}
    return ModelFile(path, values, lines, Settings(**own))


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
    assumed: list[str] = []
    flags, own = model.flags, model.own
    attention = _attention(flags)
    ffn = flags.ffn_hidden_size or 4 * flags.hidden_size
    tensor, stage_ranks = flags.tensor_model_parallel_size, ranks // flags.pipeline_model_parallel_size
    expert_tensor = flags.expert_tensor_parallel_size or tensor
    expert = flags.expert_model_parallel_size
    if expert is None:
        expert = gcd(max(1, stage_ranks // expert_tensor), flags.num_experts)
        assumed.append(
            f"expert-model-parallel-size {expert}: the model names none; this is the largest that divides "
            f"both {flags.num_experts} experts and {ranks} ranks"
        )
    local = flags.transformer_impl == "local"
    block = Block(
        sequence_length=flags.seq_length,
        batch=flags.micro_batch_size,
        hidden=flags.hidden_size,
        heads=flags.num_attention_heads,
        **attention,
        experts=flags.num_experts,
        topk=flags.moe_router_topk,
        ffn=flags.moe_ffn_hidden_size or ffn,
        gated=flags.swiglu,
        shared_ffn=flags.moe_shared_expert_intermediate_size or None,
        dense_ffn=ffn if layers_of(model).dense else None,
        capacity=flags.moe_expert_capacity_factor,
        capacity_per_chunk=own.capacity_scope == "chunk",
        chooses=chooses_at_once(flags, own),
        padded=flags.moe_pad_expert_input_to_capacity,
        imbalance=imbalance,
        grouped=flags.moe_grouped_gemm,
        dispatcher=flags.dispatcher,
        dtype=_dtype(flags, cluster, assumed),
        fp8_tile=FP8_TILES.get(fp8_recipe(flags) or "", 1),
        losses=router_has_losses(flags),
        window=flags.window_size,
        fused_gradients=not flags.no_gradient_accumulation_fusion,
        tensor=tensor,
        context=flags.context_parallel_size,
        ring=uses_ring_attention(flags),
        expert=expert,
        expert_tensor=expert_tensor,
        ranks_per_node=None if cluster is None else cluster.ranks_per_node,
        recomputes=flags.recompute_granularity == "full",
        recompute_modules=flags.recompute_modules if flags.recompute_granularity == "selective" else (),
        local=local,
        splits_weights=splits_weights(flags) and not (local and flags.moe_grouped_gemm),
        replicas=max(1, stage_ranks // tensor),
        expert_replicas=max(1, stage_ranks // (expert * expert_tensor)),
        shards_optimizer=flags.use_distributed_optimizer,
    )
    # A run's own arguments are checked when they are parsed.
    _check(model, block, ranks if cluster is not None else None)
    for key in model.values:
        place = f"{model.path}:{model.lines.get(key, 1)}"
        if (near := meant(key, TRAINING_FLAGS)) is not None:
            assumed.append(f"{key} ({place}) is not read by the planner; did you mean {near}?")
        elif key in {setting.key for setting in SETTING.values()}:
            assumed.append(f"{key} ({place}) is not read: AMPipe's settings stand below 'ampipe:', indented")
    return block, tuple(assumed)


def _attention(flags: ModelFlags) -> dict[str, Any]:
    """Fields of a block: sizes of heads, and products before attention."""
    hidden, heads = flags.hidden_size, flags.num_attention_heads
    if not flags.multi_latent_attention:
        groups = flags.num_query_groups if flags.group_query_attention else heads
        size = flags.kv_channels or max(1, hidden // heads)
        return {
            "head_size": size,
            "value_size": size,
            "projections": ((hidden, (heads + 2 * groups) * size),),
            "key_value_width": 2 * groups * size,
        }
    rank, compressed, value = flags.kv_lora_rank, flags.q_lora_rank, flags.v_head_dim
    plain, rotary = flags.qk_head_dim, flags.qk_pos_emb_head_dim
    query = heads * (plain + rotary)
    query_products = [(hidden, compressed), (compressed, query)] if compressed else [(hidden, query)]
    return {
        "latent": True,
        "head_size": plain + rotary,
        "value_size": value,
        "projections": ((hidden, rank + rotary), (rank, heads * (plain + value)), *query_products),
        "key_value_width": heads * (plain + rotary + value),
    }


def _dtype(flags: ModelFlags, cluster: Cluster | None, assumed: list[str]) -> Dtype:
    if fp8_recipe(flags) is not None:
        return "fp8"
    if flags.bf16 or flags.fp16:
        return "bf16" if flags.bf16 else "fp16"
    known = {} if cluster is None else cluster.compute.gemm
    dtype: Dtype = "bf16" if "bf16" in known else "fp16" if "fp16" in known else "fp32"
    assumed.append(f"{dtype}: the model file does not set a precision")
    return dtype


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
    if fp8_recipe(model.flags) not in (None, *FP8_TILES):
        model.refuse("fp8-recipe", *OTHER_FP8_RECIPE)
    if block.dtype == "fp8" and block.local:
        model.refuse("transformer-impl", "has no FP8", "Use transformer_engine, or leave fp8-format out.")
    if model.flags.dispatcher not in ("alltoall", "allgather", *FLEX_BACKENDS):
        model.refuse("moe-flex-dispatcher-backend", "cannot run in chunks", "Use deepep or hybridep.")
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
