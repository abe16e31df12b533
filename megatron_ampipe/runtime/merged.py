"""Attention of a chunk in pieces (ranges of keys), each run by a flash kernel, merged by their log-sum-exp.

A kernel that supports causal attention only with as many keys as queries could run the first chunk only.
Here it runs every chunk in two calls: causal over the chunk's own keys, and without a mask over all earlier
keys. A kernel that aligns its causal mask to the bottom right takes both as one piece. This module does not
depend on the device; the kernels are in :mod:`.cpu_flash`, :mod:`.torch_flash` and
:mod:`.flash_attn_packages`.

Shapes as in :mod:`.attention_kernels`, whose list of kernels includes those that are built here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_ampipe.runtime.key_value_sums import KeyValueSums, RowSums, sum_dtype
from megatron_ampipe.runtime.rows import split_spans
from megatron_ampipe.schedule.chunks import Span


@dataclass(frozen=True, slots=True)
class AttentionPiece:
    """Rows of a span and the keys that they attend to in one kernel call.

    Attributes:
        first_row: First row, counted in the span.
        last_row: One past the last row.
        first_key: First key, counted in the sequence.
        last_key: One past the last key.
        causal: The last row sees the last key, the row before it one key less, and so on; otherwise all rows
            see all keys.
    """

    first_row: int
    last_row: int
    first_key: int
    last_key: int
    causal: bool


@dataclass(frozen=True, slots=True)
class PieceOutput:
    """What a kernel returns for one piece.

    Attributes:
        output: ``[R, B, H, V]``.
        lse: ``[B, H, R]``, at least fp32: log-sum-exp (natural logarithm) of the scaled scores.
        state: What else the kernel's backward call needs; it is the same for all pieces of a chunk.
    """

    output: Tensor
    lse: Tensor
    state: tuple[Any, ...] = ()


class PieceKernel(Protocol):
    """A flash kernel: attention of one piece, and its gradients."""

    def pieces(self, span: Span, *, backward: bool) -> tuple[AttentionPiece, ...]:
        """The pieces of a span, in the order in which they are computed.

        Every row has exactly one causal piece, which comes before the other pieces of that row. In forward,
        pieces that have a row in common have all rows in common and are adjacent in the list.
        """
        ...

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
    ) -> PieceOutput:
        """Attention of ``[R, B, H, C]`` over ``[S, B, G, C]`` and ``[S, B, G, V]``."""
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
        """Gradients of query, key and value, in the shapes of these.

        ``output`` and ``lse`` are the merged ones, over all pieces of the rows: the gradients of the pieces
        then add up to those of the whole attention.
        """
        ...


def causal_then_earlier(span: Span) -> tuple[AttentionPiece, ...]:
    """The keys of the span itself, causal, as many as queries; then all earlier keys, without a mask."""
    own = AttentionPiece(0, span.length, span.global_start, span.global_end, causal=True)
    if not span.global_start:
        return (own,)
    return own, AttentionPiece(0, span.length, 0, span.global_start, causal=False)


def all_visible_keys(span: Span) -> tuple[AttentionPiece, ...]:
    """All keys that the span sees, for a kernel whose causal mask is aligned to the bottom right."""
    return (AttentionPiece(0, span.length, 0, span.global_end, causal=True),)


class MergedAttention:
    """A kernel of :mod:`.attention_kernels`, built from a :class:`PieceKernel`.

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
        sums: RowSums | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See :class:`.attention_kernels.AttentionKernel`; supports no dropout, no window and no sinks."""
        assert dropout == 0.0 and window is None and sinks is None, "pieces are of plain attention"
        output: Tensor = _Merged.apply(query, key, value, self._kernel, tuple(spans), scale, sums)
        return output

    @property
    def pieces(self) -> PieceKernel:
        """What computes every piece."""
        return self._kernel

    @property
    def num_calls(self) -> int:
        """Kernel calls for a short chunk that is not the first one."""
        return len(self._kernel.pieces(Span(0, 1, 1), backward=False))


class _Merged(torch.autograd.Function):
    """All spans of a chunk; the gradients of keys and values are accumulated in place.

    Backward differentiates every piece with the merged output and log-sum-exp, which makes the sum exact. It
    has nothing to merge, so it may use different pieces than forward.
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
        sums: RowSums | None,
    ) -> Tensor:
        found = attend_in_pieces(kernel, query, key, value, spans=spans, scale=scale)
        joined = found.output.reshape(*query.shape[:2], -1)
        ctx.save_for_backward(query, key, value, joined, found.lse)
        ctx.state = found.state
        ctx.kernel, ctx.spans, ctx.scale, ctx.sums = kernel, spans, scale, sums
        return joined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        gradient, output = (x.reshape(*query.shape[:3], -1) for x in (gradient, output))

        found = PieceOutput(output, lse, ctx.state)
        gradients = differentiate_in_pieces(
            ctx.kernel, gradient, query, key, value, found, spans=ctx.spans, scale=ctx.scale, sums=ctx.sums
        )
        return gradients[0].to(query.dtype), *gradients[1:], None, None, None, None


def attend_in_pieces(
    kernel: PieceKernel, query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span], scale: float
) -> PieceOutput:
    """Attention of the rows of some spans ``[R, B, H, C]``, merged over the pieces of each row."""
    outputs, exponents, state = [], [], ()
    for rows, span in split_spans(query, spans):
        for same_rows in _group_by_rows(kernel, span):
            parts = [
                kernel.forward(
                    rows[piece.first_row : piece.last_row],
                    key[piece.first_key : piece.last_key],
                    value[piece.first_key : piece.last_key],
                    causal=piece.causal,
                    scale=scale,
                )
                for piece in same_rows
            ]
            state = parts[-1].state
            output, lse = merge_pieces(parts)
            outputs.append(output)
            exponents.append(lse)
    if len(outputs) == 1:
        return PieceOutput(outputs[0], exponents[0], state)
    return PieceOutput(torch.cat(outputs), torch.cat(exponents, dim=-1), state)


def differentiate_in_pieces(
    kernel: PieceKernel,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: PieceOutput,
    *,
    spans: Sequence[Span],
    scale: float,
    sums: RowSums | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key and value; None for the last two if they were added to ``sums``.

    Args:
        kernel: As in :func:`attend_in_pieces`.
        gradient: Of the output, ``[R, B, H, V]``.
        query: ``[R, B, H, C]``.
        key: ``[S, B, G, C]``.
        value: ``[S, B, G, V]``.
        found: Merged over all keys that the rows see, of which ``key`` may be a part.
        spans: Positions of the rows in ``key``.
        scale: Factor on the scores.
        sums: Where the gradients of keys and values are added.

    Returns:
        The gradient of the query may have the dtype of sums.
    """

    def differentiate(rows: slice, piece: AttentionPiece) -> tuple[Tensor, Tensor, Tensor]:
        keys = slice(piece.first_key, piece.last_key)
        return kernel.backward(
            gradient[rows],
            query[rows],
            key[keys],
            value[keys],
            found.output[rows],
            found.lse[..., rows],
            found.state,
            causal=piece.causal,
            scale=scale,
        )

    return _sum_gradients(_pieces_with_rows(kernel, spans), differentiate, query, key, value, sums)


def _pieces_with_rows(kernel: PieceKernel, spans: Sequence[Span]) -> list[tuple[slice, AttentionPiece]]:
    """All pieces of a backward pass, each with its rows in the query tensor."""
    pieces, first_row = [], 0
    for span in spans:
        for piece in kernel.pieces(span, backward=True):
            pieces.append((slice(first_row + piece.first_row, first_row + piece.last_row), piece))
        first_row += span.length
    return pieces


def _sum_gradients(
    pieces: Sequence[tuple[slice, AttentionPiece]],
    differentiate: Callable[[slice, AttentionPiece], tuple[Tensor, Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sums: RowSums | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    rows, piece = pieces[0]
    if len(pieces) == 1 and sums is None and piece.last_key - piece.first_key == key.shape[0]:
        # The whole sequence in one piece, as in a stock layer: there is nothing to sum.
        return differentiate(rows, piece)
    target = KeyValueSums(key, value) if sums is None else sums
    several = any(not piece.causal for _, piece in pieces)
    dtype = sum_dtype(query) if several else query.dtype
    query_gradient = torch.empty(query.shape, dtype=dtype, device=query.device)
    for rows, piece in pieces:
        dq, dk, dv = differentiate(rows, piece)
        target.add(piece.first_key, dk, dv)
        if piece.causal:
            # The causal piece is the first one of its rows.
            query_gradient[rows] = dq
        else:
            query_gradient[rows] += dq
    if sums is not None:
        return query_gradient, None, None
    of_key, of_value = (total.to(key.dtype) for total in target.totals())
    return query_gradient, of_key, of_value


def _group_by_rows(kernel: PieceKernel, span: Span) -> list[list[AttentionPiece]]:
    """The pieces of a span, grouped by their rows."""
    pieces = kernel.pieces(span, backward=False)
    groups = itertools.groupby(pieces, key=lambda piece: (piece.first_row, piece.last_row))
    return [list(same_rows) for _, same_rows in groups]


def merge_pieces(parts: Sequence[PieceOutput]) -> tuple[Tensor, Tensor]:
    """Merge the outputs of the same rows over several ranges of keys; returns output and log-sum-exp.

    Scaled and added in the dtype of the log-sum-exp, rounded once; the first output may be overwritten.
    """
    first, *others = parts
    if not others:
        return first.output, first.lse
    total = functools.reduce(torch.logaddexp, [part.lse for part in parts])
    weights = [(part.lse - total).exp_().permute(2, 0, 1).unsqueeze(-1) for part in parts]
    # In place if the output already has that dtype.
    in_place = first.output.dtype == total.dtype
    output = first.output.mul_(weights[0]) if in_place else first.output * weights[0]
    for part, weight in zip(others, weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return output.to(first.output.dtype), total
