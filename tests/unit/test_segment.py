"""Segments: what they compute again, and sums of the chunks' gradients."""

import gc
import operator
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron_ampipe.runtime.saved_tensors import DroppedOutput, not_saving
from megatron_ampipe.runtime.segment import BlockParameters, GradientSums, Segment, WeightProducts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_sum_is_in_place_and_rounded_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(40, 30, generator=generator).to(dtype) for _ in range(4)]
    before = [gradient.clone() for gradient in gradients]
    sums = GradientSums(BlockParameters([], [Parameter(torch.zeros(40, 30, dtype=dtype))]))
    places = []
    for gradient in gradients:
        sums.add(0, gradient)
        places.append(sums.entry(0)[0].data_ptr())  # type: ignore[union-attr]
    assert places[0] == gradients[0].data_ptr() != places[1] == places[2] == places[3]
    assert all(torch.equal(*pair) for pair in zip(gradients, before, strict=True)), (
        "the inputs may share memory and must not change"
    )
    total = sums.take(0)
    assert total is not None and total.dtype == dtype
    exact = torch.stack([gradient.double() for gradient in gradients]).sum(dim=0)
    # Rounded once, for every dtype.
    assert torch.allclose(total.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_gradient_is_released_after_its_first_use(recompute: bool) -> None:
    inputs, alive = torch.randn(4, 3), []

    def stage(tensor: Tensor) -> tuple[Tensor]:
        hidden = tensor * 2
        if hidden.requires_grad:
            hidden.register_hook(lambda _: alive.append(watched() is not None))
        return (hidden * 3,)

    recall = (lambda: [inputs]) if recompute else None
    segment = Segment(stage, [inputs], recall=recall, releases=True)
    gradients: list[Tensor | None] = [torch.ones(4, 3)]
    watched = weakref.ref(gradients[0].untyped_storage())  # type: ignore[union-attr]
    (found,) = segment.backward(gradients, parameters=[], sums=GradientSums(BlockParameters([], [])))
    assert alive == [False] and gradients == []
    assert torch.equal(found, torch.full((4, 3), 6.0))


def test_the_tensors_of_delayed_products_are_found() -> None:
    """Also in objects that Transformer Engine gives in place of tensors: streams may share their memory."""
    products, tensors = WeightProducts(), [torch.zeros(1) for _ in range(5)]
    quantized = SimpleNamespace(data=tensors[2], scale=tensors[3], tile=128)
    grouped = SimpleNamespace(data=tensors[4], scale=None)
    delayed: Any = [tensors[0], [tensors[1], quantized], grouped, None]
    products.delay([], lambda _: [], delayed)
    assert all(map(operator.is_, products.tensors, tensors))
    assert len(products.tensors) == len(tensors)


def project(rows: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Two products of the rows, one of which sees them as a view."""
    return rows @ weight, (rows.flatten(0, 1) @ weight).view(rows.shape)


def test_a_dropped_output_is_computed_again_once_for_all_stages_that_took_it() -> None:
    norm, weight = torch.nn.LayerNorm(4), Parameter(torch.randn(4, 4))
    calls: list[weakref.ref[Any]] = []
    norm.register_forward_hook(lambda *call: calls.append(weakref.ref(call[-1].untyped_storage())))
    given = torch.randn(6, 2, 4)
    copy = given.clone().requires_grad_()
    parts = [part for rows in norm(copy).split(3) for part in project(rows, weight)]
    trained = [*norm.parameters(), weight]
    expected = torch.autograd.grad([part.sum() for part in parts], [copy, *trained])
    del parts, copy
    calls.clear()

    dropped = DroppedOutput()
    giver = Segment(lambda rows: (dropped.compute(norm, rows),), [given])
    (output,), giver.values = giver.values, ()
    takers = []
    for half in range(2):

        def stage(rows: Tensor, half: int = half) -> tuple[Tensor, ...]:
            with not_saving(rows, lambda: dropped.recompute().split(3)[half]):
                return project(rows, weight)

        takers.append(Segment(stage, [output.split(3)[half]]))
    values = [len(taker.values) for taker in takers]
    del output
    gc.collect()
    assert [alive() for alive in calls] == [None], "a graph keeps the output"

    sums = GradientSums(BlockParameters([], trained))
    gradients = []
    for taker, count in zip(takers, values, strict=True):
        ones: list[Tensor | None] = [torch.ones(3, 2, 4) for _ in range(count)]
        gradients += taker.backward(ones, parameters=[2], sums=sums)
    (of_rows,) = giver.backward([torch.cat(gradients)], parameters=[0, 1], sums=sums)
    found = (of_rows, *map(sums.take, range(3)))
    torch.testing.assert_close(found, expected)
    gc.collect()
    assert [alive() for alive in calls] == [None, None], "it is computed more than twice, or kept"
