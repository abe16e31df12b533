"""The process groups that the blocks of a model need in addition to Megatron's.

Every rank makes them right before it builds a model, whichever layers it builds, or none: which groups are
needed follows from the configuration of the model, which all ranks share.
"""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed as dist

from megatron_ampipe.exchange.hops import node_groups
from megatron_ampipe.exchange.packing import counts_group
from megatron_ampipe.layers.context import AMPipeContext
from megatron_ampipe.runtime.groups import GroupRequest, make_groups
from megatron_ampipe.schedule import Exchange, useful_exchanges


def make_groups_of_model(
    config: TransformerConfig, context: AMPipeContext, groups: ProcessGroupCollection | None
) -> None:
    """Make the groups of a model's blocks. All ranks of the world must call it, once for each of its models.

    ``groups`` are those that the model is built with; None for the ones of ``parallel_state``.
    """
    if not context.pipelined:
        return
    if groups is None:
        groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "ep", "tp_ep"])
    requests = []
    if config.sequence_parallel and groups.tp.size() > 1:
        requests.append(row_group(groups.tp))
    if config.num_moe_experts and config.moe_token_dispatcher_type == "allgather":
        requests.append(counts_group(groups.tp_ep))
    if any(exchange.has_two_hops for exchange in possible_exchanges(config, context)):
        requests.extend(node_groups(groups.ep, context.settings.ranks_per_node))
    # Megatron's own function: --distributed-timeout-seconds-after-init changes the groups that it has made.
    make_groups(requests, create=parallel_state.create_group)


def row_group(group: dist.ProcessGroup) -> GroupRequest:
    """The group of the lane ``comm.tensor`` of the tensor-parallel ``group``.

    NCCL runs the collectives of a group one after another, but this lane must not wait for others.
    """
    return GroupRequest.of_all(group, "rows of attention")


def possible_exchanges(config: TransformerConfig, context: AMPipeContext) -> set[Exchange]:
    """The exchanges that a run can use: that of its pipeline, or all between which it chooses."""
    if not config.num_moe_experts:
        return set()
    exchanges = {context.pipeline.exchange}
    if context.settings.chooses_exchange:
        ranks_per_node = context.settings.ranks_per_node
        exchanges.update(useful_exchanges(config, config.num_moe_experts, ranks_per_node))
    return exchanges
