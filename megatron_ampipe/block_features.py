"""What a block contains, from Megatron's settings: the one answer for launch, plan and layers.

The features decide which stages a schedule has and which stage waits for which, so whoever makes, checks or
runs a schedule must get the same ones. Imports neither torch nor Megatron. Called by ``launch`` with
Megatron's arguments, by ``layers`` with a ``TransformerConfig`` and by ``plan`` with a workload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ampipe.schedule import BlockFeatures

AUX_LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss")
"""Load-balancing types that come with a loss."""


def features_of_settings(
    settings: Any,
    *,
    capacity_scope: str,
    with_losses: bool = True,
    dense: bool = False,
    shares_schedule: bool = False,
) -> BlockFeatures:
    """The features of the blocks that Megatron builds from these settings.

    Args:
        settings: Megatron's arguments or its ``TransformerConfig``, which have the same names.
        capacity_scope: ``sequence`` or ``chunk``, see :class:`~megatron_ampipe.config.AMPipeConfig`.
        with_losses: Whether the pass adds the router's losses, if there are any: it trains and keeps a graph.
        dense: Of a layer without experts.
        shares_schedule: Several layers share a schedule.
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
        capacity_per_chunk=capacity_scope == "chunk",
        tensor_ranks=settings.tensor_model_parallel_size,
        context_ranks=settings.context_parallel_size,
        shares_schedule=shares_schedule,
        flex=settings.moe_token_dispatcher_type == "flex",
        latent=has_latent_experts(settings),
    )


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
    tensor_ranks: int,
    context_ranks: int,
    shares_schedule: bool = False,
    flex: bool = False,
    latent: bool = False,
) -> BlockFeatures:
    """The features of a block.

    Args:
        dense: A layer without experts, of which the rest of the settings of experts do not count.
        losses: The router has auxiliary or z losses.
        shared_size: Width inside the shared experts; None without.
        capacity_factor: None or below 0 if no token is dropped. A factor of 0 is a capacity: it drops all.
        capacity_per_chunk: Every chunk has its own capacity.
        tensor_ranks: Over how many ranks tensor parallelism spreads a sequence.
        context_ranks: Over how many ranks context parallelism does.
        shares_schedule: Several layers share a schedule.
        flex: The flex dispatcher.
        latent: Tokens are projected to fewer columns for the experts, and back.
    """
    has_capacity = capacity_factor is not None and capacity_factor >= 0
    chunked_qkv = context_ranks == 1 and (
        tensor_ranks == 1 or (shares_schedule and moves_rows(capacity_factor))
    )
    if dense:
        return BlockFeatures(dense=True, chunked_qkv=chunked_qkv)
    return BlockFeatures(
        losses=losses,
        shared=shared_size is not None,
        # A chunk leaves the next one what is left of the capacity.
        ordered_routing=has_capacity and not capacity_per_chunk,
        chunked_qkv=chunked_qkv,
        flex=flex,
        latent=latent,
    )


def boundary(settings: Any, *, whole_attention: bool) -> str | None:
    """Why consecutive layers cannot share a schedule; None if they can.

    Args:
        settings: Megatron's arguments or its ``TransformerConfig``, which have the same names.
        whole_attention: The schedule computes attention of the whole sequence at once (``moe-only``).
    """
    if settings.context_parallel_size > 1:
        return "with context parallelism, a layer gathers keys and values of the whole sequence"
    if settings.tensor_model_parallel_size > 1 and not moves_rows(settings.moe_expert_capacity_factor):
        return "with tensor parallelism, which tokens a capacity drops depends on the whole sequence"
    if settings.tensor_model_parallel_size > 1 and whole_attention:
        return "with tensor parallelism, attention of the whole sequence needs Megatron's order of the rows"
    if settings.tensor_model_parallel_size > 1 and any(
        getattr(settings, name, None) for name in ("moe_enable_routing_replay", "moe_routing_trace_path")
    ):
        return "with tensor parallelism, records of the routing need Megatron's order of the rows"
    if settings.recompute_granularity == "full":
        return "Megatron's full recompute works around one layer"
    return None


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
