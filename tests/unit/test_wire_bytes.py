"""The bytes that an exchange has to send, counted copy by copy."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_ampipe.schedule import Exchange
from megatron_ampipe.tools.benchmark.wire_bytes import Routings
from megatron_ampipe.tools.measuring.link import Nodes

RANK, RANKS, PER_NODE, LOCAL_EXPERTS, HIDDEN = 1, 6, 2, 2, 16
ROW_BYTES = 4 * HIDDEN * 4
"""Dispatch and combine in both passes, fp32."""
PROBABILITY_BYTES = 2 * 4
"""A dispatch and its backward pass."""


class Router(torch.nn.Module):
    """A router with a fixed result."""

    def __init__(self, routing_map: Tensor) -> None:
        super().__init__()
        self.routing_map = routing_map

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``[T, D]`` to probabilities and map ``[T, E]``."""
        return self.routing_map.float(), self.routing_map


@pytest.mark.parametrize("exchange", Exchange)
def test_bytes_equal_those_of_a_count_row_by_row(exchange: Exchange) -> None:
    """Six ranks on three nodes, three experts of twelve for each token."""
    generator = torch.Generator().manual_seed(1)
    experts = RANKS * LOCAL_EXPERTS
    chosen = torch.rand(40, experts, generator=generator).topk(3).indices
    routing_map = torch.zeros(40, experts, dtype=torch.bool).scatter(1, chosen, True)
    router = Router(routing_map)
    layer = SimpleNamespace(mlp=SimpleNamespace(num_local_experts=LOCAL_EXPERTS, router=router))
    routings = Routings(SimpleNamespace(layers=[layer]))
    router(torch.zeros(40, HIDDEN))
    routings.stop()
    found = routings.expected_bytes(exchange, rank=RANK, nodes=Nodes(PER_NODE, 1e6))
    assert found == dict(_counted(exchange, chosen.tolist()))


def _counted(exchange: Exchange, tokens: list[list[int]]) -> Counter[str]:
    """Each row over each link that it crosses, with its probabilities."""
    total: Counter[str] = Counter(inter=0, intra=0)
    for of_token in tokens:
        ranks = [expert // LOCAL_EXPERTS for expert in of_token]
        if not exchange.sends_every_copy:
            ranks = sorted(set(ranks))
        probabilities = 1 if exchange.sends_every_copy else LOCAL_EXPERTS
        size = ROW_BYTES + probabilities * PROBABILITY_BYTES
        if not exchange.has_two_hops:
            for rank in ranks:
                if rank != RANK:
                    total["intra" if rank // PER_NODE == RANK // PER_NODE else "inter"] += size
            continue
        nodes = [rank // PER_NODE for rank in ranks]
        crossing = size
        if not exchange.sends_every_copy:
            nodes, crossing = sorted(set(nodes)), ROW_BYTES + PER_NODE * LOCAL_EXPERTS * PROBABILITY_BYTES
        total["inter"] += crossing * sum(node != RANK // PER_NODE for node in nodes)
        total["intra"] += size * sum(rank % PER_NODE != RANK % PER_NODE for rank in ranks)
    return total
