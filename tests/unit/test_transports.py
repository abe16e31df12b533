"""The order of rows in a second hop, and rows that were gathered: not kept, and given back to a backward."""

from __future__ import annotations

import gc
import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_ampipe.exchange.hops import SortHop
from megatron_ampipe.runtime.saved_tensors import DroppedRows
from megatron_ampipe.runtime.segment import BlockParameters, GradientSums, Segment

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


def project(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Two products of the rows, one of which sees them as a view."""
    return rows @ weight, (rows.flatten(0, 1) @ weight).view(rows.shape)


def test_gathered_rows_are_not_kept_and_come_back() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    owned = torch.randn(3, 2, 4)
    gathered = torch.cat([owned, 2 * owned])
    copy = gathered.clone().requires_grad_()
    (expected_input, expected) = torch.autograd.grad(
        sum(out.sum() for out in project(copy, weight)), [copy, weight]
    )  # type: ignore[arg-type]

    rows = DroppedRows(owned)

    def stage(tensor: Tensor) -> tuple[Tensor, ...]:
        with rows.dropped(tensor):
            return project(tensor, weight)

    segment = Segment(stage, [gathered])
    outputs, segment.values = segment.values, ()
    alive = weakref.ref(gathered.untyped_storage())
    del gathered
    gc.collect()
    assert alive() is None, "the graph keeps what was gathered"

    again = torch.cat([owned, 2 * owned])
    rows.give_back(again)
    alive = weakref.ref(again.untyped_storage())
    del again
    sums = GradientSums(BlockParameters([], [weight]))
    gradients: list[Tensor | None] = [torch.ones_like(output) for output in outputs]
    (of_input,) = segment.backward(gradients, parameters=[0], sums=sums)
    assert of_input is not None
    torch.testing.assert_close(of_input, expected_input, rtol=0, atol=0)
    torch.testing.assert_close(sums.take(0), expected, rtol=0, atol=0)
    gc.collect()
    assert alive() is None, "what was gathered again is kept after its use"
