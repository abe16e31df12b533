"""The second hop of rows of one expert each: only their order changes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ampipe.exchange.hops import SortHop

COUNTS = st.integers(2, 4).flatmap(
    lambda ranks: st.lists(
        st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks), min_size=2, max_size=4
    )
)


@given(rows=COUNTS)
def test_rows_go_from_the_order_of_nodes_into_that_of_ranks_and_back(rows: list[list[int]]) -> None:
    """Rows ``[R, D]`` and probabilities ``[R]`` of which each says where it is from and where it goes."""
    places = [(node, rank) for node, sizes in enumerate(rows) for rank, size in enumerate(sizes)
              for _ in range(size)]  # fmt: skip
    numbers = torch.tensor([10.0 * node + rank for node, rank in places])
    tensors = [torch.stack([numbers, -numbers], dim=1), numbers]
    hop = SortHop(rows, [0] * len(rows[0]), group=None)
    packed = hop.send(tensors, combine=False)
    expected = torch.tensor([10.0 * node + rank for node, rank in sorted(places, key=lambda place: place[1])])
    assert torch.equal(packed[1], expected) and torch.equal(packed[0][:, 0], expected)
    assert hop.transport.input_splits == [sum(sizes) for sizes in zip(*rows, strict=True)]
    outputs, fill = hop.arrive(packed, combine=True)
    fill()
    for output, tensor in zip(outputs, tensors, strict=True):
        assert torch.equal(output, tensor)
