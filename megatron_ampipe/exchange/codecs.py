"""What travels in place of the rows of tokens: casts to fewer bits, statistics, a user's compression.

A :class:`Wire` is put around the transfers of dispatch and combine, in both passes (``--ampipe-wire``). It is
no part of the autograd graph: the backward pass sends gradients through the same two methods. What a class
must promise is in docs/wire.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_ampipe.block.named_values import SHIPPED_WIRES, WIRE_FLAG, import_class
from megatron_ampipe.errors import BadInput
from megatron_ampipe.schedule import Direction

# T rows that are sent or received, D hidden size.


@dataclass(frozen=True, slots=True)
class Trip:
    """Which transfer a wire is asked for.

    Attributes:
        layer: Megatron's number of the layer, from 1.
        chunk: Index of the chunk.
        stage: ``dispatch`` or ``combine``.
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
"""Wires by name."""
assert set(SHIPPED) == set(SHIPPED_WIRES)


def load_wire(name: str) -> Wire:
    """The wire that ``--ampipe-wire NAME`` names. Imports its module, and makes an object without arguments.

    Raises:
        BadInput: there is no such module or class, it cannot be made, or it lacks a method.
    """
    if name in SHIPPED:
        return SHIPPED[name]()
    wire_class = import_class(
        WIRE_FLAG,
        name,
        name,
        fits=lambda found: (
            callable(getattr(found, "encode", None)) and callable(getattr(found, "decode", None))
        ),
        kind="Wires",
        rule="is no class with the methods encode(rows, trip) and decode(parts, out, trip)",
        remedy="Give it both; see docs/wire.md.",
    )
    try:
        wire: Wire = wire_class()
    except Exception as error:
        raise BadInput(
            WIRE_FLAG,
            name,
            rule=f"cannot be made without arguments: {type(error).__name__}: {error}".rstrip("."),
            remedy="Give its arguments defaults.",
        ) from error
    return wire


class WireCodec:
    """A wire around one transfer. Of the tensors of a chunk the first has the rows; others go as they are.

    Args:
        wire: Encodes and decodes.
        trip: Which transfer.
    """

    uses: Sequence[Tensor] = ()

    def __init__(self, wire: Wire, trip: Trip) -> None:
        self._wire, self._trip = wire, trip

    @torch.no_grad()
    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        """What the wire returns for the rows ``[T, D]``, and the other tensors.

        Raises:
            BadInput: the wire returned a tensor without a row for each row.
        """
        rows, *others = tensors
        encoded = tuple(self._wire.encode(rows, self._trip))
        if not encoded or any([part.ndim == 0 or part.shape[0] != rows.shape[0] for part in encoded]):
            sizes = [list(part.shape) for part in encoded]
            raise BadInput(
                WIRE_FLAG,
                type(self._wire).__qualname__,
                rule=f"encode returned tensors of sizes {sizes} for {rows.shape[0]} rows, which go to "
                "several ranks",
                remedy="Return tensors whose first size is the number of rows.",
            )
        self._num_parts, self._row_shape, self._dtype = len(encoded), rows.shape[1:], rows.dtype
        return (*encoded, *others)

    def arrive(
        self, received: Sequence[Tensor], *, combine: bool
    ) -> tuple[Sequence[Tensor], Callable[[], None]]:
        """Rows ``[T, D]`` as they were sent, and the other tensors."""
        parts, others = received[: self._num_parts], received[self._num_parts :]
        rows = parts[0].new_empty((parts[0].shape[0], *self._row_shape), dtype=self._dtype)

        @torch.no_grad()
        def fill() -> None:
            self._wire.decode(parts, rows, self._trip)

        return (rows, *others), fill
