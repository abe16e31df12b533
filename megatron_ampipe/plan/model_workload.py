"""Converts a model file into a workload: the sizes of its block, and the layers of a pipeline stage.

At launch, the flags of the run are in place of a file.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from megatron_ampipe.block.hybrid_pattern import HybridPattern
from megatron_ampipe.errors import BadInput
from megatron_ampipe.plan.cluster import Cluster, Dtype
from megatron_ampipe.plan.model_file import ModelFile
from megatron_ampipe.plan.workload import Workload
from megatron_ampipe.schedule import Exchange
from megatron_ampipe.schedule.features import chooses_at_once, router_has_losses, uses_ring_attention

_LONGEST = 10_000
"""Of a pattern of layers: it comes from a file, and could name any number."""


def workload_of(
    model: ModelFile, cluster: Cluster | None, *, ranks: int | None = None, imbalance: float = 1.0
) -> tuple[Workload, tuple[str, ...]]:
    """The workload of a model on a cluster.

    Args:
        model: What :func:`.model_file.read_model` read.
        cluster: Gives the dtype and the number of ranks where these are not given; None for a model file that
            names its dtype, or trains in fp32.
        ranks: Number of ranks of the run; those of one node of the cluster if None.
        imbalance: See :class:`Workload`.

    Returns:
        The workload, and a sentence for each assumption about what the model file does not specify.

    Raises:
        BadInput: a value is missing or invalid; the message names file and line.
    """
    if ranks is None:
        assert cluster is not None
        ranks = cluster.ranks_per_node
    assumed: list[str] = []
    hidden, heads = model.whole("hidden-size"), model.whole("num-attention-heads")
    if "kv-channels" not in model.values and hidden % heads:
        rule = f"does not divide hidden-size {hidden}, and kv-channels is not given"
        model.refuse("num-attention-heads", rule, "Choose a divisor, or set kv-channels.")
    ffn, experts = model.whole("ffn-hidden-size", default=4 * hidden), model.whole("num-experts")
    sequence_length = model.whole("seq-length")
    attention = _attention(model, hidden, heads)
    sizes = _parallel_sizes(model, experts, ranks, assumed)
    of_stage = ranks // model.whole("pipeline-model-parallel-size", default=1)
    settings = _settings(model, sizes["context"])
    local = model.values.get("transformer-impl") == "local"
    workload = Workload(
        sequence_length=sequence_length,
        batch=model.whole("micro-batch-size", default=1),
        hidden=hidden,
        heads=heads,
        **attention,
        experts=experts,
        topk=model.whole("moe-router-topk", default=2),
        ffn=model.whole("moe-ffn-hidden-size", default=ffn),
        gated=model.on("swiglu"),
        shared_ffn=model.whole("moe-shared-expert-intermediate-size", default=0) or None,
        dense_ffn=ffn if layers_of(model).dense else None,
        capacity=settings.moe_expert_capacity_factor,
        capacity_per_chunk=model.own.capacity_scope == "chunk",
        chooses=chooses_at_once(settings, model.own),
        padded=model.on("moe-pad-expert-input-to-capacity"),
        imbalance=imbalance,
        grouped=model.on("moe-grouped-gemm"),
        dispatcher=_dispatcher(model),
        dtype=_dtype(model, cluster, assumed),
        losses=router_has_losses(settings),
        window=settings.window_size,
        ring=uses_ring_attention(settings),
        fused_gradients=not model.on("no-gradient-accumulation-fusion"),
        recomputes=model.values.get("recompute-granularity") == "full",
        exchange=Exchange.ROWS,
        local=local,
        splits_weights=local and not model.on("moe-grouped-gemm"),
        ranks_per_node=None if cluster is None else cluster.ranks_per_node,
        replicas=max(1, of_stage // sizes["tensor"]),
        expert_replicas=max(1, of_stage // (sizes["expert"] * sizes["expert_tensor"])),
        shards_optimizer=model.on("use-distributed-optimizer"),
        **sizes,
    )
    _check(model, workload, ranks)
    for key, near in model.misspelt().items():
        place = f"{model.path}:{model.lines[key]}"
        assumed.append(f"{key} ({place}) is not read by the planner; did you mean {near}?")
    return workload, tuple(assumed)


def _attention(model: ModelFile, hidden: int, heads: int) -> dict[str, Any]:
    """Fields of a workload: sizes of heads, and products before attention."""
    if not model.on("multi-latent-attention"):
        groups = heads
        if model.on("group-query-attention"):
            groups = model.whole("num-query-groups", default=1)
            if heads % groups:
                model.refuse(
                    "num-query-groups", f"does not divide num-attention-heads {heads}", "Choose a divisor."
                )
        size = model.whole("kv-channels", default=max(1, hidden // heads))
        return {
            "head_size": size,
            "value_size": size,
            "projections": ((hidden, (heads + 2 * groups) * size),),
            "key_value_width": 2 * groups * size,
        }
    rank, value = model.whole("kv-lora-rank", default=32), model.whole("v-head-dim", default=128)
    plain = model.whole("qk-head-dim", default=128)
    rotary = model.whole("qk-pos-emb-head-dim", default=64)
    query, compressed = heads * (plain + rotary), model.whole("q-lora-rank", default=0)
    of_query = [(hidden, compressed), (compressed, query)] if compressed else [(hidden, query)]
    return {
        "latent": True,
        "head_size": plain + rotary,
        "value_size": value,
        "projections": ((hidden, rank + rotary), (rank, heads * (plain + value)), *of_query),
        "key_value_width": heads * (plain + rotary + value),
    }


def _parallel_sizes(model: ModelFile, experts: int, ranks: int, assumed: list[str]) -> dict[str, Any]:
    tensor = model.whole("tensor-model-parallel-size", default=1)
    expert_tensor = model.whole("expert-tensor-parallel-size", default=tensor)
    if "expert-model-parallel-size" in model.values:
        expert = model.whole("expert-model-parallel-size")
    else:
        room = max(1, ranks // model.whole("pipeline-model-parallel-size", default=1) // expert_tensor)
        expert = max(size for size in range(1, min(room, experts) + 1) if experts % size == 0)
        assumed.append(
            f"expert-model-parallel-size {expert}: the model names none; this is the largest divisor of "
            f"{experts} that fits on {ranks} ranks"
        )
    context = model.whole("context-parallel-size", default=1)
    return {"tensor": tensor, "context": context, "expert": expert, "expert_tensor": expert_tensor}


def _settings(model: ModelFile, context_ranks: int) -> SimpleNamespace:
    """What the features of a block depend on, by Megatron's names, and with its defaults."""
    values, dropout = model.values, model.number("attention-dropout")
    return SimpleNamespace(
        context_parallel_size=context_ranks,
        cp_comm_type=values.get("cp-comm-type"),
        attention_dropout=0.1 if dropout is None else dropout,
        window_size=_window(model),
        softmax_type=values.get("softmax-type", "vanilla"),
        qk_clip=model.on("qk-clip"),
        log_max_attention_logit=model.on("log-max-attention-logit"),
        moe_expert_capacity_factor=model.number("moe-expert-capacity-factor"),
        moe_token_drop_policy=values.get("moe-token-drop-policy", "probs"),
        moe_router_load_balancing_type=_balancing(model),
        moe_aux_loss_coeff=model.numbers("moe-aux-loss-coeff", signed=True) or [0.0],
        moe_z_loss_coeff=model.number("moe-z-loss-coeff", signed=True),
    )


def _dtype(model: ModelFile, cluster: Cluster | None, assumed: list[str]) -> Dtype:
    if "fp8-format" in model.values:
        return "fp8"
    for name in ("bf16", "fp16"):
        if model.on(name):
            return name
    known = {} if cluster is None else cluster.compute.gemm
    dtype: Dtype = next((name for name in ("bf16", "fp16") if name in known), "fp32")
    assumed.append(f"{dtype}: the model file does not set a precision")
    return dtype


def _dispatcher(model: ModelFile) -> str:
    dispatcher = model.values.get("moe-token-dispatcher-type", "allgather")
    if dispatcher not in ("alltoall", "allgather"):
        model.refuse("moe-token-dispatcher-type", "cannot be pipelined", "Use alltoall or allgather.")
    return str(dispatcher)


def _balancing(model: ModelFile) -> list[str]:
    kinds = model.values.get("moe-router-load-balancing-type", "aux_loss")
    return [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]


def _window(model: ModelFile) -> int | None:
    value = model.values.get("window-size")
    if value is None:
        return None
    parts = value if isinstance(value, list) else str(value).strip("()").split(",")
    try:
        left, right = (int(part) for part in parts)
    except ValueError:
        model.refuse("window-size", "is not two whole numbers", "Write for example '128,0'.")
    if right != 0:
        rule = "attends to later keys, which is not causal"
        model.refuse("window-size", rule, "Write for example '128,0'.")
    return left if left >= 0 else None


def _check(model: ModelFile, workload: Workload, ranks: int) -> None:
    slices = workload.tensor * workload.context * (2 if workload.context > 1 else 1)
    if workload.sequence_length % slices:
        multiple = -(-workload.sequence_length // slices) * slices
        rule = f"must be a multiple of {slices} for this tensor and context parallelism"
        model.refuse("seq-length", rule, f"Write for example {multiple}.")
    key = "expert-model-parallel-size"
    if workload.experts % workload.expert:
        model.refuse(key, f"does not divide {workload.experts} experts", "Choose a divisor.")
    if workload.topk > workload.experts:
        rule = f"is above num-experts {workload.experts}"
        model.refuse("moe-router-topk", rule, f"Choose at most {workload.experts}.")
    busiest = workload.expert * min(1.0, workload.local_experts / workload.topk)
    if workload.imbalance > busiest * (1 + 1e-9):
        raise BadInput(
            "--imbalance",
            f"{workload.imbalance:g}",
            rule=f"none of the {workload.expert} expert-parallel ranks can have more than "
            f"{busiest:g} times the mean: a token is sent to each of its experts once",
            remedy=f"Use {busiest:g} or less.",
        )
    needed = workload.expert * workload.expert_tensor
    if needed > ranks:
        rule = f"{needed} ranks share the experts of a layer, and there are {ranks}"
        model.refuse(key, rule, f"Give --ranks {needed} or more.")


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Consecutive layers that one rank runs one after another, and that can share a schedule.

    Attributes:
        num_layers: How many.
        dense: Which of them have no experts, from 0.
    """

    num_layers: int = 1
    dense: tuple[int, ...] = ()


def layers_of(model: ModelFile) -> StageLayers:
    """The layers of the pipeline stage with the most experts; one layer if the file does not say how many.

    Raises:
        BadInput: a value is invalid; the message names file and line.
    """
    stages = model.whole("pipeline-model-parallel-size", default=1)
    first = model.whole("decoder-first-pipeline-num-layers", default=0) or None
    last = model.whole("decoder-last-pipeline-num-layers", default=0) or None
    key = "hybrid-layer-pattern"
    if key in model.values:
        hybrid, text = None, model.values[key]
        if isinstance(text, str):
            hybrid = HybridPattern.of(text, stages=stages, first=first, last=last)
        if hybrid is None or not hybrid.runs:
            rule = "has no attention layer (* or +) with an MoE layer (E) right after it"
            model.refuse(key, rule, "Use a pattern such as M*EM*E.")
        # Pairs share schedules in runs; every stage is planned as its longest run.
        return _busiest(hybrid.runs[::-1])
    num_layers = model.whole("num-layers", default=1)
    frequency = model.values.get("moe-layer-freq", 1)
    try:
        pattern = _pattern(frequency, num_layers) if "num-layers" in model.values else (True,)
    except ValueError as error:
        remedy = "Write 2 for every second layer, or a pattern such as ([0]*1+[1]*11)."
        model.refuse("moe-layer-freq", str(error), remedy)
    if "num-layers-per-virtual-pipeline-stage" in model.values:
        stages = max(stages, num_layers // model.whole("num-layers-per-virtual-pipeline-stage"))
    else:
        stages *= model.whole("num-virtual-stages-per-pipeline-rank", default=1)
    size = -(-len(pattern) // stages)
    return _busiest([pattern[start : start + size] for start in range(0, len(pattern), size)])


def _busiest(parts: Sequence[tuple[bool, ...]]) -> StageLayers:
    """The consecutive layers with the most experts; of equal ones the last."""
    part = max(reversed(parts), key=lambda one: (sum(one), len(one)))
    return StageLayers(len(part), tuple(layer for layer, experts in enumerate(part) if not experts))


def _pattern(frequency: object, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer of a model has experts, from the value of ``--moe-layer-freq``.

    Args:
        frequency: A whole number, such as 2 for every second layer; a list of 0 and 1, or one as text, such
            as ``([0]*1+[1]*26)``.
        num_layers: Layers of the model.

    Raises:
        ValueError: it is none of these, or of another number of layers.
    """
    if isinstance(frequency, str):
        try:
            frequency = _value(ast.parse(frequency, mode="eval").body)
        except (SyntaxError, RecursionError, MemoryError):
            frequency = None
    if type(frequency) is int and frequency > 0:
        return tuple(layer % frequency == 0 for layer in range(num_layers))
    if not isinstance(frequency, list) or not all(one in (0, 1) for one in frequency):
        raise ValueError("is neither a whole number nor a pattern of 0 and 1")
    if len(frequency) != num_layers:
        raise ValueError(f"is of {len(frequency)} layers, and num-layers is {num_layers}")
    return tuple(one == 1 for one in frequency)


def _value(node: ast.expr) -> object:
    """The value of a sum and product of lists and whole numbers; None for anything else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            return [_value(element) for element in elements]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            one, other = _value(left), _value(right)
            return one + other if isinstance(one, list) and isinstance(other, list) else None
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            one, times = _value(left), _value(right)
            if isinstance(one, list) and type(times) is int and len(one) * times <= _LONGEST:
                return one * times
    return None
