"""The process groups of two hops: the ranks of one place in all nodes, and the ranks of one node.

Made once for each expert-parallel group, from how many ranks a node has. Called by :mod:`.node_dispatcher`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch.distributed as dist

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import NodeLayout


@dataclass(frozen=True, slots=True)
class NodeGroups:
    """The groups of this rank.

    Attributes:
        layout: How many nodes there are, and ranks on each.
        node: The node of this rank, counted within its expert-parallel group.
        place: The place of this rank in its node.
        inter: The ranks of the same place in all nodes, node by node.
        intra: The ranks of this rank's node.
    """

    layout: NodeLayout
    node: int
    place: int
    inter: dist.ProcessGroup
    intra: dist.ProcessGroup


@cache
def node_groups(group: dist.ProcessGroup, ranks_per_node: int | None) -> NodeGroups:
    """Make the groups of this rank. To be called by all ranks of ``group``, and by no others.

    Args:
        group: The expert-parallel ranks.
        ranks_per_node: Of all ranks, how many a node has; they follow one another.

    Raises:
        BadInput: the ranks of ``group`` do not follow one another node by node, several on each of several
            nodes.
    """
    ranks, layout = dist.get_process_group_ranks(group), None
    if ranks_per_node is not None:
        nodes = [rank // ranks_per_node for rank in ranks]
        near = nodes.count(nodes[0])
        if 1 < near < len(ranks) and nodes == sorted(nodes) and {*map(nodes.count, nodes)} == {near}:
            layout = NodeLayout(len(ranks) // near, near)
    if layout is None:
        raise BadInput(
            "--ampipe-ranks-per-node",
            ranks_per_node,
            rule=f"does not spread the expert-parallel ranks {', '.join(map(str, ranks))} equally over "
            "several nodes, with several of them on each",
            remedy="Use --ampipe-exchange ranks.",
        )
    node, place = divmod(group.rank(), layout.ranks_per_node)
    first = node * layout.ranks_per_node
    # Separate groups, also where one has the same ranks as another: each lane has its own.
    inter = ranks[place :: layout.ranks_per_node]
    intra = ranks[first : first + layout.ranks_per_node]
    return NodeGroups(
        layout,
        node,
        place,
        dist.new_group(inter, use_local_synchronization=True, group_desc="ampipe between nodes"),
        dist.new_group(intra, use_local_synchronization=True, group_desc="ampipe within a node"),
    )
