"""Gradients of weights that wait: what is one product when chunks are joined, and what it adds up to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.segment import BlockParameters, GradientSums, WeightProducts

INPUTS, OUTPUTS = 8, 16


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # Two further sums of the weight's 128 numbers, or 24 numbers of each row.
        ((3, 3, 4), [10]),
        ((4, 0, 7), [4, 0, 7]),
        ((3,), [3]),
    ],
)
def test_joined_chunks_are_one_product_where_that_moves_less(
    rows: tuple[int, ...], expected: list[int]
) -> None:
    torch.manual_seed(1)
    weight = Parameter(torch.zeros(OUTPUTS, INPUTS))
    called: list[int] = []

    def product(inputs: Tensor, gradient: Tensor) -> Tensor:
        called.append(len(inputs))
        return gradient.t() @ inputs

    kept = [(torch.randn(count, 1, INPUTS), torch.randn(count, 1, OUTPUTS)) for count in rows]
    chunks = [WeightProducts() for _ in kept]
    for chunk, (inputs, gradient) in zip(chunks, kept, strict=True):
        chunk.keep(weight, product, inputs, gradient)
    joined, sums = WeightProducts.joined(chunks), GradientSums(BlockParameters([], [weight]))
    joined.add_to(sums)
    assert called == expected
    assert joined.tensors == []
    whole = (
        torch.cat([gradient for _, gradient in kept])[:, 0].t() @ torch.cat([one for one, _ in kept])[:, 0]
    )
    found = sums.take(0)
    assert found is not None
    torch.testing.assert_close(found, whole)
