"""How the all-to-all groups copies of a token (``--ampipe-exchange``).

Part of a :class:`~.pipeline.Pipeline`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.features import BlockFeatures


class Exchange(StrEnum):
    """What the all-to-all of a chunk sends. Changes no result: sums are added in another order."""

    ROWS = "rows"
    """A row for each expert of a token, as Megatron's dispatcher does."""
    RANKS = "ranks"
    """A row for each rank that has experts of the token; the rank copies it and adds their outputs."""
    NODES = "nodes"
    """A row for each node that has experts of the token, to the rank of the same place in the node; that rank
    hands it on to the ranks of the experts, and adds what they send back."""
    TWO_DIMENSIONAL = "2dh"
    """The rows of ``rows`` over the two hops of ``nodes``: fewer and larger messages between nodes, as many
    bytes there, and a second hop. After the two-dimensional hierarchical all-to-all of Tutel and FSMoE."""

    @property
    def sends_every_copy(self) -> bool:
        """Whether a row is of one expert."""
        return self in (Exchange.ROWS, Exchange.TWO_DIMENSIONAL)

    @property
    def has_two_hops(self) -> bool:
        """Whether rows cross nodes between ranks of one place, and are handed on inside a node."""
        return self in (Exchange.NODES, Exchange.TWO_DIMENSIONAL)


ALL_EXCHANGES = "auto"
"""In place of names of exchanges: all that can be used."""


def parse_exchanges(text: str, *, flag: str) -> tuple[Exchange, ...]:
    """The exchanges that a text names, each once: a list, or ``auto`` for all.

    Args:
        text: What was given.
        flag: The flag with this value, for error messages.

    Raises:
        BadInput: a word is no exchange.
    """
    if text == ALL_EXCHANGES:
        return tuple(Exchange)
    try:
        return tuple(dict.fromkeys(map(Exchange, text.split(","))))
    except ValueError:
        raise BadInput(
            flag,
            text or "(empty)",
            rule=f"is not {ALL_EXCHANGES}, or a list of {', '.join(Exchange)}",
            remedy=f"Use {flag} rows,ranks.",
        ) from None


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
    """What a layer can choose from: Megatron's own exchange, and those with fewer copies or larger messages.

    Args:
        experts: All experts of the layer.
        expert: Expert-parallel ranks.
        expert_tensor: Expert-tensor-parallel ranks.
        topk: Experts of a token.
        dispatcher: Megatron's token dispatcher.
        ranks_per_node: As in :meth:`NodeLayout.of`.
    """
    found = [Exchange.ROWS]
    if dispatcher == "alltoall":
        if topk > 1 and expert * expert_tensor > 1 and experts > expert:
            found.append(Exchange.RANKS)
        if NodeLayout.of(expert=expert, expert_tensor=expert_tensor, ranks_per_node=ranks_per_node):
            found += [Exchange.NODES] * (topk > 1) + [Exchange.TWO_DIMENSIONAL]
    return tuple(found)


def with_exchange(features: BlockFeatures, exchange: Exchange) -> BlockFeatures:
    """The features of a block whose tokens are sent in this way."""
    return features if features.dense else replace(features, nodes=exchange.has_two_hops)
