"""How often a token is sent: the values of ``--ampipe-exchange``. Part of a :class:`~.pipeline.Pipeline`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_ampipe.schedule.graph import BlockFeatures


class Exchange(StrEnum):
    """What the all-to-all of a chunk sends. Changes no result: sums are added in another order."""

    ROWS = "rows"
    """A row for each expert of a token, as Megatron's dispatcher does."""
    RANKS = "ranks"
    """A row for each rank that has experts of the token; the rank copies it and adds their outputs."""
    NODES = "nodes"
    """A row for each node that has experts of the token, to the rank of the same place in the node; that rank
    hands it on to the ranks of the experts, and adds what they send back."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """How the expert-parallel ranks are spread over nodes. They follow one another, node by node.

    Attributes:
        num_nodes: Nodes over which a group of expert-parallel ranks is spread.
        ranks_per_node: Ranks of the group on each of them.
    """

    num_nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, *, expert: int, expert_tensor: int, ranks_per_node: int | None) -> NodeLayout | None:
        """The layout of Megatron's expert-parallel groups: expert-tensor-parallel ranks are adjacent.

        Args:
            expert: Expert-parallel ranks.
            expert_tensor: Expert-tensor-parallel ranks.
            ranks_per_node: Of all ranks, those of a node; None if that is not known.

        Returns:
            None where a group is not spread equally over several nodes with several of its ranks on each.
        """
        if ranks_per_node is None or ranks_per_node % expert_tensor:
            return None
        near = ranks_per_node // expert_tensor
        return cls(expert // near, near) if 1 < near < expert and expert % near == 0 else None


def useful_exchanges(
    *,
    experts: int,
    expert: int,
    expert_tensor: int,
    topk: int,
    dispatcher: str,
    ranks_per_node: int | None,
) -> tuple[Exchange, ...]:
    """What a layer can choose from: Megatron's own exchange, and those that send fewer copies of a token.

    Args:
        experts: All experts of the layer.
        expert: Expert-parallel ranks.
        expert_tensor: Expert-tensor-parallel ranks.
        topk: Experts of a token.
        dispatcher: Megatron's token dispatcher.
        ranks_per_node: As in :meth:`NodeLayout.of`.
    """
    found = [Exchange.ROWS]
    if dispatcher == "alltoall" and topk > 1:
        if expert * expert_tensor > 1 and experts > expert:
            found.append(Exchange.RANKS)
        if NodeLayout.of(expert=expert, expert_tensor=expert_tensor, ranks_per_node=ranks_per_node):
            found.append(Exchange.NODES)
    return tuple(found)


def with_exchange(features: BlockFeatures, exchange: Exchange) -> BlockFeatures:
    """The features of a block whose tokens are sent in this way."""
    return features if features.dense else replace(features, nodes=exchange is Exchange.NODES)
