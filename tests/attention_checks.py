"""Checks of an attention kernel, on a GPU by ``tests/gpu``, and on a CPU, where its library is a stand-in.

A kernel is compared with the definition in fp64 (:mod:`.reference_pieces`).
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from megatron_ampipe.attention.backends import visible_keys
from megatron_ampipe.attention.kernels import KERNELS
from megatron_ampipe.runtime.segment import KeyValueSums
from megatron_ampipe.schedule import SequenceLayout, Span, chunk_sequence
from megatron_ampipe.schedule.chunks import Documents
from tests import reference_pieces


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Spans of a chunk, and sizes of the tensors."""

    name: str
    spans: tuple[Span, ...]
    head_size: int = 128
    value_size: int | None = None
    """The head size of values; None for that of keys."""
    heads: int = 8
    groups: int = 2
    batch: int = 1

    @property
    def num_keys(self) -> int:
        return max(span.global_end for span in self.spans)


@dataclasses.dataclass(frozen=True)
class On:
    """Where a kernel runs, its precision, and how far from fp64 it may be, relative to the largest value."""

    device: str
    dtype: torch.dtype
    bound: float


def inputs(sizes: Sizes, on: On) -> list[Tensor]:
    """Query, key and value."""
    rows = sum(span.length for span in sizes.spans)
    of_values = sizes.value_size or sizes.head_size
    shapes = (
        (rows, sizes.batch, sizes.heads, sizes.head_size),
        (sizes.num_keys, sizes.batch, sizes.groups, sizes.head_size),
        (sizes.num_keys, sizes.batch, sizes.groups, of_values),
    )
    return [torch.randn(shape, device=on.device).to(on.dtype).requires_grad_() for shape in shapes]


def precise(tensors: list[Tensor]) -> list[Tensor]:
    """The same numbers in fp64."""
    return [tensor.detach().double().requires_grad_() for tensor in tensors]


def differences(expected: dict[str, Tensor], found: dict[str, Tensor], on: On) -> dict[str, float]:
    """What differs by more than the bound, relative to the largest expected value."""
    assert expected.keys() == found.keys()
    wrong = {}
    for name, value in expected.items():
        assert found[name].shape == value.shape, name
        largest = max(value.detach().abs().max().item(), 1e-30)
        difference = (found[name].double() - value.double()).detach().abs().max().item() / largest
        # A NaN is not at most the bound.
        if not difference <= on.bound:
            wrong[name] = difference
    return wrong


NAMES = ("output", "query", "key", "value", "sinks")


def compare(
    kernel: str, sizes: Sizes, on: On, *, documents: Documents | None = None, **options: Any
) -> dict[str, float]:
    """What is wrong with the output and all gradients of a chunk; ``options`` as of a ``SpanFunction``."""
    torch.manual_seed(1)
    tensors = inputs(sizes, on)
    sinks = options.pop("sinks", None)
    if sinks is not None:
        tensors.append(sinks.to(on.device, on.dtype).requires_grad_())

    def attend(name: str, given: list[Tensor]) -> Tensor:
        more = {"sinks": given[3]} if sinks is not None else {}
        scale = sizes.head_size**-0.5
        return KERNELS[name](
            *given[:3], spans=sizes.spans, scale=scale, documents=documents, **options, **more
        )

    exactly = precise(tensors)
    expected = attend("exact", exactly)
    gradient = torch.randn(expected.shape, device=on.device).to(on.dtype)
    wanted = [expected, *torch.autograd.grad(expected, exactly, gradient.double())]
    found = attend(kernel, tensors)
    got = [found, *torch.autograd.grad(found, tensors, gradient)]
    return differences(dict(zip(NAMES, wanted, strict=False)), dict(zip(NAMES, got, strict=False)), on)


def compare_sums(kernel: str, sizes: Sizes, on: On) -> dict[str, float]:
    """What is wrong if gradients of keys and values are added to ``KeyValueSums``, as pipelined layers do."""
    torch.manual_seed(2)
    tensors, scale = inputs(sizes, on), sizes.head_size**-0.5
    exactly = precise(tensors)
    expected = KERNELS["exact"](*exactly, spans=sizes.spans, scale=scale)
    # As of a sum: its rows are one number, repeated.
    gradient = torch.ones(1, device=on.device, dtype=on.dtype).expand(expected.shape)
    wanted = torch.autograd.grad(expected, exactly, gradient.double())
    sums = KeyValueSums(*tensors[1:])
    found = KERNELS[kernel](*tensors, spans=sizes.spans, scale=scale, sums=sums)
    of_query, *of_keys = torch.autograd.grad(found, tensors, gradient, allow_unused=True)
    # Kernels that support sums return no gradients to autograd.
    summed = of_keys if of_keys[0] is not None else sums.totals()
    names = NAMES[:4]
    return differences(
        dict(zip(names, (expected, *wanted), strict=True)),
        dict(zip(names, (found, of_query, *summed), strict=True)),
        on,
    )


def compare_pieces(kernel: str, sizes: Sizes, on: On, *, causal: bool) -> dict[str, float]:
    """What is wrong with a piece: its output, its log-sum-exp, and the gradients from both.

    The backward gets the output and the log-sum-exp of a merged result, here of more keys than the piece has.
    """
    pieces = KERNELS[kernel].pieces
    assert pieces is not None
    torch.manual_seed(3)
    query, key, value = (x.detach() for x in inputs(sizes, on))
    gradient = torch.randn(query.shape, device=on.device).to(on.dtype)
    if sizes.value_size is not None:
        gradient = gradient[..., : sizes.value_size]
    how: dict[str, Any] = {"causal": causal, "scale": sizes.head_size**-0.5}
    reference = reference_pieces.EXACT_PIECES
    doubled = [x.double() for x in (gradient, query, key, value)]
    expected, found = reference.attend(*doubled[1:], **how), pieces.attend(query, key, value, **how)
    merged = expected._replace(output=expected.output * 0.5, lse=expected.lse + math.log(2))
    wanted = reference.differentiate(merged, *doubled, **how)
    of_kernel = found._replace(output=merged.output.to(on.dtype), lse=merged.lse.to(found.lse.dtype))
    got = pieces.differentiate(of_kernel, gradient, query, key, value, **how)
    names = (*NAMES[:4], "log-sum-exp")
    return differences(
        dict(zip(names, (expected.output, *wanted, expected.lse), strict=True)),
        dict(zip(names, (found.output, *got, found.lse), strict=True)),
        on,
    )


def compare_dropout(
    kernel: str, on: On, *, documents: Documents | None = None, window: int | None = None
) -> dict[str, float]:
    """What is wrong with dropout: whether the backward drops the weights that the forward dropped.

    With the unit matrix as values, the output is the weights that are left; the same seed drops the same ones
    with other values. Before the backward, others draw from the random state.
    """
    probability, spans = 0.25, (Span(0, 40, 16),)
    sizes = Sizes("dropout", spans, head_size=64, heads=4, batch=2)
    torch.manual_seed(4)
    tensors = inputs(sizes, on)
    query, key, value = tensors
    unit = torch.eye(sizes.num_keys, sizes.head_size, device=on.device, dtype=on.dtype)
    unit = unit.view(sizes.num_keys, 1, 1, -1).expand_as(value).contiguous()
    options = {} if window is None else {"window": window}

    def attend(values: Tensor) -> Tensor:
        torch.manual_seed(5)
        return KERNELS[kernel](
            query,
            key,
            values,
            spans=spans,
            scale=0.2,
            documents=documents,
            dropout=probability,
            **options,
        )

    left = attend(unit).detach().unflatten(-1, (sizes.heads, sizes.head_size))[..., : sizes.num_keys]
    kept = left.permute(1, 2, 0, 3) != 0
    visible = _visible(sizes, documents, window).to(on.device)
    assert not (kept & ~visible).any(), "a weight of a key that the row does not see"
    share = float(kept.sum() / visible.expand_as(kept).sum())
    assert abs(share - (1 - probability)) < 0.05, f"{share:.0%} of the weights are left"
    exactly = precise(tensors)
    repeated = [x.repeat_interleave(sizes.heads // sizes.groups, dim=2) for x in exactly[1:]]
    scores = torch.einsum("rbhc,sbhc->bhrs", exactly[0], repeated[0]) * 0.2
    weights = scores.masked_fill(~visible, -math.inf).softmax(-1) * kept / (1 - probability)
    expected = torch.einsum("bhrs,sbhc->rbhc", weights, repeated[1]).flatten(2)
    gradient = torch.randn(expected.shape, device=on.device).to(on.dtype)
    found = attend(value)
    torch.manual_seed(6)
    torch.rand(1000, device=on.device)
    got = [found, *torch.autograd.grad(found, tensors, gradient)]
    wanted = [expected, *torch.autograd.grad(expected, exactly, gradient.double())]
    names = NAMES[:4]
    return differences(dict(zip(names, wanted, strict=True)), dict(zip(names, got, strict=True)), on)


def _visible(sizes: Sizes, documents: Documents | None, window: int | None) -> Tensor:
    """``[B, 1, R, S]``, True where a row of the only span sees a key."""
    (span,) = sizes.spans
    rows, keys = torch.empty(span.length), torch.empty(sizes.num_keys)
    visible = visible_keys(rows, keys, window).expand(sizes.batch, 1, -1, -1)
    if documents is None:
        return visible
    begins = torch.zeros(sizes.batch, sizes.num_keys, dtype=torch.int64)
    for sequence, starts in enumerate(documents.starts):
        for start in starts:
            begins[sequence, start] = 1
    number = begins.cumsum(-1)
    same = number[:, span.global_start :, None] == number[:, None, :]
    return visible & same.unsqueeze(1)


_LATER = (Span(0, 1024, 3072),)
SIZES = [
    Sizes("whole", (Span(0, 2048, 0),)),
    Sizes("later chunk", _LATER),
    Sizes("later chunk, one head each", _LATER, groups=8, head_size=64, batch=2),
    Sizes("odd", (Span(0, 333, 501),), batch=3),
    Sizes("a few rows", (Span(0, 2, 700),)),
    Sizes(
        "tensor parallel", chunk_sequence(2048, degree=2, layout=SequenceLayout(tensor_ranks=2))[1].queries
    ),
    Sizes(
        "context parallel",
        chunk_sequence(2052, degree=3, layout=SequenceLayout(context_ranks=2, context_rank=1))[1].queries,
    ),
]
ODD = Sizes("odd chunk", (Span(0, 61, 76),), batch=2)
LATENT_SIZES = Sizes("latent attention", (Span(0, 61, 76),), head_size=192, value_size=128, groups=8)
DOCUMENTS = Documents(((0, 1, 70, 95), (0, 80)), 137, own_positions=True)
"""Of :data:`ODD`: one of a single row, some that begin in an earlier chunk, and some in this one."""
ONE_DOCUMENT = Documents(((0, 80),), 137, own_positions=True)
"""Of :data:`LATENT_SIZES`."""
DROPPED_DOCUMENTS = Documents(((0, 20, 33), (0,)), 56, own_positions=True)
"""Of :func:`compare_dropout`."""
