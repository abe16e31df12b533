"""The conditions of the table of refusals, as functions of Megatron's parsed arguments.

Each condition returns the refused value, or None if the combination is supported. Imports neither torch nor
Megatron. Called by :mod:`.refusals`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from megatron_ampipe.block.hybrid_pattern import HybridPattern
from megatron_ampipe.block.settings import AUTO, settings_of
from megatron_ampipe.schedule import KEEP, Exchange, NodeLayout, Pipeline, useful_exchanges
from megatron_ampipe.schedule.features import expert_tensor_ranks, has_capacity


def hybrid_without_pair(arguments: Any) -> object:
    """Refuses a hybrid model of which nothing can be pipelined."""
    pattern = HybridPattern.of_arguments(arguments)
    return None if pattern is None or pattern.num_pairs else arguments.hybrid_layer_pattern


def above_one(name: str) -> Callable[[Any], object]:
    """Refuses values above 1."""
    return lambda arguments: value if (value := getattr(arguments, name, 1) or 1) > 1 else None


def is_set(name: str) -> Callable[[Any], object]:
    """Refuses every value except None, False and 0."""
    return lambda arguments: value if (value := getattr(arguments, name, None)) else None


def is_given(name: str) -> Callable[[Any], object]:
    """Refuses every value except None."""
    return lambda arguments: getattr(arguments, name, None)


def equal(name: str, *values: object) -> Callable[[Any], object]:
    """Refuses these values."""
    return lambda arguments: value if (value := getattr(arguments, name, None)) in values else None


def not_equal(name: str, expected: object) -> Callable[[Any], object]:
    """Refuses every value except None and ``expected``."""
    return lambda arguments: (
        value if (value := getattr(arguments, name, expected)) not in (expected, None) else None
    )


def of_setting(name: str, applies: Callable[[Any, Any], bool]) -> Callable[[Any], object]:
    """Refuses values of AMPipe's setting ``name`` for which ``applies(value, arguments)``."""

    def refused(arguments: Any) -> object:
        value = getattr(arguments, f"ampipe_{name}", None)
        return value if value is not None and applies(value, arguments) else None

    return refused


def has(arguments: Any, *names: str) -> bool:
    """Whether one of these flags is on."""
    return any(getattr(arguments, name, False) for name in names)


def recomputes_experts(arguments: Any) -> bool:
    """Whether Megatron computes the experts again."""
    granularity = getattr(arguments, "recompute_granularity", None)
    modules = getattr(arguments, "recompute_modules", None) or []
    return granularity == "full" or (granularity == "selective" and "moe" in modules)


def sends_rows(arguments: Any) -> bool:
    """Whether the dispatcher sends each row to the ranks that need it, in a collective of AMPipe's."""
    return getattr(arguments, "moe_token_dispatcher_type", "alltoall") == "alltoall"


def weights_apart_without_local_layers(arguments: Any) -> object:
    """Refuses schedules whose weight gradients are separate stages for other layers than local ones."""
    schedule = getattr(arguments, "ampipe_schedule", None)
    if schedule is None or getattr(arguments, "transformer_impl", "local") == "local":
        return None
    return schedule if Pipeline.of(1, schedule=schedule).splits_weights else None


def load_balancing(*kinds: str) -> Callable[[Any], object]:
    """Refuses these load balancing types."""

    def applies(arguments: Any) -> object:
        chosen = getattr(arguments, "moe_router_load_balancing_type", None)
        chosen = chosen if isinstance(chosen, list) else [chosen]
        return next((kind for kind in chosen if kind in kinds), None)

    return applies


def _routes_by_hash(arguments: Any) -> bool:
    return getattr(arguments, "ampipe_router", None) == "hash"


def balances_fixed_experts(arguments: Any) -> object:
    """Refuses balancing of a choice that is fixed."""
    balancing = load_balancing("sinkhorn", "quantile_balancing")
    return balancing(arguments) if _routes_by_hash(arguments) else None


def drops_equal_weights(arguments: Any) -> object:
    """Refuses dropping by probability where all probabilities are equal."""
    if not _routes_by_hash(arguments) or not has_capacity(arguments):
        return None
    return equal("moe_token_drop_policy", "probs")(arguments)


def auto_degree_without_training(arguments: Any) -> object:
    """Refuses ``--skip-train`` if degrees would have to be measured in training iterations."""
    if getattr(arguments, "ampipe_degree", None) != AUTO or getattr(arguments, "ampipe_cluster", None):
        return None
    saved = getattr(arguments, "ampipe_save_plan", None)
    if saved is not None and os.path.isfile(saved):
        return None
    return is_set("skip_train")(arguments)


def tensor_without_sequence_parallel(arguments: Any) -> object:
    """Refuses tensor parallelism without sequence parallelism."""
    if getattr(arguments, "sequence_parallel", False):
        return None
    return above_one("tensor_model_parallel_size")(arguments)


def expert_parallel_above_ranks(arguments: Any) -> object:
    """Refuses an expert-parallel size above the number of ranks of a pipeline stage."""
    experts = getattr(arguments, "expert_model_parallel_size", 1) or 1
    stages = getattr(arguments, "pipeline_model_parallel_size", 1) or 1
    ranks = getattr(arguments, "world_size", None) or int(os.environ.get("WORLD_SIZE", "1"))
    return experts if experts * stages > ranks else None


def topk_above_experts(arguments: Any) -> object:
    """Refuses a top-k above the number of experts."""
    topk = getattr(arguments, "moe_router_topk", 1)
    return topk if topk > (getattr(arguments, "num_experts", None) or topk) else None


def probs_on_input_above_top1(arguments: Any) -> object:
    """Refuses probabilities on the input with a top-k above 1."""
    if getattr(arguments, "moe_router_topk", 1) == 1:
        return None
    return is_set("moe_apply_probs_on_input")(arguments)


def fp32_residual_with_local_layers(arguments: Any) -> object:
    """Refuses an fp32 residual connection with 16-bit local layers."""
    if not has(arguments, "bf16", "fp16") or getattr(arguments, "transformer_impl", "local") != "local":
        return None
    return is_set("fp32_residual_connection")(arguments)


def window_looks_ahead(arguments: Any) -> object:
    """Refuses attention windows that are not causal."""
    window = getattr(arguments, "window_size", None)
    return window if window and window[1] != 0 else None


def recomputes(*modules: str) -> Callable[[Any], object]:
    """Refuses selective recompute of these modules."""

    def applies(arguments: Any) -> object:
        if getattr(arguments, "recompute_granularity", None) != "selective":
            return None
        chosen = getattr(arguments, "recompute_modules", None) or []
        return next((module for module in chosen if module in modules), None)

    return applies


def packs_documents(arguments: Any) -> bool:
    """Whether sequences are packed from documents, which do not attend to one another."""
    return has(arguments, "sft", "dataloader_inter_document_masking")


def packs_documents_of_context_ranks(arguments: Any) -> object:
    """Refuses context parallelism of packed documents."""
    return above_one("context_parallel_size")(arguments) if packs_documents(arguments) else None


def exchange_without_copies(arguments: Any) -> object:
    """Refuses an exchange that saves neither copies of a token nor messages."""
    chosen = getattr(arguments, "ampipe_exchange", None)
    return None if chosen in (None, AUTO) or chosen in exchanges_of(arguments) else chosen


def nodes_without_layout(arguments: Any) -> object:
    """Refuses an exchange in two hops where expert-parallel ranks are not spread over nodes."""
    chosen = getattr(arguments, "ampipe_exchange", None)
    if chosen in (None, AUTO) or not Exchange(chosen).has_two_hops or _node_layout(arguments) is not None:
        return None
    return ranks_per_node(arguments) or "(unknown)"


def exchanges_of(arguments: Any) -> tuple[Exchange, ...]:
    """What the layers can choose from, by Megatron's arguments."""
    return useful_exchanges(
        experts=getattr(arguments, "num_experts", None) or 1,
        topk=arguments.moe_router_topk,
        dispatcher=arguments.moe_token_dispatcher_type,
        **_expert_ranks(arguments),
    )


def ranks_per_node(arguments: Any) -> int | None:
    """Ranks of a node: as the flag says, else the launcher, such as torchrun; None if neither does."""
    given: int | None = getattr(arguments, "ampipe_ranks_per_node", None)
    of_launcher = os.environ.get("LOCAL_WORLD_SIZE", "")
    return given if given is not None or not of_launcher.isdecimal() else int(of_launcher)


def _node_layout(arguments: Any) -> NodeLayout | None:
    return NodeLayout.of(**_expert_ranks(arguments))


def _expert_ranks(arguments: Any) -> dict[str, Any]:
    return {
        "expert": arguments.expert_model_parallel_size,
        "expert_tensor": expert_tensor_ranks(arguments),
        "ranks_per_node": ranks_per_node(arguments),
    }


def flex_backend_with_shared_buffers(arguments: Any) -> object:
    """Refuses the flex dispatcher with other backends than DeepEP and HybridEP."""
    if equal("moe_token_dispatcher_type", "flex")(arguments) is None:
        return None
    backend = getattr(arguments, "moe_flex_dispatcher_backend", "deepep")
    return None if backend in ("deepep", "hybridep") else backend


def flex_with_what_it_cannot(arguments: Any) -> object:
    """Refuses the flex dispatcher with a memory strategy for experts, a budget of a rank, or padding."""
    refused = (
        getattr(arguments, "ampipe_memory", None) not in (None, KEEP),
        getattr(arguments, "moe_expert_rank_capacity_factor", None) is not None,
        getattr(arguments, "moe_hybridep_pad_uneven_dispatch_inputs", False),
    )
    return equal("moe_token_dispatcher_type", "flex")(arguments) if any(refused) else None


def places_reductions_of_instances(arguments: Any) -> object:
    """Refuses to place the reductions of several instances of the distributed optimizer."""
    several = above_one("num_distributed_optimizer_instances")(arguments)
    return several if settings_of(arguments).grad_reduce == "placed" else None
