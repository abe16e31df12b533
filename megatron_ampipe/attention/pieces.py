"""Attention of a chunk in pieces (ranges of keys), each run by a flash kernel, merged by their log-sum-exp.

Some kernels support a causal mask only if there are as many keys as queries. They run a chunk in two pieces:
its own keys, with a causal mask, and all earlier keys. A kernel with a bottom-right mask needs one piece.

Shapes: ``R`` query rows of the chunk, ``S`` keys, ``B`` batch, ``H`` query heads, ``G`` key/value heads,
``C`` head size of queries and keys, ``V`` head size of values.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_ampipe.runtime.segment import KeyValueSums, sum_dtype
from megatron_ampipe.schedule.chunks import Span

HEADS_FIRST, ROWS_FIRST = (1, 2, 0, 3), (2, 0, 1, 3)
"""Permutations of dimensions to ``[B, H, R, C]``, which kernels take, and back to ``[R, B, H, C]``."""
AddKeys = Callable[[int, Tensor, Tensor], None]
"""Adds gradients of keys and values, from a given row on (:meth:`KeyValueSums.add`)."""


class AttentionPiece(NamedTuple):
    """Rows of a span and the keys that they attend to in one kernel call. Both ends are exclusive.

    Rows count in the span, keys in the sequence. A causal mask is aligned to the bottom right.
    """

    first_row: int
    last_row: int
    first_key: int
    last_key: int
    causal: bool


KernelState = tuple[Tensor | int, ...]
"""What a kernel's forward returns for its backward only."""
KernelOutput = tuple[Tensor, Tensor, *KernelState]
"""Output, log-sum-exp and state."""


class PieceOutput(NamedTuple):
    """The output of a kernel for one piece, or of several pieces merged."""

    output: Tensor
    """``[R, B, H, V]``."""
    lse: Tensor
    """``[B, H, R]``, at least fp32: log-sum-exp (natural logarithm) of the scaled scores."""
    state: KernelState = ()
    """Further arguments of the kernel's backward, the same for all pieces of a chunk."""


@dataclass(frozen=True, slots=True)
class PieceKernel:
    """A flash kernel: attention of one piece, and its gradients."""

    cut: Callable[[Span], tuple[AttentionPiece, ...]]
    """Cuts a span into pieces, in order. Each row has one causal piece, which comes first. Pieces that share
    a row have the same rows and are adjacent."""
    forward: Callable[..., KernelOutput]
    """Called as ``(query, key, value, causal=, scale=)``, all ``[B, H, R, C]``: ``(output, lse, *state)``."""
    backward: Callable[..., Sequence[Tensor]]
    """Called as ``(gradient, query, key, value, output, lse, *state, causal=, scale=)``: 3 gradients."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> PieceOutput:
        """Attention of ``[R, B, H, C]`` over ``[S, B, G, C]`` and ``[S, B, G, V]``."""
        tensors = (x.permute(HEADS_FIRST) for x in (query, key, value))
        output, lse, *state = self.forward(*tensors, causal=causal, scale=scale)
        return PieceOutput(output.permute(ROWS_FIRST), lse, tuple(state))

    def differentiate(
        self, attended: PieceOutput, *tensors: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value; ``tensors`` are the output gradient and these three.

        ``attended`` is merged over all pieces of the rows.
        """
        given = (x.permute(HEADS_FIRST) for x in (*tensors, attended.output))
        gradients = self.backward(*given, attended.lse, *attended.state, causal=causal, scale=scale)
        dq, dk, dv = (x.permute(ROWS_FIRST) for x in gradients)
        return dq, dk, dv


@functools.cache
def causal_then_earlier(span: Span, *, rows: int | None = None) -> tuple[AttentionPiece, ...]:
    """Two pieces: the keys of the span itself, with a causal mask; then all earlier keys, without a mask.

    With ``rows``, the span is first split into parts of so many rows.
    """
    start, pieces = span.global_start, []
    for first in range(0, span.length, rows or span.length):
        last = min(span.length, first + (rows or span.length))
        pieces.append(AttentionPiece(first, last, start + first, start + last, causal=True))
        if start + first:
            pieces.append(AttentionPiece(first, last, 0, start + first, causal=False))
    return tuple(pieces)


def all_visible_keys(span: Span) -> tuple[AttentionPiece, ...]:
    """All keys that the span sees, for a kernel whose causal mask is aligned to the bottom right."""
    return (AttentionPiece(0, span.length, 0, span.global_end, causal=True),)


class _PiecesContext(Protocol):
    """What a node of :class:`AttentionInPieces` saves."""

    state: KernelState
    kernel: PieceKernel
    spans: Sequence[Span]
    scale: float
    add: AddKeys | None

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]: ...

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class AttentionInPieces(torch.autograd.Function):
    """Attention of all spans of a chunk, ``(query, key, value, kernel, spans, scale, add)``.

    ``forward`` has a parameter for each argument of ``apply``, as autograd calls it.
    Returns ``[R, B, H * V]``. The backward uses the merged output and log-sum-exp for every piece, so the sum
    is exact. With ``add``, gradients of keys and values are only added there.
    """

    @staticmethod
    def forward(
        ctx: _PiecesContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kernel: PieceKernel,
        spans: Sequence[Span],
        scale: float,
        add: AddKeys | None,
    ) -> Tensor:
        attended = attend_in_pieces(kernel, query, key, value, spans=spans, scale=scale)
        output = attended.output.reshape(*query.shape[:2], -1)
        ctx.save_for_backward(query, key, value, output, attended.lse)
        ctx.state, ctx.kernel, ctx.spans, ctx.scale, ctx.add = attended.state, kernel, spans, scale, add
        return output

    @staticmethod
    def backward(ctx: _PiecesContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        gradient, output = (x.reshape(*query.shape[:3], -1) for x in (gradient, output))
        attended = PieceOutput(output, lse, ctx.state)
        tensors = gradient, query, key, value
        gradients = differentiate_in_pieces(
            ctx.kernel, attended, tensors, spans=ctx.spans, scale=ctx.scale, add=ctx.add
        )
        return gradients[0].to(query.dtype), *gradients[1:], None, None, None, None


def attend_in_pieces(
    kernel: PieceKernel, query: Tensor, key: Tensor, value: Tensor, *, spans: Sequence[Span], scale: float
) -> PieceOutput:
    """Attention of the rows of some spans ``[R, B, H, C]``, merged over the pieces of each row."""
    outputs: list[Tensor] = []
    exponents: list[Tensor] = []
    state: KernelState = ()
    for rows, span in split_spans(query, spans):
        pieces = kernel.cut(span)
        for (first, last), same_rows in itertools.groupby(pieces, key=lambda x: (x.first_row, x.last_row)):
            parts = [
                kernel.attend(
                    rows[first:last],
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
    return PieceOutput(joined(outputs), joined(exponents, dim=-1), state)


def differentiate_in_pieces(
    kernel: PieceKernel,
    attended: PieceOutput,
    tensors: Sequence[Tensor],
    *,
    spans: Sequence[Span],
    scale: float,
    add: AddKeys | None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of query (maybe in the dtype of sums), key and value; the last two None with ``add``.

    ``tensors`` are the output gradient ``[R, B, H, V]``, query, key and value. ``attended`` is merged over
    all keys that the rows see, maybe more than ``key``. ``spans`` are the positions of the rows in ``key``.
    """
    gradient, query, key, value = tensors

    def differentiate(rows: slice, piece: AttentionPiece) -> tuple[Tensor, Tensor, Tensor]:
        keys = slice(piece.first_key, piece.last_key)
        attended_rows = PieceOutput(attended.output[rows], attended.lse[..., rows], attended.state)
        inputs = gradient[rows], query[rows], key[keys], value[keys]
        return kernel.differentiate(attended_rows, *inputs, causal=piece.causal, scale=scale)

    pieces: list[tuple[slice, AttentionPiece]] = []
    first_row = 0
    for span in spans:
        for piece in kernel.cut(span):
            pieces.append((slice(first_row + piece.first_row, first_row + piece.last_row), piece))
        first_row += span.length
    rows, piece = pieces[0]
    if len(pieces) == 1 and add is None and piece.last_key - piece.first_key == len(key):
        # One piece with all keys, as in a stock layer: there is nothing to sum.
        return differentiate(rows, piece)
    sums = KeyValueSums(key, value)
    target = sums.add if add is None else add
    several = any(not piece.causal for _, piece in pieces)
    dtype = sum_dtype(query) if several else query.dtype
    query_gradient = torch.empty(query.shape, dtype=dtype, device=query.device)
    for rows, piece in pieces:
        dq, dk, dv = differentiate(rows, piece)
        target(piece.first_key, dk, dv)
        if piece.causal:
            # The causal piece comes first for its rows.
            query_gradient[rows] = dq
        else:
            query_gradient[rows] += dq
    if add is not None:
        return query_gradient, None, None
    key_gradient, value_gradient = (total.to(key.dtype) for total in sums.totals())
    return query_gradient, key_gradient, value_gradient


def merge_pieces(parts: Sequence[PieceOutput]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the same rows over several ranges of keys; may overwrite the first output."""
    first, *others = parts
    if not others:
        return first.output, first.lse
    total = functools.reduce(torch.logaddexp, [part.lse for part in parts])
    weights = [(part.lse - total).exp_().permute(2, 0, 1).unsqueeze(-1) for part in parts]
    in_place = first.output.dtype == total.dtype
    output = first.output.mul_(weights[0]) if in_place else first.output * weights[0]
    for part, weight in zip(others, weights[1:], strict=True):
        output.addcmul_(part.output, weight)
    return output.to(first.output.dtype), total


def split_spans(tensor: Tensor, spans: Sequence[Span]) -> list[tuple[Tensor, Span]]:
    """Split the concatenated rows of all spans: ``(rows, span)`` for each span."""
    if len(spans) == 1:
        return [(tensor, spans[0])]
    return list(zip(tensor.split([span.length for span in spans]), spans, strict=True))


def joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    """``torch.cat`` without a copy of a single part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def repeat_heads(tensor: Tensor, heads: int) -> Tensor:
    """``[B, G, S, C]`` to ``[B, heads, S, C]``; each key/value head serves consecutive query heads."""
    repeats = heads // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)
