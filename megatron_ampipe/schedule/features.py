"""The features of a block that decide which stages it has, and how they follow from Megatron's settings.

The functions take ``settings``: Megatron's arguments, its ``TransformerConfig``, or any object with the same
names. All code that builds, checks or runs a schedule gets the features here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_ampipe.block.megatron_settings import (
    AttentionSettings,
    LayoutSettings,
    MegatronSettings,
    ModuleSettings,
    RouterSettings,
)
from megatron_ampipe.block.settings import Settings
from megatron_ampipe.schedule.saved import SAVES_ALL, SavedPolicy
from megatron_ampipe.schedule.stage_kind import COMM, COMM_LANE, INTRA, INTRA_LANE

BALANCED = ("sinkhorn", "quantile_balancing")
"""Load-balancing types that compare all tokens of a rank, or of a sequence, to choose experts."""
DEEPEP_RANKS_OF_NODE = 8
"""With more ranks, DeepEP cannot be given the number of received rows in advance (``num_worst_tokens``)."""
FP8_TILES = {"blockwise": 128, "mxfp8": 32, "tensorwise": 16}
"""The FP8 recipes that support chunks, each with the number that a chunk's tokens must be a multiple of.

So many tokens share a scale in the wgrad product; with one scale per tensor, kernels require the multiple.
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
    "Use --ampipe-schedule ampipe and --ampipe-degree 2, or leave out --use-transformer-engine-op-fuser, "
    "--use-grouped-gemm-for-shared-expert and --moe-single-grouped-bias.",
)
"""Why layers cannot run a schedule that computes gradients of weights apart, and what to do."""


@dataclass(frozen=True, slots=True)
class BlockFeatures:
    """The features of a block.

    Attributes:
        attention: Attention before the experts. Without it, the block begins with the norm before the router.
        dense: An MLP in place of routed experts.
        losses: The router has auxiliary or z losses.
        shared: There are shared experts.
        ordered_routing: Chunks must be routed from first to last, because they share the experts' capacity.
        chooses: The router chooses experts for all chunks at once.
        chunked_qkv: Queries, keys and values can be projected chunk by chunk.
        saved: What the stages save between forward and backward, and how the backward pass gets the rest.
        condensed: Similar tokens are sent once.
        flex: The dispatcher counts the tokens itself, in the same call that sends them.
        reduces: The backward pass has a stage that reduces parameter gradients over data-parallel ranks.
        reduces_experts: It has a separate one for gradients of experts.
        nodes: Tokens are sent between nodes first, then forwarded within the node.
        gathers: The lane in which ranks that share an expert all-gather its tokens and reduce-scatter its
            outputs; empty if experts are not sharded, or if the dispatch gathers. With ``nodes``, the lane
            within the node is used.
        row_links: The resource (``Lane.resource``) of the reduce-scatter of attention's output projection, if
            that is a stage; empty if the projection does it itself.
        gathers_rows: With ``row_links``, the all-gather of attention's input is also a stage.
        ring_ranks: Context-parallel ranks that pass keys around in a ring; 1 without a ring.
        latent: ``merge`` projects the expert outputs, so its backward needs their values.
    """

    attention: bool = True
    dense: bool = False
    losses: bool = False
    shared: bool = False
    ordered_routing: bool = False
    chooses: bool = False
    chunked_qkv: bool = False
    saved: SavedPolicy = SAVES_ALL
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
        """Whether context-parallel ranks pass keys around in a ring."""
        return self.ring_ranks > 1

    @property
    def recomputed(self) -> bool:
        """Full recompute: the forward pass saves only the input of the block, and its stages run again."""
        return self.saved.recomputes_block

    def of_chunk(self, chunk: int, degree: int | None = None) -> BlockFeatures:
        """The features for one chunk, see :meth:`SavedPolicy.of_chunk`."""
        if len(self.saved.experts) <= 1:
            return self
        return replace(self, saved=self.saved.of_chunk(chunk, degree))

    @property
    def without_experts(self) -> BlockFeatures:
        """The features of a block with the same attention and an MLP."""
        kept = ("chunked_qkv", "reduces", "row_links", "gathers_rows", "ring_ranks")
        saved = self.saved._replace(experts=())
        return BlockFeatures(dense=True, saved=saved, **{name: getattr(self, name) for name in kept})

    @property
    def without_attention(self) -> BlockFeatures:
        """The features of a block with the same experts, without attention."""
        return replace(
            self, attention=False, chunked_qkv=False, row_links="", gathers_rows=False, ring_ranks=1
        )


def features_of_settings(
    settings: MegatronSettings,
    own: Settings,
    *,
    with_losses: bool = True,
    dense: bool = False,
    shares_schedule: bool = False,
    local: bool = False,
) -> BlockFeatures:
    """The features of the blocks that Megatron builds from its settings and AMPipe's ``own``.

    Args:
        settings: Megatron's settings, see the module.
        own: AMPipe's settings.
        with_losses: Whether the pass adds the router's losses, if there are any (training, with a graph).
        dense: For a layer without experts.
        shares_schedule: Whether several layers share a schedule.
        local: Whether linear layers are Megatron's local ones, whose transfers can be separate stages.
    """
    tensor, context = settings.tensor_model_parallel_size, settings.context_parallel_size
    limited, chooses = has_capacity(settings), chooses_at_once(settings, own)
    chunked_qkv = context == 1 and (tensor == 1 or (shares_schedule and not limited))
    row_links = ""
    if local and tensor > 1 and settings.sequence_parallel:
        within_node = _within_node(settings, tensor, own.ranks_per_node)
        row_links = (INTRA_LANE if within_node else COMM_LANE).resource
    features = BlockFeatures(
        losses=with_losses and router_has_losses(settings),
        shared=settings.moe_shared_expert_intermediate_size is not None,
        # The next chunk gets the rest of the capacity.
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


def has_capacity(settings: object) -> bool:
    """Whether experts have a capacity limit: Megatron treats a negative factor as none, and 0 drops all."""
    factor = getattr(settings, "moe_expert_capacity_factor", None)
    return factor is not None and factor >= 0


def fp8_recipe(settings: object) -> str | None:
    """Megatron's FP8 recipe; None without FP8."""
    if not (getattr(settings, "fp8", None) or getattr(settings, "fp8_format", None)):
        return None
    recipe = getattr(settings, "fp8_recipe", None) or "delayed"
    return str(getattr(recipe, "value", recipe))


def has_other_fp8_recipe(settings: object) -> bool:
    """Whether training is in FP8 with a recipe that does not support chunks (:data:`OTHER_FP8_RECIPE`)."""
    return fp8_recipe(settings) not in (None, *FP8_TILES)


def rows_of_tile(settings: object, batch: int) -> int:
    """The number that a chunk's rows, of ``batch`` tokens each, must be a multiple of for whole FP8 tiles."""
    return rows_of_recipe(fp8_recipe(settings), batch)


def rows_of_recipe(recipe: str | None, batch: int) -> int:
    """As :func:`rows_of_tile`, for an FP8 recipe; None without FP8."""
    tile = FP8_TILES.get(recipe or "", 1)
    return tile // math.gcd(tile, batch)


def counts_inside(settings: MegatronSettings) -> bool:
    """Whether the dispatcher counts the tokens in the call that sends them."""
    if settings.moe_token_dispatcher_type != "flex":
        return False
    ranks = settings.expert_model_parallel_size * expert_tensor_ranks(settings)
    backend = getattr(settings, "moe_flex_dispatcher_backend", None) or "deepep"
    return backend != "deepep" or ranks > DEEPEP_RANKS_OF_NODE


def expert_tensor_ranks(settings: LayoutSettings) -> int:
    """The expert tensor-parallel size; Megatron's default is the tensor-parallel size."""
    num_ranks: int = settings.expert_tensor_parallel_size or settings.tensor_model_parallel_size
    return num_ranks


def gather_lane(settings: MegatronSettings, ranks_per_node: int | None) -> str:
    """The lane of the all-gathers and reduce-scatters of tensor-parallel experts; empty if there are none.

    If ranks that share an expert are in one node and tokens also come from other nodes, gathers and dispatch
    use different links. Only the ``alltoall`` dispatcher gathers in a separate collective.
    """
    num_ranks = expert_tensor_ranks(settings)
    if settings.moe_token_dispatcher_type != "alltoall" or num_ranks == 1:
        return ""
    return INTRA if _within_node(settings, num_ranks, ranks_per_node) else COMM


def _within_node(settings: LayoutSettings, num_ranks: int, ranks_per_node: int | None) -> bool:
    """Whether ``num_ranks`` consecutive ranks are on one node, but the ranks that exchange tokens are not."""
    num_expert_ranks = settings.expert_model_parallel_size * expert_tensor_ranks(settings)
    return ranks_per_node is not None and not ranks_per_node % num_ranks and num_expert_ranks > ranks_per_node


def uses_ring_attention(settings: AttentionSettings) -> bool:
    """Whether context-parallel ranks pass keys and values around in a ring, instead of gathering them.

    ``p2p`` is Megatron's default of ``--cp-comm-type``.
    """
    modes = getattr(settings, "cp_comm_type", None)
    return (
        settings.context_parallel_size > 1
        and set(modes if isinstance(modes, list) else [modes]) <= {"p2p", None}
        and ring_hindrance(settings) is None
    )


def ring_hindrance(settings: AttentionSettings) -> str | None:
    """Why ring attention is not possible; None if it is."""
    if getattr(settings, "sft", False) or getattr(settings, "dataloader_inter_document_masking", False):
        return "packed documents"
    if settings.attention_dropout > 0:
        return "attention dropout"
    if settings.window_size is not None:
        return "an attention window"
    if (getattr(settings, "softmax_type", None) or "vanilla") != "vanilla":
        return "attention sinks"
    return None


def splits_weights(settings: ModuleSettings) -> bool:
    """Whether linear layers can compute weight gradients separately from input gradients."""
    if settings.transformer_impl != "transformer_engine":
        return bool(settings.transformer_impl == "local")
    others = (
        "use_transformer_engine_op_fuser",
        "use_grouped_gemm_for_shared_expert",
        "moe_single_grouped_bias",
    )
    return not any(getattr(settings, name, None) for name in others)


def boundary(settings: MegatronSettings, *, whole_attention: bool) -> str | None:
    """Why consecutive layers cannot share a schedule; None if they can.

    With tensor parallelism, Megatron shards the whole sequence over the ranks, but layers that share a
    schedule shard each chunk, which moves tokens to other ranks. ``whole_attention``: the schedule computes
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
            return f"{tensor} unchunked attention requires Megatron's row order"
        if any(getattr(settings, name, None) for name in records):
            return f"{tensor} records of the routing need Megatron's order of the rows"
    if getattr(settings, "use_megatron_fsdp", False):
        return "Megatron-FSDP gathers the parameters of a layer when that layer is called"
    if settings.recompute_granularity == "full":
        return "Megatron's full recompute works around one layer"
    return None


def chooses_at_once(settings: RouterSettings, own: Settings) -> bool:
    """Whether experts must be chosen for all chunks before the first token is sent.

    Dropping by probability compares all tokens of an expert, unless ``capacity_scope`` is ``chunk``. Sinkhorn
    compares all tokens, unless ``router_scope`` is ``chunk``; balancing by quantiles always does.
    """
    drops = has_capacity(settings) and settings.moe_token_drop_policy == "probs"
    balances_chunks = own.router_scope == "chunk" and "sinkhorn" in settings.moe_router_load_balancing_type
    return (drops and own.capacity_scope != "chunk") or (balances(settings) and not balances_chunks)


def balances(settings: RouterSettings) -> bool:
    """Whether experts are balanced by comparing tokens: Megatron does so if it is the only balancing type."""
    kinds = settings.moe_router_load_balancing_type
    return (kinds if isinstance(kinds, str) else " ".join(kinds)) in BALANCED


def router_has_losses(settings: RouterSettings) -> bool:
    """Whether a training step adds a router loss, by the same rule as in Megatron's router.

    An auxiliary loss counts if its coefficient is above 0. The z-loss counts with any coefficient, even 0,
    because the router then computes and logs it.
    """
    if settings.moe_z_loss_coeff is not None:
        return True
    kinds, coefficients = settings.moe_router_load_balancing_type, settings.moe_aux_loss_coeff
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    numbers = [coefficients] if isinstance(coefficients, int | float) else list(coefficients or [])
    if len(numbers) == 1:
        numbers *= len(names)
    # Other types of load balancing have no loss.
    with_loss = ("aux_loss", "seq_aux_loss", "global_aux_loss")
    return any(name in with_loss and number > 0 for name, number in zip(names, numbers, strict=False))
