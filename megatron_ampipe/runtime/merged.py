"""Attention of a chunk as pieces of keys, each by a flash kernel, merged by their log-sum-exp.

A kernel that knows causal attention only for as many keys as queries would leave all chunks but the first to
a slower one. Here every chunk gets it: once for its own keys, causal, and once for all earlier keys, without
a mask. A kernel that aligns its causal mask to the bottom right takes both as one piece. Nothing here knows a
device; the kernels are in :mod:`.cpu_flash`, :mod:`.torch_flash` and :mod:`.flash_attn_packages`.

Shapes as in :mod:`.attention_kernels`, which lists what is made here among its kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import KeyValueSums, sum_dtype
from megatron_ampipe.runtime.rows import join_spans, split_spans
from megatron_ampipe.schedule.chunks import Span


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a span and the keys that they attend to in one call of a kernel.

    Attributes:
        first_row: Of the span.
        last_row: One past the last.
        first_key: Of the sequence.
        last_key: One past the last.
        causal: The last row sees the last key, the row before it one key less, and so on; else all rows see
            all keys.
    """

    first_row: int
    last_row: int
    first_key: int
    last_key: int
    causal: bool


@dataclass(frozen=True, slots=True)
class PieceOutput:
    """What a kernel computed of a piece.

    Attributes:
        output: ``[R, B, H, V]``.
        lse: ``[B, H, R]``, at least fp32: natural logarithm of the sum of the exponentials of the scaled
            scores.
        state: What the backward call of the kernel asks for besides; that of any piece of a chunk will do.
    """

    output: Tensor
    lse: Tensor
    state: tuple[Any, ...] = ()


class PieceKernel(Protocol):
    """A flash kernel: attention of one piece, and its gradients."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[Piece, ...]:
        """The pieces of a span, in the order in which they are computed.

        Every row has exactly one causal piece, which comes before its other ones. Forward, pieces that share
        a row have the same rows and follow one another.
        """
        ...

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """Attend: ``[R, B, H, C]``, ``[S, B, G, C]`` and ``[S, B, G, V]``."""
        ...

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        state: tuple[Any, ...],
        *,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, shaped as these are.

        ``output`` and ``lse`` are those over all pieces of the rows, not over this one: the gradients of a
        piece are then its part of the whole.
        """
        ...


def own_and_earlier(span: Span) -> tuple[Piece, ...]:
    """The span's own keys, causal, with as many queries; then all earlier keys without a mask."""
    own = Piece(0, span.length, span.global_start, span.global_end, causal=True)
    if not span.global_start:
        return (own,)
    return own, Piece(0, span.length, 0, span.global_start, causal=False)


def all_keys(span: Span) -> tuple[Piece, ...]:
    """Everything that the span sees, for a kernel whose causal mask is aligned to the bottom right."""
    return (Piece(0, span.length, 0, span.global_end, causal=True),)


class MergedAttention:
    """One of the kernels of :mod:`.attention_kernels`, made of a :class:`PieceKernel`.

    Args:
        kernel: Computes every piece.
    """

    def __init__(self, kernel: PieceKernel) -> None:
        self._kernel = kernel

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        spans: Sequence[Span],
        scale: float,
        dropout: float = 0.0,
        window: int | None = None,
        sums: KeyValueSums | None = None,
    ) -> Tensor:
        """See :class:`.attention.AttentionKernel`; neither dropout nor window."""
        assert dropout == 0.0 and window is None, "pieces have neither dropout nor window"
        output: Tensor = _Merged.apply(query, key, value, self._kernel, tuple(spans), scale, sums)
        return output

    @property
    def num_calls(self) -> int:
        """How often the kernel is called for a chunk of few rows behind other chunks."""
        return len(self._kernel.pieces(Span(0, 1, 1), backward=False))


class _Merged(torch.autograd.Function):
    """All spans of a chunk, the gradients of keys and values summed in place.

    Backward, every piece is differentiated with the merged output and log-sum-exp, which makes it exact;
    there nothing has to be merged, so pieces may be others than forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: PieceKernel,
        spans: tuple[Span, ...],
        scale: float,
        sums: KeyValueSums | None,
    ) -> Tensor:
        outputs, exponents = [], []
        for rows, span in split_spans(query, spans):
            for same_rows in _by_rows(kernel, span):
                found = [
                    kernel.forward(
                        rows[piece.first_row : piece.last_row],
                        key[piece.first_key : piece.last_key],
                        value[piece.first_key : piece.last_key],
                        causal=piece.causal,
                        scale=scale,
                    )
                    for piece in same_rows
                ]
                ctx.state = found[-1].state
                output, lse = _merge(found)
                outputs.append(output)
                exponents.append(lse)
        joined = join_spans(outputs)
        lse = exponents[0] if len(exponents) == 1 else torch.cat(exponents, dim=-1)
        ctx.save_for_backward(query, key, value, joined, lse)
        ctx.kernel, ctx.spans, ctx.scale, ctx.sums = kernel, spans, scale, sums
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        gradient, output = (x.reshape(*query.shape[:3], -1) for x in (gradient, output))

        def differentiate(rows: slice, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
            keys = slice(piece.first_key, piece.last_key)
            of_piece: tuple[Tensor, Tensor, Tensor] = ctx.kernel.backward(
                gradient[rows],
                query[rows],
                key[keys],
                value[keys],
                output[rows],
                lse[..., rows],
                ctx.state,
                causal=piece.causal,
                scale=ctx.scale,
            )
            return of_piece

        found = _sum_pieces(_placed(ctx.kernel, ctx.spans), differentiate, query, key, value, ctx.sums)
        return *found, None, None, None, None


def _placed(kernel: PieceKernel, spans: Sequence[Span]) -> list[tuple[slice, Piece]]:
    """All pieces of a backward pass, each with its rows of the query tensor."""
    placed, first_row = [], 0
    for span in spans:
        for piece in kernel.pieces(span, backward=True):
            placed.append((slice(first_row + piece.first_row, first_row + piece.last_row), piece))
        first_row += span.length
    return placed


def _sum_pieces(
    placed: Sequence[tuple[slice, Piece]],
    differentiate: Callable[[slice, Piece], tuple[Tensor, Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sums: KeyValueSums | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value; of the last two None where there are ``sums`` to add to."""
    rows, piece = placed[0]
    if len(placed) == 1 and sums is None and piece.last_key - piece.first_key == key.shape[0]:
        # The whole sequence in one piece, as in a stock layer: nothing to sum.
        return differentiate(rows, piece)
    into = KeyValueSums(key, value) if sums is None else sums
    several = any(not piece.causal for _, piece in placed)
    dtype = sum_dtype(query) if several else query.dtype
    query_gradient = torch.empty(query.shape, dtype=dtype, device=query.device)
    for rows, piece in placed:
        of_rows, *of_keys = differentiate(rows, piece)
        into.add(piece.first_key, *of_keys)
        if piece.causal:
            # The one piece of these rows that comes first.
            query_gradient[rows] = of_rows
        else:
            query_gradient[rows] += of_rows
    query_gradient = query_gradient.to(query.dtype)
    if sums is not None:
        return query_gradient, None, None
    return query_gradient, *(total.to(key.dtype) for total in into.totals())


def _by_rows(kernel: PieceKernel, span: Span) -> list[list[Piece]]:
    """The pieces of a span, those of the same rows together."""
    pieces = kernel.pieces(span, backward=False)
    groups = itertools.groupby(pieces, key=lambda piece: (piece.first_row, piece.last_row))
    return [list(same_rows) for _, same_rows in groups]


def _merge(found: Sequence[PieceOutput]) -> tuple[Tensor, Tensor]:
    """The output of the same rows over the keys of all pieces, and its log-sum-exp.

    Weighed and added in the dtype of the log-sum-exp, rounded once.
    """
    first, *others = found
    if not others:
        return first.output, first.lse
    total = functools.reduce(torch.logaddexp, [part.lse for part in found])
    weights = [(part.lse - total).exp_().permute(2, 0, 1).unsqueeze(-1) for part in found]
    # In place where the output has that dtype already.
    in_place = first.output.dtype == total.dtype
    output = first.output.mul_(weights[0]) if in_place else first.output * weights[0]
    for part, weight in zip(others, weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return output.to(first.output.dtype), total
