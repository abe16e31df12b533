"""Documents that share a sequence: every kernel against a mask."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ampipe import compat
from megatron_ampipe.attention.kernels import KERNELS, Kernel, choose_kernel
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import Span, chunk_sequence
from megatron_ampipe.schedule.chunks import Documents
from tests.reference_pieces import settings_of_plain_attention

LENGTH = 40
DOCUMENTS = Documents(((0, 1, 2, 17, 39), (0,), (0, 20)), LENGTH, own_positions=True)


def masked(query: Tensor, key: Tensor, value: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """The same by scores of all keys and a mask."""
    rows = torch.tensor([span.global_start + row for span in spans for row in range(span.length)])
    own = torch.stack(
        [torch.bucketize(torch.arange(LENGTH), torch.tensor(s), right=True) for s in DOCUMENTS.starts]
    )
    keys = torch.arange(key.shape[0])
    visible = (own[:, rows].unsqueeze(2) == own[:, : len(keys)].unsqueeze(1)) & (keys <= rows.unsqueeze(1))
    key, value = (x.repeat_interleave(query.shape[2] // x.shape[2], dim=2) for x in (key, value))
    scores = torch.einsum("rbhc,sbhc->bhrs", query, key) * 0.3
    weights = scores.masked_fill(~visible.unsqueeze(1), -math.inf).softmax(dim=-1)
    return torch.einsum("bhrs,sbhv->rbhv", weights, value).flatten(2)


def documents_one_by_one(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, scale: float) -> Tensor:
    """As torch's operator for documents of different lengths."""
    *ends, most_rows, most_keys = bounds
    assert [most_rows, most_keys] == [int(one.diff().max()) for one in ends]
    assert all(one.dtype == torch.int32 for one in ends)
    outputs = []
    for (first, last), (begin, end) in zip(*(one.unfold(0, 2, 1).tolist() for one in ends), strict=True):
        span = Span(0, last - first, end - begin - (last - first))
        parts = (x.unsqueeze(1) for x in (query[first:last], key[begin:end], value[begin:end]))
        outputs.append(KERNELS["exact"](*parts, spans=(span,), scale=scale).squeeze(1))
    return torch.cat(outputs).view(len(query), query.shape[1], -1)


@pytest.mark.parametrize("with_sums", [True, False])
@pytest.mark.parametrize("name", ["exact", "sdpa", "cpu-flash", "torch-flash-2"])
def test_kernels_equal_a_mask(name: str, with_sums: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "torch-flash-2":
        monkeypatch.setitem(KERNELS, name, Kernel(documents=documents_one_by_one))
    torch.manual_seed(1)
    shapes = ((LENGTH, 3, 4, 8), (LENGTH, 3, 2, 8), (LENGTH, 3, 2, 8))
    query, key, value = (torch.randn(shape, requires_grad=True) for shape in shapes)
    gradient = torch.randn(LENGTH, 3, 32)
    expected = torch.autograd.grad(
        masked(query, key, value, (Span(0, LENGTH, 0),)), (query, key, value), gradient
    )
    sums = KeyValueSums(key, value) if with_sums else None
    of_query, others = torch.empty_like(query), []
    for chunk in reversed(chunk_sequence(LENGTH, degree=3)):
        (span,) = chunk.queries
        rows = slice(span.local_start, span.local_end)
        inputs = [
            x.detach().requires_grad_()
            for x in (query[rows], key[: span.global_end], value[: span.global_end])
        ]
        output = KERNELS[name](*inputs, spans=chunk.queries, documents=DOCUMENTS, scale=0.3, sums=sums)
        torch.testing.assert_close(output, masked(*inputs, chunk.queries))
        found = torch.autograd.grad(output, inputs, gradient[rows], allow_unused=True)
        of_query[rows] = found[0]
        if found[1] is not None:
            others.append([torch.cat([x, x.new_zeros(LENGTH - len(x), *x.shape[1:])]) for x in found[1:]])
    if sums is not None and name == "cpu-flash":
        assert not others, "all are added to the sums"
        totals = sums.totals()
    else:
        totals = tuple(torch.stack(parts).sum(0) for parts in zip(*others, strict=True))
    for one, found_one in zip(expected, (of_query, *totals), strict=True):
        torch.testing.assert_close(found_one, one)


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "many"])
@pytest.mark.parametrize("beyond", [{}, {"window": 5, "dropout": 0.1}], ids=["plain", "window"])
def test_torch_accepts_the_calls_of_its_kernel(beyond: dict[str, Any], documents: Documents | None) -> None:
    """On the meta device, where torch's operator checks its arguments; it gives a gradient."""
    shapes = ((24, 3, 4, 16), (34, 3, 2, 16), (34, 3, 2, 16))
    inputs = [torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    spans = (Span(0, 24, 10),)
    output = KERNELS["torch-flash-2"](*inputs, spans=spans, documents=documents, scale=0.3, **beyond)
    assert output.shape == (24, 3, 64)
    found = torch.autograd.grad(output, inputs, torch.empty_like(output))
    assert [one.shape for one in found] == [one.shape for one in inputs]


def test_a_kernel_that_takes_all_documents_at_once_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = compat.Gpu(capability=(10, 0), cudnn=92000, deterministic=False)
    monkeypatch.setattr(compat, "current_gpu", lambda: gpu)
    settings = settings_of_plain_attention()
    assert choose_kernel(settings, local=False, on_gpu=True).name == "te"
    assert choose_kernel(settings, local=True, on_gpu=True).name == "cudnn"
    chosen = choose_kernel(settings, local=False, on_gpu=True, documents=True)
    assert chosen.name == "torch-flash-2"
    assert "cudnn: one call for each document" in chosen.reason
