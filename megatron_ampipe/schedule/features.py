"""What a block contains, as far as its stages depend on it, and how it follows from Megatron's settings.

The functions take ``settings``: Megatron's arguments, its ``TransformerConfig``, or anything else with the
same names. Whoever makes, checks or runs a schedule gets its features here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.schedule.stage_kind import COMM, COMM_LANE, INTRA, INTRA_LANE

BALANCED = ("sinkhorn", "quantile_balancing")
"""Load-balancing types that compare all tokens of a rank, or of a sequence, to choose their experts."""
DEEPEP_RANKS_OF_NODE = 8
"""Among more ranks, DeepEP does not take the number of rows that will arrive (``num_worst_tokens``)."""
FP8_TILES = {"blockwise": 128, "mxfp8": 32, "tensorwise": 16}
"""The recipes of FP8 in which chunks can train, and of how many tokens a chunk must have a multiple.

So many share a scale where the gradient of a weight is computed; with one scale for all, kernels ask for it.
"""
OTHER_FP8_RECIPE = (
    "delayed scaling, Megatron's default, takes its scales from the largest values of earlier calls, and "
    "chunks are more calls; what a custom recipe does is not known",
    "Use --fp8-recipe blockwise, mxfp8 or tensorwise.",
)
"""Why no other recipe works, and what to do."""
WEIGHTS_TOGETHER = (
    "only the linear layers of --transformer-impl local, and of Transformer Engine from "
    "2.3 on without its fused operations and joint biases, can compute gradients of weights apart",
    "Use --ampipe-schedule ampipe and --ampipe-degree 4, or leave out --use-transformer-engine-op-fuser, "
    "--use-grouped-gemm-for-shared-expert and --moe-single-grouped-bias.",
)
"""Why layers cannot run a schedule that computes gradients of weights apart, and what to do."""


class Restored(StrEnum):
    """How the backward pass of the experts gets what their forward pass has not kept."""

    REBUILD = "rebuild"
    """Inner tensors are computed once more."""
    REDISPATCH = "redispatch"
    """Tokens are sent once more."""
    OFFLOAD = "offload"
    """Inner tensors wait in host memory."""
    OFFLOAD_TOKENS = "offload_tokens"
    """What has arrived waits in host memory."""


@dataclass(frozen=True, slots=True)
class BlockFeatures:
    """What a block contains.

    Attributes:
        attention: Attention before the experts. Without it, the block begins with the norm before the router.
        dense: An MLP in place of routed experts.
        losses: The router has auxiliary or z losses.
        shared: There are shared experts.
        ordered_routing: Chunks must be routed from first to last, because they share the experts' capacity.
        chooses: The router chooses for all chunks at once.
        chunked_qkv: Queries, keys and values can be projected chunk by chunk.
        recomputed: The forward pass keeps only what the block is given, and its stages run again in the
            backward pass (``Stage.again``).
        drops_normed: What the router and the experts are given is not kept either: the norm before them runs
            again where it is needed.
        restored: What is not kept for the backward pass of the experts, and is restored in it: of each chunk
            of the backward pass, or once for all.
        condensed: Similar tokens are sent once.
        flex: The dispatcher counts the tokens itself, in the same call that sends them.
        reduces: Its backward pass reduces gradients of parameters over data-parallel ranks, as a stage.
        reduces_experts: Also those of its experts, in a separate stage.
        nodes: Tokens are sent between nodes and then handed on inside one.
        gathers: The lane in which ranks that share an expert gather its tokens, and reduce and scatter what
            it gives; empty where experts are whole, or the dispatch gathers. With ``nodes``, it is that of
            the node.
        row_links: The resource (``Lane.resource``) over which tensor-parallel ranks add and scatter the rows
            that attention projects, as a stage; empty where the projection does that itself.
        gathers_rows: With ``row_links``, these ranks also gather what attention is given as a stage.
        ring_ranks: Context-parallel ranks that pass keys on to one another; 1 where none do.
        latent: ``merge`` projects what the experts return, so its backward needs their values.
    """

    attention: bool = True
    dense: bool = False
    losses: bool = False
    shared: bool = False
    ordered_routing: bool = False
    chooses: bool = False
    chunked_qkv: bool = False
    recomputed: bool = False
    drops_normed: bool = False
    restored: tuple[tuple[Restored, ...], ...] = ()
    condensed: bool = False
    flex: bool = False
    reduces: bool = False
    reduces_experts: bool = False
    nodes: bool = False
    gathers: str = ""
    row_links: str = ""
    gathers_rows: bool = False
    ring_ranks: int = 1
    latent: bool = False

    @property
    def ring(self) -> bool:
        """Whether ranks pass keys on to one another."""
        return self.ring_ranks > 1

    def restores(self, what: Restored) -> bool:
        """Whether this is restored of any chunk."""
        return any(what in of_chunk for of_chunk in self.restored)

    def of_chunk(self, chunk: int, degree: int | None = None) -> BlockFeatures:
        """With what is restored of one chunk of a pass of this degree; of the backward pass if None.

        A chunk of a forward pass with fewer chunks has what is restored of any of its parts.
        """
        count = len(self.restored)
        if count <= 1:
            return self
        degree = count if degree is None else degree
        first, end = chunk * count // degree, -(-(chunk + 1) * count // degree)
        return replace(self, restored=self.restored[first:end])

    @property
    def without_experts(self) -> BlockFeatures:
        """The features of a block with the same attention and an MLP."""
        of_attention = ("chunked_qkv", "recomputed", "reduces", "row_links", "gathers_rows", "ring_ranks")
        return BlockFeatures(dense=True, **{name: getattr(self, name) for name in of_attention})

    @property
    def without_attention(self) -> BlockFeatures:
        """The features of a block with the same experts whose attention is not a part of it."""
        return replace(
            self, attention=False, chunked_qkv=False, row_links="", gathers_rows=False, ring_ranks=1
        )


def features_of_settings(
    settings: Any,
    own: Settings,
    *,
    with_losses: bool = True,
    dense: bool = False,
    shares_schedule: bool = False,
    local: bool = False,
) -> BlockFeatures:
    """The features of the blocks that Megatron builds from its settings and AMPipe's ``own``.

    Args:
        settings: See the module.
        own: AMPipe's.
        with_losses: Whether the pass adds the router's losses, if there are any: it trains and keeps a graph.
        dense: Of a layer without experts.
        shares_schedule: Several layers share a schedule.
        local: The linear layers are Megatron's local ones, which can leave their transfers to others.
    """
    tensor, context = settings.tensor_model_parallel_size, settings.context_parallel_size
    limited, chooses = has_capacity(settings), chooses_at_once(settings, own)
    chunked_qkv = context == 1 and (tensor == 1 or (shares_schedule and not limited))
    row_links = ""
    if local and tensor > 1 and settings.sequence_parallel:
        near = _within_node(settings, tensor, own.ranks_per_node)
        row_links = (INTRA_LANE if near else COMM_LANE).resource
    features = BlockFeatures(
        losses=with_losses and router_has_losses(settings),
        shared=settings.moe_shared_expert_intermediate_size is not None,
        # A chunk leaves the next one what is left of the capacity.
        ordered_routing=limited and own.capacity_scope != "chunk" and not chooses,
        chooses=chooses,
        chunked_qkv=chunked_qkv,
        condensed=own.condense is not None,
        flex=counts_inside(settings),
        gathers=gather_lane(settings, own.ranks_per_node),
        row_links=row_links,
        gathers_rows=chunked_qkv and bool(row_links) and not settings.multi_latent_attention,
        ring_ranks=context if uses_ring_attention(settings) else 1,
        latent=bool(getattr(settings, "moe_latent_size", None)),
    )
    return features.without_experts if dense else features


def has_capacity(settings: Any) -> bool:
    """Whether experts have a capacity limit: Megatron treats a negative factor as none, and 0 drops all."""
    factor = getattr(settings, "moe_expert_capacity_factor", None)
    return factor is not None and factor >= 0


def fp8_recipe(settings: Any) -> str | None:
    """Megatron's recipe of FP8; None without FP8."""
    if not (getattr(settings, "fp8", None) or getattr(settings, "fp8_format", None)):
        return None
    recipe = getattr(settings, "fp8_recipe", None) or "delayed"
    return str(getattr(recipe, "value", recipe))


def rows_of_tile(settings: Any, batch: int) -> int:
    """Of how many rows of ``batch`` tokens a chunk must have a multiple, so that FP8 has whole tiles."""
    tile = FP8_TILES.get(fp8_recipe(settings) or "", 1)
    return tile // math.gcd(tile, batch)


def counts_inside(settings: Any) -> bool:
    """Whether the dispatcher counts the tokens in the call that sends them."""
    if settings.moe_token_dispatcher_type != "flex":
        return False
    ranks = settings.expert_model_parallel_size * expert_tensor_ranks(settings)
    backend = getattr(settings, "moe_flex_dispatcher_backend", "deepep")
    return backend != "deepep" or ranks > DEEPEP_RANKS_OF_NODE


def expert_tensor_ranks(settings: Any) -> int:
    """How many ranks share an expert, with Megatron's default: those that share attention."""
    num_ranks: int = settings.expert_tensor_parallel_size or settings.tensor_model_parallel_size
    return num_ranks


def gather_lane(settings: Any, ranks_per_node: int | None) -> str:
    """The lane of the all-gathers and reduce-scatters of tensor-parallel experts; empty if there are none.

    Where all ranks that share an expert are in a node and the tokens come from other nodes too, the two use
    different links. Only the dispatcher ``alltoall`` gathers apart from its exchange.
    """
    num_ranks = expert_tensor_ranks(settings)
    if settings.moe_token_dispatcher_type != "alltoall" or num_ranks == 1:
        return ""
    return INTRA if _within_node(settings, num_ranks, ranks_per_node) else COMM


def _within_node(settings: Any, num_ranks: int, ranks_per_node: int | None) -> bool:
    """Whether consecutive ranks are on one node, and those that exchange tokens on several."""
    of_experts = settings.expert_model_parallel_size * expert_tensor_ranks(settings)
    return ranks_per_node is not None and not ranks_per_node % num_ranks and of_experts > ranks_per_node


def uses_ring_attention(settings: Any) -> bool:
    """Whether context-parallel ranks pass keys and values on in a ring, rather than gather all of them.

    ``p2p`` is Megatron's default of ``--cp-comm-type``.
    """
    modes = getattr(settings, "cp_comm_type", None)
    return (
        settings.context_parallel_size > 1
        and set(modes if isinstance(modes, list) else [modes]) <= {"p2p", None}
        and ring_hindrance(settings) is None
    )


def ring_hindrance(settings: Any) -> str | None:
    """Why attention cannot be merged from the keys of one rank after another; None if it can."""
    if settings.attention_dropout > 0:
        return "attention dropout"
    if settings.window_size is not None:
        return "an attention window"
    if getattr(settings, "softmax_type", "vanilla") != "vanilla":
        return "attention sinks"
    return None


def splits_weights(settings: Any) -> bool:
    """Whether the linear layers can compute gradients of weights apart from those of their inputs."""
    if settings.transformer_impl != "transformer_engine":
        return bool(settings.transformer_impl == "local")
    others = (
        "use_transformer_engine_op_fuser",
        "use_grouped_gemm_for_shared_expert",
        "moe_single_grouped_bias",
    )
    return not any(getattr(settings, name, None) for name in others)


def boundary(settings: Any, *, whole_attention: bool) -> str | None:
    """Why consecutive layers cannot share a schedule; None if they can.

    With tensor parallelism Megatron spreads the whole sequence over the ranks. Layers that share a schedule
    spread each chunk, so that other ranks hold its tokens. With ``whole_attention``, the schedule computes
    attention of the whole sequence at once (``moe-only``).
    """
    if settings.context_parallel_size > 1:
        return "with context parallelism, a layer needs keys and values of the whole sequence"
    if settings.tensor_model_parallel_size > 1:
        tensor = "with tensor parallelism,"
        records = ("moe_enable_routing_replay", "moe_routing_trace_path")
        if has_capacity(settings):
            return f"{tensor} which tokens a capacity drops depends on the whole sequence"
        if balances(settings):
            return f"{tensor} balancing compares the tokens of a rank"
        if whole_attention:
            return f"{tensor} attention of the whole sequence needs Megatron's order of the rows"
        if any(getattr(settings, name, None) for name in records):
            return f"{tensor} records of the routing need Megatron's order of the rows"
    if getattr(settings, "use_megatron_fsdp", False):
        return "Megatron-FSDP gathers the parameters of a layer when that layer is called"
    if settings.recompute_granularity == "full":
        return "Megatron's full recompute works around one layer"
    return None


def chooses_at_once(settings: Any, own: Settings) -> bool:
    """Whether experts must be chosen for all chunks before the first token is sent.

    Dropping by probability compares all tokens of an expert, unless ``capacity_scope`` is ``chunk``. Sinkhorn
    compares all tokens, unless ``router_scope`` is ``chunk``, and balancing by quantiles always.
    """
    drops = has_capacity(settings) and settings.moe_token_drop_policy == "probs"
    balances_chunks = own.router_scope == "chunk" and "sinkhorn" in settings.moe_router_load_balancing_type
    return (drops and own.capacity_scope != "chunk") or (balances(settings) and not balances_chunks)


def balances(settings: Any) -> bool:
    """Whether experts are balanced by comparing tokens. Megatron does so if it is the only kind."""
    kinds = settings.moe_router_load_balancing_type
    return (kinds if isinstance(kinds, str) else " ".join(kinds)) in BALANCED


def router_has_losses(settings: Any) -> bool:
    """Whether a training step adds a loss of the router, as Megatron's router decides it.

    An auxiliary loss counts with a coefficient above 0. The z-loss counts with any coefficient, 0 included:
    the router computes and logs it then.
    """
    if settings.moe_z_loss_coeff is not None:
        return True
    kinds, coefficients = settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    numbers = [coefficients] if isinstance(coefficients, int | float) else list(coefficients or [])
    if len(numbers) == 1:
        numbers *= len(names)
    # Other types of load balancing come without a loss.
    with_loss = ("aux_loss", "seq_aux_loss", "global_aux_loss")
    return any(name in with_loss and number > 0 for name, number in zip(names, numbers, strict=False))
