"""Rows that were gathered: not kept by a graph, and given back to its backward."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor

from megatron_ampipe.exchange.transports import RegatheredRows
from megatron_ampipe.runtime.segment import BlockParameters, GradientSums, Segment


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

    rows = RegatheredRows(owned)

    def stage(tensor: Tensor) -> tuple[Tensor, ...]:
        with rows.dropped(tensor):
            return project(tensor, weight)

    segment = Segment(stage, [gathered])
    outputs, segment.values = segment.values, ()
    alive = weakref.ref(gathered.untyped_storage())
    del gathered
    gc.collect()
    assert alive() is None, "the graph keeps what was gathered"

    rows.gathered = torch.cat([owned, 2 * owned])
    sums = GradientSums(BlockParameters([], [weight]))
    gradients: list[Tensor | None] = [torch.ones_like(output) for output in outputs]
    (of_input,) = segment.backward(gradients, parameters=[0], sums=sums)
    assert of_input is not None
    torch.testing.assert_close(of_input, expected_input, rtol=0, atol=0)
    torch.testing.assert_close(sums.take(0), expected, rtol=0, atol=0)
    assert rows.gathered is None
