"""Sums of the chunks' gradients: their values and their allocations."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe.runtime.segment import BlockParameters, GradientSums, Segment


class Allocations(TorchDispatchMode):
    """Keeps the results of all operations in this context, so that no memory is reused."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.Tensor] = []

    def sizes_bytes(self, *known: torch.Tensor) -> list[int]:
        """Sizes of the memory of all results, without that of ``known``."""
        memories = [tensor.untyped_storage() for tensor in self._kept]
        found = {memory.data_ptr(): memory.nbytes() for memory in memories}
        for tensor in known:
            found.pop(tensor.untyped_storage().data_ptr(), None)
        return list(found.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._kept.append(result)
        return result


def chunk_gradients(dtype: torch.dtype, *, count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(40, 30, generator=generator).to(dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_sum_is_allocated_once(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.zeros(40, 30, dtype=dtype))
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


def test_a_single_gradient_is_returned_without_a_copy() -> None:
    parameter = torch.nn.Parameter(torch.zeros(40, 30))
    (gradient,) = chunk_gradients(torch.float32, count=1)
    sums = GradientSums(BlockParameters([], [parameter]))
    with Allocations() as allocations:
        sums.add(0, None)
        sums.add(0, gradient)
        assert sums.take(0) is gradient
    assert allocations.sizes_bytes(gradient) == []
    assert sums.take(0) is None


class Look(torch.autograd.Function):
    """The identity; its backward notes whether a tensor is still alive."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, notes: list[object]) -> torch.Tensor:
        ctx.notes = notes
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        watched = ctx.notes[0]
        ctx.notes.append(watched() is not None)
        return gradient, None


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("releases", [False, True])
def test_a_gradient_is_released_after_its_first_use(releases: bool, recompute: bool) -> None:
    weight, inputs = torch.nn.Parameter(torch.randn(3, 3)), torch.randn(4, 3)
    notes: list[Any] = []

    def stage(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (Look.apply(tensor @ weight, notes) * 2,)

    segment = Segment(stage, [inputs], recompute=recompute, releases=releases)
    gradient = torch.randn(4, 3)
    expected, of_weight = gradient * 2 @ weight.t(), inputs.t() @ (gradient * 2)
    gradients: list[torch.Tensor | None] = [gradient]
    notes.append(weakref.ref(gradient.untyped_storage()))
    del gradient
    sums = GradientSums(BlockParameters([], [weight]))
    (found,) = segment.backward(gradients, parameters=[0], sums=sums)
    assert notes[1:] == [not releases]
    assert torch.equal(found, expected) and torch.equal(sums.take(0), of_weight)
    assert gradients == []
