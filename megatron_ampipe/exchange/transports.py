"""Transfers of the rows of chunks: of tokens, with codecs, and of attention over tensor-parallel ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ampipe.runtime.collectives import Transfer, exchange_rows, issued, send_receive

# T rows of this rank, G rows of all ranks.

Arrived = tuple[Sequence[Tensor], Callable[[], None] | None]
"""Outputs, and a function that fills them once the transfer has ended; None if they are received as such."""


Operation = tuple[Callable[..., Transfer], Callable[..., Transfer]]
"""Dispatch and its adjoint, combine: functions of tensors, rows to ``send`` and ``receive``, a ``group``."""


@dataclass(frozen=True, slots=True)
class RowTransport:
    """The exchange of the rows of one chunk between the ranks of a group."""

    operation: Operation
    input_splits: Sequence[int]
    """Rows of each part of the dispatch's input: one part per rank for :data:`ALL_TO_ALL`, else one part."""
    output_splits: Sequence[int]
    """Rows of each part of the dispatch's output, one part per rank."""
    group: dist.ProcessGroup


class CallTransport(Protocol):
    """An exchange of the rows of one chunk by the calls of a communication library."""

    def dispatch(self, tensors: Sequence[Tensor]) -> Transfer: ...

    def combine(self, tensors: Sequence[Tensor]) -> Transfer: ...


Transport = RowTransport | CallTransport


class Codec(Protocol):
    """Encodes the tensors of one chunk before they are sent, and decodes the received tensors.

    ``combine`` says the way of the rows: from the experts back to the ranks of the tokens, as in the forward
    pass of ``combine`` and in the backward pass of ``dispatch``; else from the tokens to the experts.
    """

    uses: Sequence[Tensor]
    """Tensors that it reads in addition to its arguments."""

    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        """The tensors that are sent in place of these."""
        ...

    def arrive(self, received: Sequence[Tensor], *, combine: bool) -> Arrived:
        """The tensors that these stand for; they are complete when its function has run."""
        ...


def exchange_chunks(
    transports: Sequence[Transport],
    tensors: Sequence[Sequence[Tensor]],
    *,
    combine: bool,
    codecs: Sequence[Codec] | None = None,
) -> Transfer:
    """Issue the dispatch or the combine of several chunks: a collective for each of their tensors.

    ``transports`` all have the same class, which says whether the rows of all chunks go as one collective.
    ``combine`` is the way of the rows (:class:`Codec`). Outputs are ordered by chunk.
    """
    if codecs is not None:
        return _through_codecs(codecs, transports, tensors, combine)
    by_rows = [transport for transport in transports if isinstance(transport, RowTransport)]
    if not by_rows:
        by_calls = [transport for transport in transports if not isinstance(transport, RowTransport)]
        return Transfer.all_of(
            [
                transport.combine(chunk_tensors) if combine else transport.dispatch(chunk_tensors)
                for transport, chunk_tensors in zip(by_calls, tensors, strict=True)
            ]
        )
    first = by_rows[0]
    send = [transport.input_splits for transport in by_rows]
    receive = [transport.output_splits for transport in by_rows]
    start, back = first.operation
    if combine:
        start, send, receive = back, receive, send
    if len(transports) == 1:
        return start(tensors[0], send=send[0], receive=receive[0], group=first.group)
    joint = [_concatenate_by_rank(by_chunk, send) for by_chunk in zip(*tensors, strict=True)]
    added = [[sum(rows) for rows in zip(*splits, strict=True)] for splits in (send, receive)]
    transfer = start(joint, send=added[0], receive=added[1], group=first.group)
    return _split_into_chunks(transfer, receive)


def _through_codecs(
    codecs: Sequence[Codec],
    transports: Sequence[Transport],
    tensors: Sequence[Sequence[Tensor]],
    combine: bool,
) -> Transfer:
    sent = [codec.send(parts, combine=combine) for codec, parts in zip(codecs, tensors, strict=True)]
    transfer = exchange_chunks(transports, sent, combine=combine)
    received = itertools.batched(transfer.outputs, len(sent[0]))
    arrived = [codec.arrive(parts, combine=combine) for codec, parts in zip(codecs, received, strict=True)]

    def fill() -> None:
        for _, fill_chunk in arrived:
            if fill_chunk is not None:
                fill_chunk()

    uses = [*transfer.outputs]
    for codec, encoded in zip(codecs, sent, strict=True):
        uses += (*encoded, *codec.uses)
    return transfer.then([output for outputs, _ in arrived for output in outputs], fill, uses=uses)


def _concatenate_by_rank(tensors: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate the first part of every tensor, then the second part of every tensor, and so on."""
    parts = [tensor.split(list(sizes)) for tensor, sizes in zip(tensors, rows, strict=True)]
    return torch.cat([part for rank_parts in zip(*parts, strict=True) for part in rank_parts])


def _split_into_chunks(transfer: Transfer, rows: Sequence[Sequence[int]]) -> Transfer:
    """The inverse of :func:`_concatenate_by_rank`, applied to a transfer; ordered by chunk."""
    sizes, count = [size for rank_sizes in zip(*rows, strict=True) for size in rank_sizes], len(rows)
    outputs = [_rows_like(tensor, sum(chunk_rows)) for chunk_rows in rows for tensor in transfer.outputs]

    def fill() -> None:
        for index, tensor in enumerate(transfer.outputs):
            parts = tensor.split(sizes)
            for chunk, output in enumerate(outputs[index :: len(transfer.outputs)]):
                torch.cat(parts[chunk::count], out=output)

    return transfer.then(outputs, fill)


def with_rows(transfer: Transfer, more: Sequence[int]) -> Transfer:
    """Append rows of zeros to the outputs of a transfer; ``more`` is their number for each output."""
    outputs = [
        _rows_like(received, received.shape[0] + rows)
        for received, rows in zip(transfer.outputs, more, strict=True)
    ]

    def fill() -> None:
        for received, output in zip(transfer.outputs, outputs, strict=True):
            output[: received.shape[0]] = received
            output[received.shape[0] :].zero_()

    return transfer.then(outputs, fill, uses=transfer.outputs)


def _rows_like(tensor: Tensor, num_rows: int) -> Tensor:
    return tensor.new_empty((num_rows, *tensor.shape[1:]))


def _gather_rows(
    tensors: Sequence[Tensor], *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """All-gather each ``[T, ...]`` to ``[G, ...]``, with the same number of rows on every rank."""
    return issued(dist.all_gather_into_tensor, tensors, num_rows=sum(receive), group=group)


def _scatter_rows(
    tensors: Sequence[Tensor], *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """Reduce-scatter each ``[G, ...]`` to ``[T, ...]``."""
    return issued(dist.reduce_scatter_tensor, tensors, num_rows=receive[0], group=group)


def _gather_unequal_rows(
    tensors: Sequence[Tensor], *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """All-gather each ``[T, ...]`` to ``[G, ...]`` in rank order, with any number of rows on each rank."""
    outputs, works = [_rows_like(tensor, sum(receive)) for tensor in tensors], []
    for tensor, output in zip(tensors, outputs, strict=True):
        parts, same = list(output.split_with_sizes(list(receive))), [tensor.contiguous()] * group.size()
        if tensor.is_cuda:
            dist.all_to_all(parts, same, group=group)
        else:
            works += send_receive(same, parts, group)
    return Transfer(tuple(outputs), tuple(works))


def _scatter_unequal_rows(
    tensors: Sequence[Tensor], *, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> Transfer:
    """Reduce-scatter each ``[G, ...]`` to ``[T, ...]``, summed in rank order; 16-bit numbers in fp32."""
    count, (own,) = group.size(), receive
    sent = exchange_rows(tensors, send=send, receive=[own] * count, group=group)
    outputs = [_rows_like(tensor, own) for tensor in tensors]

    def fill() -> None:
        for received, output in zip(sent.outputs, outputs, strict=True):
            parts = received.view(count, own, *received.shape[1:])
            if output.dtype in (torch.bfloat16, torch.float16):
                output.copy_(parts.sum(dim=0, dtype=torch.float32))
            else:
                torch.sum(parts, dim=0, out=output)

    return sent.then(outputs, fill, uses=sent.outputs)


ALL_TO_ALL: Operation = (exchange_rows, exchange_rows)
"""Each row goes to one rank."""
ALL_GATHER: Operation = (_gather_rows, _scatter_rows)
"""Each row goes to every rank, and returned rows are added (reduce-scatter); see :func:`all_gather`."""
UNEQUAL_GATHER: Operation = (_gather_unequal_rows, _scatter_unequal_rows)
"""The same with different numbers of rows per rank: exchanges with every other rank, without padding."""


def all_gather(num_rows: int, group: dist.ProcessGroup) -> RowTransport:
    """The transport of an all-gather of ``num_rows`` rows of each rank."""
    return RowTransport(ALL_GATHER, (num_rows,), (num_rows,) * group.size(), group)


# R rows of the residual stream of one rank, P ranks.


def exchange_sequence_rows(
    tensors: Sequence[Sequence[Tensor]], group: dist.ProcessGroup, *, scatter: bool
) -> Transfer:
    """Start to all-gather ``[R, B, D]`` of each chunk to ``[P * R, B, D]``, or to reduce-scatter back."""
    ranks = group.size() if scatter else 1
    transports = [all_gather(rows.shape[0] // ranks, group) for (rows,) in tensors]
    return exchange_chunks(transports, tensors, combine=scatter)
