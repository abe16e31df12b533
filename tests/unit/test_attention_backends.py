"""The kernels for GPUs, tested without one: torch's operators on the meta device and as fakes that compute,
the packages as fakes with their documented signatures. Their results on a GPU are tested in tests/gpu.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import Span
from tests import reference_pieces

LATER = (Span(0, 24, 40),)
WHOLE = (Span(0, 64, 0),)
SEVERAL = (Span(0, 24, 16), Span(24, 8, 56))
GPU_KERNELS = ("cudnn", "torch-flash-2")
aten = torch.ops.aten


def tensors(
    spans: Sequence[Span], *, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    rows = sum(span.length for span in spans)
    shapes = ((rows, 2, 4, 16), (64, 2, 2, 16), (64, 2, 2, 16))
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


class Called(TorchDispatchMode):
    """Records the calls of torch's attention operators: name, queries, keys, causal."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int, bool]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Trailing arguments with their default values are not passed on.
        arguments = function._schema.arguments
        named = {a.name: a.default_value for a in arguments}
        named |= {a.name: value for a, value in zip(arguments, args, strict=False)}
        if "scaled_dot_product" in str(function):
            query, key = named["query"].shape[2], named["key"].shape[2]
            self.calls.append((function.__name__.split(".")[0], query, key, named["is_causal"]))
        return self.compute(function, named, args, kwargs or {})

    def compute(
        self, function: Any, named: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return function(*args, **kwargs)


class Computing(Called):
    """Computes torch's attention operators with the reference implementation.

    ``lse_dimensions``: 3 or 4, the number of dimensions of cuDNN's log-sum-exp, which depends on torch's
    version; the backward operator expects what the forward operator returns.
    """

    def __init__(self, lse_dimensions: int) -> None:
        super().__init__()
        self._lse_dimensions = lse_dimensions
        self._random = torch.tensor([3, 5]), torch.tensor(7)

    def compute(
        self, function: Any, named: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        cudnn = "cudnn" in str(function)
        if "scaled_dot_product" not in str(function):
            return function(*args, **kwargs)
        query, key, value = (named[name] for name in ("query", "key", "value"))
        causal, scale = named["is_causal"], kwargs["scale"]
        assert named["dropout_p"] == 0.0
        # Through torch, cuDNN's causal mask is aligned to the top left only.
        assert not (cudnn and causal) or query.shape[2] == key.shape[2]
        if "backward" not in str(function):
            output, lse = reference_pieces.forward(query, key, value, causal=causal, scale=scale)
            lse = lse.unsqueeze(-1) if cudnn and self._lse_dimensions == 4 else lse
            return output, lse, None, None, 1, 1, *self._random, None
        assert (named["max_q"], named["max_k"]) == (query.shape[2], key.shape[2])
        assert named["philox_seed"] is self._random[0] and named["philox_offset"] is self._random[1]
        lse = named["logsumexp"]
        assert lse.is_contiguous() and lse.dim() == (self._lse_dimensions if cudnn else 3)
        given = named["grad_out"], query, key, value, named["out"], lse.reshape(lse.shape[:3])
        return reference_pieces.backward(*given, causal=causal, scale=scale)


FLASH_2, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"


@pytest.mark.parametrize(
    ("kernel", "spans", "pieces"),
    [
        ("cudnn", LATER, [(CUDNN, 24, 24, True), (CUDNN, 24, 40, False)]),
        ("cudnn", WHOLE, [(CUDNN, 64, 64, True)]),
        ("torch-flash-2", LATER, [(FLASH_2, 24, 64, True)]),
        ("torch-flash-2", WHOLE, [(FLASH_2, 64, 64, True)]),
    ],
)
def test_torch_accepts_the_calls_and_all_chunks_use_the_same_kernel(
    kernel: str, spans: tuple[Span, ...], pieces: list[tuple[str, int, int, bool]]
) -> None:
    """On the meta device, where torch's operators check their arguments and compute shapes."""
    inputs = tensors(spans, device="meta", dtype=torch.bfloat16)
    with Called() as called:
        output = KERNELS[kernel](*inputs, spans=spans, scale=0.3)
        gradients = torch.autograd.grad(output, inputs, torch.empty_like(output))
    assert output.shape == (len(inputs[0]), 2, 64) and output.dtype == torch.bfloat16
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in inputs]
    backward = [(name + "_backward", *rest) for name, *rest in pieces]
    assert called.calls == [*pieces, *backward]


@pytest.mark.parametrize("lse_dimensions", [3, 4])
@pytest.mark.parametrize("spans", [LATER, WHOLE, SEVERAL], ids=["later", "whole", "several"])
@pytest.mark.parametrize("kernel", GPU_KERNELS)
def test_merged_attention_with_each_kernel_equals_the_reference(
    kernel: str, spans: tuple[Span, ...], lse_dimensions: int
) -> None:
    """Tests layouts, arguments and merging; the kernels themselves are fakes of the reference."""
    torch.manual_seed(3)
    inputs = tensors(spans)
    expected = KERNELS["exact"](*inputs, spans=spans, scale=0.3)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    with Computing(lse_dimensions):
        found = KERNELS[kernel](*inputs, spans=spans, scale=0.3)
        gradients = torch.autograd.grad(found, inputs, gradient)
        sums = KeyValueSums(*inputs[1:])
        again = KERNELS[kernel](*inputs, spans=spans, scale=0.3, sums=sums)
        torch.autograd.grad(again, inputs, gradient, allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip((*gradients, *sums.totals()), (*wanted, *wanted[1:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_cudnn_refuses_a_single_key() -> None:
    inputs = tensors((Span(0, 1, 40),), device="meta")
    with pytest.raises(AssertionError, match="cuDNN attends to two keys or more"):
        KERNELS["cudnn"](*inputs, spans=(Span(0, 1, 40),), scale=0.3)
