"""What travels in place of the rows of tokens: casts to fewer bits, statistics, a user's compression.

A :class:`Wire` is put around the transfers of dispatch and combine, in both passes (``--ampipe-wire``). It is
no part of the autograd graph: the backward pass sends gradients through the same two methods. Called by
``layers/moe_stages.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_ampipe.errors import BadInput
from megatron_ampipe.runtime.collectives import Transfer, Transport, exchange_chunks
from megatron_ampipe.schedule import Direction

# T rows that are sent or received, D hidden size.


@dataclass(frozen=True, slots=True)
class Trip:
    """Which transfer a wire is asked for.

    Attributes:
        layer: Megatron's number of the layer, from 1.
        chunk: Index of the chunk.
        stage: ``dispatch``, ``combine`` or ``redispatch``.
        direction: ``forward`` for values, ``backward`` for their gradients, which go the other way.
    """

    layer: int
    chunk: int
    stage: str
    direction: Direction


class Wire(Protocol):
    """Replaces rows by what is sent, and restores them. One object per process, for all layers.

    Lanes call it from their own threads: ``encode`` and ``decode`` of different trips can run at the same
    time. On CUDA both run on the stream of the lane. Rows that stay on the rank go through both as well, so
    that the result does not depend on which rank has which expert.
    """

    def encode(self, rows: Tensor, trip: Trip) -> Sequence[Tensor]:
        """What is sent.

        Args:
            rows: ``[T, D]``; not to be changed.
            trip: Of which transfer.

        Returns:
            Tensors ``[T, ...]`` of which row ``t`` is of row ``t`` alone, because rows go to different ranks.
            Their number, other sizes and dtypes must be the same on all ranks. The same for the same rows:
            some settings of memory and recompute send rows twice.
        """
        ...

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: Trip) -> None:
        """Write the rows into ``out`` ``[T, D]``, from what other ranks' :meth:`encode` returned."""
        ...


class Bf16Wire:
    """Rows in bf16: half of the bytes of fp32. Relative error of a value at most 2**-8."""

    def encode(self, rows: Tensor, trip: Trip) -> Sequence[Tensor]:
        """See :class:`Wire`."""
        return (rows.bfloat16(),)

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: Trip) -> None:
        """See :class:`Wire`."""
        out.copy_(parts[0])


class Fp8Wire:
    """Rows in fp8 (e4m3) with a scale per row: ``D + 4`` bytes of a row in place of ``2 * D`` in bf16.

    The largest value of a row becomes the largest of the format. Relative error of a value at most 2**-4;
    values below 2**-16 of the largest in their row become 0. A row with NaN or infinity becomes NaN.
    """

    _LARGEST = torch.finfo(torch.float8_e4m3fn).max
    _SCALE_BYTES = 4

    def encode(self, rows: Tensor, trip: Trip) -> Sequence[Tensor]:
        """See :class:`Wire`; one tensor ``[T, D + 4]`` of bytes, the values and then the scale in fp32."""
        wide = rows.float()
        largest = wide.abs().amax(dim=1, keepdim=True)
        # Of a row of zeros any scale is right. What is divided by must not be 0 in fp32.
        scale = torch.where(largest > 0, (largest / self._LARGEST).clamp_min(1e-37), 1.0)
        scale = torch.where(largest.isnan(), largest, scale)
        values = (wide / scale).clamp(-self._LARGEST, self._LARGEST).to(torch.float8_e4m3fn)
        return (torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], dim=1),)

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: Trip) -> None:
        """See :class:`Wire`."""
        values = parts[0][:, : -self._SCALE_BYTES].view(torch.float8_e4m3fn)
        scale = parts[0][:, -self._SCALE_BYTES :].contiguous().view(torch.float32)
        out.copy_(values.float().mul_(scale))


SHIPPED: Mapping[str, Callable[[], Wire]] = {"bf16": Bf16Wire, "fp8": Fp8Wire}
"""Wires by name (:data:`megatron_ampipe.block.named_values.SHIPPED_WIRES`)."""


def exchange_encoded(
    wire: Wire,
    transports: Sequence[Transport],
    tensors: Sequence[Sequence[Tensor]],
    trips: Sequence[Trip],
    *,
    combine: bool,
) -> Transfer:
    """:func:`~.collectives.exchange_chunks`, with the first tensor of each chunk sent through a wire.

    Args:
        wire: Encodes and decodes.
        transports: Of each chunk.
        tensors: Of each chunk the rows ``[T, D]``, and what is sent as it is (probabilities).
        trips: Of each chunk.
        combine: Combine instead of dispatch.

    Raises:
        BadInput: the wire returned a tensor without a row for each row.
    """
    with torch.no_grad():
        parts = [
            _checked(wire, rows, wire.encode(rows, trip))
            for (rows, *_), trip in zip(tensors, trips, strict=True)
        ]
    sent = [(*encoded, *of_chunk[1:]) for encoded, of_chunk in zip(parts, tensors, strict=True)]
    inner = exchange_chunks(transports, sent, combine=combine)
    count, num_parts = len(sent[0]), len(parts[0])
    outputs: list[Tensor] = []
    arrived: list[tuple[Sequence[Tensor], Tensor, Trip]] = []
    for place, (of_chunk, trip) in enumerate(zip(tensors, trips, strict=True)):
        received = inner.outputs[place * count : (place + 1) * count]
        rows = of_chunk[0].new_empty((received[0].shape[0], *of_chunk[0].shape[1:]))
        arrived.append((received[:num_parts], rows, trip))
        outputs += [rows, *received[num_parts:]]

    def unpack() -> None:
        if inner.unpack is not None:
            inner.unpack()
        with torch.no_grad():
            for encoded, rows, trip in arrived:
                wire.decode(encoded, rows, trip)

    uses = (*inner.uses, *(part for encoded in parts for part in encoded), *inner.outputs)
    if inner.works:
        return Transfer(tuple(outputs), inner.works, unpack, uses)
    unpack()
    return Transfer(tuple(outputs), uses=uses)


def _checked(wire: Wire, rows: Tensor, encoded: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found = tuple(encoded)
    if not found or any(part.ndim == 0 or part.shape[0] != rows.shape[0] for part in found):
        sizes = [list(part.shape) for part in found]
        raise BadInput(
            "--ampipe-wire",
            type(wire).__qualname__,
            rule=f"encode returned tensors of sizes {sizes} for {rows.shape[0]} rows, which go to several "
            "ranks",
            remedy="Return tensors whose first size is the number of rows.",
        )
    return found
