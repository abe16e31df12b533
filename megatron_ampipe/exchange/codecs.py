"""What travels in place of the rows of tokens, with other numbers: casts, a user's class, fewer rows.

A :class:`Wire` (``--ampipe-wire``) is put around the transfers of dispatch and combine; the backward pass
sends gradients through the same two methods.

A :class:`Condenser` (``--ampipe-condense``) is Luffy's condensation, for causal models (Chen et al., 2024,
arXiv 2411.15419; the abstract was at hand). Among the rows of a chunk that one sequence sends to one expert,
a row goes if no earlier row that goes is similar to it. Every other row takes the result of the earliest such
row, weighted by its own token's probability. The choice of rows has no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import normalize

from megatron_ampipe.block.settings import SHIPPED_WIRES, WIRE_FLAG, import_class
from megatron_ampipe.exchange.transports import Arrived
from megatron_ampipe.schedule import Direction

# T rows that are sent or received, D hidden size. Condensed: P rows of a chunk, one for each pair of a token
# and an expert; Q rows that are sent; T tokens, E experts, B batch.


@dataclass(frozen=True, slots=True)
class Trip:
    """Which transfer a wire is asked for."""

    layer: int
    """Megatron's number of the layer, from 1."""
    chunk: int
    stage: str
    """``dispatch`` or ``combine``."""
    direction: Direction
    """``forward`` for values, ``backward`` for their gradients, which go the other way."""


class Wire(Protocol):
    """Replaces rows by what is sent, and restores them. One object per process, for all layers.

    Lanes call it from their own threads: ``encode`` and ``decode`` of different trips can run at the same
    time. On CUDA both run on the stream of the lane. Rows that stay on the rank go through both as well, so
    that the result does not depend on which rank has which expert.
    """

    def encode(self, rows: Tensor, trip: Trip) -> Sequence[Tensor]:
        """What is sent in place of ``rows [T, D]``, which are not to be changed.

        Tensors ``[T, ...]`` of which row ``t`` is of row ``t`` alone, because rows go to different ranks.
        Their number, other sizes and dtypes must be the same on all ranks. The same for the same rows: some
        settings of memory and recompute send rows twice.
        """

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: Trip) -> None:
        """Write the rows into ``out`` ``[T, D]``, from what other ranks' :meth:`encode` returned."""


class Bf16Wire:
    """Rows in bf16: half of the bytes of fp32. Relative error of a value at most 2**-8."""

    def encode(self, rows: Tensor, trip: Trip) -> Sequence[Tensor]:
        return (rows.bfloat16(),)

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: Trip) -> None:
        out.copy_(parts[0])


class Fp8Wire:
    """Rows in fp8 (e4m3) with a scale per row: ``D + 4`` bytes of a row in place of ``2 * D`` in bf16.

    The largest value of a row becomes the largest of the format. Relative error of a value at most 2**-4;
    values below 2**-16 of the largest in their row become 0. A row with NaN or infinity becomes NaN.
    """

    _LARGEST = torch.finfo(torch.float8_e4m3fn).max
    _SCALE_BYTES = 4

    def encode(self, rows: Tensor, trip: Trip) -> Sequence[Tensor]:
        """One tensor ``[T, D + 4]`` of bytes, the values and then the scale in fp32."""
        wide = rows.float()
        largest = wide.abs().amax(dim=1, keepdim=True)
        # Of a row of zeros any scale is right. What is divided by must not be 0 in fp32.
        scale = torch.where(largest > 0, (largest / self._LARGEST).clamp_min(1e-37), 1.0)
        scale = torch.where(largest.isnan(), largest, scale)
        values = (wide / scale).clamp(-self._LARGEST, self._LARGEST).to(torch.float8_e4m3fn)
        return (torch.cat([values.view(torch.uint8), scale.view(torch.uint8)], dim=1),)

    def decode(self, parts: Sequence[Tensor], out: Tensor, trip: Trip) -> None:
        values = parts[0][:, : -self._SCALE_BYTES].view(torch.float8_e4m3fn)
        scale = parts[0][:, -self._SCALE_BYTES :].contiguous().view(torch.float32)
        out.copy_(values.float().mul_(scale))


def load_wire(name: str) -> Wire:
    """The wire that ``--ampipe-wire NAME`` names, made without arguments; or ``BadInput``."""
    wire_class = import_class(
        name,
        SHIPPED_WIRES,
        flag=WIRE_FLAG,
        fits=lambda other: all(callable(getattr(other, method, None)) for method in ("encode", "decode")),
        rule="is no class with the methods encode(rows, trip) and decode(parts, out, trip)",
        remedy="Give it both; see docs/wire.md.",
    )
    wire: Wire = wire_class()
    return wire


class WireCodec:
    """A wire around one transfer. Of the tensors of a chunk the first has the rows; others go as they are."""

    uses: Sequence[Tensor] = ()

    def __init__(self, wire: Wire, trip: Trip) -> None:
        self._wire, self._trip = wire, trip

    @torch.no_grad()
    def send(self, tensors: Sequence[Tensor], *, combine: bool) -> Sequence[Tensor]:
        rows, *others = tensors
        encoded = tuple(self._wire.encode(rows, self._trip))
        self._num_parts, self._row_shape, self._dtype = len(encoded), rows.shape[1:], rows.dtype
        return (*encoded, *others)

    def arrive(self, received: Sequence[Tensor], *, combine: bool) -> Arrived:
        parts, others = received[: self._num_parts], received[self._num_parts :]
        rows = parts[0].new_empty((parts[0].shape[0], *self._row_shape), dtype=self._dtype)

        @torch.no_grad()
        def fill() -> None:
            self._wire.decode(parts, rows, self._trip)

        return (rows, *others), fill


ROUNDING = 1e-6
"""Rounding may make the cosine of equal rows so much smaller than 1."""


class Condensed(NamedTuple):
    """Which rows of a chunk are sent."""

    sent: Tensor
    """``[Q]`` int64, rows that are sent, in order."""
    place: Tensor
    """``[P]`` int64, for each row the place in ``sent`` of the row whose result it takes."""
    counts: Tensor
    """``[E]`` int64, rows that are sent for each expert."""


class Condenser:
    """Chooses the rows that are sent, and counts them; similar are rows of at least this cosine."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._rows = self._sent = 0

    def condense(self, rows: Tensor, routing_map: Tensor, *, batch: int, counted: bool) -> Condensed:
        """Choose the rows of one chunk, perhaps counted for :meth:`take_share`; the host waits for them.

        ``rows [P, D]`` are sorted by expert and then by token, as Megatron permutes them, perhaps followed by
        rows that are not sent; of ``routing_map [T, E]`` bool, token ``t`` is of sequence ``t % batch``.
        """
        tokens = routing_map.T.nonzero()[:, 1]
        directions = normalize(rows[: len(tokens)].detach().float(), dim=1)
        per_expert = routing_map.sum(dim=0).tolist()
        first, taken = 0, []
        for of_expert, of_token in zip(directions.split(per_expert), tokens.split(per_expert), strict=True):
            taken.append(first + _earliest_similar(of_expert, of_token % batch, self.threshold))
            first += len(of_token)
        taken_from = torch.cat(taken)
        goes = taken_from == torch.arange(first, device=rows.device)
        sent = goes.nonzero()[:, 0]
        counts = torch.stack([part.sum() for part in goes.split(per_expert)])
        if counted:
            self._rows, self._sent = self._rows + first, self._sent + len(sent)
        return Condensed(sent, (goes.cumsum(dim=0) - 1)[taken_from], counts)

    def take_share(self) -> float | None:
        """Share of the rows that were not sent since the last call, 0 to 1; None if there were none."""
        rows, sent = self._rows, self._sent
        self._rows = self._sent = 0
        return 1 - sent / rows if rows else None


def _earliest_similar(rows: Tensor, sequences: Tensor, threshold: float) -> Tensor:
    """For each row of one expert the earliest row that goes and is similar to it, ``[N]``; itself if it goes.

    Rows are ``[N, D]`` of length 1, in the order of the tokens; ``sequences [N]`` says of which one each is.
    """
    own = torch.arange(len(rows), device=rows.device)
    if not len(rows):
        return own
    similar = (rows @ rows.T >= threshold - ROUNDING) & (sequences[:, None] == sequences).tril(-1)
    open_rows, goes = torch.ones_like(own, dtype=torch.bool), torch.zeros_like(own, dtype=torch.bool)
    while open_rows.any():
        # A row is decided when all earlier rows that are similar to it are.
        decided = open_rows & ~(similar & open_rows).any(dim=1)
        goes |= decided
        open_rows &= ~(decided | (similar & goes).any(dim=1))
    # argmax is the first of equal values.
    return torch.where(goes, own, (similar & goes).int().argmax(dim=1))
