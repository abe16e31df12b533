"""Bytes that a pass sends: counted by the kernel, and those that the routing of the pass asks for.

The two come from different places: counters of the network interface, and the routing maps of Megatron's own
routers. Called by :mod:`.timed_passes` in the ranks of ``ampipe bench``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ampipe.exchange.codecs import Trip, load_wire
from megatron_ampipe.schedule import Direction, Exchange
from megatron_ampipe.tools.measuring.link import Nodes
from megatron_ampipe.tools.measuring.network import INTERFACE, WITHIN_NODE

_COUNTERS = Path("/proc/self/net/dev")
"""Of the interfaces in this process's network namespace."""
_SENT_COLUMN = 8
_EXCHANGES = 4
"""Dispatch and combine, forward and backward."""
_WITH_PROBABILITIES = 2
"""Of those, how many carry probabilities or their gradients: the dispatches."""


CLASSES = {"inter": INTERFACE, "intra": WITHIN_NODE}
"""Classes of links by name: between nodes, and within one. Without nodes, all is of the first."""


def sent_bytes() -> dict[str, int]:
    """What this rank has sent so far, headers included, by class of links."""
    found = {}
    for line in _COUNTERS.read_text().splitlines():
        name, colon, columns = line.partition(":")
        if colon:
            found[name.strip()] = int(columns.split()[_SENT_COLUMN])
    sent = {name: found[interface] for name, interface in CLASSES.items() if interface in found}
    assert sent, f"this process has no interface {INTERFACE}"
    return sent


class _Routing(NamedTuple):
    """What a router decided.

    Attributes:
        map: ``[T, E]`` bool.
        row: ``[1, D]``, of the size and dtype of a token.
        probability_bytes: Of a probability.
    """

    map: Tensor
    row: Tensor
    probability_bytes: int

    def bytes_of(self, row_bytes: int, probabilities: int) -> int:
        """Of a row of so many bytes in a pass, with so many probabilities."""
        return _EXCHANGES * row_bytes + _WITH_PROBABILITIES * probabilities * self.probability_bytes


class Routings:
    """The routing of the latest pass through Megatron's layers.

    Args:
        layers: Megatron's own ``blocks.Layers``, whose routers are watched until :meth:`stop`.
    """

    def __init__(self, layers: torch.nn.Module) -> None:
        self._found: dict[int, _Routing] = {}
        self._num_local_experts = layers.layers[0].mlp.num_local_experts
        self._hooks = [
            layer.mlp.router.register_forward_hook(self._keep(number))
            for number, layer in enumerate(layers.layers)
        ]

    def _keep(self, number: int) -> Any:
        def keep(_module: torch.nn.Module, arguments: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> None:
            (hidden, *_), (probs, routing_map) = arguments, result
            row = hidden.new_zeros(1, hidden.shape[-1])
            self._found[number] = _Routing(routing_map, row, probs.element_size())

        return keep

    def stop(self) -> None:
        """Keep what was found, and watch no longer."""
        for hook in self._hooks:
            hook.remove()

    def expected_bytes(
        self, exchange: Exchange, *, wire: str | None = None, rank: int, nodes: Nodes | None
    ) -> dict[str, int]:
        """What sending this rank's tokens to other ranks, and the experts' outputs back, takes in a pass.

        By class of links.

        Rows and probabilities with their gradients, without headers and without the exchange of counts. Half
        of it is sent by this rank, the other half by those of the experts.

        Args:
            exchange: How the all-to-all groups copies of a token.
            wire: What rows become while they travel, as ``--ampipe-wire``.
            rank: Of this process, in the order of the experts.
            nodes: The nodes, if there are any.
        """
        total = dict.fromkeys(CLASSES if nodes is not None else ["inter"], 0)
        for routing in self._found.values():
            by_rank = routing.map.unflatten(1, (-1, self._num_local_experts))
            copies = exchange.sends_every_copy
            rows = (by_rank.sum(dim=2) if copies else by_rank.any(dim=2)).sum(dim=0)
            parts: Sequence[Tensor] = [routing.row]
            if wire is not None:
                parts = load_wire(wire).encode(routing.row, Trip(1, 0, "dispatch", Direction.FORWARD))
            sent = sum(part.nbytes for part in parts)
            row_bytes = routing.bytes_of(sent, 1 if copies else self._num_local_experts)
            if exchange.has_two_hops:
                assert nodes is not None
                of_node = nodes.ranks_per_node * self._num_local_experts
                to_nodes = routing.map.unflatten(1, (-1, of_node))
                by_node = (to_nodes.sum(dim=2) if copies else to_nodes.any(dim=2)).sum(dim=0).tolist()
                others = sum(by_node) - by_node[nodes.node_of(rank)]
                total["inter"] += others * routing.bytes_of(sent, 1 if copies else of_node)
                # Within a node, rows travel as they are.
                row_bytes = routing.bytes_of(routing.row.nbytes, 1 if copies else self._num_local_experts)
            for peer, num_rows in enumerate(rows.tolist()):
                if exchange.has_two_hops:
                    # Handed on by the rank of that node which has this rank's place.
                    if (peer - rank) % nodes.ranks_per_node:
                        total["intra"] += num_rows * row_bytes
                elif peer != rank:
                    same = nodes is not None and nodes.node_of(peer) == nodes.node_of(rank)
                    total["intra" if same else "inter"] += num_rows * row_bytes
        return total
