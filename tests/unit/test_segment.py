"""Segments: what they keep and release, and sums of the chunks' gradients: values and allocations."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe.runtime.saved_tensors import DroppedOutput, recomputed
from megatron_ampipe.runtime.segment import BlockParameters, GradientSums, Segment


class Allocations(TorchDispatchMode):
    """Keeps the results of all operations in this context, so that no memory is reused."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[Tensor] = []

    def sizes_bytes(self, *known: Tensor) -> list[int]:
        """Sizes of the memory of all results, without that of ``known``."""
        memories = [tensor.untyped_storage() for tensor in self._kept]
        sizes = {memory.data_ptr(): memory.nbytes() for memory in memories}
        for tensor in known:
            sizes.pop(tensor.untyped_storage().data_ptr(), None)
        return [*sizes.values()]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._kept.append(function(*args, **(kwargs or {})))
        return self._kept[-1]


def chunk_gradients(dtype: torch.dtype, *, count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(40, 30, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_sum_is_allocated_once(dtype: torch.dtype) -> None:
    parameter = Parameter(torch.zeros(40, 30, dtype=dtype))
    gradients = chunk_gradients(dtype)
    before = [gradient.clone() for gradient in gradients]
    sums = GradientSums(BlockParameters([], [parameter]))
    with Allocations() as allocations:
        for gradient in gradients:
            sums.add(0, gradient)
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    assert allocations.sizes_bytes(*gradients) == [40 * 30 * wide.itemsize]
    assert all(torch.equal(*pair) for pair in zip(gradients, before, strict=True)), (
        "the inputs may share memory and must not change"
    )
    total = sums.take(0)
    assert total is not None and total.dtype == dtype
    exact = torch.stack([gradient.double() for gradient in gradients]).sum(dim=0)
    # Rounded once, for every dtype.
    assert torch.allclose(total.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


class Look(torch.autograd.Function):
    """The identity; its backward notes whether a tensor is still alive."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, notes: list[object]) -> Tensor:
        ctx.notes = notes
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        watched = ctx.notes[0]
        ctx.notes.append(watched() is not None)
        return gradient, None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("releases", [False, True])
def test_a_gradient_is_released_after_its_first_use(releases: bool, recompute: bool) -> None:
    weight, inputs = Parameter(torch.randn(3, 3)), torch.randn(4, 3)
    notes: list[Any] = []

    def stage(tensor: Tensor) -> tuple[Tensor]:
        return (Look.apply(tensor @ weight, notes) * 2,)

    recall = (lambda: [inputs]) if recompute else None
    segment = Segment(stage, [inputs], recall=recall, releases=releases)
    gradient = torch.randn(4, 3)
    expected, of_weight = gradient * 2 @ weight.t(), inputs.t() @ (gradient * 2)
    gradients: list[Tensor | None] = [gradient]
    notes.append(weakref.ref(gradient.untyped_storage()))
    del gradient
    sums = GradientSums(BlockParameters([], [weight]))
    (found,) = segment.backward(gradients, parameters=[0], sums=sums)
    assert notes[1:] == [not releases]
    assert torch.equal(found, expected) and torch.equal(sums.take(0), of_weight)
    assert gradients == []


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

    dropped = DroppedOutput(norm)
    giver = Segment(lambda rows: (dropped.compute(rows),), [given])
    (output,), giver.values = giver.values, ()
    takers = []
    for half in range(2):

        def stage(rows: Tensor, half: int = half) -> tuple[Tensor, ...]:
            with recomputed(rows, lambda: dropped.again().split(3)[half]):
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
