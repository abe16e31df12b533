"""Attention of chunks in pieces: merging, and gradient sums.

The kernels for GPUs are tested without one: torch's operators on the meta device, where they check their
arguments, and as fakes that compute. Their results on a GPU are tested in tests/gpu.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import SequenceLayout, Span, chunk_sequence
from megatron_ampipe.schedule.chunks import Documents
from tests import flash_attn_standin, reference_pieces

exact = KERNELS["exact"]


class Operators(TorchDispatchMode):
    """Records the calls of torch's attention operators for GPUs: name, queries, keys, causal.

    With ``lse_dimensions`` it also computes them, as the reference does. It is the number of dimensions of
    cuDNN's log-sum-exp, 3 or 4 by torch's version; the backward operator expects what the forward operator
    returns.
    """

    def __init__(self, lse_dimensions: int | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[str, int, int, bool]] = []
        self._lse_dimensions = lse_dimensions
        self._random = torch.tensor([3, 5]), torch.tensor(7)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" not in str(function) or "for_cpu" in str(function):
            return function(*args, **(kwargs or {}))
        # Trailing arguments with their default values are not passed on.
        arguments = function._schema.arguments
        named = {a.name: a.default_value for a in arguments}
        named |= {a.name: value for a, value in zip(arguments, args, strict=False)}
        query, key = named["query"].shape[2], named["key"].shape[2]
        self.calls.append((function.__name__.split(".")[0], query, key, named["is_causal"]))
        if self._lse_dimensions is None:
            return function(*args, **kwargs)
        return self._compute(str(function), named, kwargs["scale"])

    def _compute(self, name: str, named: dict[str, Any], scale: float) -> tuple[Any, ...]:
        query, key, value = (named[part] for part in ("query", "key", "value"))
        how = {"causal": named["is_causal"], "scale": scale}
        assert named["dropout_p"] == 0.0
        # Through torch, cuDNN's causal mask is aligned to the top left only.
        assert "cudnn" not in name or not how["causal"] or query.shape[2] == key.shape[2]
        dimensions = self._lse_dimensions if "cudnn" in name else 3
        if "backward" not in name:
            output, lse = reference_pieces.forward(query, key, value, **how)
            lse = lse.unsqueeze(-1) if dimensions == 4 else lse
            return output, lse, None, None, 1, 1, *self._random, None
        assert (named["max_q"], named["max_k"]) == (query.shape[2], key.shape[2])
        assert named["philox_seed"] is self._random[0] and named["philox_offset"] is self._random[1]
        lse = named["logsumexp"]
        assert lse.is_contiguous() and lse.dim() == dimensions
        given = named["grad_out"], query, key, value, named["out"], lse.reshape(lse.shape[:3])
        return reference_pieces.backward(*given, **how)


LAYOUTS = {
    # As in the stock layer of a benchmark.
    "whole": (Span(0, 150, 0),),
    "first": (Span(0, 137, 0),),
    "later": (Span(0, 61, 140),),
    "one row": (Span(0, 1, 5),),
    "tensor parallel": chunk_sequence(520, degree=2, layout=SequenceLayout(tensor_ranks=2))[1].queries,
    "context parallel": chunk_sequence(520, degree=3, layout=SequenceLayout(context_ranks=2, context_rank=1))[
        1
    ].queries,
    "both": chunk_sequence(
        528, degree=3, layout=SequenceLayout(tensor_ranks=2, tensor_rank=1, context_ranks=2)
    )[0].queries,
}


def inputs(spans: Sequence[Span], *, groups: int) -> list[Tensor]:
    """Query, key and value in fp64, with more keys than the spans see except of the whole sequence."""
    num_keys = max(span.global_end for span in spans) + 9 * (spans != LAYOUTS["whole"])
    num_rows = sum(span.length for span in spans)
    shapes = ((num_rows, 2, 4, 16), (num_keys, 2, groups, 16), (num_keys, 2, groups, 16))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


MERGED = [
    *(("cpu-flash", 3), ("torch-flash-2", 3), ("cudnn", 3), ("cudnn", 4)),
    *((kernel, 3) for kernel in flash_attn_standin.KERNELS),
]
"""Kernels, and dimensions of the log-sum-exp."""


@pytest.mark.parametrize(("kernel", "lse_dimensions"), MERGED)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_pieces_equal_the_reference(
    layout: str, groups: int, kernel: str, lse_dimensions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash_attn_standin.install(monkeypatch)
    torch.manual_seed(groups)
    spans, attend = LAYOUTS[layout], KERNELS[kernel]
    tensors = inputs(spans, groups=groups)
    expected = exact(*tensors, spans=spans, scale=0.3)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, gradient)
    if kernel == "cudnn" and layout == "one row":
        with pytest.raises(AssertionError, match="cuDNN attends to two keys or more"):
            attend(*tensors, spans=spans, scale=0.3)
        return
    with Operators(lse_dimensions):
        found = attend(*tensors, spans=spans, scale=0.3)
        gradients = torch.autograd.grad(found, tensors, gradient)
        # The same with the gradients of keys and values added to KeyValueSums.
        sums = KeyValueSums(*tensors[1:])
        again = attend(*tensors, spans=spans, scale=0.3, sums=sums)
        dq, dk, dv = torch.autograd.grad(again, tensors, gradient, allow_unused=True)
    assert dk is None and dv is None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for other in (gradients, (dq, *sums.totals())):
        torch.testing.assert_close(other, wanted, rtol=1e-5, atol=1e-5)


FLASH_2, CUDNN = "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"
LATER, WINDOW = Span(0, 24, 40), {"window": 5, "dropout": 0.1}
DOCUMENTS = {"documents": Documents(((0, 1, 45, 63), (0,)), 64, own_positions=True)}


@pytest.mark.parametrize(
    ("kernel", "span", "beyond", "pieces"),
    [
        ("cudnn", LATER, {}, [(CUDNN, 24, 24, True), (CUDNN, 24, 40, False)]),
        ("cudnn", Span(0, 64, 0), {}, [(CUDNN, 64, 64, True)]),
        ("torch-flash-2", LATER, {}, [(FLASH_2, 24, 64, True)]),
        ("torch-flash-2", Span(0, 64, 0), {}, [(FLASH_2, 64, 64, True)]),
        *(("torch-flash-2", LATER, beyond, []) for beyond in (WINDOW, DOCUMENTS, DOCUMENTS | WINDOW)),
    ],
)
def test_torch_accepts_the_calls_and_all_chunks_use_the_same_kernel(
    kernel: str, span: Span, beyond: dict[str, Any], pieces: list[tuple[str, int, int, bool]]
) -> None:
    tensors = [x.detach().to("meta", torch.bfloat16).requires_grad_() for x in inputs([span], groups=2)]
    with Operators() as operators:
        output = KERNELS[kernel](*tensors, spans=(span,), scale=0.3, **beyond)
        gradients = torch.autograd.grad(output, tensors, torch.empty_like(output))
    assert output.shape == (span.length, 2, 64) and output.dtype == torch.bfloat16
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in tensors]
    backward = [(name + "_backward", *rest) for name, *rest in pieces]
    assert operators.calls == [*pieces, *backward]


def test_16_bit_key_and_value_gradients_are_summed_in_fp32() -> None:
    key = torch.empty(2, 1, 1, 1, dtype=torch.bfloat16)
    sums = KeyValueSums(key, key)
    for _ in range(257):
        sums.add(0, torch.ones_like(key), torch.ones_like(key))
    # In bf16 the sum would stop at 256, which is also what 257 is rounded to.
    assert [total.unique().tolist() for total in sums.totals()] == [[257.0], [257.0]]
