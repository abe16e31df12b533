"""Attention of chunks in pieces: coverage of all visible keys, merging, and gradient sums."""

import pytest
import torch
from torch import Tensor

from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import SequenceLayout, Span, chunk_sequence
from tests.reference_pieces import REFERENCE_KERNELS

exact = KERNELS["exact"]
MERGED = {"cpu-flash": KERNELS["cpu-flash"], **REFERENCE_KERNELS}


@pytest.mark.parametrize("kernel", ["cpu-flash", "cudnn", "torch-flash-2"])
@pytest.mark.parametrize(("length", "start"), [(1, 0), (128, 0), (129, 7), (300, 0), (512, 512), (700, 1)])
def test_pieces_cover_what_a_query_sees_exactly_once(length: int, start: int, kernel: str) -> None:
    seen = torch.zeros(length, start + length, dtype=torch.int)
    begun = torch.zeros(length, dtype=torch.bool)
    for piece in KERNELS[kernel].pieces.cut(Span(0, length, start)):
        rows = slice(piece.first_row, piece.last_row)
        part = seen[rows, piece.first_key : piece.last_key]
        offset = part.shape[1] - part.shape[0]
        part += torch.ones_like(part).tril(offset) if piece.causal else 1
        # The causal piece of a row comes first, and there is only one.
        assert bool((begun[rows] != piece.causal).all())
        begun[rows] = True
    assert torch.equal(seen, torch.ones_like(seen).tril(start))


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


def inputs(spans: tuple[Span, ...], *, groups: int) -> list[Tensor]:
    """Query, key and value in fp64, with more keys than the spans see except of the whole sequence."""
    num_keys = max(span.global_end for span in spans) + 9 * (spans != LAYOUTS["whole"])
    num_rows = sum(span.length for span in spans)
    shapes = ((num_rows, 2, 4, 16), (num_keys, 2, groups, 16), (num_keys, 2, groups, 16))
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("kernel", MERGED)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_pieces_equal_the_reference(layout: str, groups: int, kernel: str) -> None:
    torch.manual_seed(groups)
    spans = LAYOUTS[layout]
    tensors = inputs(spans, groups=groups)
    _, key, value = tensors
    expected = exact(*tensors, spans=spans, scale=0.3)
    gradient = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, tensors, gradient)
    found = MERGED[kernel](*tensors, spans=spans, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad(found, tensors, gradient), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    # The same with the gradients of keys and values added to KeyValueSums.
    sums = KeyValueSums(key, value)
    found = MERGED[kernel](*tensors, spans=spans, scale=0.3, sums=sums)
    dq, dk, dv = torch.autograd.grad(found, tensors, gradient, allow_unused=True)
    assert dk is None and dv is None
    for a, b in zip((dq, *sums.totals()), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", MERGED)
def test_attention_of_16_bit_tensors_is_within_their_precision(kernel: str) -> None:
    """Within a few bf16 roundings (2**-8 each) of the result in fp64."""
    torch.manual_seed(2)
    spans = LAYOUTS["later"]
    tensors = [x.detach().bfloat16().requires_grad_() for x in inputs(spans, groups=2)]
    precise = [x.detach().double().requires_grad_() for x in tensors]
    expected, found = (
        exact(*precise, spans=spans, scale=0.3),
        MERGED[kernel](*tensors, spans=spans, scale=0.3),
    )
    gradient = torch.randn_like(found)
    pairs = zip(
        (found, *torch.autograd.grad(found, tensors, gradient)),
        (expected, *torch.autograd.grad(expected, precise, gradient.double())),
        strict=True,
    )
    for a, b in pairs:
        assert a.dtype == torch.bfloat16
        assert bool((a.double() - b).abs().max() <= 2**-6 * b.abs().max())


def test_16_bit_key_and_value_gradients_are_summed_in_fp32() -> None:
    key = torch.empty(2, 1, 1, 1, dtype=torch.bfloat16)
    sums = KeyValueSums(key, key)
    for _ in range(257):
        sums.add(0, torch.ones_like(key), torch.ones_like(key))
    # In bf16 the sum would stop at 256.
    assert all(bool((total == 257).all()) for total in sums.totals())
