"""The dispatcher of an MoE layer for each exchange, in the process groups that it sends in."""

from __future__ import annotations

from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ampipe.exchange.budgets import FixedRows
from megatron_ampipe.exchange.fixed_flex import FixedHybridEPChunk
from megatron_ampipe.exchange.fixed_rows import FixedRowsChunk
from megatron_ampipe.exchange.flex import FlexChunk
from megatron_ampipe.exchange.hops import node_groups
from megatron_ampipe.exchange.packing import AllGatherChunk, AllToAllChunk
from megatron_ampipe.layers.grouped_experts import require_fixed_experts, tile_of
from megatron_ampipe.runtime.groups import made_group
from megatron_ampipe.schedule import Exchange

Dispatcher = AllToAllChunk | AllGatherChunk | FlexChunk


def make_dispatcher(layer: TransformerLayer, exchange: Exchange, ranks_per_node: int | None) -> Dispatcher:
    """The dispatcher of a layer, which each chunk copies.

    Args:
        layer: Megatron's layer, with experts.
        exchange: How the all-to-all groups copies of a token; only for the ``alltoall`` dispatcher.
        ranks_per_node: Number of consecutive ranks on a node, for two hops.
    """
    config, groups, moe = layer.config, layer.pg_collection, layer.mlp
    local_experts = moe.num_local_experts, moe.local_expert_indices
    if config.moe_token_dispatcher_type == "allgather":
        return AllGatherChunk(*local_experts, config=config, pg_collection=groups)
    if config.moe_token_dispatcher_type == "flex":
        chunk = FlexChunk(*local_experts, config=config, pg_collection=groups)
        factor = getattr(config, "moe_expert_rank_capacity_factor", None)
        if factor is not None and config.moe_flex_dispatcher_backend == "hybridep":
            chunk.share_budget(moe.token_dispatcher)
        return chunk
    nodes = None
    if exchange.has_two_hops:
        between_nodes, within_node = node_groups(groups.ep, ranks_per_node)
        nodes = made_group(between_nodes), made_group(within_node)
    return AllToAllChunk(
        *local_experts,
        config=config,
        pg_collection=groups,
        dedup_copies=not exchange.sends_every_copy,
        nodes=nodes,
        has_fixed_choices=moe.router.has_stock_routing,
    )


def make_fixed_dispatcher(
    layer: TransformerLayer, fixed_rows: FixedRows
) -> FixedRowsChunk | FixedHybridEPChunk:
    """Create the dispatcher of an MoE layer whose chunks are sent with fixed rows.

    Raises:
        BadInput: its experts cannot take their numbers of rows from the device.
    """
    moe = layer.mlp
    require_fixed_experts(moe.experts)
    local_experts = moe.num_local_experts, moe.local_expert_indices
    config, groups = layer.config, layer.pg_collection
    chunk: FixedRowsChunk | FixedHybridEPChunk
    if config.moe_token_dispatcher_type == "flex":
        chunk = FixedHybridEPChunk(*local_experts, config=config, pg_collection=groups)
    else:
        chunk = FixedRowsChunk(
            *local_experts,
            config=config,
            pg_collection=groups,
            has_fixed_choices=moe.router.has_stock_routing,
        )
    chunk.share(fixed_rows, tile=tile_of(config))
    return chunk
