"""What a block contains, from Megatron's settings: the one answer for launch, plan and layers.

The features decide which stages a schedule has and which stage waits for which, so whoever makes, checks or
runs a schedule must get the same ones. Imports neither torch nor Megatron. Called by ``launch`` with
Megatron's arguments, by ``layers`` with a ``TransformerConfig`` and by ``plan`` with a workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ampipe.block.settings import Settings
from megatron_ampipe.schedule import BlockFeatures
from megatron_ampipe.schedule.stage_kind import COMM, COMM_LANE, INTRA, INTRA_LANE

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load-balancing types that come with a loss."""
BALANCED = ("sinkhorn", "quantile_balancing")
"""Load-balancing types that compare all tokens of a rank, or of a sequence, to choose their experts."""


def features_of_settings(
    settings: Any,
    own: Settings,
    *,
    with_losses: bool = True,
    dense: bool = False,
    shares_schedule: bool = False,
    local: bool = False,
) -> BlockFeatures:
    """The features of the blocks that Megatron builds from these settings.

    Args:
        settings: Megatron's arguments or its ``TransformerConfig``, which have the same names.
        own: AMPipe's settings.
        with_losses: Whether the pass adds the router's losses, if there are any: it trains and keeps a graph.
        dense: Of a layer without experts.
        shares_schedule: Several layers share a schedule.
        local: As for :func:`row_links`.
    """
    return block_features(
        dense=dense,
        losses=with_losses
        and router_has_losses(
            settings.moe_router_load_balancing_type,
            coefficients=settings.moe_aux_loss_coeff,
            z_loss_coefficient=settings.moe_z_loss_coeff,
        ),
        shared_size=settings.moe_shared_expert_intermediate_size,
        capacity_factor=settings.moe_expert_capacity_factor,
        capacity_per_chunk=own.capacity_scope == "chunk",
        chooses=chooses_at_once(
            settings.moe_router_load_balancing_type,
            own,
            drop_policy=settings.moe_token_drop_policy,
            capacity_factor=settings.moe_expert_capacity_factor,
        ),
        condensed=own.condense is not None,
        tensor_ranks=settings.tensor_model_parallel_size,
        context_ranks=settings.context_parallel_size,
        shares_schedule=shares_schedule,
        flex=counts_inside(settings),
        latent=has_latent_experts(settings),
        ring=uses_ring_attention(settings),
        gathers=gather_lane_of(settings, own.ranks_per_node),
        row_links=row_links(
            tensor=settings.tensor_model_parallel_size if settings.sequence_parallel else 1,
            local=local,
            expert=settings.expert_model_parallel_size,
            expert_tensor=expert_tensor_ranks(settings),
            ranks_per_node=own.ranks_per_node,
        ),
        latent_attention=settings.multi_latent_attention,
    )


DEEPEP_RANKS_OF_NODE = 8
"""Among more ranks, DeepEP does not take the number of rows that will arrive (``num_worst_tokens``)."""


def counts_inside(settings: Any) -> bool:
    """Whether the dispatcher of these settings counts the tokens in the call that sends them."""
    if settings.moe_token_dispatcher_type != "flex":
        return False
    ranks = settings.expert_model_parallel_size * (
        settings.expert_tensor_parallel_size or settings.tensor_model_parallel_size
    )
    backend = getattr(settings, "moe_flex_dispatcher_backend", "deepep")
    return backend != "deepep" or ranks > DEEPEP_RANKS_OF_NODE


def gather_lane_of(settings: Any, ranks_per_node: int | None) -> str:
    """:func:`gather_lane` of Megatron's arguments or its ``TransformerConfig``."""
    return gather_lane(
        dispatcher=settings.moe_token_dispatcher_type,
        expert=settings.expert_model_parallel_size,
        expert_tensor=expert_tensor_ranks(settings),
        ranks_per_node=ranks_per_node,
    )


def expert_tensor_ranks(settings: Any) -> int:
    """How many ranks share an expert, with Megatron's default: those that share attention."""
    found: int = settings.expert_tensor_parallel_size or settings.tensor_model_parallel_size
    return found


def gather_lane(*, dispatcher: str, expert: int, expert_tensor: int, ranks_per_node: int | None) -> str:
    """The lane of the all-gathers and reduce-scatters of tensor-parallel experts.

    Ranks that share an expert follow one another. Where all of them are in a node and the tokens come from
    other nodes too, the two use different links. Elsewhere they use the same ones.

    Args:
        dispatcher: Megatron's token dispatcher; only ``alltoall`` gathers apart from its exchange.
        expert: Expert-parallel ranks.
        expert_tensor: Ranks that share an expert.
        ranks_per_node: Of all ranks, those of a node; None if that is not known.

    Returns:
        The name of the lane; empty if nothing is gathered.
    """
    if dispatcher != "alltoall" or expert_tensor == 1:
        return ""
    within = _within_node(expert_tensor, expert * expert_tensor, ranks_per_node)
    return INTRA if within else COMM


def row_links(
    *, tensor: int, local: bool, expert: int, expert_tensor: int, ranks_per_node: int | None
) -> str:
    """Over which links tensor-parallel ranks add and scatter the rows that attention projects, as a stage.

    Args:
        tensor: Tensor-parallel ranks with sequence parallelism; 1 without it.
        local: The linear layers are Megatron's local ones, which can leave their transfers to others.
        expert: Expert-parallel ranks.
        expert_tensor: Ranks that share an expert.
        ranks_per_node: As for :func:`gather_lane`.

    Returns:
        The resource (``Lane.resource``); empty if there is no such stage.
    """
    if tensor == 1 or not local:
        return ""
    within = _within_node(tensor, expert * expert_tensor, ranks_per_node)
    return (INTRA_LANE if within else COMM_LANE).resource


def _within_node(ranks: int, of_experts: int, ranks_per_node: int | None) -> bool:
    """Whether consecutive ranks are on one node, and those that exchange tokens on several."""
    return ranks_per_node is not None and not ranks_per_node % ranks and of_experts > ranks_per_node


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
    if reads_largest_scores(settings):
        return "the largest score of each head"
    return None


def reads_largest_scores(settings: Any) -> bool:
    """Whether Megatron reads the largest attention score of each head after every iteration."""
    return any(getattr(settings, name, False) for name in ("qk_clip", "log_max_attention_logit"))


def has_latent_experts(settings: Any) -> bool:
    """Whether experts work on fewer columns than the rest of the layer (``--moe-latent-size``)."""
    return bool(getattr(settings, "moe_latent_size", None))


def block_features(
    *,
    dense: bool = False,
    losses: bool,
    shared_size: int | None,
    capacity_factor: float | None,
    capacity_per_chunk: bool,
    chooses: bool = False,
    condensed: bool = False,
    tensor_ranks: int,
    context_ranks: int,
    shares_schedule: bool = False,
    flex: bool = False,
    latent: bool = False,
    ring: bool = False,
    gathers: str = "",
    row_links: str = "",
    latent_attention: bool = False,
) -> BlockFeatures:
    """The features of a block.

    Args:
        dense: A layer without experts, of which the rest of the settings of experts do not count.
        losses: The router has auxiliary or z losses.
        shared_size: Width inside the shared experts; None without.
        capacity_factor: None or below 0 if no token is dropped. A factor of 0 is a capacity: it drops all.
        capacity_per_chunk: Every chunk has its own capacity.
        chooses: As :func:`chooses_at_once`.
        condensed: Similar tokens are sent once.
        tensor_ranks: Over how many ranks tensor parallelism spreads a sequence.
        context_ranks: Over how many ranks context parallelism does.
        shares_schedule: Several layers share a schedule.
        flex: As :func:`counts_inside`.
        latent: Tokens are projected to fewer columns for the experts, and back.
        ring: Context-parallel ranks pass keys and values on, rather than gather them.
        gathers: As :func:`gather_lane`.
        row_links: As :func:`row_links`.
        latent_attention: Queries and keys are projected by several layers one after the other.
    """
    has_capacity = not moves_rows(capacity_factor)
    chunked_qkv = context_ranks == 1 and (
        tensor_ranks == 1 or (shares_schedule and moves_rows(capacity_factor))
    )
    gathers_rows = chunked_qkv and bool(row_links) and not latent_attention
    ring_ranks = context_ranks if ring else 1
    if dense:
        return BlockFeatures(
            dense=True,
            chunked_qkv=chunked_qkv,
            ring_ranks=ring_ranks,
            row_links=row_links,
            gathers_rows=gathers_rows,
        )
    return BlockFeatures(
        ring_ranks=ring_ranks,
        losses=losses,
        shared=shared_size is not None,
        # A chunk leaves the next one what is left of the capacity.
        ordered_routing=has_capacity and not capacity_per_chunk and not chooses,
        chooses=chooses,
        condensed=condensed,
        chunked_qkv=chunked_qkv,
        flex=flex,
        latent=latent,
        gathers=gathers,
        row_links=row_links,
        gathers_rows=gathers_rows,
    )


def boundary(settings: Any, *, whole_attention: bool) -> str | None:
    """Why consecutive layers cannot share a schedule; None if they can.

    Args:
        settings: Megatron's arguments or its ``TransformerConfig``, which have the same names.
        whole_attention: The schedule computes attention of the whole sequence at once (``moe-only``).
    """
    if settings.context_parallel_size > 1:
        return "with context parallelism, a layer needs keys and values of the whole sequence"
    if settings.tensor_model_parallel_size > 1 and not moves_rows(settings.moe_expert_capacity_factor):
        return "with tensor parallelism, which tokens a capacity drops depends on the whole sequence"
    if settings.tensor_model_parallel_size > 1 and _balances(settings.moe_router_load_balancing_type):
        return "with tensor parallelism, balancing compares the tokens of a rank"
    if settings.tensor_model_parallel_size > 1 and whole_attention:
        return "with tensor parallelism, attention of the whole sequence needs Megatron's order of the rows"
    if settings.tensor_model_parallel_size > 1 and any(
        getattr(settings, name, None) for name in ("moe_enable_routing_replay", "moe_routing_trace_path")
    ):
        return "with tensor parallelism, records of the routing need Megatron's order of the rows"
    if settings.recompute_granularity == "full":
        return "Megatron's full recompute works around one layer"
    return None


def chooses_at_once(
    kinds: str | Sequence[str],
    own: Settings,
    *,
    drop_policy: str | None,
    capacity_factor: float | None,
) -> bool:
    """Whether experts must be chosen for all chunks before the first token is sent.

    Args:
        kinds: ``--moe-router-load-balancing-type``, one or several. Sinkhorn compares all tokens, unless
            ``router_scope`` is ``chunk``, and balancing by quantiles always.
        own: AMPipe's settings.
        drop_policy: ``--moe-token-drop-policy``. Dropping by probability compares all tokens of an expert,
            unless ``capacity_scope`` is ``chunk``.
        capacity_factor: As for :func:`block_features`.
    """
    drops = not moves_rows(capacity_factor) and drop_policy == "probs" and own.capacity_scope != "chunk"
    return drops or (_balances(kinds) and not (own.router_scope == "chunk" and "sinkhorn" in kinds))


def _balances(kinds: str | Sequence[str]) -> bool:
    """Whether experts are balanced by comparing tokens. Megatron does so if it is the only kind."""
    return (kinds if isinstance(kinds, str) else " ".join(kinds)) in BALANCED


def moves_rows(capacity_factor: float | None) -> bool:
    """Whether layers that share a schedule can spread each chunk over the tensor-parallel ranks.

    Megatron spreads the whole sequence: a chunk then consists of rows from everywhere in it, whose attention
    needs the keys of all chunks. With a capacity, the dropped tokens depend on which rank holds them.
    """
    return capacity_factor is None or capacity_factor < 0


def router_has_losses(
    kinds: str | Sequence[str],
    *,
    coefficients: float | Sequence[float] | None,
    z_loss_coefficient: float | None,
) -> bool:
    """Whether a training step adds a loss of the router, as Megatron's router decides it.

    An auxiliary loss counts with a coefficient above 0. The z-loss counts with any coefficient, 0 included:
    the router computes and logs it then.

    Args:
        kinds: ``--moe-router-load-balancing-type``, one or several.
        coefficients: ``--moe-aux-loss-coeff``: one, or one for each kind.
        z_loss_coefficient: ``--moe-z-loss-coeff``; None where it is not given.
    """
    if z_loss_coefficient is not None:
        return True
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    numbers = [coefficients] if isinstance(coefficients, int | float) else list(coefficients or [])
    if len(numbers) == 1:
        numbers *= len(names)
    return any(name in AUX_LOSSES and number > 0 for name, number in zip(names, numbers, strict=False))
