"""The flags of Megatron that determine blocks, parameters and optimizer state, with their values checked.

They are the keys of a model file (:mod:`.model_file`), without leading dashes.
"""

from __future__ import annotations

import ast
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat

from megatron_ampipe.plan.cluster import Dtype

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
    cuda_graph_impl: str | None = None
    cuda_graph_modules: Annotated[tuple[str, ...], BeforeValidator(_listed)] = ()

    @property
    def captures_layers(self) -> bool:
        """Whether Megatron would capture layers as a whole."""
        return self.cuda_graph_impl in ("local", "transformer_engine") and not self.cuda_graph_modules

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


GRAPH_FLAGS = ("cuda-graph-impl", "cuda-graph-modules")
"""Keys that a launch takes over, so that its arguments no longer say it."""
SIZE_FLAGS, TRAINING_FLAGS = _keys(ModelFlags), _keys(TrainingFlags)
