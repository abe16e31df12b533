"""What a :class:`~.pipeline.Pipeline` is told besides degrees and order, and how its texts are read.

How the all-to-all groups copies of a token (``--ampipe-exchange``), and what experts keep for their backward
(``--ampipe-memory``): MPipeMoE, section III-D and table II. What arrives at a rank is T_DI there, and the
experts' inner tensors (first product, activation) are T_M.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from megatron_ampipe.block.settings import AUTO
from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule.features import BlockFeatures, Restored


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


def parse_exchanges(text: str, *, flag: str) -> tuple[Exchange, ...]:
    """The exchanges that a text names, each once: a list, or ``auto`` for all; or :class:`BadInput`."""
    if text == AUTO:
        return tuple(Exchange)
    try:
        return tuple(dict.fromkeys(map(Exchange, text.split(","))))
    except ValueError:
        rule = f"is not {AUTO}, or a list of {', '.join(Exchange)}"
        raise BadInput(flag, text or "(empty)", rule=rule, remedy=f"Use {flag} rows,ranks.") from None


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Over how many nodes a group of expert-parallel ranks is spread, and how many of its ranks are on each.

    They follow one another, node by node.
    """

    num_nodes: int
    ranks_per_node: int

    @classmethod
    def of(cls, *, expert: int, expert_tensor: int, ranks_per_node: int | None) -> NodeLayout | None:
        """The layout of Megatron's expert-parallel groups: expert-tensor-parallel ranks are adjacent.

        ``ranks_per_node`` are, of all ranks, those of a node; None if that is not known. Returns None where a
        group is not spread equally over several nodes with several of its ranks on each.
        """
        if ranks_per_node is None or ranks_per_node % expert_tensor:
            return None
        near = ranks_per_node // expert_tensor
        return cls(expert // near, near) if 1 < near < expert and expert % near == 0 else None


def useful_exchanges(
    *, experts: int, expert: int, expert_tensor: int, topk: int, dispatcher: str, ranks_per_node: int | None
) -> tuple[Exchange, ...]:
    """What a layer can choose from: Megatron's own exchange, and those with fewer copies or larger messages.

    ``experts`` are all of the layer, ``topk`` those of a token; ``dispatcher`` is Megatron's, and the rest is
    as in :meth:`NodeLayout.of`.
    """
    useful = [Exchange.ROWS]
    if dispatcher == "alltoall":
        if topk > 1 and expert * expert_tensor > 1 and experts > expert:
            useful.append(Exchange.RANKS)
        if NodeLayout.of(expert=expert, expert_tensor=expert_tensor, ranks_per_node=ranks_per_node):
            useful += [Exchange.NODES] * (topk > 1) + [Exchange.TWO_DIMENSIONAL]
    return tuple(useful)


def with_exchange(features: BlockFeatures, exchange: Exchange) -> BlockFeatures:
    """The features of a block whose tokens are sent in this way."""
    return features if features.dense else replace(features, nodes=exchange.has_two_hops)


KEEP = "keep"
"""The strategy that restores nothing."""

STRATEGIES: Mapping[str, tuple[Restored, ...]] = {
    KEEP: (),
    "rebuild": (Restored.REBUILD,),
    "redispatch": (Restored.REBUILD, Restored.REDISPATCH),
    "offload": (Restored.OFFLOAD,),
    "S2": (Restored.REDISPATCH, Restored.OFFLOAD),
    "S3": (Restored.REBUILD, Restored.OFFLOAD_TOKENS),
}
"""What each strategy restores, as in ``BlockFeatures.restored``.

``S2`` and ``S3`` are those of the paper's table II. ``rebuild`` is not in it: what arrived is kept, the inner
tensors are computed once more. Of the first three, each keeps less than the one before.
"""
PAPER_NAMES: Mapping[str, str] = {"S1": "offload", "S4": "redispatch"}
"""Other names of strategies, from the same table."""
COPYING = ("offload", "S2", "S3")
"""The strategies that copy to host memory."""


def with_memory(features: BlockFeatures, memory: str) -> BlockFeatures:
    """The features of a block that trains under a strategy. A block without experts, or a recomputed one, has
    nothing that a strategy could restore."""
    if features.dense or features.recomputed:
        return features
    restored = tuple(STRATEGIES[name] for name in of_chunks(memory))
    return replace(features, restored=restored if any(restored) else ())


def of_chunks(memory: str) -> tuple[str, ...]:
    """The strategy of each chunk of the backward pass, from the first on; or one of all."""
    return tuple(PAPER_NAMES.get(name, name) for name in memory.split("/"))


def memory_to_text(names: Sequence[str]) -> str:
    """What :func:`of_chunks` reads; one name if all chunks have the same."""
    return names[0] if len(set(names)) == 1 else "/".join(names)


def check_memory(memory: str, *, backward_degree: int | None = None, flag: str = "--ampipe-memory") -> None:
    """Raise :class:`BadInput` unless these are strategies, and every chunk of the backward pass has one.

    Of how many chunks is not checked where ``backward_degree`` is not known yet.
    """
    names = of_chunks(memory)
    for name in names:
        if name not in STRATEGIES:
            rule = f"is not one of {', '.join((*STRATEGIES, *PAPER_NAMES))}"
            remedy = f"Use {flag} rebuild, or leave it out to keep everything."
            raise BadInput(flag, name or "(empty)", rule=rule, remedy=remedy)
    if backward_degree is not None and len(names) not in (1, backward_degree):
        rule = f"names strategies of {len(names)} chunks, and the backward pass has {backward_degree}"
        example = "/".join([KEEP, *["rebuild"] * (backward_degree - 1)])
        remedy = f"Name one of all chunks, or one of each: {flag} {example}."
        raise BadInput(flag, memory, rule=rule, remedy=remedy)


ALL_LAYERS = 0
"""The :attr:`Pipeline.stack <.pipeline.Pipeline.stack>` of all layers of a pipeline stage."""
_ALL = "all"


def parse_stack(text: str, *, flag: str) -> int:
    """How many layers share a schedule, as ``Pipeline.stack``: a number, or ``all``; or :class:`BadInput`."""
    if text == _ALL:
        return ALL_LAYERS
    # Python does not read a number of thousands of digits.
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        rule = f"must be a whole number of layers, at least 1, or {_ALL}"
        remedy = f"Use {flag} {_ALL}, or {flag} 1 to run layer by layer."
        raise BadInput(flag, text or "(empty)", rule=rule, remedy=remedy)
    return int(text)


def stack_to_text(stack: int) -> str:
    """What :func:`parse_stack` reads."""
    return str(stack) if stack else _ALL


def parse_shares(text: str, *, flag: str) -> tuple[float, ...]:
    """Shares of a sequence, such as ``0.4,0.3,0.3``, scaled to a sum of exactly 1; or :class:`BadInput`."""
    try:
        shares = [float(word) for word in text.split(",")]
    except ValueError:
        shares = []
    total = sum(shares)
    # So that 0.33,0.33,0.33 means thirds. NaN is refused.
    if shares and all(share > 0 for share in shares) and abs(total - 1) <= 0.015:
        return tuple(share / total for share in shares)
    rule = "is not a list of numbers above 0 with a sum of 1, separated by commas"
    raise BadInput(flag, text or "(empty)", rule=rule, remedy=f"Use for example {flag} 0.4,0.3,0.3.")
